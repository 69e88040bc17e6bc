"""Order within a dataset: which row a lane reads next, as a pure function of lane and position.

Indices used here, all in rows of one dataset with N rows:

row
    Place in the dataset: shards by name, rows as they stand. 0 to N - 1.
virtual position
    Place in the order of one epoch: segments (runs of neighbouring rows) permuted, rows inside a segment as they
    stand. 0 to N - 1.
lane position
    How many rows of this dataset a lane has had before; runs on through the epochs.

Each epoch's virtual positions are cut into L ranges, [floor(jN/L), floor((j+1)N/L)) for j = 0 .. L - 1, and lane l
reads range (l + epoch) mod L. Because floor((j+L)N/L) = floor(jN/L) + N, the rows lane l has read before epoch e are
floor((l+e)N/L) - floor(lN/L): a closed form, so any lane position of any epoch is found without a walk, also where a
dataset has fewer rows than there are lanes. Each row is in exactly one range of each epoch, whatever L is.

Within its range a lane shuffles rows inside blocks; a block covers neighbouring virtual positions, so only a few
segments are open at a time. A small dataset of which a lane gets but a few rows per epoch is permuted as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from zephon.curriculum.permute import derive_key, feistel, hash64, mix_key, mix_keys, shuffled_indices
from zephon.data.catalog import Catalog

BLOCK_BYTES_PER_JOB = 32 << 20
SMALL_DATASET_BYTES = 128 << 20
_SMALL_SEGMENTS = 1024
_SMALL_SEGMENTS_PER_LANE = 16
_BLOCKS_KEPT_PER_LANE = 2
# A chunk of a small dataset in a run of many lanes goes through many epochs, each with an order of its segments.
_EPOCHS_KEPT = 64
_TINY_ROWS_PER_LANE = 256
_SEGMENTS_KEPT = 1 << 18


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """How the rows of a dataset are ordered.

    Attributes:
        shuffle_shards: permute segments in every epoch; else they stay in catalog order.
        shuffle_within_shard: shuffle rows inside blocks; else rows of a segment stay in order.
        block_size: rows of a block over all lanes together (each lane gets its share), "auto" (32 MiB of data over
            all lanes), "global" (one permutation of all rows) or "none".
        reshuffle: a new order in every epoch.
    """

    shuffle_shards: bool = True
    shuffle_within_shard: bool = True
    block_size: int | Literal["auto", "global", "none"] = "auto"
    reshuffle: bool = True


def segment_starts(catalog: Catalog, lanes: int) -> np.ndarray:
    """Where the segments of a dataset begin, int64[n_segments + 1], ending with the number of rows.

    A segment is what the format reads in one go (a row group, a record batch, a run of lines; a whole shard where
    the format has no random access). Small datasets, which fit the decode cache, are cut finer, down to single
    rows, so that their order is well mixed at any number of lanes.
    """
    starts = catalog.row_starts
    if catalog.sequential:
        first_group = np.flatnonzero(np.diff(catalog.group_shard, prepend=-1))
        starts = np.append(starts[first_group], catalog.rows)
    starts = np.asarray(starts, dtype=np.int64)
    if not (np.diff(starts) > 0).all():
        starts = np.unique(starts)
    if catalog.bytes > SMALL_DATASET_BYTES:
        return starts
    rows = max(1, catalog.rows // max(_SMALL_SEGMENTS, _SMALL_SEGMENTS_PER_LANE * lanes))
    sizes = np.diff(starts)
    pieces = -(-sizes // rows)
    owner = np.repeat(np.arange(len(sizes)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(starts[owner] + nth * rows, starts[-1])


class DatasetOrder:
    """The order in which the lanes read one dataset.

    Args:
        name: the dataset's name, which with `seed` keys all its permutations.
        catalog: its shards and rows.
        lanes: L.
        seed: seed of the run.
        options: see `OrderOptions`.
    """

    def __init__(self, name: str, catalog: Catalog, *, lanes: int, seed: int, options: OrderOptions) -> None:
        self.rows_total = int(catalog.rows)
        self._lanes = lanes
        self._key = derive_key("order", seed, name)
        self._options = options
        self._segments = segment_starts(catalog, lanes)
        block = options.block_size if options.shuffle_within_shard else "none"
        self._global = block == "global"
        self._block_rows = 0  # no blocks
        if block == "auto":
            row_bytes = max(1, catalog.bytes // max(1, catalog.rows))
            self._block_rows = max(1, BLOCK_BYTES_PER_JOB // lanes // row_bytes)
        elif isinstance(block, int):
            self._block_rows = max(1, block // lanes)
        self._shuffled = options.shuffle_shards or block != "none"
        # Going from epoch to epoch costs something each time, which is all there is where epochs are short.
        small = catalog.bytes <= SMALL_DATASET_BYTES
        self._tiny = small and self.rows_total < _TINY_ROWS_PER_LANE * lanes
        self._keep()

    @staticmethod
    def rows_of(orders: Sequence[DatasetOrder], lane: int, starts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
        """`rows` of several datasets, put end to end: of each, so many from a lane position on."""
        ends = np.cumsum(counts)
        out = np.empty(int(ends[-1]), dtype=np.int64)
        tiny = [d for d, order in enumerate(orders) if order._tiny]
        for d in sorted(set(range(len(orders))).difference(tiny)):
            out[ends[d] - counts[d] : ends[d]] = orders[d].rows(lane, starts[d], starts[d] + counts[d])
        if tiny:
            some = [orders[d] for d in tiny], lane, [starts[d] for d in tiny], [counts[d] for d in tiny]
            out[np.repeat(np.isin(np.arange(len(orders)), tiny), counts)] = _tiny_rows(*some)
        return out

    def _keep(self) -> None:
        """Keep what the next chunk of a lane needs again."""
        epochs = max(2, min(_EPOCHS_KEPT, _SEGMENTS_KEPT // len(self._segments)))
        self._segments_in = lru_cache(epochs)(self._segments_in_order)
        self._block = lru_cache(_BLOCKS_KEPT_PER_LANE * self._lanes)(self._block_in_order)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_segments_in", "_block")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep()

    def rows_of_lane(self, lane: int, passes: int = 1) -> int:
        """Rows that `lane` reads in the first `passes` epochs."""
        return (lane + passes) * self.rows_total // self._lanes - lane * self.rows_total // self._lanes

    def rows(self, lane: int, start: int, stop: int) -> np.ndarray:
        """Row numbers int64[stop - start] at lane positions `start` to `stop`."""
        if self._tiny:
            return _tiny_rows([self], lane, [start], [stop - start])
        out = np.empty(stop - start, dtype=np.int64)
        filled = 0
        while filled < len(out):
            epoch, low, high, offset = self._find(lane, start + filled)
            count = min(len(out) - filled, high - low - offset)
            out[filled : filled + count] = self._range_rows(epoch, low, high, offset, offset + count)
            filled += count
        return out

    def _find(self, lane: int, position: int) -> tuple[int, int, int, int]:
        """Epoch, the lane's virtual range in it, and how far into that range a lane position lies."""
        n, lanes = self.rows_total, self._lanes
        before = lane * n // lanes
        # The largest x with floor(x * n / lanes) <= position + before; x = lane + epoch.
        x = ((position + before + 1) * lanes - 1) // n
        reached = x * n // lanes
        low = reached - (x // lanes) * n
        high = low + (x + 1) * n // lanes - reached
        return x - lane, low, high, position + before - reached

    def _range_rows(self, epoch: int, low: int, high: int, start: int, stop: int) -> np.ndarray:
        """Rows at places `start` to `stop` of the lane's virtual range [low, high)."""
        if self._global:
            return feistel(self._epoch_key(epoch), self.rows_total, np.arange(low + start, low + stop, dtype=np.int64))
        size = self._block_rows
        if not size:
            return self._run_of_rows(epoch, low + start, low + stop)
        first, last = start // size, (stop - 1) // size

        def edge(block: int) -> np.ndarray:
            begin = low + block * size
            return self._block(epoch, begin, min(begin + size, high))

        parts = [edge(first)[start - first * size : stop - first * size]]
        if last > first + 1:
            parts.append(self._whole_blocks(epoch, low + (first + 1) * size, last - first - 1))
        if last > first:
            parts.append(edge(last)[: stop - last * size])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _block_in_order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """The shuffled rows of one block, from virtual position `begin` to `end`."""
        order = shuffled_indices(mix_key(self._epoch_key(epoch), 1, begin), end - begin)
        return self._run_of_rows(epoch, begin, end)[order]

    def _whole_blocks(self, epoch: int, begin: int, count: int) -> np.ndarray:
        """The shuffled rows of `count` full blocks from virtual position `begin` on, as `_block` would give them."""
        size = self._block_rows
        key = mix_key(self._epoch_key(epoch), 1)
        keys = mix_keys(key, begin + size * np.arange(count, dtype=np.int64))
        hashes = hash64(keys[:, None], np.broadcast_to(np.arange(size, dtype=np.uint64), (count, size)))
        rows = self._run_of_rows(epoch, begin, begin + count * size).reshape(count, size)
        return np.take_along_axis(rows, np.argsort(hashes, axis=1), axis=1).reshape(-1)

    def _run_of_rows(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Rows at the virtual positions from `begin` to `end` of an epoch."""
        if not self._options.shuffle_shards:
            return np.arange(begin, end, dtype=np.int64)
        first_rows, ends = self._segments_in(epoch if self._options.reshuffle else 0)
        low, high = np.searchsorted(ends, [begin, end - 1], side="right").tolist()
        starts = np.concatenate([[begin], ends[low:high]])  # the parts of the run, one per segment that it touches
        counts = np.diff(starts, append=end)
        from_row = first_rows[low : high + 1].copy()
        from_row[0] += begin - (ends[low - 1] if low else 0)
        return np.repeat(from_row - starts, counts) + np.arange(begin, end, dtype=np.int64)

    def _segments_in_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """First rows and ends of the segments int64[n_segments] in the order of an epoch, ends in virtual positions."""
        order = shuffled_indices(mix_key(self._epoch_key(epoch), 2), len(self._segments) - 1)
        return self._segments[order], np.cumsum(np.diff(self._segments)[order])

    def _epoch_key(self, epoch: int) -> int:
        return mix_key(self._key, epoch if self._options.reshuffle else 0)


def _tiny_rows(orders: Sequence[DatasetOrder], lane: int, starts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """`DatasetOrder.rows_of` where a lane has few rows of each epoch: all epochs at once, each permuted as a whole."""

    def each(values: list[int] | list[bool], kind: type = np.int64) -> np.ndarray:
        return np.repeat(np.array(values, dtype=kind), counts)

    lanes = orders[0]._lanes
    n = each([order.rows_total for order in orders])
    begun = [start - before for start, before in zip(starts, np.cumsum(counts) - counts, strict=True)]
    read = np.arange(len(n), dtype=np.int64) + each(begun) + lane * n // lanes
    x = ((read + 1) * lanes - 1) // n
    virtual = read - x // lanes * n
    epoch = (x - lane) * each([order._options.reshuffle for order in orders])
    keys = hash64(each([order._key for order in orders], np.uint64), epoch)
    return np.where(each([order._shuffled for order in orders], bool), feistel(keys, n, virtual), virtual)
