"""Rates: how fast the datasets of a mixture advance over some stretch of a run, as straight lines between knots.

Time runs in one of two units. Where the mixture stays the same it is rows per lane: with row weights a_d (of M = sum of
all a) and chunks of C rows, due(d, x) is x * a_d / M and chunk i begins at x = i * C. Under a schedule it is planned
tokens over all lanes (see `zephon.curriculum.schedule`), rates change along straight lines, due(d, x) is a polynomial
of degree two between the knots of a span, and each span of the schedule is cut into chunks of about C rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from zephon.curriculum.schedule import Span

FRACTION_BITS = 40
_WEIGHT_ONE = 1 << 48
_RATE_ONE = 1 << 64


def row_weights(token_weights: Sequence[float], tokens_per_row: Sequence[float]) -> list[int]:
    """Whole-number row weights that give the wanted shares of tokens, one per dataset, 0 only where none is wanted."""
    rates = [w / t for w, t in zip(token_weights, tokens_per_row, strict=True)]
    total = math.fsum(rates)  # exact on every Python; sum() of floats rounds otherwise before 3.12 than after
    return [max(1, round(rate / total * _WEIGHT_ONE)) if rate else 0 for rate in rates]


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
            return (x * self.rates[0][d] << FRACTION_BITS) // self.total
        k = min(bisect_right(self.knots, x) - 1, len(self.knots) - 2)
        width, into = self.knots[k + 1] - self.knots[k], x - self.knots[k]
        rate, slope = self.rates[k][d], self.rates[k + 1][d] - self.rates[k][d]
        twice = self._areas[k][d] * width + 2 * rate * into * width + slope * into * into
        return (twice << FRACTION_BITS) // (2 * self.total * width)

    def when(self, d: int, rows: int) -> int | None:
        """The first time by which `rows` (times 2**40, above 0) are due, or None where they never are."""
        if len(self.knots) == 1:
            rate = self.rates[0][d]
            return -(-rows * self.total // (rate << FRACTION_BITS)) if rate else None
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
