"""The index of a dataset: made once, in parallel, and gone on with after an interruption."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from support.io_data import open_path, write_shard
from zephon.cli.app import app
from zephon.data import catalog
from zephon.errors import DataError
from zephon.io import Dataset


def run(*arguments) -> str:
    result = CliRunner().invoke(app, ["index", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_scan_that_fails_goes_on_where_it_was(tmp_path, opened):
    for n in range(20):
        write_shard(tmp_path / f"data/{n:02}.jsonl", [f"document {n}"])
    broken = tmp_path / "data/15.jsonl"
    broken.write_text("no JSON\n")
    dataset = Dataset.from_path("x", tmp_path / "data")
    with pytest.raises(DataError, match=r"15\.jsonl' is no JSON lines"):
        dataset.scan("text", index_dir=tmp_path / "index", threads=2)
    opened.clear()
    write_shard(broken, ["repaired"])
    done = []
    found = dataset.scan("text", index_dir=tmp_path / "index", progress=lambda *numbers: done.append(numbers))
    assert set(opened) == {f"{n:02}.jsonl" for n in range(15, 20)}
    assert found.rows == 20
    assert done[0][:2] == (15, 20) and done[-1][:2] == (20, 20) and done[-1][2] == done[-1][3]
    opened.clear()
    whole = open_path(tmp_path / "data", index_dir=tmp_path / "index")
    assert not opened
    assert whole.catalog.fingerprint == open_path(tmp_path / "data").catalog.fingerprint
    assert whole.take(np.arange(20))["text"].to_pylist()[15:17] == ["repaired", "document 16"]


def test_an_interrupted_scan_goes_on_where_it_was(tmp_path, opened):
    for n in range(20):
        write_shard(tmp_path / f"data/{n:02}.jsonl", [f"document {n}"])
    dataset = Dataset.from_path("x", tmp_path / "data")

    def interrupt(files: int, *_: int) -> None:
        if files == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dataset.scan("text", index_dir=tmp_path / "index", threads=1, progress=interrupt)
    opened.clear()
    assert dataset.scan("text", index_dir=tmp_path / "index").rows == 20
    assert set(opened) == {f"{n:02}.jsonl" for n in range(10, 20)}


def test_an_index_is_saved_while_there_is_more_to_scan(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "_SAVE_SECONDS", 0.0)
    saved = []
    original = catalog.save_table
    monkeypatch.setattr(
        catalog, "save_table", lambda index, shards: saved.append(len(shards)) or original(index, shards)
    )
    for n in range(12):
        write_shard(tmp_path / f"data/{n:02}.jsonl", [f"document {n}"])
    Dataset.from_path("x", tmp_path / "data").scan("text", index_dir=tmp_path / "index")
    assert 0 < saved[0] < 12 and saved[-1] == 12


def test_the_command_indexes_a_path_and_a_run_finds_it(tmp_path, opened):
    for n in range(3):
        write_shard(tmp_path / f"data/{n}.parquet", [f"document {n}"] * 5)
    output = run(tmp_path / "data", "--cache-dir", tmp_path / "cache")
    assert " parquet " in output and " 15 " in output and str(tmp_path / "cache/index") in output
    opened.clear()
    open_path(tmp_path / "data", index_dir=tmp_path / "cache/index")
    assert not opened


def test_the_command_indexes_the_sources_of_a_recipe(tmp_path, opened):
    write_shard(tmp_path / "a/0.jsonl", ["one", "two"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b/0.jsonl").write_text(json.dumps({"meta": {"body": "three"}}) + "\n")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"cache_dir = '{tmp_path}/cache'\n[[sources]]\nname = 'a'\npath = 'a'\n"
        "[[sources]]\nname = 'b'\npath = 'b'\ntext_field = 'meta.body'\n"
    )
    output = run(recipe)
    assert [line.split()[:5] for line in output.splitlines()[1:3]] == [
        ["a", "jsonl", "1", "1", "2"],
        ["b", "jsonl", "1", "1", "1"],
    ]
    opened.clear()
    Dataset.from_path("b", tmp_path / "b").scan("meta.body", index_dir=tmp_path / "cache/index")
    assert not opened


def test_the_command_leaves_out_lost_shards_where_the_recipe_skips_damage(tmp_path):
    write_shard(tmp_path / "a/0.parquet", ["one", "two"])
    (tmp_path / "a/1.parquet").write_bytes((tmp_path / "a/0.parquet").read_bytes()[:-9])
    recipe = tmp_path / "recipe.toml"
    sources = f"cache_dir = '{tmp_path}/cache'\n[[sources]]\nname = 'a'\npath = 'a'\n"
    recipe.write_text(sources)
    assert CliRunner().invoke(app, ["index", str(recipe)]).exit_code == 2
    recipe.write_text(f"on_error = 'skip'\nerror_budget = 0.5\n{sources}")
    result = CliRunner().invoke(app, ["index", str(recipe)])
    assert result.exit_code == 0 and "left out: " in result.output and "1.parquet" in result.output


def test_the_command_finds_unusual_documents_or_says_what_there_is(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10))
    assert " tokens " in run(tmp_path / "a.npy")
    (tmp_path / "b.jsonl").write_text('{"body": "text"}\n')
    result = CliRunner().invoke(app, ["index", str(tmp_path / "b.jsonl")])
    assert result.exit_code == 2
    assert "has the columns" in result.output and "body; expected one of text," in result.output
    assert " body " in run(tmp_path / "b.jsonl", "--text-field", "body")


def test_the_command_needs_a_folder_that_it_can_write_to(tmp_path):
    write_shard(tmp_path / "data/a.jsonl", ["a"])
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["index", str(tmp_path / "data"), "--cache-dir", str(tmp_path / "file/cache")])
    assert result.exit_code != 0 and "rows" not in result.output
    assert "the index cannot be written to" in f"{result.output}{result.exception}"
