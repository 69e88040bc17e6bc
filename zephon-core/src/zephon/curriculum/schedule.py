"""Schedules: how the mixture changes in the course of a run.

A schedule is a list of stages. A stage says which mixture holds from its start on, and how it is reached from the one
before: at once ("constant"), or along a straight line ("linear") or half a cosine wave ("cosine") that is done at the
stage's end. Starts and ends are counted in planned tokens: rows times the tokens per row measured when the run
began. Counting what rows really make would need the rows, and the curriculum would be no pure function any longer; the
two differ by as much as the measurement is off, usually well under one percent. A start in steps is a start in tokens,
at so many tokens per step.

Shares are whole numbers of 2**-60 here and every change is a chain of straight lines (a cosine is made of 32 of them,
which stay within 0.13 points of it), so that integrals are polynomials of whole numbers and come out alike on every
platform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from zephon.config.settings import Stage
from zephon.errors import RecipeError

COSINE_PIECES = 32
SHARE_ONE = 1 << 60


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a run in which shares change along straight lines.

    Attributes:
        start: where it starts, in planned tokens of the run.
        knots: places within the span, in tokens from its start, ascending from 0; the last is its length, except in a
            span without end, which has the one knot 0.
        shares: wanted shares at every knot, [n_knots][n_datasets], in units of 2**-60.
    """

    start: int
    knots: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int | None:
        """Tokens, or None where it has no end."""
        return self.knots[-1] if len(self.knots) > 1 else None


def spans_of(stages: Sequence[Stage], names: Sequence[str], tokens_per_step: int) -> list[Span]:
    """The schedule as spans without gaps, the last without end.

    Raises:
        RecipeError: stages are not in order, or overlap.
    """
    starts = [stage.start(tokens_per_step) for stage in stages]
    for nth, (before, start) in enumerate(pairwise(starts), start=2):
        if start <= before:
            raise RecipeError(
                f"stage {nth} of the schedule starts at {start} tokens; expected more than {before}, where stage "
                f"{nth - 1} starts."
            )
    spans: list[Span] = []
    shares = _shares(stages[0], names)
    for nth, (stage, start) in enumerate(zip(stages, starts, strict=True), start=1):
        until = starts[nth] if nth < len(starts) else None
        wanted = _shares(stage, names)
        if stage.change != "constant":
            own = stage.end(tokens_per_step)
            end = until if own is None else own
            assert end is not None
            if end <= start or (until is not None and end > until):
                raise RecipeError(
                    f"the change of stage {nth} of the schedule goes from {start} to {end} tokens; expected an end "
                    f"after the start{'' if until is None else f', and at most {until}, where stage {nth + 1} starts'}."
                )
            spans.append(_change(stage.change, start, end - start, shares, wanted))
        else:
            end = start
        if until is None:
            spans.append(Span(end, (0,), (wanted,)))
        elif end < until:
            spans.append(Span(end, (0, until - end), (wanted, wanted)))
        shares = wanted
    return spans


def _shares(stage: Stage, names: Sequence[str]) -> tuple[int, ...]:
    """Shares in units of 2**-60, exact but for rounding."""
    weights = [Fraction(stage.mixture.get(name, 0.0)) for name in names]
    total = sum(weights)
    return tuple(max(round(SHARE_ONE * weight / total), 1 if weight else 0) for weight in weights)


def _change(kind: str, start: int, length: int, before: tuple[int, ...], after: tuple[int, ...]) -> Span:
    """The span in which one mixture becomes another."""
    pieces = 1 if kind == "linear" else min(COSINE_PIECES, length)
    done = [SHARE_ONE * k // pieces for k in range(pieces + 1)] if kind == "linear" else _half_cosine(pieces)
    return Span(
        start,
        tuple(length * k // pieces for k in range(pieces + 1)),
        tuple(tuple(b + ((a - b) * part) // SHARE_ONE for b, a in zip(before, after, strict=True)) for part in done),
    )


def _half_cosine(pieces: int) -> list[int]:
    """(1 - cos(pi * k / pieces)) / 2 for k = 0 .. pieces, in units of 2**-60, by whole numbers alone.

    `math.cos` may differ in its last digit between platforms. Rotating a quarter circle halved again and again needs
    square roots only, and those of whole numbers are exact.
    """
    one = 1 << 120
    # 2**m sectors of the half circle, m large enough that any k / pieces is met closely: halve cos(pi) = -1.
    halvings = 40
    turn_cos, turn_sin = [-one], [0]
    for _ in range(halvings):
        cos = math.isqrt((one + turn_cos[-1]) * one // 2)
        turn_sin.append(math.isqrt(one * one - cos * cos))
        turn_cos.append(cos)
    heights = []
    for k in range(pieces + 1):
        angle = (k << halvings) // pieces  # of 2**halvings in half a circle
        cos, sin = one, 0
        for bit in range(halvings + 1):
            if angle >> (halvings - bit) & 1:
                c, s = turn_cos[bit], turn_sin[bit]
                cos, sin = (cos * c - sin * s) // one, (sin * c + cos * s) // one
        heights.append(min(SHARE_ONE, max(0, (one - cos) * SHARE_ONE // (2 * one))))
    return heights


def shares_between(spans: Sequence[Span], begin: int, end: int) -> list[int]:
    """Mean shares from `begin` to `end`, in planned tokens of the run, in units of 2**-60; at a place where equal."""
    if end <= begin:
        end = begin + 1
    sums = [0] * len(spans[0].shares[0])
    for span in spans:
        knots, shares = span.knots, span.shares
        if span.length is None:
            knots, shares = (0, max(1, end - span.start)), (*shares, *shares)
        for k in range(len(knots) - 1):
            low, width = span.start + knots[k], knots[k + 1] - knots[k]
            a, b = max(begin, low), min(end, low + width)
            for d, (p, q) in enumerate(zip(shares[k], shares[k + 1], strict=True) if a < b else ()):
                # The mean of a straight line is its value in the middle.
                sums[d] += (b - a) * (p + (q - p) * (a + b - 2 * low) // (2 * width))
    return [each // (end - begin) for each in sums]
