"""The catalog of a dataset, its fingerprint, and the sidecar index that saves a second scan."""

import logging
import os
import shutil

import numpy as np
import pytest

from support.io_data import SUFFIXES, open_path, write_shard
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache


def texts(first: int, count: int) -> list[str]:
    return [f"document {n}" for n in range(first, first + count)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_shards_groups_and_rows_are_counted_in_name_order(tmp_path, suffix):
    write_shard(tmp_path / f"b{suffix}", texts(7, 5))
    write_shard(tmp_path / f"a{suffix}", texts(0, 7))
    catalog = open_path(tmp_path).catalog
    assert catalog.shard_names.to_pylist() == [f"a{suffix}", f"b{suffix}"]
    assert catalog.shard_sizes.tolist() == [os.path.getsize(tmp_path / f"{name}{suffix}") for name in "ab"]
    group_rows = [7, 5] if ".jsonl" in suffix else [3, 3, 1, 3, 2]
    assert catalog.group_rows.tolist() == group_rows
    assert catalog.row_starts.tolist() == [0, *np.cumsum(group_rows)]
    assert catalog.shard_row_starts.tolist() == [0, 7, 12]
    assert catalog.shard_group_starts.tolist() == [0, len(group_rows) - len(group_rows) // 2, len(group_rows)]
    assert (catalog.rows, catalog.n_shards, catalog.n_groups) == (12, 2, len(group_rows))
    assert catalog.bytes > 0 and catalog.bytes == catalog.group_bytes.sum()
    shard, row = catalog.locate(np.array([0, 6, 7, 11]))
    assert shard.tolist() == [0, 0, 1, 1] and row.tolist() == [0, 6, 0, 4]
    with pytest.raises(ValueError, match="read-only"):
        catalog.group_rows[0] = 1


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_fingerprint_depends_on_names_and_content_and_not_on_place_or_time(tmp_path, suffix):
    for name, first in (("a", 0), ("sub/b", 10)):
        write_shard(tmp_path / f"one/{name}{suffix}", texts(first, 10))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    os.utime(tmp_path / f"two/a{suffix}", (1, 1))
    one, two = open_path(tmp_path / "one").catalog.fingerprint, open_path(tmp_path / "two").catalog.fingerprint
    assert one == two and len(one) == 64
    (tmp_path / f"two/a{suffix}").rename(tmp_path / f"two/c{suffix}")
    renamed = open_path(tmp_path / "two").catalog.fingerprint
    (tmp_path / f"two/c{suffix}").rename(tmp_path / f"two/a{suffix}")
    write_shard(tmp_path / f"two/a{suffix}", [*texts(0, 9), "document 9 changed"])
    changed = open_path(tmp_path / "two").catalog.fingerprint
    assert len({one, renamed, changed}) == 3


def test_one_changed_letter_of_json_lines_changes_the_fingerprint(tmp_path):
    path = write_shard(tmp_path / "a.jsonl", texts(0, 100))
    before = open_path(path).catalog.fingerprint
    path.write_bytes(path.read_bytes().replace(b"document 55", b"document 56"))
    assert open_path(path).catalog.fingerprint != before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_second_start_opens_no_data_file(tmp_path, opened, suffix):
    for shard in range(5):
        write_shard(tmp_path / f"data/{shard}{suffix}", texts(shard * 10, 10))
    first = open_path(tmp_path / "data", index_dir=tmp_path / "index").catalog
    assert sorted(set(opened)) == [f"{shard}{suffix}" for shard in range(5)]
    opened.clear()
    second = open_path(tmp_path / "data", index_dir=tmp_path / "index").catalog
    assert opened == []
    assert second.fingerprint == first.fingerprint
    for field in ("group_shard", "group_rows", "group_bytes", "group_offset", "group_length", "shard_sizes"):
        assert np.array_equal(getattr(first, field), getattr(second, field))
    with pytest.raises(DataError, match=r"no column 'txt'.*'text'"):
        open_path(tmp_path / "data", ["txt"], index_dir=tmp_path / "index")
    assert opened == [], "columns are checked without opening a file"


def test_only_new_and_changed_shards_are_scanned_again_and_removed_ones_are_gone(tmp_path, opened):
    data, index = tmp_path / "data", tmp_path / "index"
    for shard in "bdf":
        write_shard(data / f"{shard}.parquet", [shard] * 4)
    open_path(data, index_dir=index)
    (data / "d.parquet").unlink()
    write_shard(data / "f.parquet", ["F"] * 5)
    for shard in "ac":
        write_shard(data / f"{shard}.parquet", [shard] * 2)
    opened.clear()
    dataset = open_path(data, index_dir=index)
    assert sorted(opened) == ["a.parquet", "c.parquet", "f.parquet"]
    assert dataset.catalog.shard_names.to_pylist() == [f"{shard}.parquet" for shard in "abcf"]
    assert dataset.catalog.fingerprint == open_path(data).catalog.fingerprint
    assert dataset.take(np.arange(dataset.catalog.rows))["text"].to_pylist() == [*"aabbbbccFFFFF"]
    opened.clear()
    assert open_path(data, index_dir=index).catalog.rows == 13
    assert opened == []


def test_a_shard_of_the_same_size_and_another_time_is_scanned_again(tmp_path, opened):
    path = write_shard(tmp_path / "a.jsonl", ["one"])
    before = open_path(path, index_dir=tmp_path / "index").catalog.fingerprint
    write_shard(path, ["two"])
    os.utime(path, (1, 1))
    opened.clear()
    assert open_path(path, index_dir=tmp_path / "index").catalog.fingerprint != before
    assert set(opened) == {"a.jsonl"}


def test_indexes_of_other_columns_formats_and_paths_are_kept_apart(tmp_path):
    write_shard(tmp_path / "d/a.parquet", ["x"])
    write_shard(tmp_path / "d/a.jsonl", ["x"])
    index = tmp_path / "index"
    open_path(tmp_path / "d", fmt="parquet", index_dir=index)
    open_path(tmp_path / "d", fmt="jsonl", index_dir=index)
    open_path(tmp_path / "d/a.jsonl", index_dir=index)
    assert len(list(index.iterdir())) == 3
    with pytest.raises(DataError, match="no column 'n2'"):
        dataset = Dataset.from_path("x", tmp_path / "d", fmt="parquet")
        dataset.open(["n2"], size_column="n2", cache=DecodeCache(0), index_dir=index)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "folder"])
