"""Rows by id: order, repeats, changed files, many threads, datasets in memory."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.io_data import SUFFIXES, open_path, write_shard
from zephon.data.storage import StoredFile
from zephon.errors import DataError, RecipeError
from zephon.io import Dataset, DecodeCache

TEXTS = [f"document {n} " + "x" * (n % 17) for n in range(400)]


@pytest.fixture(params=SUFFIXES)
def suffix(request) -> str:
    return request.param


def write_shards(folder, suffix, group_rows=16):
    for shard in range(4):
        write_shard(folder / f"{shard}{suffix}", TEXTS[shard * 100 : shard * 100 + 100], group_rows)
    return folder


@pytest.mark.parametrize("cache_bytes", [0, 300, 1 << 20])
def test_take_gives_any_rows_in_any_order_with_one_chunk_per_column(tmp_path, suffix, cache_bytes):
    dataset = open_path(write_shards(tmp_path, suffix), cache_bytes=cache_bytes)
    generator = np.random.default_rng(0)
    for rows in (
        generator.permutation(400),
        generator.integers(0, 400, 1000),
        np.array([399, 0]),
        np.array([5, 5, 5]),
        np.arange(90, 210),
        generator.integers(0, 400, 7),
        np.array([17], np.int32),
    ):
        taken = dataset.take(rows)
        assert taken["text"].to_pylist() == [TEXTS[row] for row in rows]
        assert taken["text"].num_chunks == 1
        assert taken["text"].chunk(0).type == pa.large_string()
        taken.validate(full=True)


def test_rows_of_many_groups_keep_their_values_and_types(tmp_path):
    """Texts, lists and nulls, also where shards have other types."""
    rows = [
        {"text": None if n % 7 == 0 else f"{n} " + "é" * (n % 50), "ids": None if n % 5 == 0 else list(range(n % 4))}
        for n in range(200)
    ]
    for shard, kind in enumerate((pa.int32(), pa.int64())):
        part = rows[shard * 100 : shard * 100 + 100]
        columns = {name: [row[name] for row in part] for name in ("text", "ids")}
        table = pa.table(columns, schema=pa.schema([("text", pa.string()), ("ids", pa.list_(kind))]))
        pq.write_table(table, tmp_path / f"{shard}.parquet", row_group_size=10)
    dataset = open_path(tmp_path, columns=["text", "ids"])
    generator = np.random.default_rng(1)
    for wanted in (generator.permutation(200)[:40], generator.integers(0, 100, 25), np.array([199, 0, 0])):
        taken = dataset.take(wanted)
        taken.validate(full=True)
        assert taken.to_pylist() == [rows[row] for row in wanted]
        assert all(column.num_chunks == 1 for column in taken.columns)


def test_read_group_gives_exactly_the_rows_of_the_group(tmp_path, suffix):
    dataset = open_path(write_shards(tmp_path, suffix))
    starts = dataset.catalog.row_starts
    for group in range(dataset.catalog.n_groups):
        assert dataset.read_group(group)["text"].to_pylist() == TEXTS[starts[group] : starts[group + 1]]


def test_rows_that_do_not_exist_are_refused(tmp_path):
    dataset = open_path(write_shards(tmp_path, ".parquet"))
    for rows, wrong in (([0, 400], 400), ([-1], -1), ([2**40, 5], 2**40)):
        with pytest.raises(DataError, match=f"row {wrong} was asked of dataset 'corpus', which has rows 0 to 399"):
            dataset.take(np.array(rows))


def test_many_threads_read_one_dataset(tmp_path):
    dataset = open_path(write_shards(tmp_path, ".jsonl.gz"), cache_bytes=2000)
    start = threading.Barrier(8)

    def work(seed):
        generator = np.random.default_rng(seed)
        start.wait()
        for _ in range(20):
            rows = generator.integers(0, 400, 50)
            assert dataset.take(rows)["text"].to_pylist() == [TEXTS[row] for row in rows]

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result(60)


def test_a_closed_dataset_holds_no_file_and_no_memory_and_still_reads(tmp_path, suffix):
    dataset = open_path(write_shards(tmp_path, suffix))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    dataset.take(np.arange(400))
    dataset.close()
    assert dataset._cache.bytes == 0
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before
    assert dataset.take(np.array([1]))["text"].to_pylist() == [TEXTS[1]]


def test_open_files_stay_bounded_over_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("zephon.data.reader._MAX_OPEN_SHARDS", 4)
    for shard in range(30):
        write_shard(tmp_path / f"{shard:02}.jsonl.gz", [f"shard {shard}"])
    dataset = open_path(tmp_path, cache_bytes=0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert dataset.take(np.arange(30))["text"].to_pylist() == [f"shard {shard}" for shard in range(30)]
    assert len(os.listdir("/proc/self/fd")) - before <= 4


# Files that change under a run


def test_a_shard_that_changed_since_the_catalog_is_reported(tmp_path, suffix):
    path = write_shard(tmp_path / f"a{suffix}", TEXTS[:50])
    dataset = open_path(path, cache_bytes=0)
    dataset.take(np.array([0]))
    dataset.close()
    write_shard(path, [text.upper() for text in TEXTS[:60]])
    with pytest.raises(DataError, match=rf"a{suffix}' has changed since the dataset was listed"):
        dataset.take(np.array([49]))


def test_a_shard_of_the_same_size_with_other_content_is_reported(tmp_path):
    path = write_shard(tmp_path / "a.jsonl", ["one", "two"])
    dataset = open_path(path)
    write_shard(path, ["two", "one"])
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match="has changed since"):
        dataset.take(np.array([0]))


def test_a_shard_that_was_only_touched_is_read_on(tmp_path, suffix):
    path = write_shard(tmp_path / f"a{suffix}", TEXTS[:50])
    dataset = open_path(path, cache_bytes=0)
    assert dataset.take(np.array([1]))["text"].to_pylist() == [TEXTS[1]]
    dataset.close()
    os.utime(path, (1, 1))
    assert dataset.take(np.array([49]))["text"].to_pylist() == [TEXTS[49]]


def test_a_shard_that_disappeared_is_reported(tmp_path, suffix):
    path = write_shard(tmp_path / f"a{suffix}", TEXTS[:50])
    dataset = open_path(path)
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot open .*a{suffix}': No such file"):
        dataset.take(np.array([0]))


# In memory


def test_a_dict_of_columns_is_a_dataset(tmp_path):
    dataset = Dataset.from_dict("mem", {"text": TEXTS * 30, "n": range(12000)})
    opened = dataset.open(["n", "text"], size_column="text", cache=DecodeCache(0))
    rows = np.array([11999, 0, 5000, 0])
    taken = opened.take(rows)
    assert taken["text"].to_pylist() == [TEXTS[row % 400] for row in rows]
    assert taken["n"].to_pylist() == rows.tolist()
    assert taken.schema.field("text").type == pa.large_string()
    assert opened.catalog.group_rows.tolist() == [4096, 4096, 3808]
    assert opened.catalog.bytes == 30 * sum(map(len, TEXTS))
    assert opened.read_group(2)["n"].to_pylist() == list(range(8192, 12000))
    assert opened.take(np.array([], np.int64)).num_rows == 0
    with pytest.raises(DataError, match="row 12000"):
        opened.take(np.array([12000]))


def test_the_fingerprint_of_a_dataset_in_memory_is_that_of_its_values():
    def fingerprint(table):
        dataset = Dataset.from_table("mem", table)
        return dataset.open(["text"], size_column="text", cache=DecodeCache(0)).catalog.fingerprint

    values = ["a", None, "ccc", ""]
    chunked = pa.table({"text": pa.chunked_array([["a"], [None, "ccc"], [""]])})
    sliced = pa.table({"text": ["zzz", *values, "zzz"]}).slice(1, 4)
    expected = fingerprint(pa.table({"text": values}))
    for same in (chunked, sliced, pa.table({"text": pa.array(values, pa.large_string()), "n": range(4)})):
        assert fingerprint(same) == expected
    assert fingerprint(pa.table({"text": ["a", "", "ccc", ""]})) != expected


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"text": []}, "no rows|type null"),
        ({"text": [1, 2]}, "has the type int64; expected text"),
        ({"txt": ["a"]}, "no column 'text' in 'dataset mem .in memory.'.*did you mean 'txt'"),
        ({"text": ["a"], "n": [1, 2]}, "make no table"),
        ({"text": ["a", 1]}, "make no table"),
        ({"text": ["\ud800"]}, "make no table"),
        ({"text": [b"a", b"\xff"]}, "row 1, column 'text', is not valid UTF-8"),
    ],
)
def test_columns_that_make_no_documents_are_refused(columns, reason):
    with pytest.raises(DataError, match=reason):
        Dataset.from_dict("mem", columns).open(["text"], size_column="text", cache=DecodeCache(0))


def test_datasets_that_cannot_be_meant_are_refused_when_made(tmp_path):
    for make in (
        lambda: Dataset.from_path("", tmp_path),
        lambda: Dataset.from_path("x", ""),
        lambda: Dataset.from_path("x", 7),
        lambda: Dataset.from_path("x", b"/bytes"),
        lambda: Dataset.from_path("x", tmp_path, text_field=""),
        lambda: Dataset("x"),
        lambda: Dataset("x", "/p", table=pa.table({})),
    ):
        with pytest.raises(RecipeError):
            make()
    assert Dataset.from_path("x", "s3://bucket/far").path == "s3://bucket/far"
    with pytest.raises(DataError, match="is of kind xyz://"):
        Dataset.from_path("x", "xyz://bucket/far").open(["text"], size_column="text", cache=DecodeCache(0))
    with pytest.raises(RecipeError, match="no columns"):
        Dataset.from_path("x", tmp_path).open([], size_column="text", cache=DecodeCache(0))


def test_a_small_parquet_file_is_opened_once_for_its_footer_and_its_rows(tmp_path, monkeypatch):
    dataset = open_path(write_shards(tmp_path, ".parquet", group_rows=100))
    opened = []
    monkeypatch.setattr(
        StoredFile, "open", lambda self, *args, o=StoredFile.open: opened.append(self.path) or o(self, *args)
    )
    assert dataset.take(np.arange(400))["text"].to_pylist() == TEXTS
    assert len(opened) == len(set(opened)) == 4
    dataset.close()
    assert dataset.take(np.array([399, 0]))["text"].to_pylist() == [TEXTS[399], TEXTS[0]]
