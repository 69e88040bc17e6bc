"""Schedules: how the mixture changes in the course of a run.

A schedule is a list of stages. A stage says which mixture holds from its start on, and how it is reached from the one
before: at once ("constant"), or along a straight line ("linear") or half a cosine wave ("cosine") that is done at the
stage's end. Starts and ends are counted in planned tokens: rows times the tokens per row measured when the run
began. Counting what rows really make would need the rows, and the curriculum would be no pure function any longer; the
two differ by as much as the measurement is off, usually well under one percent. A start in steps is a start in tokens,
at so many tokens per step.

Shares are whole numbers of 2**-60 here and every change is a chain of straight lines (a cosine is made of 32 of them,
which stay within 0.1 % of it), so that integrals are polynomials of whole numbers and come out alike on every platform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from zephon.errors import RecipeError

__all__ = ["CHANGES", "COSINE_PIECES", "SHARE_ONE", "Span", "Stage", "check_stages", "shares_between", "spans_of"]

CHANGES = ("constant", "linear", "cosine")
COSINE_PIECES = 32
SHARE_ONE = 1 << 60
_MOST_TOKENS = 1 << 62


@dataclass(frozen=True)
class Stage:
    """One stage of a schedule.

    Attributes:
        mixture: weight of each dataset by name from here on, finite and at least 0, not all 0; a dataset that is not
            named has none. Shares of tokens are weight / sum of weights.
        start_tokens, start_steps: where the stage starts, in planned tokens or in steps of the run; neither is the
            start of the run.
        change: "constant" (the mixture holds from the start), "linear" or "cosine" (it is reached at the end).
        end_tokens, end_steps: where a change ends; neither is the start of the next stage.

    Raises:
        RecipeError: a value is not usable.
    """

    mixture: Mapping[str, float]
    start_tokens: int | None = None
    start_steps: int | None = None
    change: str = "constant"
    end_tokens: int | None = None
    end_steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mixture, Mapping) or not self.mixture:
            raise RecipeError(f"mixture of a stage is {self.mixture!r}; weights by dataset name are needed.")
        for name, weight in self.mixture.items():
            if not _is_weight(weight):
                raise RecipeError(
                    f'the weight of "{name}" in a stage is {str(weight)[:40]}; a finite number of at least 0 is needed.'
                )
        total = sum(float(weight) for weight in self.mixture.values())
        if not 0 < total < math.inf:
            raise RecipeError(
                f"the weights {dict(self.mixture)} of a stage add up to {total}; at least one must be above 0, "
                "and their sum finite."
            )
        if self.change not in CHANGES:
            raise RecipeError(f"change of a stage is {self.change!r}; {', '.join(map(repr, CHANGES))} are known.")
        for name in ("start_tokens", "start_steps", "end_tokens", "end_steps"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_TOKENS
            ):
                raise RecipeError(f"{name} of a stage is {value!r}; a whole number of at least 0 is needed.")
        for side in ("start", "end"):
            if getattr(self, f"{side}_tokens") is not None and getattr(self, f"{side}_steps") is not None:
                raise RecipeError(
                    f"a stage has both {side}_tokens ({getattr(self, f'{side}_tokens')}) and {side}_steps "
                    f"({getattr(self, f'{side}_steps')}); one of them is enough."
                )
        if self.change == "constant" and (self.end_tokens is not None or self.end_steps is not None):
            raise RecipeError(
                'a stage whose change is "constant" has an end, but it holds until the next one starts; remove the '
                'end, or let change be "linear" or "cosine".'
            )
        object.__setattr__(self, "mixture", {name: float(weight) for name, weight in self.mixture.items()})

    @property
    def in_steps(self) -> bool:
        """Whether it takes the number of tokens per step to know where the stage lies."""
        return self.start_steps is not None or self.end_steps is not None

    def start(self, tokens_per_step: int) -> int:
        """Where it starts, in planned tokens."""
        return self.start_tokens or (self.start_steps or 0) * tokens_per_step

    def end(self, tokens_per_step: int) -> int | None:
        """Where its change ends, in planned tokens, or None where the next stage says it."""
        return self.end_steps * tokens_per_step if self.end_steps is not None else self.end_tokens

    def to_plain(self, tokens_per_step: int) -> list[Any]:
        """As JSON types, places in tokens and weights as shares, for a fingerprint."""
        total = math.fsum(self.mixture.values())
        shares = {name: round(weight / total, 12) for name, weight in sorted(self.mixture.items()) if weight}
        return [self.start(tokens_per_step), self.change, self.end(tokens_per_step), shares]


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 <= float(value) < math.inf
    except OverflowError:
        return False


def check_stages(stages: Sequence[Stage], names: Sequence[str]) -> None:
    """Refuse stages that do not make a schedule over the datasets `names`.

    What depends on the number of tokens per step is checked by `spans_of`.

    Raises:
        RecipeError: one sentence about the first thing wrong.
    """
    if not stages:
        raise RecipeError("the schedule has no stages; at least one is needed, which starts at 0.")
    for nth, stage in enumerate(stages, start=1):
        if not isinstance(stage, Stage):
            raise RecipeError(f"stage {nth} of the schedule is {stage!r}; a zephon.work.Stage is needed.")
        for name in stage.mixture:
            if name not in names:
                raise RecipeError(
                    f'stage {nth} of the schedule names "{name}", which is not among the sources {list(names)}.'
                )
    idle = [name for name in names if not any(stage.mixture.get(name) for stage in stages)]
    if idle:
        raise RecipeError(f"no stage of the schedule gives {idle} a weight above 0; remove them, or give them one.")
    first = stages[0]
    if first.start_tokens or first.start_steps:
        raise RecipeError(
            f"stage 1 of the schedule starts at {first.start_tokens or first.start_steps} "
            f"{'tokens' if first.start_tokens else 'steps'}; the first stage must start at 0."
        )
    if first.change != "constant":
        raise RecipeError(
            f'stage 1 of the schedule has the change "{first.change}", but there is no mixture before it to change '
            'from; let it be "constant".'
        )
    last = stages[-1]
    if last.change != "constant" and last.end_tokens is None and last.end_steps is None:
        raise RecipeError(
            f'the last stage of the schedule has the change "{last.change}" and no end; give it end_tokens or '
            "end_steps."
        )
    if not any(stage.in_steps for stage in stages):
        spans_of(stages, names, 1)


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
                f"stage {nth} of the schedule starts at {start} tokens and the one before it at {before}; "
                "stages must be in the order of their starts, each after the one before."
            )
    spans: list[Span] = []
    shares = _shares(stages[0], names)
    for nth, (stage, start) in enumerate(zip(stages, starts, strict=True), start=1):
        until = starts[nth] if nth < len(starts) else None
        wanted = _shares(stage, names)
        if stage.change != "constant":
            told = stage.end(tokens_per_step)
            end = until if told is None else told
            assert end is not None
            if end <= start:
                raise RecipeError(
                    f"the change of stage {nth} of the schedule starts at {start} tokens and ends at {end}; "
                    "the end must be after the start."
                )
            if until is not None and end > until:
                raise RecipeError(
                    f"the change of stage {nth} of the schedule ends at {end} tokens, but stage {nth + 1} starts at "
                    f"{until}: stages must not overlap."
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
    made = []
    for k in range(pieces + 1):
        angle = (k << halvings) // pieces  # of 2**halvings in half a circle
        cos, sin = one, 0
        for bit in range(halvings + 1):
            if angle >> (halvings - bit) & 1:
                c, s = turn_cos[bit], turn_sin[bit]
                cos, sin = (cos * c - sin * s) // one, (sin * c + cos * s) // one
        made.append(min(SHARE_ONE, max(0, (one - cos) * SHARE_ONE // (2 * one))))
    return made


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
