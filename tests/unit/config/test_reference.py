"""docs/recipe.md is what the declarations of the keys say, and they say what the fingerprint of a run says."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from zephon import Pipeline
from zephon.config.keys import keys_of
from zephon.config.recipe import DataRecipe

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from key_reference import PATH, reference

CHANGES: dict[str, Any] = {
    "seed": 43,
    "chunk_size": 1,
    "shuffle_shards": False,
    "shuffle_within_shard": False,
    "shuffle_block_size": "global",
    "reshuffle_on_repeat": False,
    "repeat": False,
    "max_repeats": 2,
    "stop_after_passes": 2,
    "flush_every_k_chunks": 2,
    "token_estimation": False,
    "canonical_replicas": 4,
    "special_tokens": "eos",
    "max_document_tokens": 9,
    "filter": "length(text) > 3",
    "text_field": "other",
    "documents": "tokens",
    "ensure_mixture": True,
    "pack_mode": "sequences",
    "pack_algorithm": "best_fit",
    "shuffle_after_pack": False,
    "shuffle_buffer_size": 2,
    "cache_dir": "cache",
    "cache_limit_bytes": "1gb",
    "tokenize_parallelism": 1,
    "pack_parallelism": 2,
    "fetch_parallelism": 3,
    "prefetch_buffer_size": "1mb",
    "runner": "inline",
    "isolate": True,
    "ray_address": "auto",
    "ray_pool": "shared",
    "ray_timeout": 60,
    "on_error": "skip",
    "error_budget": 0.5,
    "error_budget_rows": 3,
    "error_report": "faults",
}


def test_the_reference_of_keys_is_made_from_their_declarations() -> None:
    assert PATH.read_text(encoding="utf-8") == reference(), "run python tools/key_reference.py"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataRecipe:
    monkeypatch.chdir(tmp_path)
    line = '{"text": "some text", "other": "more text", "input_ids": [3, 4]}\n'
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(line * 20)
    sources = [{"name": name, "path": f"{name}.jsonl"} for name in ("a", "b")]
    return DataRecipe.from_dict({"cache_dir": "first", "sources": sources})


def test_keys_decide_data_as_declared(recipe: DataRecipe, tiny_tokenizer: Path) -> None:
    def fingerprint(recipe: DataRecipe) -> dict[str, Any]:
        pipeline = Pipeline.from_recipe(recipe, tokenizer=tiny_tokenizer, seq_len=8, microbatch_size=1)
        return pipeline.compiled.fingerprint

    before = fingerprint(recipe)
    for name, value in CHANGES.items():
        assert (fingerprint(recipe.replace(**{name: value})) != before) == keys_of(DataRecipe)[name].decides_data, name
    moved = [{**asdict(source), "path": f"./{source.name}.jsonl", "fmt": "jsonl"} for source in recipe.sources]
    assert fingerprint(recipe.replace(sources=moved)) == before
    moved[0]["weight"] = 2
    assert fingerprint(recipe.replace(sources=moved)) != before
