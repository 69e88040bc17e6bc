"""Whose turn it is to give out a record, and how many tokens of each dataset a lane is to have by plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, product

_ONE = 1 << 64
_UNIT = 1 << 32
_COURSES = 4096


class Turns:
    """The points that decide whose turn it is, for one lane of L: whole numbers of 2**-64."""

    def __init__(self, lane: int, lanes: int) -> None:
        self._lane, self._lanes, self._step = lane, lanes, _step(lanes)

    def choose(self, record: int, weights: Sequence[int], order: Sequence[int]) -> int:
        """Whose turn it is at the lane's record number `record`: an index of `weights`, not all of which are 0.

        The parts of 0 .. 1 lie in the given order of the indices.
        """
        point = (record * self._lanes + self._lane) * self._step % _ONE
        ends = list(accumulate(weights[d] for d in order))
        return order[bisect_right(ends, point * ends[-1] >> 64)]


@lru_cache
def _step(lanes: int) -> int:
    """How far the points of neighbouring records of the run lie apart, in units of 2**-64.

    Points are spread the more evenly, the harder it is to come near the step with a fraction: the smaller the partial
    quotients of its continued fraction are. That is asked of the step from record to record of the run first, but also
    of the step from record to record of one lane, L times as long, as far as that matters for what a lane holds.
    """

    def badness(step: int) -> tuple[int, int]:
        in_lane = max(_quotients(step * lanes % _ONE, 1 << 10), default=_ONE)
        return max(0, in_lane - 6), sum(_quotients(step, 1 << 14))

    return min(_steps(), key=badness)


@lru_cache
def _steps() -> list[int]:
    """Numbers whose partial quotients are all 1 after a few that are up to 4."""
    made = []
    for count in range(5):
        for head in product((1, 2, 3, 4), repeat=count):
            above, below = 0, 1
            for quotient in (*[1] * 100, *reversed(head)):
                above, below = below, quotient * below + above
            made.append((above << 64) // below)
    return made


def _quotients(point: int, most: int) -> list[int]:
    """Partial quotients of point / 2**64, up to fractions with a denominator of `most`."""
    quotients, above, below, behind = [], _ONE, point, (0, 1)
    while below and behind[1] < most:
        quotients.append(above // below)
        behind = behind[1], quotients[-1] * behind[1] + behind[0]
        above, below = below, above % below
    return quotients


class TokenPlan:
    """The tokens that a lane is to have by plan, at any place of it: whole numbers, by dataset.

    Args:
        due_through: rows of each dataset that are due to the lane in the course of a chunk.
        cut_at: rows of a chunk after which the run was taken over by another, which goes on with the next chunk.
        tokens_per_row: for each dataset, in units of 2**-16.
    """

    def __init__(
        self,
        due_through: Callable[[int], list[list[int]]],
        cut_at: Callable[[int], int | None],
        tokens_per_row: Sequence[int],
    ) -> None:
        self._due_through, self._cut_at, self._per_row = due_through, cut_at, tokens_per_row
        self._known: dict[int, _Course] = {}
        self._near = 0  # a chunk to begin looking at

    def rows(self, chunk: int) -> int:
        """Rows of a chunk, about."""
        rows = self._course(chunk).rows
        return rows[-1] - rows[0] >> 16

    def until(self, chunk: int, row: int) -> list[int]:
        """Tokens up to `row` rows into a chunk."""
        course = self._course(chunk)
        return course.tokens_by(course.rows, course.rows[0] + (row << 16))

    def at(self, tokens: int, last: int) -> tuple[int, list[int], int, int, list[int]]:
        """Where so many tokens have been had, in a chunk up to the last one: the chunk, the datasets' shares of what
        follows (in units of 2**-32), and the stretch of which these are the shares: the tokens at its begin, at its
        end, and by dataset at its begin."""
        index = min(self._near, last)
        while index and self._course(index).sums[0] > tokens:
            index -= 1
        while index < last and self._course(index).end <= tokens:
            index += 1
        self._near = index
        course = self._course(index)
        part = max(0, min(bisect_right(course.sums, tokens), len(course.sums) - 1) - 1)
        low, high = course.tokens[part], course.tokens[part + 1]
        begin, end = course.sums[part], course.sums[part + 1]
        shares = [(b - a << 32) // max(1, end - begin) for a, b in zip(low, high, strict=True)]
        until = max(tokens + 1, min(end, course.end))
        return index, shares, begin, until, low

    def _course(self, chunk: int) -> _Course:
        course = self._known.get(chunk)
        if course is None:
            if len(self._known) >= _COURSES:
                self._known.clear()
            due = self._due_through(chunk)
            tokens = [[rows * ratio >> 32 for rows, ratio in zip(at, self._per_row, strict=True)] for at in due]
            course = _Course([sum(at) for at in due], tokens, [sum(at) for at in tokens])
            if (rows := self._cut_at(chunk)) is not None:
                course.end = sum(course.tokens_by(course.rows, course.rows[0] + (rows << 16)))
            self._known[chunk] = course
        return course


@dataclass(slots=True)
class _Course:
    """What is due in the course of a chunk, at some times of it, from its begin to its end.

    Attributes:
        rows: all rows, in units of 2**-16.
        tokens: [n_times][n_datasets].
        sums: of the tokens at each time.
        end: of the tokens up to the end, or to where the run was taken over.
    """

    rows: list[int]
    tokens: list[list[int]]
    sums: list[int]
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.sums[-1]

    def tokens_by(self, axis: list[int], place: int) -> list[int]:
        """Tokens at the time at which `axis` comes to `place`, by dataset."""
        part = max(0, min(bisect_right(axis, place), len(axis) - 1) - 1)
        width = axis[part + 1] - axis[part]
        into = max(0, min(place - axis[part], width))
        low, high = self.tokens[part], self.tokens[part + 1]
        return [a + (b - a) * into // max(1, width) for a, b in zip(low, high, strict=True)]


def weight(share: int, held: int, wanted: int, stock: int) -> int:
    """How wide the part of 0 .. 1 of a dataset is, in units of 2**-32.

    Args:
        share: of the planned tokens, in the same units.
        held: tokens of it in stock.
        wanted: tokens of it in stock by plan.
        stock: tokens in stock.
    """
    if 4 * held < wanted:
        return 4 * share * held * (2 * wanted - 4 * held) // wanted**2
    extra = held - min(4 * wanted, wanted + 3 * max(0, stock - wanted) // 4)
    if extra <= 0:
        return share
    more = (extra << 32) // stock
    return share + max(more * min(_UNIT // 4, 2 * more) >> 32, share * min(extra, 2 * wanted) ** 2 // max(1, wanted**2))
