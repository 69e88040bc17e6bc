"""How well a run is shuffled, compared with one random permutation of all rows.

For each way to order a dataset, over one pass as the lanes read it, round by round:

neighbours    correlation of the row numbers of neighbouring rows; 0 for a random order, 1 for none
same source   mean length of runs of rows that come from one shard; a random order has about 1
displacement  mean distance of a row from where it stands in the files, as a part of the dataset; 1/3 for a random order

    python scripts/shuffle_quality.py [--rows 1000000] [--lanes 16]
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import numpy as np

from zephon.curriculum.order import DatasetOrder, OrderOptions

WAYS = {
    "as it stands": OrderOptions(shuffle_shards=False, shuffle_within_shard=False),
    "shards only": OrderOptions(shuffle_within_shard=False),
    "blocks of 10,000 rows": OrderOptions(block_size=10_000),
    "auto": OrderOptions(),
    "global": OrderOptions(block_size="global"),
}


def catalog(rows: int, shards: int, groups: int, row_bytes: int) -> SimpleNamespace:
    """A dataset as far as order is concerned: `shards` shards of `groups` row groups each."""
    starts = np.linspace(0, rows, shards * groups + 1).astype(np.int64)
    return SimpleNamespace(
        row_starts=starts,
        rows=rows,
        bytes=rows * row_bytes,
        group_shard=np.arange(shards * groups, dtype=np.int32) // groups,
        sequential=False,
    )


def quality(order: np.ndarray, shard_of: np.ndarray) -> tuple[float, float, float]:
    """Neighbour correlation, mean run of one shard, and mean displacement of an order int64[n] of all rows."""
    n = len(order)
    neighbours = float(np.corrcoef(order[:-1], order[1:])[0, 1])
    runs = n / (1 + int((np.diff(shard_of[order]) != 0).sum()))
    return neighbours, runs, float(np.abs(order - np.arange(n)).mean() / n)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--groups", type=int, default=10, help="row groups per shard")
    parser.add_argument("--row-bytes", type=int, default=2000)
    parser.add_argument("--lanes", type=int, default=16)
    options = parser.parse_args()
    made = catalog(options.rows, options.shards, options.groups, options.row_bytes)
    shard_of = np.repeat(made.group_shard, np.diff(made.row_starts))
    print(f"{options.rows:,} rows in {options.shards} shards, {options.lanes} lanes")
    print(f"{'':24}{'neighbours':>12}{'same source':>13}{'displacement':>14}")
    orders = {}
    for name, way in WAYS.items():
        order = DatasetOrder("d", made, lanes=options.lanes, seed=1, options=way)  # type: ignore[arg-type]
        each = [order.rows(lane, 0, order.rows_of_lane(lane)) for lane in range(options.lanes)]
        shortest = min(map(len, each))
        rounds = np.stack([rows[:shortest] for rows in each], axis=1).reshape(-1)
        orders[name] = np.concatenate([rounds, *(rows[shortest:] for rows in each)])
    orders["one random permutation"] = np.random.default_rng(1).permutation(options.rows)
    for name, rows in orders.items():
        neighbours, runs, displacement = quality(rows, shard_of)
        print(f"{name:24}{neighbours:12.4f}{runs:13.2f}{displacement:14.3f}")


if __name__ == "__main__":
    main()
