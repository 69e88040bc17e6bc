"""Mixture: how many rows of each dataset a lane has had by any chunk, and in which order they stand in it.

Targets are kept as whole numbers, so every quota is exact and the same on every platform. What dataset d is due by some
time x is the integral of its rate, and a lane l has taken before a chunk that begins at time x

    floor(due(d, x) + phase(d, l)),    phase(d, l) = p / L, p a permutation of the lanes keyed by d

rows: monotone, never more than one row from the target, and without history. The phases make the lanes take
their fractional rows in turn: over all lanes together the count is floor(L * due(d, x)) (Hermite's identity),
so a dataset of weight 1e-6 comes in at its share of the run and not in every lane at once.

Rates and time are those of `zephon.curriculum.rates`. A dataset that ends leaves its share to the others: the rates
change at the chunk in which it ends. So a run is a short list of segments, each with its own rates and the same closed
form inside.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from zephon.curriculum.order import DatasetOrder
from zephon.curriculum.permute import derive_key, hash64, mix_key, shuffled_indices
from zephon.curriculum.rates import FRACTION_BITS, Curve, CurveFrom
from zephon.errors import CheckpointError

_GRID_BITS = 5  # a rate that changes in a chunk is looked up at every 32nd of it

NO_CUT = (
    "this run takes over from an earlier one and does not know where: restore a state of the earlier run, or of this "
    "one, before taking batches or a checkpoint, and before seek and skip."
)
Cuts = Mapping[int, tuple[int, int]]
"""By lane: the chunk in which a run was taken over, and how many of its rows come before the cut."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Row pointers of one lane, in order.

    Attributes:
        dataset: int32[n], index of the dataset.
        row: int64[n], row within the dataset.
    """

    dataset: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.row)


_EMPTY = Chunk(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Ending:
    """When a dataset ends.

    Attributes:
        passes: times that each of its rows is used before it leaves its share to the others, or None for no end.
        ends_run: the run ends with it, instead of going on with the others.
    """

    passes: int | None = None
    ends_run: bool = False


@dataclass(frozen=True, slots=True)
class _Segment:
    """From chunk `first` on, rates follow `curve`."""

    first: int
    length: int | None  # the time at which it ends
    curve: Curve
    base: tuple[int, ...]  # by dataset, what was due before, rows << 40
    ended: tuple[bool, ...]  # by dataset
    limits: Sequence[int | None]  # by dataset, what is due at its end, rows << 40

    def time(self, index: int) -> int:
        """When chunk `index` begins, in the time of the curve."""
        x = (index - self.first) * self.curve.step
        return x if self.length is None else min(x, self.length)

    def times(self, index: int) -> list[int]:
        """When every 32nd of chunk `index` begins, and its end."""
        begin, width = self.time(index), self.time(index + 1) - self.time(index)
        return [begin + (width * k >> _GRID_BITS) for k in range((1 << _GRID_BITS) + 1)]

    def due(self, d: int, x: int) -> int:
        """Rows of dataset `d` due per lane by time `x`, times 2**40, whether it has ended before or not."""
        return self.base[d] + self.curve.due(d, x)


class Curriculum:
    """`chunk(lane, index)`: the whole curriculum of a run, as a pure function.

    A run may take over from an earlier one. Then a lane follows the earlier curriculum up to its cut, so many rows into
    some chunk, and this one from the next chunk on. Every dataset begins at the row of its order that the lane has come
    to, so one that stays loses no row and repeats none. Chunks go on being counted, so every place of the run keeps its
    name. The cut of a lane is decided once, when the run is taken over, and kept in its states: the first place after
    the records already used at which the lane can be entered, since those are made of rows before it.

    Args:
        orders: one per dataset.
        stretches: the mixture, one stretch after the other; see `constant_curve` and `scheduled_curve`.
        lanes: L.
        seed: seed of the run.
        endings: one per dataset; by default none ends.
        before: the curriculum of the run that this one takes over from.
        place: for each dataset of `before`, its index here.
        cuts: where lanes are cut; what is asked of a lane without a cut raises a `CheckpointError`.
    """

    def __init__(
        self,
        orders: Sequence[DatasetOrder],
        stretches: Sequence[CurveFrom],
        *,
        lanes: int,
        seed: int,
        endings: Sequence[Ending] | None = None,
        before: Curriculum | None = None,
        place: Sequence[int] = (),
        cuts: Cuts | None = None,
    ) -> None:
        self._orders, self._stretches, self._lanes = list(orders), list(stretches), lanes
        self._endings = list(endings) if endings is not None else [Ending()] * len(orders)
        self._before, self._place, self._cuts = before, np.asarray(place, dtype=np.int32), cuts or {}
        self._key = derive_key("mixture", seed)
        self._phases = [shuffled_indices(mix_key(self._key, 1, d), lanes).tolist() for d in range(len(orders))]
        self._rows_at_cut: dict[int, list[int]] = {}
        self._routes: dict[int, list[_Segment]] = {}

    def chunks_of(self, lane: int) -> int | None:
        """Chunks of `lane`, or None where there is no end."""
        last = self._route(lane)[-1]
        return None if any(last.curve.rates[0]) else self._cut(lane)[0] + 1 + last.first

    def chunk(self, lane: int, index: int, most: int | None = None) -> Chunk | None:
        """Chunk `index` of `lane`, or only its first `most` rows, which take less time; None past the end."""
        cut, rows = self._cut(lane)
        if self._before is not None and index <= cut:
            chunk = self._before.chunk(lane, index, most) or _EMPTY
            end = rows if index == cut else len(chunk)
            return Chunk(self._place[chunk.dataset[:end]], chunk.row[:end])
        chunks = self.chunks_of(lane)
        return self._own_chunk(lane, index - cut - 1, most) if chunks is None or index < chunks else None

    def rows_before(self, lane: int, index: int) -> list[int]:
        """Rows of each dataset that `lane` has taken before chunk `index`."""
        cut, _ = self._cut(lane)
        if self._before is not None and index <= cut:
            return self._moved(self._before.rows_before(lane, index))
        return self._own_rows(lane, index - cut - 1)

    def due_through(self, lane: int, index: int) -> list[list[int]]:
        """Rows of each dataset that are due to `lane` at evenly spaced times of chunk `index`, from begin to end of it:
        [n_times][n_datasets], in units of 2**-16.

        There are two times where rates stay the same. A lane that is through a part of the chunk is no further than a
        row from what is due. The chunk of a cut is taken as a whole.
        """
        cut, _ = self._cut(lane)
        if self._before is not None and index <= cut:
            return [self._moved(due) for due in self._before.due_through(lane, index)]
        index -= cut + 1
        segment, at_cut = self._segment(lane, index), self._at_cut(lane)
        times = segment.times(index)

        def ends(d: int, limit: int | None) -> bool:
            return limit is not None and not segment.ended[d] and segment.due(d, times[-1]) > limit

        if segment.curve.is_straight and not any(map(ends, range(len(at_cut)), segment.limits)):
            times = [times[0], times[-1]]
        due = []
        for x in times:
            counts = [segment.due(d, x) for d in range(len(at_cut))]
            counts = [c if limit is None else min(c, limit) for c, limit in zip(counts, segment.limits, strict=True)]
            due.append([(had << 16) + (c >> FRACTION_BITS - 16) for had, c in zip(at_cut, counts, strict=True)])
        return due

    def cut_at(self, lane: int, index: int) -> int | None:
        """The rows of chunk `index` of `lane` before the place where the run was taken over, or None: nowhere in it."""
        cut, rows = self._cut(lane)
        if self._before is None or index > cut:
            return None
        return rows if index == cut else self._before.cut_at(lane, index)

    # Takeover

    def _cut(self, lane: int) -> tuple[int, int]:
        if self._before is None:
            return -1, 0
        if lane not in self._cuts:
            raise CheckpointError(NO_CUT)
        return self._cuts[lane]

    def _moved(self, counts: Sequence[int]) -> list[int]:
        """Counts by dataset of the earlier curriculum, by dataset of this one."""
        moved = [0] * len(self._orders)
        for d, count in zip(self._place.tolist(), counts, strict=True):
            moved[d] = count
        return moved

    def _at_cut(self, lane: int) -> list[int]:
        """Rows of each dataset that `lane` has had before its cut."""
        if self._before is None:
            return [0] * len(self._orders)
        if lane not in self._rows_at_cut:
            cut, rows = self._cut(lane)
            counts = self.rows_before(lane, cut)
            if rows:
                chunk = self.chunk(lane, cut)
                assert chunk is not None
                part = np.bincount(chunk.dataset, minlength=len(counts)).tolist()
                counts = [had + more for had, more in zip(counts, part, strict=True)]
            self._rows_at_cut[lane] = counts
        return self._rows_at_cut[lane]

    # This curriculum alone, whose chunks are counted from the cut.

    def _own_chunk(self, lane: int, index: int, most: int | None) -> Chunk:
        begin, end = self._own_rows(lane, index), self._own_rows(lane, index + 1)
        segment = self._segment(lane, index)
        # Each dataset's rows stand evenly over the chunk, one at a random place in each of `wanted` equal parts;
        # a dataset that ends in this chunk stops early rather than being thinned out.
        parts = [
            (d, count, max(count, self._target(segment, lane, d, index + 1) - self._target(segment, lane, d, index)))
            for d in range(len(self._orders))
            if (count := end[d] - begin[d])
        ]
        if not parts:
            return _EMPTY
        share = 1.0 if most is None else 2 * most / sum(count for _, count, _ in parts)

        def keys_of(d: int, wanted: int, nth: np.ndarray, jitter: np.ndarray | int) -> np.ndarray:
            keys = ((nth << np.uint64(32)) + jitter) // np.uint64(wanted)
            flat = segment.curve.is_flat(d)
            return keys if flat else _bend(keys, [segment.curve.due(d, x) for x in segment.times(index)])

        while True:
            datasets, keys = [], []
            known = (1 << 32) - 1  # rows left out stand at this place or behind it
            for d, count, wanted in parts:
                some = min(count, int(wanted * share) + 4)
                nth = np.arange(some, dtype=np.uint64)
                jitter = hash64(mix_key(self._key, 2, lane, index, d), nth) >> np.uint64(32)
                datasets.append(np.full(some, d, dtype=np.int32))
                keys.append(keys_of(d, wanted, nth, jitter))
                if some < count:
                    known = min(known, int(keys_of(d, wanted, np.array([some], dtype=np.uint64), 0)[0]))
            # Keys have 32 bits and chunks far fewer rows than 2**32: sorting both as one number is three times as fast
            # as a stable argsort, and gives the same order.
            place = np.concatenate(keys) << np.uint64(32) | np.arange(sum(map(len, keys)), dtype=np.uint64)
            place.sort()
            if most is None or share > 1 or np.searchsorted(place, np.uint64(known << 32)) >= most:
                break
            share *= 2
        dataset = np.concatenate(datasets)[place[:most] & np.uint64((1 << 32) - 1)]
        row = np.empty(len(dataset), dtype=np.int64)
        present = {d: count for d, count in enumerate(np.bincount(dataset).tolist()) if count}
        row[np.argsort(dataset, kind="stable")] = DatasetOrder.rows_of(
            [self._orders[d] for d in present], lane, [begin[d] for d in present], list(present.values())
        )
        return Chunk(dataset, row)

    def _own_rows(self, lane: int, index: int) -> list[int]:
        """Rows of each dataset that `lane` has taken before chunk `index`, those before the cut included."""
        segment, rows = self._segment(lane, index), []
        for d, (at_cut, ending) in enumerate(zip(self._at_cut(lane), self._endings, strict=True)):
            count = at_cut + self._target(segment, lane, d, index)
            if ending.passes is not None:
                whole = self._orders[d].rows_of_lane(lane, ending.passes)
                count = max(at_cut, whole if segment.ended[d] else min(count, whole))
            rows.append(count)
        return rows

    def _target(self, segment: _Segment, lane: int, d: int, index: int) -> int:
        """Rows of dataset `d` due before chunk `index`, by the rates of `segment`."""
        phase = (self._phases[d][lane] << FRACTION_BITS) // self._lanes
        return segment.due(d, segment.time(index)) + phase >> FRACTION_BITS

    def _segment(self, lane: int, index: int) -> _Segment:
        route = self._route(lane)
        return route[bisect_right(route, index, key=attrgetter("first")) - 1]

    def _route(self, lane: int) -> list[_Segment]:
        """The segments of a lane, the same for all lanes but after a takeover."""
        lane = 0 if self._before is None else lane
        if lane not in self._routes:
            self._routes[lane] = self._segments([self._limit(lane, d) for d in range(len(self._orders))])
        return self._routes[lane]

    def _limit(self, lane: int, d: int) -> int | None:
        """Rows << 40 after which dataset `d` ends for `lane`, or None; those before the cut do not count."""
        order, passes = self._orders[d], self._endings[d].passes
        if passes is None:
            return None
        if self._before is not None:
            return max(0, order.rows_of_lane(lane, passes) - self._at_cut(lane)[d]) << FRACTION_BITS
        # The mean share of a lane, rounded up so that none is cut short.
        return -((-passes * order.rows_total << FRACTION_BITS) // self._lanes)

    def _segments(self, limits: Sequence[int | None]) -> list[_Segment]:
        """The segments of a run in which each dataset ends at so many rows << 40, or never; the last has no end, and no
        rates where the run ends."""
        segments: list[_Segment] = []
        first, base = 0, [0] * len(limits)
        ended = [limit == 0 for limit in limits]
        over = any(gone and ending.ends_run for gone, ending in zip(ended, self._endings, strict=True))
        for stretch in self._stretches:
            at = 0
            while not over and (curve := stretch(ended, at)) is not None:
                until, times = curve.length, {}
                for d, limit in enumerate(limits):
                    if limit is not None and not ended[d] and (x := curve.when(d, limit - base[d])) is not None:
                        times[d] = x
                if times:
                    # To the end of the chunk in which the first dataset ends; where the run ends with it, not further.
                    chunk_end = -(-min(times.values()) // curve.step) * curve.step
                    until = chunk_end if until is None else min(chunk_end, until)
                    stops = [x for d, x in times.items() if self._endings[d].ends_run]
                    if stops and min(stops) <= until:
                        until, over = min(stops), True
                segments.append(_Segment(first, until, curve, tuple(base), tuple(ended), limits))
                if until is None:
                    return segments
                first += -(-until // curve.step)
                for d, limit in enumerate(limits):
                    base[d] += curve.due(d, until)
                    if limit is not None and base[d] >= limit:
                        base[d], ended[d] = limit, True
                at += until
        nothing = Curve((0,), [[0] * len(limits)], 1, 1)
        return [*segments, _Segment(first, None, nothing, tuple(base), tuple(ended), limits)]


def _bend(key: np.ndarray, due: Sequence[int]) -> np.ndarray:
    """Places uint64[n] in a chunk (units of 2**-32), evenly spread, moved to where a changing rate puts them.

    Args:
        key: the places.
        due: what is due at the begin of every 32nd of the chunk, and at its end.
    """
    whole = due[-1] - due[0]
    if not whole:
        return key
    grid = np.array([((each - due[0]) << 32) // whole for each in due], dtype=np.uint64)
    k = np.minimum(np.searchsorted(grid, key, side="right") - 1, len(grid) - 2)
    low, high = grid[k], grid[k + 1]
    inside = ((key - low) << np.uint64(32 - _GRID_BITS)) // np.maximum(high - low, np.uint64(1))
    return (k.astype(np.uint64) << np.uint64(32 - _GRID_BITS)) + inside
