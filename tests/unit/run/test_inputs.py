"""What a start reads and checks, and what it finds from an earlier one."""

import json

import pytest

from zephon import Pipeline
from zephon.data.reader import OpenDataset
from zephon.io import Dataset
from zephon.tokenizer import backends, choice
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.work import StaticMixtureWorkSource


@pytest.mark.parametrize("names", [("web",), ("web", "news")])
def test_what_an_earlier_start_checked_is_checked_again_only_where_files_or_settings_differ(
    tiny_tokenizer, tmp_path, monkeypatch, names
):
    groups, checks, loaded = [], [], []
    read, check, load = OpenDataset.read_group, Tokenizer.selfcheck, backends.load_library
    monkeypatch.setattr(OpenDataset, "read_group", lambda *args: groups.append(1) or read(*args))
    monkeypatch.setattr(Tokenizer, "selfcheck", lambda *args: checks.append(1) or check(*args))
    for module in (choice, "zephon.tokenizer.tokenizer"):
        target = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{target}.load_library", lambda *args: loaded.append(args[1]) or load(*args))

    def start(texts, **tokenize):
        choice.choose.cache_clear()
        for counts in (groups, checks, loaded):
            counts.clear()
        for name in names:
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = [Dataset.from_path(name, tmp_path / f"{name}.jsonl") for name in names]
        pipeline = Pipeline(StaticMixtureWorkSource(data, dict.fromkeys(names, 1)))
        pipeline = pipeline.options(canonical_replicas=1, io_options={"cache": {"dir": str(tmp_path / "c")}})
        pipeline.tokenize(tiny_tokenizer, **tokenize).pack_flat(31).batch(1).explain()
        return len(checks)

    texts = ["some words"] * 50
    assert start(texts) == len(names) and "tokenizers" in loaded
    assert start(texts) == 0 and not groups and "tokenizers" not in loaded
    assert start([*texts, "more"]) == len(names) and "tokenizers" in loaded
    assert start([*texts, "more"], max_length=9) == len(names)
    for kept in (tmp_path / "c/index").glob("*.result"):
        kept.write_bytes(kept.read_bytes()[:-1])
    assert start([*texts, "more"]) == len(names) and groups
