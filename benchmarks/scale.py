"""What a very large dataset costs before its first row is read: from the index of a million shards to any chunk.

    .venv/bin/python scripts/bench_scale.py [--shards 1000000] [--groups 10] [--group-rows 1000] [--lanes 1024]

The files do not exist; their index does, as `zephon index` would leave it. Times are wall clock, memory is this
process's peak, which the making of the index (in a process of its own) does not touch.
"""

import argparse
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.curriculum.mixture import Curriculum
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.data import sidecar
from zephon.data.catalog import Catalog
from zephon.data.formats.registry import formats

ROW_BYTES = 3000


def shards_table(n_shards: int, groups: int, group_rows: int) -> pa.Table:
    """What scans of so many shards would have found."""
    bounds = int64_array(np.arange(n_shards + 1, dtype=np.int64) * groups)
    total = n_shards * groups

    def lists(values: np.ndarray) -> pa.Array:
        return pa.LargeListArray.from_arrays(bounds, int64_array(values))

    numbers = np.arange(n_shards)
    rows = np.full(total, group_rows, np.int64) - np.arange(total) % 7
    return pa.table(
        {
            "name": pa.array([f"crawl/part-{n:08}.parquet" for n in range(n_shards)]),
            "size": int64_array(np.full(n_shards, groups * group_rows * ROW_BYTES // 3)),
            "mtime_ns": int64_array(numbers),
            "digest": pa.array([f"{n:032x}" for n in range(n_shards)]),
            "columns": pa.array(['{"text": "large_string", "url": "large_string"}'] * n_shards),
            "group_rows": lists(rows),
            "group_bytes": lists(rows * ROW_BYTES),
            "group_offset": lists(np.arange(total, dtype=np.int64) % groups),
            "group_length": lists(rows * ROW_BYTES // 3),
        },
        schema=sidecar.SCHEMA,
    )


def write_index(path: Path, n_shards: int, groups: int, group_rows: int) -> None:
    sidecar.save(path, shards_table(n_shards, groups, group_rows))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shards", type=int, default=1_000_000)
    arguments.add_argument("--groups", type=int, default=10, help="per shard")
    arguments.add_argument("--group-rows", type=int, default=1010)
    arguments.add_argument("--lanes", type=int, default=1024)
    arguments.add_argument("--chunk-size", type=int, default=16384)
    arguments.add_argument("--lookups", type=int, default=2000)
    given = arguments.parse_args()
    before = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "d.index"
        making = multiprocessing.get_context("spawn").Process(
            target=write_index, args=(index, given.shards, given.groups, given.group_rows)
        )
        making.start()
        making.join()
        print(f"index: {index.stat().st_size / 1e6:,.0f} MB for {given.shards:,} shards")
        began = last = time.perf_counter()

        def told(what: str) -> None:
            nonlocal last
            now = time.perf_counter()
            print(f"{what:<28}{now - last:8.2f} s   peak {peak_bytes() / 1e9:.2f} GB")
            last = now

        table = sidecar.load(index)
        assert table is not None
        told("index read")
        catalog = Catalog.from_shards("crawl", formats()["parquet"], table)
        del table
        told(f"catalog of {catalog.rows:,} rows")
        catalog.fingerprint  # noqa: B018
        told("fingerprint")
        order = DatasetOrder("crawl", catalog, lanes=given.lanes, seed=1, options=OrderOptions())
        curriculum = Curriculum([order], [1], lanes=given.lanes, chunk_size=given.chunk_size, seed=1)
        told("order")
        curriculum.chunk(0, 0)
        told("first chunk")
        plan_seconds = time.perf_counter() - began
    chooser = random.Random(1)
    most = max(1, catalog.rows // given.lanes // given.chunk_size)
    times = []
    for _ in range(given.lookups):
        lane, number = chooser.randrange(given.lanes), chooser.randrange(most)
        began = time.perf_counter()
        curriculum.chunk(lane, number)
        times.append(time.perf_counter() - began)
    anywhere = np.sort(times) * 1e3
    times = []
    for number in range(min(most, given.lookups)):
        began = time.perf_counter()
        curriculum.chunk(1, number)
        times.append(time.perf_counter() - began)
    in_order = np.sort(times) * 1e3
    print(f"planned in {plan_seconds:.1f} s, peak {peak_bytes() / 1e9:.2f} GB ({before / 1e9:.2f} GB before)")
    for what, each in (("any chunk", anywhere), ("next chunk", in_order)):
        print(f"{what}: median {each[len(each) // 2]:.2f} ms, 99 % {each[len(each) * 99 // 100]:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
