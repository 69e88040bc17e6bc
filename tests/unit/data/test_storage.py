"""Which files a dataset path means."""

import os
import re
from pathlib import Path

import fsspec
import pytest

from support.io_data import open_path, texts_of, write_shard
from zephon.data import storage
from zephon.data.storage import list_files
from zephon.errors import DataError


def make(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_a_folder_gives_all_files_below_it_sorted_by_relative_name(tmp_path):
    make(tmp_path, "b.jsonl", "a/z.jsonl", "a/b/c.jsonl", "B.jsonl", "é.jsonl")
    listing = list_files(str(tmp_path))
    assert listing.names == ["B.jsonl", "a/b/c.jsonl", "a/z.jsonl", "b.jsonl", "é.jsonl"]
    assert listing.sizes.tolist() == [len(name.encode()) for name in listing.names]
    assert listing.file(1).path == str(tmp_path / "a/b/c.jsonl")


def test_names_that_start_with_a_dot_or_underscore_are_skipped_in_folders_and_globs_but_not_when_named(tmp_path):
    make(tmp_path, "x.jsonl", "_SUCCESS", ".x.jsonl.crc", ".git/y.jsonl", "_tmp/z.jsonl")
    assert list_files(str(tmp_path)).names == ["x.jsonl"]
    assert list_files(f"{tmp_path}/*").names == ["x.jsonl"]
    assert list_files(f"{tmp_path}/_*").names == ["_SUCCESS", "_tmp/z.jsonl"]
    assert list_files(f"{tmp_path}/_SUCCESS").names == ["_SUCCESS"]
    assert list_files(f"{tmp_path}/_tmp").names == ["z.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jsonl", ["top.jsonl"]),
        ("2024-*", ["2024-01/a.jsonl", "2024-01/deep/c.jsonl", "2024-02/b.jsonl"]),
        ("2024-0[2-9]/*", ["2024-02/b.jsonl"]),
        ("*/a.jsonl", ["2024-01/a.jsonl"]),
        ("**/*.jsonl", ["2024-01/a.jsonl", "2024-01/deep/c.jsonl", "2024-02/b.jsonl", "top.jsonl"]),
        ("**", ["2024-01/a.jsonl", "2024-01/deep/c.jsonl", "2024-02/b.jsonl", "top.jsonl"]),
        ("**/deep/**/?.jsonl", ["2024-01/deep/c.jsonl"]),
    ],
)
def test_a_glob_gives_what_matches_named_relative_to_the_folder_before_the_first_wildcard(tmp_path, pattern, names):
    make(tmp_path, "top.jsonl", "2024-01/a.jsonl", "2024-01/deep/c.jsonl", "2024-02/b.jsonl")
    assert list_files(f"{tmp_path}/{pattern}").names == names


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    make(tmp_path, "part[1].jsonl", "part1.jsonl")
    assert list_files(f"{tmp_path}/part[1].jsonl").names == ["part[1].jsonl"]


def test_relative_paths_and_the_home_folder_work(tmp_path, monkeypatch):
    make(tmp_path, "d/a.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("d", "d/*.jsonl", "d/a.jsonl", "./d/", "~/d", "*/a.jsonl"):
        assert list_files(path).names[0].endswith("a.jsonl")
    monkeypatch.chdir(tmp_path / "d")
    assert list_files("*.jsonl").names == ["a.jsonl"]
    assert Path(list_files("a.jsonl").file(0).path).read_text() == "d/a.jsonl"


def test_file_uris_are_local_paths(tmp_path):
    make(tmp_path, "a b/x.jsonl")
    assert list_files(f"file://{tmp_path}/a%20b").names == ["x.jsonl"]
    assert list_files(f"FILE://localhost{tmp_path}/a b").names == ["x.jsonl"]
    with pytest.raises(DataError, match="host 'elsewhere'"):
        list_files("file://elsewhere/data")


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        ("s33://bucket/x", "did you mean s3://?"),
        ("python://x", "copy or mount"),
        ("s3:///x", "names no bucket"),
    ],
)
def test_stores_that_are_unknown_are_refused_in_one_sentence(uri, hint):
    with pytest.raises(DataError) as caught:
        list_files(uri)
    assert hint in str(caught.value)


def test_loops_of_links_end_and_every_file_is_listed_once(tmp_path):
    make(tmp_path, "a/x.jsonl", "b/y.jsonl")
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "a/across").symlink_to(tmp_path / "b")
    (tmp_path / "b/across").symlink_to(tmp_path / "a")
    assert list_files(str(tmp_path)).names == ["a/x.jsonl", "b/y.jsonl"]
    assert list_files(f"{tmp_path}/**/*.jsonl").names == ["a/x.jsonl", "b/y.jsonl"]
    (tmp_path / "0-link").symlink_to(tmp_path / "a")
    assert list_files(f"{tmp_path}/*/*.jsonl").names == ["a/x.jsonl", "b/y.jsonl"]
    assert list_files(f"{tmp_path}/[0a]*/x*").names == ["a/x.jsonl"]
    assert list_files(f"{tmp_path}/0*").names == ["0-link/across/y.jsonl", "0-link/x.jsonl"]


