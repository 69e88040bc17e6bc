"""Small data and stand-ins that several test files build on."""

from types import SimpleNamespace

import numpy as np


def catalog_of(group_rows: list[int], groups_per_shard: int, *, row_bytes: int = 100, sequential: bool = False):
    """A catalog as far as the order of rows is concerned: groups of so many rows, so many groups per shard."""
    starts = np.concatenate([[0], np.cumsum(group_rows)]).astype(np.int64)
    return SimpleNamespace(
        row_starts=starts,
        rows=int(starts[-1]),
        bytes=int(starts[-1]) * row_bytes,
        group_shard=np.arange(len(group_rows), dtype=np.int32) // groups_per_shard,
        sequential=sequential,
    )
