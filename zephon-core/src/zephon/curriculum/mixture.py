"""Mixture: how many rows of each dataset a lane has had by any chunk, and in which order they stand in it.

Targets are kept as whole numbers, so every quota is exact and the same on every platform. What dataset d is due by some
time x is the integral of its rate, and a lane l has taken before a chunk that begins at time x

    floor(due(d, x) + phase(d, l)),    phase(d, l) = p / L, p a permutation of the lanes keyed by d

rows: monotone, never more than one row from the target, and without history. The phases make the lanes take
their fractional rows in turn: over all lanes together the count is floor(L * due(d, x)) (Hermite's identity),
so a dataset of weight 1e-6 comes in at its share of the run and not in every lane at once.

Time runs in one of two units. Where the mixture stays the same it is rows per lane: with row weights a_d (of M = sum of
all a) and chunks of C rows, due(d, x) is x * a_d / M and chunk i begins at x = i * C. Under a schedule it is planned
tokens over all lanes (see `zephon.curriculum.schedule`), rates change along straight lines, due(d, x) is a polynomial
of degree two between the knots of a span, and each span of the schedule is cut into chunks of about C rows.

A dataset that ends leaves its share to the others: the rates change at the chunk in which it ends. So a run is a short
list of segments, each with its own rates and the same closed form inside.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from zephon.curriculum.order import DatasetOrder
from zephon.curriculum.permute import derive_key, hash64, mix_key, shuffled_indices
from zephon.curriculum.schedule import Span

__all__ = ["Chunk", "Curriculum", "Ending", "row_weights"]

_WEIGHT_ONE = 1 << 48
_FRACTION_BITS = 40
_RATE_ONE = 1 << 64
_GRID_BITS = 5


def row_weights(token_weights: Sequence[float], tokens_per_row: Sequence[float]) -> list[int]:
    """Whole-number row weights that give the wanted shares of tokens, one per dataset, 0 only where none is wanted."""
    rates = [w / t for w, t in zip(token_weights, tokens_per_row, strict=True)]
    total = math.fsum(rates)  # exact on every Python; sum() of floats rounds otherwise before 3.12 than after
    return [max(1, round(rate / total * _WEIGHT_ONE)) if rate else 0 for rate in rates]


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
class _Curve:
    """Rates of all datasets over some stretch of time, straight lines between knots.

    Attributes:
        knots: times, ascending from 0; the last is the end, except that one knot alone means rates without end.
        rates: [n_knots][n_datasets].
        total: a dataset advances by rate / total rows per lane and unit of time.
        areas: [n_knots][n_datasets], twice the integral of the rate up to each knot.
    """

    knots: tuple[int, ...]
    rates: tuple[tuple[int, ...], ...]
    total: int
    areas: tuple[tuple[int, ...], ...]

    @staticmethod
    def through(knots: Sequence[int], rates: Sequence[Sequence[int]], total: int) -> _Curve:
        """The curve through some knots."""
        areas = [(0,) * len(rates[0])]
        for i in range(1, len(knots)):
            width = knots[i] - knots[i - 1]
            areas.append(tuple(a + (p + q) * width for a, p, q in zip(areas[-1], rates[i - 1], rates[i], strict=True)))
        return _Curve(tuple(knots), tuple(tuple(each) for each in rates), total, tuple(areas))

    @property
    def length(self) -> int | None:
        """When it ends, or None."""
        return self.knots[-1] if len(self.knots) > 1 else None

    def is_flat(self, d: int) -> bool:
        """Whether the rate of dataset `d` stays the same."""
        return all(rates[d] == self.rates[0][d] for rates in self.rates)

    def due(self, d: int, x: int) -> int:
        """Rows of dataset `d` due per lane by time `x`, times 2**40, rounded down."""
        if len(self.knots) == 1:
            return (x * self.rates[0][d] << _FRACTION_BITS) // self.total
        k = min(bisect_right(self.knots, x) - 1, len(self.knots) - 2)
        width, into = self.knots[k + 1] - self.knots[k], x - self.knots[k]
        rate, slope = self.rates[k][d], self.rates[k + 1][d] - self.rates[k][d]
        twice = self.areas[k][d] * width + 2 * rate * into * width + slope * into * into
        return (twice << _FRACTION_BITS) // (2 * self.total * width)

    def when(self, d: int, rows: int) -> int | None:
        """The first time by which `rows` (times 2**40, above 0) are due, or None where they never are."""
        if len(self.knots) == 1:
            rate = self.rates[0][d]
            return -(-rows * self.total // (rate << _FRACTION_BITS)) if rate else None
        low, high = 0, self.knots[-1]
        if self.due(d, high) < rows:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.due(d, middle) >= rows else (middle, high)
        return high


@dataclass(frozen=True, slots=True)
class _Segment:
    """From chunk `first` on, rates follow `curve`.

    Attributes:
        first: the first chunk.
        step: time that a chunk covers; the last chunk of the segment may cover less.
        length: time at which the segment ends, or None.
        base: what was due before, rows << 40.
        ended: whether each dataset has ended.
    """

    first: int
    step: int
    length: int | None
    base: tuple[int, ...]
    curve: _Curve
    ended: tuple[bool, ...]

    def time(self, index: int) -> int:
        """When chunk `index` begins, in the time of the curve."""
        x = (index - self.first) * self.step
        return x if self.length is None else min(x, self.length)


class _Constant:
    """The only stretch of a run whose mixture stays the same; time is rows per lane."""

    length = None

    def __init__(self, weights: Sequence[int], chunk_size: int) -> None:
        self._weights, self._size = weights, chunk_size

    def curve(self, ended: Sequence[bool], at: int) -> _Curve | None:
        """What is left of the stretch after time `at`; None where no dataset is left."""
        rates = [0 if gone else weight for weight, gone in zip(self._weights, ended, strict=True)]
        return _Curve.through((0,), [rates], sum(rates)) if any(rates) else None

    def step(self, curve: _Curve) -> int:
        """Time per chunk."""
        return self._size


class _Scheduled:
    """A span of a schedule; time is planned tokens over all lanes."""

    def __init__(self, span: Span, tokens_per_row: Sequence[float], lanes: int, chunk_size: int) -> None:
        self.length = span.length
        self._span, self._lanes, self._rows = span, lanes, lanes * chunk_size
        self._ratios = [float(ratio).as_integer_ratio() for ratio in tokens_per_row]

    def curve(self, ended: Sequence[bool], at: int) -> _Curve | None:
        """What is left of the span after time `at`; None where no dataset is left."""
        knots, shares = self._span.knots, [list(each) for each in self._span.shares]
        if at and len(knots) > 1:
            k = bisect_right(knots, at) - 1
            into, width = at - knots[k], knots[k + 1] - knots[k]
            here = [p + (q - p) * into // width for p, q in zip(shares[k], shares[k + 1], strict=True)]
            knots, shares = (0, *(knot - at for knot in knots[k + 1 :])), [here, *shares[k + 1 :]]
        live = [[0 if gone else s for s, gone in zip(each, ended, strict=True)] for each in shares]
        sums = [sum(each) for each in live]
        if not any(sums):
            return None
        # Where nobody is left at a knot, the mixture of the nearest one where somebody is holds.
        full = [k for k, total in enumerate(sums) if total]
        nearest = [min(full, key=lambda f, k=k: (abs(f - k), f)) for k in range(len(sums))]  # type: ignore[misc]
        rates = [
            [
                max(1, share * _RATE_ONE * below // (sums[k] * above)) if share else 0
                for share, (above, below) in zip(live[k], self._ratios, strict=True)
            ]
            for k in nearest
        ]
        return _Curve.through(knots, rates, self._lanes * _RATE_ONE)

    def step(self, curve: _Curve) -> int:
        """Time per chunk: the curve's length cut into chunks of about the wanted number of rows."""
        if curve.length is None:
            return max(1, self._rows * _RATE_ONE // sum(curve.rates[0]))
        rows = sum(curve.areas[-1]) // (2 * _RATE_ONE)
        return max(1, -(-curve.length // max(1, -(-rows // self._rows))))


@dataclass(frozen=True, slots=True)
class _Route:
    """The segments of a run, or of one lane of it, ascending; the last one is the end where there is one."""

    segments: tuple[_Segment, ...]
    firsts: tuple[int, ...]
    chunks: int | None


class Curriculum:
    """`chunk(lane, index)`: the whole curriculum of a run, as a pure function.

    Args:
        orders: one per dataset.
        weights: whole-number row weights, one per dataset (see `row_weights`); unused under a schedule.
        lanes: L.
        chunk_size: rows per chunk; about so many under a schedule.
        seed: seed of the run.
        repeat: go through every dataset again and again; else each row is used once and the lanes end.
        endings: one per dataset, in place of `repeat`.
        spans: a schedule.
        tokens_per_row: one per dataset, for the schedule.
        taken: rows of each dataset that a lane has had before the first chunk, by an earlier curriculum.
    """

    def __init__(
        self,
        orders: Sequence[DatasetOrder],
        weights: Sequence[int],
        *,
        lanes: int,
        chunk_size: int,
        seed: int,
        repeat: bool = True,
        endings: Sequence[Ending] | None = None,
        spans: Sequence[Span] | None = None,
        tokens_per_row: Sequence[float] | None = None,
        taken: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self._orders = list(orders)
        self._lanes = lanes
        self._endings = list(endings) if endings is not None else [Ending(None if repeat else 1)] * len(orders)
        self._taken = taken
        self._key = derive_key("mixture", seed)
        self._phases = [shuffled_indices(mix_key(self._key, 1, d), lanes).tolist() for d in range(len(orders))]
        self._stretches: list[_Constant] | list[_Scheduled] = [_Constant(list(weights), chunk_size)]
        if spans is not None:
            assert tokens_per_row is not None
            self._stretches = [_Scheduled(span, tokens_per_row, lanes, chunk_size) for span in spans]
        self._routes: dict[int, _Route] = {}
        self._grids: dict[tuple[int, int], list[np.ndarray | None]] = {}
        self._lock = Lock()
        # What a lane gets of each dataset, as a fixed-point number of rows, rounded up so that none is cut short.
        self._common = self._route(self._limits(0)) if taken is None else None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    @property
    def n_datasets(self) -> int:
        """How many datasets there are."""
        return len(self._orders)

    @property
    def chunks(self) -> int | None:
        """Chunks of a lane, or None where there is no end; of a curriculum that takes over, those of lane 0."""
        return self.chunks_of(0)

    def chunks_of(self, lane: int) -> int | None:
        """Chunks of `lane`, or None where there is no end."""
        return self._route_of(lane).chunks

    def chunk(self, lane: int, index: int) -> Chunk | None:
        """Chunk `index` of `lane`, or None past the end."""
        route = self._route_of(lane)
        if route.chunks is not None and index >= route.chunks:
            return None
        begin, end = self.rows_before(lane, index), self.rows_before(lane, index + 1)
        segment = _segment(route, index)
        grid = self._grid(segment, index)
        bent = [None] * len(self._orders) if grid is None else grid
        datasets, rows, keys = [], [], []
        for d, order in enumerate(self._orders):
            count = end[d] - begin[d]
            if not count:
                continue
            # Each dataset's rows stand evenly over the chunk, one at a random place in each of `wanted` equal parts;
            # a dataset that ends in this chunk stops early rather than being thinned out.
            wanted = max(count, self._target(segment, lane, d, index + 1) - self._target(segment, lane, d, index))
            nth = np.arange(count, dtype=np.uint64)
            jitter = hash64(mix_key(self._key, 2, lane, index, d), nth) >> np.uint64(32)
            key = ((nth << np.uint64(32)) + jitter) // np.uint64(wanted)
            datasets.append(np.full(count, d, dtype=np.int32))
            keys.append(key if (bend := bent[d]) is None else _bend(key, bend))
            rows.append(order.rows(lane, begin[d], end[d]))
        if not rows:
            return Chunk(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
        if len(rows) == 1:
            return Chunk(datasets[0], rows[0])
        # Keys have 32 bits and chunks far fewer rows than 2**32: sorting both as one number is three times as fast as a
        # stable argsort, and gives the same order.
        place = np.concatenate(keys) << np.uint64(32) | np.arange(sum(map(len, keys)), dtype=np.uint64)
        place.sort()
        place &= np.uint64((1 << 32) - 1)
        return Chunk(np.concatenate(datasets)[place], np.concatenate(rows)[place])

    def rows_before(self, lane: int, index: int) -> list[int]:
        """Rows of each dataset that `lane` has taken before chunk `index`, those of an earlier curriculum included."""
        segment = _segment(self._route_of(lane), index)
        taken = self._taken(lane) if self._taken is not None else None
        rows = []
        for d, ending in enumerate(self._endings):
            before = 0 if taken is None else int(taken[d])
            limit = None if ending.passes is None else self._orders[d].rows_of_lane(lane, ending.passes)
            if segment.ended[d] and limit is not None:
                rows.append(max(before, limit))
                continue
            target = before + self._target(segment, lane, d, index)
            rows.append(target if limit is None else max(before, min(target, limit)))
        return rows

    def rows_due(self, index: int, part: float = 0.0) -> list[float]:
        """Rows of each dataset due per lane by some part of the way through chunk `index`: a forecast, within a row of
        each lane. Not for a curriculum that takes over."""
        assert self._common is not None
        segment = _segment(self._common, index)
        begin, end = segment.time(index), segment.time(index + 1)
        due = [base + segment.curve.due(d, begin + int((end - begin) * part)) for d, base in enumerate(segment.base)]
        limits = [self._fixed_limit(d) for d in range(len(due))]
        return [
            (each if limit is None else min(each, limit)) / (1 << _FRACTION_BITS)
            for each, limit in zip(due, limits, strict=True)
        ]

    def due_through(self, lane: int, index: int) -> list[list[int]]:
        """Rows of each dataset that are due to `lane` at evenly spaced times of chunk `index`, from begin to end of it,
        those of an earlier curriculum included: [n_times][n_datasets], in units of 2**-16.

        There are two times where rates stay the same. A lane that is through a part of the chunk is no further than a
        row from what is due.
        """
        segment = _segment(self._route_of(lane), index)
        begin, end = segment.time(index), segment.time(index + 1)
        before = self._taken(lane) if self._taken else [0] * len(self._orders)
        limits = self._limits(lane)

        def due(x: int) -> list[int]:
            counts = []
            for d, base in enumerate(segment.base):
                count, limit = base + segment.curve.due(d, x), limits[d]
                counts.append((int(before[d]) << 16) + ((count if limit is None else min(count, limit)) >> 24))
            return counts

        first, last = due(begin), due(end)
        ends = any(
            limit is not None and base + segment.curve.due(d, end) > limit and not segment.ended[d]
            for d, (base, limit) in enumerate(zip(segment.base, limits, strict=True))
        )
        if not ends and (len(segment.curve.knots) == 1 or all(map(segment.curve.is_flat, range(len(self._orders))))):
            return [first, last]
        inner = range(1, 1 << _GRID_BITS)
        return [first, *(due(begin + ((end - begin) * k >> _GRID_BITS)) for k in inner), last]

    def cut_at(self, lane: int, index: int) -> int | None:
        """The rows of chunk `index` of `lane` before the place where the run was taken over, or None: nowhere in it."""
        return None

    def _limits(self, lane: int) -> list[int | None]:
        """Rows << 40 after which each dataset ends, for `lane`; of those that an earlier curriculum left."""
        if self._taken is None:
            return [self._fixed_limit(d) for d in range(len(self._orders))]
        taken = self._taken(lane)
        limits: list[int | None] = []
        for d, ending in enumerate(self._endings):
            whole = None if ending.passes is None else self._orders[d].rows_of_lane(lane, ending.passes)
            limits.append(None if whole is None else max(0, whole - int(taken[d])) << _FRACTION_BITS)
        return limits

    def _route_of(self, lane: int) -> _Route:
        if self._common is not None:
            return self._common
        if lane not in self._routes:
            self._routes[lane] = self._route(self._limits(lane))
        return self._routes[lane]

    def _fixed_limit(self, d: int) -> int | None:
        passes = self._endings[d].passes
        if passes is None:
            return None
        return -((-passes * self._orders[d].rows_total << _FRACTION_BITS) // self._lanes)

    def _target(self, segment: _Segment, lane: int, d: int, index: int) -> int:
        """Rows of dataset `d` due before chunk `index`, by the rates of `segment`."""
        phase = (self._phases[d][lane] << _FRACTION_BITS) // self._lanes
        return (segment.base[d] + segment.curve.due(d, segment.time(index)) + phase) >> _FRACTION_BITS

    def _grid(self, segment: _Segment, index: int) -> list[np.ndarray | None] | None:
        """For each dataset whose rate changes in chunk `index`, uint64[33]: the part of the chunk's rows, in units of
        2**-32, due by each 32nd of the chunk; None where no rate changes."""
        if len(segment.curve.knots) == 1 or all(segment.curve.is_flat(d) for d in range(len(self._orders))):
            return None
        key = segment.first, index
        with self._lock:
            if key in self._grids:
                return self._grids[key]
        begin, end = segment.time(index), segment.time(index + 1)
        times = [begin + ((end - begin) * k >> _GRID_BITS) for k in range((1 << _GRID_BITS) + 1)]
        grid: list[np.ndarray | None] = []
        for d in range(len(self._orders)):
            due = [segment.curve.due(d, x) for x in times]
            whole = due[-1] - due[0]
            flat = not whole or segment.curve.is_flat(d)
            grid.append(None if flat else np.array([((each - due[0]) << 32) // whole for each in due], dtype=np.uint64))
        with self._lock:
            while len(self._grids) >= 8:
                self._grids.pop(next(iter(self._grids)))
            self._grids[key] = grid
        return grid

    def _route(self, limits: Sequence[int | None]) -> _Route:
        """The segments of a run in which each dataset ends at so many rows << 40, or never."""
        segments: list[_Segment] = []
        first, base = 0, [0] * len(limits)
        ended = [limit == 0 for limit in limits]
        over = any(gone and ending.ends_run for gone, ending in zip(ended, self._endings, strict=True))
        for stretch in self._stretches:
            at = 0
            while not over and (curve := stretch.curve(ended, at)) is not None:
                step, length = stretch.step(curve), curve.length
                times = {
                    d: curve.when(d, limit - base[d])
                    for d, limit in enumerate(limits)
                    if limit is not None and not ended[d]
                }
                ends = [x for x in times.values() if x is not None]
                stops = [x for d, x in times.items() if x is not None and self._endings[d].ends_run]
                if ends:
                    # To the end of the chunk in which the first dataset ends; where the run ends with it, not further.
                    until = -(-min(ends) // step) * step
                    until = until if length is None else min(until, length)
                    if stops and min(stops) <= until:
                        until, over = min(stops), True
                    segments.append(_Segment(first, step, until, tuple(base), curve, tuple(ended)))
                elif length is None:
                    segments.append(_Segment(first, step, None, tuple(base), curve, tuple(ended)))
                    return _Route(tuple(segments), tuple(s.first for s in segments), None)
                else:
                    until = length
                    segments.append(_Segment(first, step, until, tuple(base), curve, tuple(ended)))
                first += -(-until // step)
                for d, limit in enumerate(limits):
                    base[d] += curve.due(d, until)
                    if limit is not None and base[d] >= limit:
                        base[d], ended[d] = limit, True
                at += until
                if at == stretch.length:
                    break
        nothing = _Curve.through((0,), [[0] * len(limits)], 1)
        segments.append(_Segment(first, 1, None, tuple(base), nothing, tuple(ended)))
        return _Route(tuple(segments), tuple(s.first for s in segments), first)


def _segment(route: _Route, index: int) -> _Segment:
    return route.segments[bisect_right(route.firsts, index) - 1]


def _bend(key: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Places uint64[n] in a chunk (units of 2**-32), evenly spread, moved to where a changing rate puts them."""
    k = np.minimum(np.searchsorted(grid, key, side="right") - 1, len(grid) - 2)
    low, high = grid[k], grid[k + 1]
    inside = ((key - low) << np.uint64(32 - _GRID_BITS)) // np.maximum(high - low, np.uint64(1))
    return (k.astype(np.uint64) << np.uint64(32 - _GRID_BITS)) + inside
