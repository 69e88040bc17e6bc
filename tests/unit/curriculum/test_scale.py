"""What large datasets cost: memory per row group, lookups without a look at all of them, bounded open files."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from zephon.data.formats import sequential
from zephon.io import Dataset, DecodeCache

# A process of its own, so that nothing else in it allocates memory meanwhile.
PROGRAM = """
import tracemalloc
from functools import partial
from benchmarks.scale import shards_table
from zephon.curriculum.mixture import Curriculum
from zephon.curriculum.rates import constant_curve
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.data.catalog import Catalog
from zephon.data.formats.registry import formats

catalog = Catalog.from_shards("crawl", formats()["parquet"], shards_table(20_000, 10, 1010))
tracemalloc.start()
order = DatasetOrder("crawl", catalog, lanes=64, seed=1, options=OrderOptions())
curriculum = Curriculum([order], [partial(constant_curve, [1], {chunk_size})], lanes=64, seed=1)
for index in {chunks}:
    for lane in range(64):
        assert len(curriculum.chunk(lane, index)) == {chunk_size}
    if index == {chunks}[0]:
        kept, peak = tracemalloc.get_traced_memory()
columns = ("group_shard", "group_rows", "group_bytes", "group_offset", "group_length", "row_starts")
held = sum(getattr(catalog, name).nbytes for name in columns)
print(catalog.n_groups, held, kept, peak, tracemalloc.get_traced_memory()[0] - kept)
"""


def measured(chunk_size, chunks):
    """Row groups, bytes of the catalog, bytes kept and at most used with the first chunk, and bytes kept for others."""
    program = PROGRAM.format(chunk_size=chunk_size, chunks=chunks)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    return map(int, done.stdout.split())


def test_a_catalog_and_its_order_take_few_bytes_per_group():
    """A million shards of ten groups must fit 2 GB with the libraries, so 150 bytes per group is the most."""
    groups, held, kept, peak, _ = measured(16384, [100])
    assert (held + peak) / groups < 150
    assert (held + kept) / groups < 100


def test_memory_does_not_grow_with_the_chunks_that_were_asked_for():
    *_, more = measured(1024, list(range(48)))
    assert more < 4 << 20


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