def test_a_linked_folder_and_linked_files_are_followed(tmp_path):
    make(tmp_path, "store/x", "store/y")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/all").symlink_to(tmp_path / "store")
    (tmp_path / "set/one.jsonl").symlink_to(tmp_path / "store/x")
    assert list_files(str(tmp_path / "set")).names == ["all/x", "all/y", "one.jsonl"]


def test_names_do_not_depend_on_the_order_in_which_the_system_lists_a_folder(tmp_path, monkeypatch):
    make(tmp_path, *(f"{folder}/{n}.jsonl" for folder in "cab" for n in range(3)))
    (tmp_path / "link1").symlink_to(tmp_path.parent / "outside")
    (tmp_path / "link2").symlink_to(tmp_path.parent / "outside")
    make(tmp_path.parent / "outside", "o.jsonl")
    expected = list_files(str(tmp_path)).names
    assert "link1/o.jsonl" in expected and "link2/o.jsonl" not in expected
    scandir = os.scandir

    class Backwards:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return self.entries

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(storage.os, "scandir", Backwards)
    assert list_files(str(tmp_path)).names == expected


def test_a_broken_link_is_named(tmp_path):
    make(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    for path in (tmp_path, tmp_path / "b.jsonl"):
        with pytest.raises(DataError, match=r"b\.jsonl'.*broken link"):
            list_files(str(path))


def test_pipes_are_no_data_and_do_not_hang(tmp_path):
    make(tmp_path, "a.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert list_files(str(tmp_path)).names == ["a.jsonl"]
    with pytest.raises(DataError, match="not a regular file"):
        list_files(str(tmp_path / "pipe.jsonl"))


def test_a_path_that_is_not_there_is_named_with_the_nearest_one_that_is(tmp_path):
    make(tmp_path, "wikipedia/a.jsonl")
    with pytest.raises(DataError, match=r"wikipedai' does not exist; did you mean '.*/wikipedia'"):
        list_files(str(tmp_path / "wikipedai"))
    with pytest.raises(DataError, match="nearest folder is"):
        list_files(str(tmp_path / "q/r/s"))
    with pytest.raises(DataError, match="does not exist"):
        list_files("")


def test_folders_and_globs_without_files_are_refused(tmp_path):
    make(tmp_path, ".hidden")
    for path in (str(tmp_path), f"{tmp_path}/*.parquet"):
        with pytest.raises(DataError, match="holds no files"):
            list_files(path)


def test_a_file_name_that_is_no_text_is_refused(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.jsonl")).write_text("{}")
    with pytest.raises(DataError, match="not valid UTF-8; rename it"):
        list_files(str(tmp_path))


def test_a_folder_with_brackets_in_its_name_is_a_folder_also_in_a_pattern(tmp_path):
    write_shard(tmp_path / "v[1]/x/a.jsonl", ["a"])
    write_shard(tmp_path / "v1/x/a.jsonl", ["b"])
    for path in ("v[1]", "v[1]/x/a.jsonl", "v[1]/x/*.jsonl", "v[1]/*/*.jsonl", "v[1]/**/*.jsonl"):
        assert texts_of(open_path(tmp_path / path)) == ["a"]
    assert texts_of(open_path(tmp_path / "v[12]/x/*.jsonl")) == ["b"]


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize(
    "log",
    [
        *("_delta_log/00000.json", ".hoodie/hoodie.properties", "metadata/v3.metadata.json"),
        "metadata/00001-0b5a4a5c-8f9d-4c1f-9a52-5e5b7c6c1f33.gz.metadata.json",
    ],
)
@pytest.mark.parametrize("below", ["", "web/"])
def test_the_folder_of_a_table_with_a_log_is_refused_and_a_glob_names_its_files(tmp_path, place, log, below):
    files = [f"{below}a.parquet", f"{below}{log}"]
    root = str(tmp_path / "table") if place == "local" else f"memory://{tmp_path.name}"
    for name in files:
        if place == "memory":
            fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{name}", b"x")
        else:
            (tmp_path / "table" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "table" / name).write_bytes(b"x")
    kind = {"_": "Delta Lake", ".": "Hudi", "m": "Iceberg"}[log[0]]
    with pytest.raises(
        DataError, match=rf"it is a table of {kind}, whose log .*{below}{re.escape(log.partition('/')[0])}\)"
    ):
        list_files(root)
    assert list_files(f"{root}/{below}*.parquet").names == ["a.parquet"]


def test_a_folder_called_metadata_with_other_files_is_read(tmp_path):
    write_shard(tmp_path / "metadata/a.jsonl", ["a"])
    write_shard(tmp_path / "b.jsonl", ["b"])
    assert list_files(str(tmp_path)).names == ["b.jsonl", "metadata/a.jsonl"]
