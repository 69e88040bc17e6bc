"""What large datasets cost: memory per row group, lookups without a look at all of them, bounded open files."""

import gzip
import os
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from zephon.columns.arrow import int64_array
from zephon.curriculum.mixture import Curriculum
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.data import sidecar
from zephon.data.catalog import Catalog
from zephon.data.formats import sequential
from zephon.data.formats.registry import formats
from zephon.io import Dataset, DecodeCache

SHARDS, GROUPS, ROWS = 20_000, 10, 1000


@pytest.fixture(scope="module")
def catalog():
    total = SHARDS * GROUPS
    bounds = int64_array(np.arange(SHARDS + 1, dtype=np.int64) * GROUPS)
    lists = {
        "group_rows": np.full(total, ROWS, np.int64),
        "group_bytes": np.full(total, ROWS * 3000, np.int64),
        "group_offset": np.arange(total, dtype=np.int64) % GROUPS,
        "group_length": np.full(total, ROWS * 900, np.int64),
    }
    table = pa.table(
        {
            "name": pa.array([f"part-{n:06}.parquet" for n in range(SHARDS)]),
            "size": int64_array(np.full(SHARDS, 10**7)),
            "mtime_ns": int64_array(np.zeros(SHARDS, np.int64)),
            "digest": pa.array([f"{n:032x}" for n in range(SHARDS)]),
            "columns": pa.array(['{"text": "large_string"}'] * SHARDS),
            **{name: pa.LargeListArray.from_arrays(bounds, int64_array(values)) for name, values in lists.items()},
        },
        schema=sidecar.SCHEMA,
    )
    return Catalog.from_shards("crawl", formats()["parquet"], table)


def test_a_catalog_and_its_order_take_few_bytes_per_group(catalog):
    """A million shards of ten groups must fit 2 GB with the libraries, so 150 bytes per group is the most."""
    tracemalloc.start()
    order = DatasetOrder("crawl", catalog, lanes=64, seed=1, options=OrderOptions())
    curriculum = Curriculum([order], [1], lanes=64, chunk_size=16384, seed=1)
    assert len(curriculum.chunk(3, 100)) == 16384
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    columns = ("group_shard", "group_rows", "group_bytes", "group_offset", "group_length", "row_starts")
    held = sum(getattr(catalog, name).nbytes for name in columns)
    assert (held + peak) / catalog.n_groups < 150
    assert (held + kept) / catalog.n_groups < 100


def test_memory_does_not_grow_with_the_chunks_that_were_asked_for(catalog):
    order = DatasetOrder("crawl", catalog, lanes=64, seed=1, options=OrderOptions())
    curriculum = Curriculum([order], [1], lanes=64, chunk_size=1024, seed=1)
    for lane in range(64):
        for index in range(12):
            curriculum.chunk(lane, index)
    tracemalloc.start()
    for lane in range(64):
        for index in range(12, 60):
            curriculum.chunk(lane, index)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 << 20


def test_compressed_files_of_many_datasets_stay_within_the_open_files_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(sequential, "most_files", lambda: 5)
    datasets = []
    for number in range(12):
        path = tmp_path / f"{number}.jsonl.gz"
        path.write_bytes(gzip.compress(b"".join(b'{"text": "%d %d"}\n' % (number, n) for n in range(2000))))
        opened = Dataset.from_path(str(number), path).open(["text"], size_column="text", cache=DecodeCache(0))
        datasets.append(opened)

    def open_files():
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links)

    for _ in range(2):
        for number, opened in enumerate(datasets):
            assert opened.take(np.array([7]))["text"].to_pylist() == [f"{number} 7"]
            assert open_files() <= (5 + 1) * 2  # the next one is opened before another is let go
    for opened in datasets:
        opened.close()
    assert open_files() == 0
