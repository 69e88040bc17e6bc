"""Holding the mixture locally: records of one dataset each, in an order that keeps every stretch at the wanted shares.

Row quotas are exact, but documents have lengths: over a few thousand of them the tokens of a dataset with long
documents may be some percent off, and a single long document fills several records in a row. Here documents of each
dataset are packed by themselves, so that a record holds tokens of one dataset, and the records of all datasets are
given out in turn.

Whose turn it is comes from a sequence of points u = frac(n * a), n the number of a record in the run, spread as evenly
over 0 .. 1 as points can be, both along the run and along each lane of it: a dataset has the turn where u falls into
its part of 0 .. 1, which is as wide as its planned share of tokens. All lanes go by the same shares, so they balance
each other to a few records, without knowing of each other.

What documents bring more or less than planned is held: each lane has a stock of records, and gives one out for every
one that comes in. By plan the stock is what came last, so the share of a dataset is that which was planned just before
it: a schedule is followed as it stands. As long as a dataset's part of the stock neither is used up nor crowds out the
others, its share stays as planned; only beyond that it is given out more or less often, gently. So a lane's surplus is
spread over a long stretch, and the stock goes on over the ends of windows, where a lane can be entered: what is held
there is the last so many tokens of each dataset, so the lane begins at the oldest of them and leaves out as many tokens
of each dataset as earlier records have used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from threading import Lock
from typing import ClassVar

import numpy as np

from zephon.columns.lane_start import LaneStart
from zephon.columns.records import Pointer, RecordBlock, TokenBlock
from zephon.config.keys import Positive, check_keys, key
from zephon.errors import PipelineError
from zephon.ops.base import Job, PackCounts
from zephon.ops.pack import WrapPacker
from zephon.ops.turns import TokenPlan, Turns, weight

SLOT_ROWS = 256
"""Rows after which records are given out: it must not show where blocks are cut."""

_STOCK_TOKENS = 1 << 25
_LEAST_TOKENS = 1 << 18
STALE = 8
"""Tokens that have waited while so many times the stock came in are given out at the end of the window: a dataset that
fills a record in a long time must not make a resume go far back."""


@dataclass(frozen=True)
class EnsureMixture:
    """Hold the shares of tokens over every stretch of the run, not only in the long run."""

    kind: ClassVar[str] = "ensure_mixture"

    buffer_size: Positive | None = key(
        None,
        "Records over all lanes together that wait for their turn, at least one per lane. None stands for 34 million "
        "tokens, whatever the sequence length, and at least 262,144 per lane.",
    )

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, "ensure_mixture ")

    def per_lane(self, lanes: int, record_length: int) -> int:
        """Records that each of so many lanes holds."""
        if self.buffer_size is None:
            return max(1, max(_LEAST_TOKENS, _STOCK_TOKENS // lanes) // record_length)
        return max(1, self.buffer_size // lanes)


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


@dataclass(slots=True)
class _Stock:
    """What a lane holds of one dataset."""

    packer: WrapPacker  # the tokens that fill no record yet
    skip: int  # tokens to come that earlier records have used
    waiting: deque[_Waiting] = field(default_factory=deque)
    queued: int = 0  # records in `waiting`
    taken: int = 0  # tokens
    # For documents taken, ascending, int64[n] each: the place of the row, chunk * 2**32 + position, and tokens before.
    keys: list[np.ndarray] = field(default_factory=list)
    begins: list[np.ndarray] = field(default_factory=list)

    def pending(self, length: int) -> int:
        """Tokens held."""
        return self.queued * length + self.packer.held

    def oldest(self, length: int) -> int | None:
        """The place of the row of the first token held."""
        pending = self.pending(length)
        if not pending:
            return None
        part = bisect_right(self.begins, self.taken - pending, key=itemgetter(0)) - 1
        return int(self.keys[part][np.searchsorted(self.begins[part], self.taken - pending, side="right") - 1])

    def used_since(self, key: int, length: int) -> int:
        """Tokens from a place on that are not held; forgets what lies before the place."""
        part = bisect_left(self.keys, key, key=itemgetter(-1))
        del self.keys[:part], self.begins[:part]
        if not self.keys:
            return 0
        return self.taken - int(self.begins[0][np.searchsorted(self.keys[0], key)]) - self.pending(length)


class MixturePacker:
    """The accumulator of `EnsureMixture` and of "wrap" for one lane.

    Args:
        record_length: tokens per record.
        turns: whose turn it is.
        start: where the lane begins.
        window_first: the first chunk of a window.
        plan: the tokens that the lane is to have.
        through_windows: rows are counted from the first chunk of a window to its end, not in each of its chunks.
        hold: records in stock.
        stretch: records after which the lane is to be one that can be entered.
        pad_token: fills up the last record of those given out because they waited for too long.
        pad_last: pad the last record of the lane too, rather than leave it out.
        order: the datasets in an order that does not change where others come or go: that of their names.
        counts: where to count.
    """

    def __init__(
        self,
        record_length: int,
        *,
        turns: Turns,
        start: LaneStart,
        window_first: Callable[[int], int],
        plan: TokenPlan,
        through_windows: bool,
        hold: int,
        stretch: int,
        pad_token: int,
        pad_last: bool,
        order: Sequence[int],
        counts: PackCounts,
    ) -> None:
        self.records = 0
        self.tokens_left_out = 0
        self._length, self._turns, self._first = record_length, turns, start.records_before
        self._window, self._window_first = start.window, window_first
        self._hold, self._pad_token, self._pad_last = hold, pad_token, pad_last
        self._plan, self._through_windows = plan, through_windows
        self._order, self._counts = order, counts
        skips = dict(zip(order, start.skips or [0] * len(order), strict=True))
        self._stocks = [_Stock(WrapPacker(record_length, counts=counts), skips[d]) for d in range(len(order))]
        self._stretch = stretch
        self._entry = Pointer(start.chunk, start.position, start.token, tuple(skips[d] for d in order))
        self._since = 0  # records given since there
        self._slot: tuple[int, int] | None = None
        self._opens = start.token  # rows before this place are only those still held

    def push(self, block: TokenBlock) -> list[Job]:
        """Take documents; gives a job for the records whose turn has come."""
        jobs: list[Job] = []
        order: list[int] = []
        slot = block.position // SLOT_ROWS
        edges = np.flatnonzero(np.diff(slot, prepend=slot[:1])).tolist() if len(slot) else []
        for start, stop in zip([0, *edges], [*edges, len(slot)], strict=True) if len(slot) else ():
            here = block.chunk, int(slot[start])
            if here != self._slot:
                order += self._give()
                if self._since + len(order) >= self._stretch:
                    jobs += self._jobs(order)
                    order = []
                    self._enter((block.chunk << 32) + here[1] * SLOT_ROWS)
            self._slot = here
            self._take(block, start, stop)
        return jobs + self._jobs(order)

    def flush(self) -> list[Job]:
        """A window ends: give out what has waited for too long, and note where the next one can be entered."""
        jobs = self._jobs(self._give())
        self._slot = None
        self._window += 1
        first = self._window_first(self._window)
        before = sum(self._plan.until(first, 0)) - STALE * self._hold * self._length
        stale = self._plan.at(before, first)[0] << 32
        oldest = {d: key for d, stock in enumerate(self._stocks) if (key := stock.oldest(self._length)) is not None}
        jobs += self._give_all([d for d in self._order if oldest.get(d, stale) < stale], pad=True)
        self._enter(first << 32)
        return jobs

    def carry(self) -> Pointer | None:
        """Where the window can be entered: `token` is the place before which rows are only those still held."""
        return self._entry

    def finish(self) -> list[Job]:
        """No document will follow: give out everything."""
        left = [stock.queued for stock in self._stocks]
        order: list[int] = []
        while any(left):
            order.append(self._turns.choose(self._first + self.records + len(order), left, self._order))
            left[order[-1]] -= 1
        return self._jobs(self._gone(order)) + self._give_all(self._order, pad=self._pad_last)

    def _enter(self, opens: int) -> None:
        """The lane can be entered at the next record, which is made of what is held and rows from a place on."""
        oldest = [key for stock in self._stocks if (key := stock.oldest(self._length)) is not None]
        at = min(oldest, default=opens)
        skips = [self._stocks[d].used_since(at, self._length) for d in self._order]
        self._entry, self._since = Pointer(at >> 32, at & 0xFFFFFFFF, opens, tuple(skips)), 0

    def _take(self, block: TokenBlock, start: int, stop: int) -> None:
        """Documents `start:stop` of a block into the stocks of their datasets."""
        datasets = block.dataset[start:stop]
        for d in np.unique(datasets).tolist():
            docs = np.flatnonzero(datasets == d) + start
            part = block if len(docs) == len(block.dataset) else block.take(docs)
            stock = self._stocks[d]
            stock.keys.append((block.chunk << 32) + part.position)
            stock.begins.append(stock.taken + part.offsets[:-1] - part.offsets[0])
            tokens = int(part.offsets[-1] - part.offsets[0])
            stock.taken += tokens
            if stock.skip >= tokens:
                stock.skip -= tokens
                self._counts.documents += len(docs)
                continue
            if stock.skip:
                stock.packer, stock.skip = WrapPacker(self._length, skip=stock.skip, counts=self._counts), 0
            for job in stock.packer.push(part):
                stock.waiting.append(_Waiting(_Once(job), len(job.origins)))
                stock.queued += len(job.origins)

    def _give(self) -> list[int]:
        """The datasets whose records are given out at the end of a slot of rows, in order."""
        if self._slot is None or (self._slot[0] << 32) + self._slot[1] * SLOT_ROWS < self._opens:
            return []
        over = sum(stock.queued for stock in self._stocks) - self._hold
        if over <= 0:
            return []
        chunk, row = self._slot[0], (self._slot[1] + 1) * SLOT_ROWS
        if self._through_windows:
            end = self._window_first(self._window + 1)
            while chunk + 1 < end and row > (rows := self._plan.rows(chunk)):
                chunk, row = chunk + 1, row - rows
        now = self._plan.until(chunk, row)
        pending = [stock.pending(self._length) for stock in self._stocks]
        queued = [stock.queued for stock in self._stocks]
        stock = self._hold * self._length
        order: list[int] = []
        # By plan, what is in stock came last; so the record to be given is of the tokens before.
        place = sum(now) - sum(pending)
        _, shares, begin, until, before = self._plan.at(place, chunk)
        for number in range(self._first + self.records, self._first + self.records + over):
            if place >= until:
                _, shares, begin, until, before = self._plan.at(place, chunk)
            into = place - begin
            weights = [
                weight(share, held, max(0, last - done - (share * into >> 32)), stock)
                for share, held, last, done in zip(shares, pending, now, before, strict=True)
            ]
            d = self._turns.choose(number, weights if any(weights) else queued, self._order)
            if not queued[d]:
                there = [weight if count else 0 for weight, count in zip(weights, queued, strict=True)]
                d = self._turns.choose(number, there if any(there) else queued, self._order)
            order.append(d)
            queued[d] -= 1
            pending[d] -= self._length
            place += self._length
        return self._gone(order)

    def _gone(self, order: list[int]) -> list[int]:
        """Count records as given out."""
        for d in order:
            self._stocks[d].queued -= 1
        self.records += len(order)
        return order

    def _give_all(self, datasets: Sequence[int], *, pad: bool) -> list[Job]:
        """Give out everything of some datasets; what fills no record goes into common ones, the last one padded."""
        jobs = self._jobs(self._gone([d for d in datasets for _ in range(self._stocks[d].queued)]))
        rest = WrapPacker(self._length, pad_token=self._pad_token if pad else None, counts=self._counts)
        made: list[Job] = []
        for d in datasets:
            made += rest.absorb(self._stocks[d].packer)
        for job in [*made, *rest.finish()]:
            self.records += len(job.origins)
            jobs.append(self._noted(job))
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
            waiting = self._stocks[d].waiting
            while need:
                first = waiting[0]
                count = min(need, first.count - first.next)
                parts.append((first.once, first.next, first.next + count))
                first.next += count
                need -= count
                if first.next == first.count:
                    waiting.popleft()

        def run() -> RecordBlock:
            return RecordBlock.arrange([once.block().slice(low, high) for once, low, high in parts], numbers)

        return [self._noted(Job(run, len(order) * self._length * 4, np.empty((len(order), 3), dtype=np.int64)))]

    def _noted(self, job: Job) -> Job:
        """The job, with the place at which the lane can be entered, if that is at its first record."""
        count, entry = len(job.origins), self._entry
        origins = np.full((count, 3 + len(self._order)), -1, dtype=np.int64)
        fresh = not self._since
        if fresh:
            origins[0] = entry.chunk, entry.position, entry.token, *entry.skips
        self._since += count
        return replace(job, origins=origins, fresh=fresh)
