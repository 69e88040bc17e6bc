"""`zephon bench`: figures, stages and the verdict."""

import json

import pytest


def options_of(corpus, *more, recipe="recipe.toml"):
    return corpus / recipe, "--tokenizer", corpus / "tokenizer", "--seq-len", "64", "--seconds", "0.5", *more


def test_bench_tells_speed_first_batch_memory_and_stages(zephon, corpus):
    code, out, err = zephon("bench", *options_of(corpus, "--json"))
    assert code == 0, err
    told = json.loads(out)
    assert told["slowest"] <= told["tokens_per_second"] <= told["fastest"] and told["slowest"] > 1000
    assert 0 < told["opening_seconds"] <= told["first_batch_seconds"]
    assert 1e7 < told["bytes_before"] <= told["peak_bytes"] < 1e11
    stages = {each["stage"]: each for each in told["stages"]}
    assert list(stages) == ["read", "tokenize", "pack", "shuffle", "to_training", "other"]
    assert sum(each["share"] for each in stages.values()) == pytest.approx(1, abs=0.02)
    assert all(stages[name]["cpu_ms_per_million_tokens"] > 0 for name in ("read", "tokenize", "pack", "to_training"))
    assert "needed" not in told


def test_the_stages_are_those_where_the_time_goes(zephon, corpus, monkeypatch):
    """A slow reader is seen in reading."""
    from zephon.cli.bench import Fetcher

    plain = Fetcher._read

    def slow(*args):
        for _ in range(200):
            plain(*args)
        return plain(*args)

    monkeypatch.setattr(Fetcher, "_read", slow)
    told = json.loads(zephon("bench", *options_of(corpus, "--json"))[1])
    assert max(told["stages"], key=lambda each: each["share"])["stage"] == "read"


def test_the_verdict_is_plain_and_is_the_exit_status(zephon, corpus):
    for needed, feeds in (
        (["--tokens-per-second-needed", "1"], True),
        (["--gpus", "8", "--tokens-per-second-per-gpu", "100b"], False),
    ):
        code, out, _ = zephon("bench", *options_of(corpus, *needed))
        assert code == (0 if feeds else 1)
        assert f"this machine {'feeds' if feeds else 'does NOT feed'} the model" in out
    assert "it takes 800G tokens/s, 0.00 times as many come" in out


def test_what_is_needed_is_said_in_one_way(zephon, corpus):
    for options in (
        ["--gpus", "8"],
        ["--tokens-per-second-needed", "1", "--gpus", "2", "--tokens-per-second-per-gpu", "3"],
    ):
        code, _, err = zephon("bench", *options_of(corpus, *options))
        assert code == 2 and "what the model takes is unclear" in err
    code, _, err = zephon("bench", *options_of(corpus, "--tokens-per-second-needed", "many"))
    assert code == 2 and err.count("\n") == 1


def test_data_that_end_too_soon_are_refused(zephon, corpus):
    code, _, err = zephon("bench", *options_of(corpus, "--seconds", "600", recipe="finite.toml"))
    assert code == 2 and "the data end before" in err
