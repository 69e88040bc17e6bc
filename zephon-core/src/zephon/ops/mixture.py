"""Holding the mixture locally: records of one dataset each, in an order that keeps every stretch at the wanted shares.

Row quotas are exact, but documents have lengths: over a few thousand of them the tokens of a dataset with long
documents may be some percent off, and a single long document fills several records in a row. Here documents of each
dataset are packed by themselves, so that a record holds tokens of one dataset, and the records of all datasets are
given out in turn.

Whose turn it is comes from a sequence of points u = frac(round * a + phase(lane)), spread as evenly over 0 .. 1 as
points can be, both along a lane and over the lanes of a round: a dataset has the turn where u falls into its part of
0 .. 1, which is as wide as its share of the tokens still to come in the window. So shares hold to a few records over
any stretch, and what a window has more of one dataset than was planned is spread over the whole window.

The accumulator waits for the dataset whose turn it is, so it holds records of the others; at the end of a window it
gives out everything, and what fills no record goes into common ones, the last of which is padded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from threading import Lock

import numpy as np

from ..errors import PipelineError
from ..records import Pointer, RecordBlock, TokenBlock, ragged_take
from .base import Job, PackCounts
from .pack import WrapPacker

__all__ = ["LEAST_HELD", "EnsureMixture", "MixturePacker", "Turns"]

SLOT_ROWS = 256
"""Rows after which records are given out: it must not show where blocks are cut."""

_ONE = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
LEAST_HELD = 64
"""Records that each lane may hold back at least."""


@dataclass(frozen=True, slots=True)
class EnsureMixture:
    """Hold the shares of tokens over every stretch of the run, not only in the long run.

    Attributes:
        buffer_size: records over all lanes together that may wait for their turn; each lane may hold at least 64. Where
            more would have to wait, they are given out early.
    """

    buffer_size: int = 32768

    def __post_init__(self) -> None:
        size = self.buffer_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PipelineError(f"ensure_mixture buffer_size is {size!r}; a whole number of at least 1 is needed.")


class Turns:
    """The points that decide whose turn it is, for one lane of L: whole numbers of 2**-64."""

    def __init__(self, lane: int, lanes: int) -> None:
        self._step = _step(lanes)
        # Phases are L even parts of 0 .. 1, handed out so that those of neighbouring lanes are spread evenly too: a
        # round is balanced not only as a whole but wherever one counts from, and so is the part of each group of it.
        self._phase = (self.place(lane, lanes) << 64) // lanes

    @staticmethod
    def place(lane: int, lanes: int) -> int:
        """A permutation of the lanes that puts neighbours far from each other."""
        return int(_places(lanes)[lane])

    def choose(self, record: int, weights: Sequence[int], order: Sequence[int]) -> int:
        """Whose turn it is at the lane's record number `record`: an index of `weights`, not all of which are 0.

        The parts of 0 .. 1 lie in the given order of the indices.
        """
        point = (record * self._step + self._phase) % _ONE
        ends = list(accumulate(weights[d] for d in order))
        return order[bisect_right(ends, point * ends[-1] >> 64)]


@lru_cache
def _places(lanes: int) -> np.ndarray:
    return np.argsort(np.argsort(np.arange(lanes, dtype=np.uint64) * np.uint64(_GOLDEN)))


@lru_cache
def _step(lanes: int) -> int:
    """How far the points of a lane lie apart, in units of 2**-64.

    L steps make the golden ratio, so that rounds as a whole are spread as evenly as can be. That leaves L choices for
    the step; the best is the one that is hardest to come near with a fraction, or a lane would come back to nearly the
    same points again and again: the largest partial quotient of its continued fraction is as small as can be.
    """
    middle = lanes * _GOLDEN >> 64
    candidates = [((k << 64) + _GOLDEN) // lanes for k in range(max(0, middle - 32), min(lanes, middle + 32) + 1)]
    return min(candidates, key=lambda step: (_largest_quotient(step % _ONE), abs(step - _GOLDEN)))


def _largest_quotient(point: int) -> int:
    quotients, above, below, behind = [], _ONE, point, (0, 1)
    while below and behind[1] < 1 << 16:  # fractions with larger denominators are of no concern
        quotients.append(above // below)
        behind = behind[1], quotients[-1] * behind[1] + behind[0]
        above, below = below, above % below
    return max(quotients, default=1 << 64)


class _Once:
    """A job whose records are given out in parts: it runs once, in whichever worker needs it first."""

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._block: RecordBlock | None = None
        self._lock = Lock()

    def block(self) -> RecordBlock:
        with self._lock:
            if self._job is not None:
                self._block, self._job = self._job.run(), None
            assert self._block is not None
            return self._block


@dataclass(slots=True)
class _Waiting:
    """Records of one dataset, from number `next` on."""

    once: _Once
    count: int
    next: int = 0


class MixturePacker:
    """The accumulator of `EnsureMixture` and of "wrap" for one lane.

    Args:
        record_length: tokens per record.
        turns: whose turn it is.
        first_record: records that the lane gave before.
        window: the window that the lane begins at the start of.
        window_first: the first chunk of a window.
        rows_before: rows of each dataset that the lane has taken before a chunk.
        tokens_per_row: for each dataset, in units of 2**-16.
        most_held: records that may wait. Half as many are held back until the window ends: they are known for certain,
            which the rows to come are not, so that the share of what is left cannot swing about towards the end.
        pad_token: fills up the last record of a window.
        pad_last: pad the last record of the lane too, rather than leave it out.
        order: the datasets in an order that does not change where others come or go: that of their names.
        counts: where to count.
    """

    def __init__(
        self,
        record_length: int,
        *,
        turns: Turns,
        first_record: int,
        window: int,
        window_first: Callable[[int], int],
        rows_before: Callable[[int], Sequence[int]],
        tokens_per_row: Sequence[int],
        most_held: int,
        pad_token: int,
        pad_last: bool,
        order: Sequence[int],
        counts: PackCounts,
    ) -> None:
        self.records = 0
        self.tokens_left_out = 0
        self._length, self._turns, self._first = record_length, turns, first_record
        self._window, self._window_first, self._rows_before = window, window_first, rows_before
        self._per_row, self._most_held, self._pad_token, self._pad_last = tokens_per_row, most_held, pad_token, pad_last
        self._order, self._counts = order, counts
        self._slot: tuple[int, int] | None = None
        self._begin_window()

    def push(self, block: TokenBlock) -> list[Job]:
        """Take documents; gives a job for the records whose turn has come."""
        order: list[int] = []
        slot = block.position // SLOT_ROWS
        edges = np.flatnonzero(np.diff(slot, prepend=slot[:1])).tolist() if len(slot) else []
        for start, stop in zip([0, *edges], [*edges, len(slot)], strict=True) if len(slot) else ():
            here = block.chunk, int(slot[start])
            if self._slot is not None and here != self._slot:
                order += self._give(*self._slot)
            self._slot = here
            self._take(block, start, stop)
        return self._jobs(order)

    def flush(self) -> list[Job]:
        """A window ends: give out everything, the last record padded."""
        jobs = self._drain(pad=True)
        self._window += 1
        self._begin_window()
        return jobs

    def carry(self) -> Pointer | None:
        """Nothing goes over the end of a window."""
        return None

    def finish(self) -> list[Job]:
        """No document will follow."""
        return self._drain(pad=self._pad_last)

    def _begin_window(self) -> None:
        n = len(self._per_row)
        self._rows_at = self._rows_before(self._window_first(self._window))
        after = self._rows_before(self._window_first(self._window + 1))
        rows = [b - a for a, b in zip(self._rows_at, after, strict=True)]
        self._planned = [count * ratio >> 16 for count, ratio in zip(rows, self._per_row, strict=True)]
        self._planned_rows = sum(rows)
        self._packers = [WrapPacker(self._length, counts=self._counts) for _ in range(n)]
        self._waiting: list[deque[_Waiting]] = [deque() for _ in range(n)]
        self._queued = [0] * n  # records that wait
        self._chunk = -1, 0  # a chunk, and the rows of the window before it
        self._slot = None
        self._begun = False

    def _take(self, block: TokenBlock, start: int, stop: int) -> None:
        """Documents `start:stop` of a block into the packers of their datasets."""
        datasets = block.dataset[start:stop]
        for d in np.unique(datasets).tolist():
            docs = np.flatnonzero(datasets == d) + start
            part = block if len(docs) == len(block.dataset) else _documents(block, docs)
            for job in self._packers[d].push(part):
                count = len(job.origins)
                self._waiting[d].append(_Waiting(_Once(job), count))
                self._queued[d] += count

    def _give(self, chunk: int, slot: int) -> list[int]:
        """The datasets whose records are given out at the end of a slot of rows, in order."""
        if chunk != self._chunk[0]:
            self._chunk = chunk, sum(self._rows_before(chunk)) - sum(self._rows_at)
        done = self._chunk[1] + (slot + 1) * SLOT_ROWS
        to_come = max(0, self._planned_rows - done)
        left = [
            queued * self._length + packer.held + planned * to_come // max(1, self._planned_rows)
            for queued, packer, planned in zip(self._queued, self._packers, self._planned, strict=True)
        ]
        order: list[int] = []
        number = self._first + self.records
        while any(left) and sum(self._queued) > self._most_held // 2:
            d = self._turns.choose(number + len(order), self._weights(left), self._order)
            if not self._queued[d]:
                if sum(self._queued) <= self._most_held:
                    break
                d = self._turns.choose(number + len(order), self._queued, self._order)
            order.append(d)
            self._queued[d] -= 1
            left[d] = max(0, left[d] - self._length)
        self.records += len(order)
        return order

    def _weights(self, left: list[int]) -> list[int]:
        """The planned tokens of the window, or those left where their shares are further from the plan than 0.4 %.

        Points are spread over all lanes, so lanes that go by the same shares balance each other to a record.
        """
        whole, rest = sum(self._planned), sum(left)
        near = whole and all(
            250 * abs(planned * rest - tokens * whole) <= whole * rest
            for planned, tokens in zip(self._planned, left, strict=True)
        )
        return self._planned if near else left

    def _drain(self, *, pad: bool) -> list[Job]:
        order: list[int] = []
        while any(self._queued):
            d = self._turns.choose(self._first + self.records, self._queued, self._order)
            order.append(d)
            self._queued[d] -= 1
            self.records += 1
        jobs = self._jobs(order)
        rest = WrapPacker(self._length, pad_token=self._pad_token if pad else None, counts=self._counts)
        made: list[Job] = []
        for d in self._order:
            made += rest.absorb(self._packers[d])
        for job in [*made, *rest.finish()]:
            self.records += len(job.origins)
            jobs.append(replace(job, origins=self._origins(len(job.origins))))
        self.tokens_left_out += rest.tokens_left_out
        return jobs

    def _jobs(self, order: list[int]) -> list[Job]:
        """A job for the next records of the datasets in `order`."""
        if not order:
            return []
        picked = np.array(order, dtype=np.int64)
        parts: list[tuple[_Once, int, int]] = []
        numbers = np.empty(len(order), dtype=np.int64)
        done = 0
        for d in dict.fromkeys(sorted(order)):
            places = np.flatnonzero(picked == d)
            numbers[places] = np.arange(done, done + len(places))
            done += len(places)
            need = len(places)
            while need:
                first = self._waiting[d][0]
                count = min(need, first.count - first.next)
                parts.append((first.once, first.next, first.next + count))
                first.next += count
                need -= count
                if first.next == first.count:
                    self._waiting[d].popleft()

        def run() -> RecordBlock:
            return RecordBlock.arrange([once.block().slice(low, high) for once, low, high in parts], numbers)

        return [Job(run, len(order) * self._length * 4, self._origins(len(order)), fresh=False)]

    def _origins(self, count: int) -> np.ndarray:
        """The lane can be entered at the first record of a window and nowhere else."""
        origins = np.full((count, 3), -1, dtype=np.int64)
        if not self._begun:
            origins[0] = self._window_first(self._window), 0, 0
            self._begun = True
        return origins


def _documents(block: TokenBlock, docs: np.ndarray) -> TokenBlock:
    """Some documents of a block, int64[m], in their order."""
    items, offsets = ragged_take(block.offsets, docs)
    return replace(
        block,
        tokens=block.tokens[items],
        offsets=offsets,
        dataset=block.dataset[docs],
        row=block.row[docs],
        position=block.position[docs],
        loss=None if block.loss is None else block.loss[items],
        positions=None if block.positions is None else block.positions[items],
    )
