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
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

import numpy as np

from zephon.curriculum.order import DatasetOrder
from zephon.curriculum.permute import derive_key, hash64, mix_key, shuffled_indices
from zephon.curriculum.schedule import Span

__all__ = ["Chunk", "Curriculum", "Ending", "constant_curve", "row_weights", "scheduled_curve"]

_WEIGHT_ONE = 1 << 48
_FRACTION_BITS = 40
_RATE_ONE = 1 << 64
_GRID_BITS = 5  # a rate that changes in a chunk is looked up at every 32nd of it


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


# ---------------------------------------------------------------------------------------------------------------------
# Rates


@dataclass(frozen=True)
class Curve:
    """Rates of all datasets over some stretch of time: straight lines between knots.

    A dataset advances by rate / total rows per lane and unit of time.
    """

    knots: Sequence[int]  # times, ascending from 0; the last is the end, but one knot alone means rates without end
    rates: Sequence[Sequence[int]]  # [n_knots][n_datasets]
    total: int
    step: int  # time per chunk; the last chunk of a segment may cover less

    @cached_property
    def _areas(self) -> list[list[int]]:
        """[n_knots][n_datasets], twice the integral of the rate up to each knot."""
        areas = [[0] * len(self.rates[0])]
        for (low, before), (high, after) in pairwise(zip(self.knots, self.rates, strict=True)):
            areas.append([a + (p + q) * (high - low) for a, p, q in zip(areas[-1], before, after, strict=True)])
        return areas

    @cached_property
    def is_straight(self) -> bool:
        """Whether all rates stay the same."""
        return all(map(self.is_flat, range(len(self.rates[0]))))

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
        twice = self._areas[k][d] * width + 2 * rate * into * width + slope * into * into
        return (twice << _FRACTION_BITS) // (2 * self.total * width)

    def when(self, d: int, rows: int) -> int | None:
        """The first time by which `rows` (times 2**40, above 0) are due, or None where they never are."""
        if len(self.knots) == 1:
            rate = self.rates[0][d]
            return -(-rows * self.total // (rate << _FRACTION_BITS)) if rate else None
        if self.due(d, self.knots[-1]) < rows:
            return None
        low, high = 0, self.knots[-1]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.due(d, middle) >= rows else (middle, high)
        return high


CurveFrom = Callable[[Sequence[bool], int], Curve | None]
"""What is left of a stretch of a run, given which datasets have ended, after some time of it; None at its end, and
where no dataset is left."""


def constant_curve(weights: Sequence[int], chunk_size: int, ended: Sequence[bool], at: int) -> Curve | None:
    """A mixture that stays the same; time is rows per lane. A `CurveFrom` once the first two arguments are bound.

    Args:
        weights: whole-number row weights, one per dataset (see `row_weights`).
        chunk_size: rows per chunk.
        ended: whether each dataset has ended.
        at: not needed.
    """
    rates = [0 if gone else weight for weight, gone in zip(weights, ended, strict=True)]
    return Curve((0,), [rates], sum(rates), chunk_size) if any(rates) else None


def scheduled_curve(
    span: Span, tokens_per_row: Sequence[float], lanes: int, chunk_size: int, ended: Sequence[bool], at: int
) -> Curve | None:
    """A span of a schedule; time is planned tokens over all lanes. A `CurveFrom` once the first four are bound.

    Args:
        span: the span.
        tokens_per_row: one per dataset.
        lanes: L.
        chunk_size: rows per chunk, about.
        ended: whether each dataset has ended.
        at: time after which the span is wanted.
    """
    knots, shares = span.knots, [list(each) for each in span.shares]
    if at and span.length is not None:
        if at == span.length:
            return None
        k = bisect_right(knots, at) - 1
        into, width = at - knots[k], knots[k + 1] - knots[k]
        here = [p + (q - p) * into // width for p, q in zip(shares[k], shares[k + 1], strict=True)]
        knots, shares = (0, *(knot - at for knot in knots[k + 1 :])), [here, *shares[k + 1 :]]
    live = [[0 if gone else share for share, gone in zip(each, ended, strict=True)] for each in shares]
    sums = [sum(each) for each in live]
    # Where nobody is left at a knot, the mixture of the nearest one where somebody is holds.
    full = [k for k, total in enumerate(sums) if total]
    if not full:
        return None
    ratios = [float(ratio).as_integer_ratio() for ratio in tokens_per_row]

    def rates_at(knot: int) -> list[int]:
        k = min(full, key=lambda other: abs(other - knot))
        return [
            max(1, share * _RATE_ONE * below // (sums[k] * above)) if share else 0
            for share, (above, below) in zip(live[k], ratios, strict=True)
        ]

    rates = [rates_at(knot) for knot in range(len(knots))]
    if len(knots) == 1:
        step = lanes * chunk_size * _RATE_ONE // sum(rates[0])
    else:
        areas = ((b - a) * (sum(p) + sum(q)) for (a, p), (b, q) in pairwise(zip(knots, rates, strict=True)))
        rows = sum(areas) // (2 * _RATE_ONE)
        step = -(-knots[-1] // max(1, -(-rows // (lanes * chunk_size))))
    return Curve(knots, rates, lanes * _RATE_ONE, max(1, step))


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


# ---------------------------------------------------------------------------------------------------------------------
# Chunks


class Curriculum:
    """`chunk(lane, index)`: the whole curriculum of a run, as a pure function.

    Args:
        orders: one per dataset.
        stretches: the mixture, one stretch after the other; see `constant_curve` and `scheduled_curve`.
        lanes: L.
        seed: seed of the run.
        endings: one per dataset; by default none ends.
        taken: rows of each dataset that a lane has had before the first chunk, by an earlier curriculum.
    """

    def __init__(
        self,
        orders: Sequence[DatasetOrder],
        stretches: Sequence[CurveFrom],
        *,
        lanes: int,
        seed: int,
        endings: Sequence[Ending] | None = None,
        taken: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self._orders, self._stretches, self._lanes = list(orders), list(stretches), lanes
        self._endings = list(endings) if endings is not None else [Ending()] * len(orders)
        self._taken = taken
        self._key = derive_key("mixture", seed)
        self._phases = [shuffled_indices(mix_key(self._key, 1, d), lanes).tolist() for d in range(len(orders))]
        self._routes: dict[int, list[_Segment]] = {}

    @property
    def n_datasets(self) -> int:
        """How many datasets there are."""
        return len(self._orders)

    def chunks_of(self, lane: int) -> int | None:
        """Chunks of `lane`, or None where there is no end."""
        last = self._route(lane)[-1]
        return None if any(last.curve.rates[0]) else last.first

    def chunk(self, lane: int, index: int) -> Chunk | None:
        """Chunk `index` of `lane`, or None past the end."""
        chunks = self.chunks_of(lane)
        if chunks is not None and index >= chunks:
            return None
        begin, end = self.rows_before(lane, index), self.rows_before(lane, index + 1)
        segment = self._segment(lane, index)
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
            if not segment.curve.is_flat(d):
                key = _bend(key, [segment.curve.due(d, x) for x in segment.times(index)])
            datasets.append(np.full(count, d, dtype=np.int32))
            keys.append(key)
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
        segment, rows = self._segment(lane, index), []
        for d, (before, ending) in enumerate(zip(self._before(lane), self._endings, strict=True)):
            count = before + self._target(segment, lane, d, index)
            if ending.passes is not None:
                whole = self._orders[d].rows_of_lane(lane, ending.passes)
                count = max(before, whole if segment.ended[d] else min(count, whole))
            rows.append(count)
        return rows

    def due_through(self, lane: int, index: int) -> list[list[int]]:
        """Rows of each dataset that are due to `lane` at evenly spaced times of chunk `index`, from begin to end of it,
        those of an earlier curriculum included: [n_times][n_datasets], in units of 2**-16.

        There are two times where rates stay the same. A lane that is through a part of the chunk is no further than a
        row from what is due.
        """
        segment, before = self._segment(lane, index), self._before(lane)
        times = segment.times(index)

        def ends(d: int, limit: int | None) -> bool:
            return limit is not None and not segment.ended[d] and segment.due(d, times[-1]) > limit

        if segment.curve.is_straight and not any(map(ends, range(len(before)), segment.limits)):
            times = [times[0], times[-1]]
        due = []
        for x in times:
            counts = [segment.due(d, x) for d in range(len(before))]
            counts = [c if limit is None else min(c, limit) for c, limit in zip(counts, segment.limits, strict=True)]
            due.append([(had << 16) + (c >> _FRACTION_BITS - 16) for had, c in zip(before, counts, strict=True)])
        return due

    def cut_at(self, lane: int, index: int) -> int | None:
        """The rows of chunk `index` of `lane` before the place where the run was taken over, or None: nowhere in it."""
        return None

    def _before(self, lane: int) -> Sequence[int]:
        """Rows of each dataset that `lane` has had by an earlier curriculum."""
        return self._taken(lane) if self._taken else [0] * self.n_datasets

    def _target(self, segment: _Segment, lane: int, d: int, index: int) -> int:
        """Rows of dataset `d` due before chunk `index`, by the rates of `segment`."""
        phase = (self._phases[d][lane] << _FRACTION_BITS) // self._lanes
        return segment.due(d, segment.time(index)) + phase >> _FRACTION_BITS

    def _segment(self, lane: int, index: int) -> _Segment:
        route = self._route(lane)
        return route[bisect_right(route, index, key=attrgetter("first")) - 1]

    def _route(self, lane: int) -> list[_Segment]:
        """The segments of a lane, the same for all lanes but after a takeover."""
        lane = lane if self._taken else 0
        if lane not in self._routes:
            self._routes[lane] = self._segments([self._limit(lane, d) for d in range(self.n_datasets)])
        return self._routes[lane]

    def _limit(self, lane: int, d: int) -> int | None:
        """Rows << 40 after which dataset `d` ends for `lane`, or None; those of an earlier curriculum do not count."""
        order, passes = self._orders[d], self._endings[d].passes
        if passes is None:
            return None
        if self._taken:
            return max(0, order.rows_of_lane(lane, passes) - self._before(lane)[d]) << _FRACTION_BITS
        # The mean share of a lane, rounded up so that none is cut short.
        return -((-passes * order.rows_total << _FRACTION_BITS) // self._lanes)

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
