"""Fixed runs whose global batches may only change together with the stream version.

Run as a script, it prints the digests of all runs as JSON: that is how the same runs are tried on other Pythons and
with other hash seeds. With --write it makes them the expected ones; do that only with a new STREAM_VERSION.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import step_digests
from zephon import Pipeline
from zephon.io import Dataset
from zephon.run.fingerprint import STREAM_VERSION
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource, TokenEstimation

EXPECTED = Path(__file__).with_name("streams.json")
STEPS = 4


def text_of(seed: str, words: int) -> str:
    """A text that is the same on every Python: words of letters drawn by SHA-256."""
    raw = hashlib.sha256(seed.encode()).hexdigest() * (1 + words // 12)
    return " ".join(raw[i * 5 : i * 5 + 2 + int(raw[i], 16) // 4] + "é" * (i % 17 == 0) for i in range(words))


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE with a handful of merges, spelled out here so that no training can change it."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    letters = {b: chr(b) for b in visible} | {b: chr(256 + n) for n, b in enumerate(hidden)}
    merges = [("Ġ", "a"), ("e", "d"), ("0", "0"), ("Ġa", "b"), ("1", "2"), ("c", "ed"), ("3", "f")]
    vocab = {"<|bos|>": 0, "<|eos|>": 1}
    for token in [*(letters[b] for b in range(256)), *("".join(pair) for pair in merges)]:
        vocab[token] = len(vocab)
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(["<|bos|>", "<|eos|>"])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>"}))
    return folder


def runs(folder: Path) -> dict[str, tuple[Pipeline, int]]:
    """The runs by name, with their global batch: each a different mix of what decides data."""
    tokenizer = write_tokenizer(folder)
    long = folder / "long.jsonl"
    rows = [{"text": text_of(f"long {i}", 40 + i % 90)} for i in range(300)]
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = [text_of(f"short {i}", i % 9) if i % 11 else None for i in range(700)]
    datasets = [Dataset.from_path("long", long), Dataset.from_dict("short", {"text": short})]

    weights = {"long": 3.0, "short": 1.0}

    def run(
        lanes: int,
        batch: int,
        seq_len: int,
        buffer: int | None,
        window: int = 1,
        special: str = "auto",
        pack: dict | None = None,
        ensure: bool = False,
        feeds: int | str = "auto",
        **source,
    ):
        kind = ScheduledMixtureWorkSource if "schedule" in source else StaticMixtureWorkSource
        mixed = kind(datasets=datasets, **({} if "schedule" in source else {"mixture": weights}), **source)
        pipeline = Pipeline(mixed).options(
            runner="inline", canonical_replicas=lanes, global_batch=batch, flush_every_k_chunks=window, feeds=feeds
        )
        pipeline = pipeline.tokenize(tokenizer, special_tokens=special)
        if ensure:
            pipeline = pipeline.ensure_mixture(40)
        options = dict(pack or {})
        pipeline = getattr(pipeline, options.pop("how", "pack_flat"))(seq_len, **options)
        if buffer:
            pipeline = pipeline.shuffle(buffer, seed=5)
        return pipeline.batch(batch), batch

    return {
        "defaults": run(8, 16, 128, 1024, seed=42),
        "one lane": run(1, 8, 200, None, seed=1, token_estimation=None),
        "small windows": run(4, 4, 64, 32, window=2, seed=7, chunk_size=50),
        "global order, no special tokens": run(16, 16, 32, 256, seed=3, shuffle_block_size="global", special="none"),
        "as it stands": run(2, 8, 100, None, shuffle_shards=False, shuffle_within_shard=False, repeat=False, feeds=2),
        "a schedule in tokens": run(
            4,
            8,
            64,
            32,
            seed=11,
            chunk_size=60,
            schedule=[
                Stage({"long": 1}),
                Stage({"long": 1, "short": 2}, start_tokens=300, change="linear", end_tokens=1100),
                Stage({"short": 1}, start_tokens=1501, change="cosine", end_tokens=2600),
            ],
        ),
        "a schedule in steps, with endings": run(
            2,
            8,
            50,
            None,
            feeds=2,
            seed=12,
            chunk_size=40,
            exhausted_policy="stop",
            per_dataset={"short": {"max_repeats": 2, "shuffle_block_size": 10}},
            reshuffle_on_repeat=False,
            schedule=[Stage(weights), Stage({"long": 1, "short": 9}, start_steps=1), Stage(weights, start_steps=3)],
        ),
        "shares held over every stretch": run(4, 8, 60, 64, window=2, seed=13, chunk_size=150, ensure=True),
        "blocks of 64 rows": run(4, 8, 90, 64, seed=9, shuffle_block_size=64, token_estimation=TokenEstimation(4096)),
        "first fit": run(4, 8, 500, 64, pack={"algorithm": "first_fit", "num_bins": 4}, seed=2),
        "best fit, datasets apart": run(
            2, 64, 700, 16, pack={"algorithm": "best_fit", "num_bins": 8, "homogeneity": "full"}, seed=2, chunk_size=500
        ),
        "best fit, cut to fill": run(1, 32, 300, None, window=2, pack={"algorithm": "best_fit_wrap", "num_bins": 16}),
        "whole sequences, few to a record": run(
            4, 16, 900, 32, pack={"how": "pack_sequences", "max_documents_per_record": 6}, seed=8
        ),
        "best fit, long documents left out": run(
            2, 16, 400, 8, pack={"algorithm": "best_fit", "oversized": "drop"}, seed=3, repeat=False, feeds=2
        ),
        "one feed": run(8, 16, 64, 32, seed=15, chunk_size=50, repeat=False),
        "two feeds, best fit": run(8, 8, 90, 16, pack={"algorithm": "best_fit"}, seed=16, repeat=False, feeds=2),
    }


def digests() -> dict[str, list[str]]:
    """The digests of every run's first steps."""
    with tempfile.TemporaryDirectory() as folder:
        made = runs(Path(folder))
        return {
            name: [digest.hex() for digest in step_digests([pipeline], STEPS, global_batch)]
            for name, (pipeline, global_batch) in made.items()
        }


if __name__ == "__main__":
    found = {"stream_version": STREAM_VERSION, "digests": digests()}
    if "--write" in sys.argv:
        EXPECTED.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
