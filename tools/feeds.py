"""Steps of one pass over documents of skewed lengths, by lanes and feeds: the table of docs/order.md.

python tools/feeds.py [ROWS ...]
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa

from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

BATCH, SEQ_LEN, LANES = 256, 1024, (1, 8, 64, 256)


def main() -> None:
    """Print a line for each number of rows, with the least steps possible and, by lanes, feeds of their own or one."""
    for rows in map(int, sys.argv[1:] or ["60", "10000", "1000000"]):
        lengths = np.random.default_rng(1).lognormal(5.5, 1.2, rows).astype(int) + 1
        ids = np.full(lengths.sum(), 7, dtype=np.uint16)
        rows_of_ids = pa.LargeListArray.from_arrays(np.append(0, np.cumsum(lengths)), ids)
        table = pa.table({"input_ids": pa.chunked_array([rows_of_ids[i : i + 4096] for i in range(0, rows, 4096)])})
        source = StaticMixtureWorkSource([Dataset.from_table("d", table)], repeat=False)
        least = -(-int(lengths.sum()) // ((SEQ_LEN + 1) * BATCH))
        steps = {}
        for lanes in LANES:
            for feeds in {1, lanes}:
                pipeline = Pipeline(source).options(canonical_replicas=lanes, global_batch=BATCH, feeds=feeds)
                pipeline = pipeline.pretokenized().pack_flat(SEQ_LEN).batch(BATCH)
                steps[lanes, feeds] = sum(1 for _ in pipeline)
        apart, shared = (", ".join(f"{steps[lanes, n or lanes]:,}" for lanes in LANES) for n in (0, 1))
        print(f"{rows:,} rows: at least {least:,}; own feeds at {LANES} lanes: {apart}; one feed: {shared}", flush=True)


if __name__ == "__main__":
    main()
