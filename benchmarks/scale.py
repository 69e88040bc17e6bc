"""What a very large dataset costs before its first row is read: from the index of a million shards to any chunk.

The files do not exist; their index does, as `zephon index` would leave it. Times are wall clock, memory is this
process's peak, which the making of the index (in a process of its own) does not touch.
"""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common import Setup, peak_mb
from zephon.columns.arrow import int64_array
from zephon.curriculum.mixture import Curriculum
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.curriculum.rates import constant_curve
from zephon.data.catalog import Catalog
from zephon.data.formats.registry import formats
from zephon.data.index import INDEX_SCHEMA, load_table, save_table

SHARDS, GROUPS, GROUP_ROWS = 1_000_000, 10, 1010
PROGRAM = "import sys; from benchmarks.scale import measure; measure(sys.argv[1])"
LANES, CHUNK_SIZE, LOOKUPS = 1024, 16384, 2000
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
        schema=INDEX_SCHEMA,
    )


def write_index(path: Path, n_shards: int, groups: int, group_rows: int) -> None:
    save_table(path, shards_table(n_shards, groups, group_rows))


def milliseconds(times: list[float]) -> str:
    each = np.sort(times) * 1e3
    return f"median {each[len(each) // 2]:.2f} ms, 99 % {each[len(each) * 99 // 100]:.2f} ms"


def measure(index: str) -> None:
    """Plan from the index, stage by stage, then look up chunks."""
    began = last = time.perf_counter()

    def report(what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        print(f"{what:<28}{now - last:8.2f} s   peak {peak_mb() / 1e3:.2f} GB", flush=True)
        last = now

    table = load_table(Path(index))
    assert table is not None
    report("index read")
    catalog = Catalog.from_shards("crawl", formats()["parquet"], table)
    del table
    report(f"catalog of {catalog.rows:,} rows")
    catalog.fingerprint  # noqa: B018
    report("fingerprint")
    order = DatasetOrder("crawl", catalog, lanes=LANES, seed=1, options=OrderOptions())
    curriculum = Curriculum([order], [partial(constant_curve, [1], CHUNK_SIZE)], lanes=LANES, seed=1)
    curriculum.chunk(0, 0)
    report("order and first chunk")
    print(f"planned in {time.perf_counter() - began:.1f} s, peak {peak_mb() / 1e3:.2f} GB")
    chooser, chunks = random.Random(1), max(1, catalog.rows // LANES // CHUNK_SIZE)
    places = {
        "any chunk": [(chooser.randrange(LANES), chooser.randrange(chunks)) for _ in range(LOOKUPS)],
        "next chunk": [(1, number) for number in range(min(chunks, LOOKUPS))],
    }
    for what, wanted in places.items():
        times = []
        for lane, number in wanted:
            began = time.perf_counter()
            curriculum.chunk(lane, number)
            times.append(time.perf_counter() - began)
        print(f"{what}: {milliseconds(times)}")


def bench(setup: Setup) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "d.index"
        making = multiprocessing.get_context("spawn").Process(
            target=write_index, args=(index, SHARDS, GROUPS, GROUP_ROWS)
        )
        making.start()
        making.join()
        print(f"index: {index.stat().st_size / 1e6:,.0f} MB for {SHARDS:,} shards", flush=True)
        subprocess.run([sys.executable, "-c", PROGRAM, str(index)], check=True)