def test_a_damaged_index_is_rebuilt_without_a_word(tmp_path, caplog, damage):
    data, index = tmp_path / "data", tmp_path / "index"
    write_shard(data / "a.parquet", texts(0, 10))
    expected = open_path(data, index_dir=index).catalog.fingerprint
    (file,) = index.iterdir()
    raw = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(raw[:-7])
    elif damage == "flipped":
        raw[len(raw) // 2] ^= 4
        file.write_bytes(raw)
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.mkdir()
    with caplog.at_level(logging.WARNING):
        assert open_path(data, index_dir=index).catalog.fingerprint == expected
    if damage != "folder":
        assert caplog.records == []
        assert [path.name for path in index.iterdir()] == [file.name]


def test_an_index_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    write_shard(tmp_path / "data/a.parquet", texts(0, 10))
    (tmp_path / "blocked").write_text("a file, not a folder")
    with caplog.at_level(logging.WARNING):
        assert open_path(tmp_path / "data", index_dir=tmp_path / "blocked/index").catalog.rows == 10
    (record,) = caplog.records
    assert "cannot write to the index folder" in record.getMessage()


def test_the_first_bad_shard_in_name_order_is_reported(tmp_path):
    for shard in range(40):
        write_shard(tmp_path / f"{shard:02}.parquet", texts(0, 2))
    for shard in (7, 8, 31):
        (tmp_path / f"{shard:02}.parquet").write_bytes(b"PAR1 damaged PAR1")
    for _ in range(3):
        with pytest.raises(DataError, match=r"07\.parquet"):
            open_path(tmp_path)
