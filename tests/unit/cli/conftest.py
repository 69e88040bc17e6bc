"""The corpus of the tests of the command, and calls of the command in this process."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.corpus import train_tokenizer, write_recipe
from zephon import Pipeline
from zephon.cli.app import app

ESCAPE = "\x1b[31mred\x1b[0m"
WORDS = ["lane", "shard", "record", "round", "step", "token", "cursor", "window", "chunk", "rank", "group", "epoch"]


def document(number: int, word: str) -> str:
    middle = " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(number % 40 + 5))
    return f"{word} {number}: {middle}."


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Two sources, a tokenizer, a recipe that repeats and one that does not."""
    folder = tmp_path_factory.mktemp("corpus")
    a = [document(i, "apple") for i in range(200)]
    b = [document(i, "bear") for i in range(60)]
    b[3], b[7] = "", " \n\t "
    b[10:] = [f"{text} {ESCAPE}" for text in b[10:]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in a))
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in b).encode())
    )
    sources = {"a": folder / "a.jsonl", "b": folder / "b.jsonl.gz"}
    train_tokenizer(a + b, folder / "tokenizer", 400)
    keys = {"chunk_size": 16, "seed": 5, "cache_dir": "cache"}
    write_recipe(folder / "recipe.toml", sources, keys=keys)
    write_recipe(folder / "finite.toml", sources, keys={**keys, "repeat": False})
    return folder


@pytest.fixture
def zephon(corpus):
    """Calls the command on the corpus: gives exit code, stdout and stderr."""

    def call(command: str, *arguments: str | Path):
        result = CliRunner().invoke(app, [command, *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return call


@pytest.fixture(scope="session")
def runs(corpus):
    """Ledgers of the same four steps at dp 1, dp 2, and of another seed."""

    def run(name, dp, steps=4, seed=5):
        recipe = corpus / f"seed-{seed}.toml"
        recipe.write_text((corpus / "recipe.toml").read_text().replace("seed = 5", f"seed = {seed}"))
        for rank in range(dp):
            pipeline = Pipeline.from_recipe(
                recipe,
                tokenizer=corpus / "tokenizer",
                seq_len=32,
                microbatch_size=2,
                global_batch=8,
                dp_degree=dp,
                dp_group_id=rank,
                ledger=corpus / name,
            )
            for n, _ in enumerate(pipeline, start=1):
                if n == steps * 8 // dp // 2:
                    break
            pipeline.close()
        return corpus / name

    return {"one": run("one", 1), "two": run("two", 2, steps=3), "other": run("other", 1, seed=6)}
