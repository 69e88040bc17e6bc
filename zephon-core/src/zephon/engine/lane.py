"""A lane at work: rows of its chunks in, records out, in order, with bounded look-ahead.

    curriculum -> [fetch, tokenize]  -> packer -> orderer -> ready
                   workers, ahead       one thread (whoever calls `advance`)

With a stateful transform there is one queue more: [fetch] -> its accumulator -> [tokenize] -> packer.

Work under way stands in queues in the order of the lane. What workers finish early waits there; accumulators only
ever take the head. The end of a window travels through the queues as a mark between blocks.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from zephon.columns.faults import FaultBudget, RowFault
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import Pointer, RecordBlock, RowBlock, TokenBlock
from zephon.engine.plan import Plan
from zephon.engine.runners import Pending, Runner
from zephon.errors import DataError
from zephon.ops.base import Job, Ordered, PackCounts
from zephon.ops.documents import Emitted

__all__ = ["LaneStream", "Totals"]

# A block costs about a millisecond besides what its text costs, so blocks are as large as the look-ahead allows; a lane
# starts with small ones, so that its first record does not wait for a large one.
_MAX_BLOCK_BYTES = 2 << 20
_FIRST_BLOCK_BYTES = 128 << 10
_BLOCKS_AHEAD = 2
_SMALL_JOB_BYTES = 1 << 20


class Totals:
    """Counts over the rows and tokens that went through the lanes of this process, per dataset.

    Attributes:
        rows: int64[n_datasets], rows read.
        skipped: int64[n_datasets], rows that were null, empty or only white space.
        dropped: int64[n_datasets], rows that operators left out on purpose.
        failed: int64[n_datasets], rows left out because they could not be used.
        tokens: int64[n_datasets], tokens made, special tokens included.
        windows: by lane, int64[n_datasets], the tokens of its last whole window.
        windows_ended: windows that have ended, over the lanes.
        left_out: tokens that did not fill a last record.
        packing: what the packers did.
    """

    def __init__(self, n_datasets: int) -> None:
        self.rows = np.zeros(n_datasets, dtype=np.int64)
        self.skipped = np.zeros(n_datasets, dtype=np.int64)
        self.dropped = np.zeros(n_datasets, dtype=np.int64)
        self.failed = np.zeros(n_datasets, dtype=np.int64)
        self.tokens = np.zeros(n_datasets, dtype=np.int64)
        self.windows: dict[int, np.ndarray] = {}
        self.windows_ended = 0
        self.left_out = 0
        self.packing = PackCounts()

    def add(self, block: TokenBlock) -> np.ndarray:
        """Count one block; gives its tokens by dataset, int64[n_datasets]."""
        self.rows += block.rows_read
        self.skipped += block.rows_skipped
        if block.rows_dropped is not None:
            self.dropped += block.rows_dropped
        if block.rows_failed is not None:
            self.failed += block.rows_failed
        tokens = np.bincount(block.dataset, weights=np.diff(block.offsets), minlength=len(self.tokens)).astype(np.int64)
        self.tokens += tokens
        return tokens

    def end_window(self, lane: int, tokens: np.ndarray) -> None:
        """A window of `lane` has ended, which had so many tokens of each dataset."""
        self.windows[lane] = tokens
        self.windows_ended += 1


class _WindowEnd:
    """The mark between the blocks of one window and the next."""


class _ReplayEnd(_WindowEnd):
    """The end of a window before the one that the lane starts in, for a stateful transform alone."""


class _LaneEnd:
    """The mark after the last block of a lane."""


_WINDOW_END, _REPLAY_END, _LANE_END = _WindowEnd(), _ReplayEnd(), _LaneEnd()


class _Now:
    """A task that is done already: a job too small to hand over."""

    __slots__ = ("_job",)

    def __init__(self, job: Job | Ordered) -> None:
        self._job = job

    def done(self) -> bool:
        return True

    def result(self) -> RecordBlock:
        return self._job.run()


_Piece = tuple[np.ndarray, np.ndarray, int, int]
_Queue = deque[Pending | _WindowEnd | _LaneEnd]


class LaneStream:
    """The records of one lane from `start` on.

    Args:
        plan: the compiled pipeline.
        lane: which lane.
        start: where it begins.
        skip: records after `start` that have been used already.
        runner: runs the work.
        totals: where to count.
        lookahead_bytes: text that this lane may have under way or ready.
        on_window: told of every window that the lane reaches.
        on_fault: told of lane, chunk and fault for every row left out as unusable.
    """

    def __init__(
        self,
        plan: Plan,
        lane: int,
        start: LaneStart,
        skip: int,
        runner: Runner,
        totals: Totals,
        lookahead_bytes: int,
        on_window: Callable[[int, LaneStart], None] | None = None,
        on_fault: Callable[[int, int, RowFault], None] | None = None,
    ) -> None:
        self.starts: deque[LaneStart] = deque([start])
        """Where the lane could be started, ascending; whoever takes checkpoints drops what is no longer needed."""
        self.ready = 0
        """Records that can be taken now."""
        self.ended = False
        """No records will come besides those ready."""
        self._plan, self._lane, self._runner, self._totals = plan, lane, runner, totals
        self._on_window = on_window
        self._packer_window = self._orderer_window = start.window
        self._records_packed = self._records_ordered = start.records_before
        self._packer = plan.packer(lane, start, totals.packing)
        self._orderer = plan.orderer(lane, start)
        self._skip = skip
        self._budget = lookahead_bytes
        self._block_bytes = _FIRST_BLOCK_BYTES
        self._largest_block = min(_MAX_BLOCK_BYTES, max(_FIRST_BLOCK_BYTES, lookahead_bytes // _BLOCKS_AHEAD))
        self._start_chunk, self._start_position = start.chunk, start.position
        self._budget_of_faults = FaultBudget(plan.faults, partial(on_fault, lane) if on_fault else None)
        self._passed: deque[bool] = deque()  # whether what was handed out lies before the place of the start
        self.told_records = skip
        """Records after the start that an earlier stream has made, and told of the rows left out before their end."""
        self._stage = plan.stateful
        self._rows: _Queue = deque()  # for the stateful transform
        self._stage_window = plan.window_at(start.chunk)
        self._window = self._stage.begin(lane, self._stage_window) if self._stage else None
        self._work = self._pieces(start)
        if plan.readahead_bytes and runner.looks_ahead:
            self._work = self._announced(self._work, plan.readahead_bytes // plan.topology.width)
        self._exhausted = False
        self._made_bytes = 0  # of records on their way from the packer to the orderer
        self._under_way = 0.0  # bytes of text handed out and not yet packed, by the catalogs' estimate
        self._estimates: deque[float] = deque()
        self._documents: _Queue = deque()
        self._packed: deque[tuple[Pending, Job] | _WindowEnd | _LaneEnd] = deque()
        self._ordered: _Queue = deque()
        self._blocks: deque[RecordBlock] = deque()
        self._barren_rows = 0  # rows since the last token
        self._window_tokens = np.zeros(len(plan.dataset_names), dtype=np.int64)

    def fill(self, most: float = math.inf) -> None:
        """Hand out work up to the look-ahead; at least one block where nothing is under way and no record is ready.

        Args:
            most: hand out no more than so many pieces.
        """
        # A lane whose records wait gets no more work: else a slow consumer would find ever more of them.
        made = self.ready * self._plan.pack.record_length * 4 + self._made_bytes
        while (
            most > 0
            and not self._exhausted
            and (
                not (self._documents or self._rows or self.ready)
                or (self._runner.looks_ahead and self._under_way + made < self._budget)
            )
        ):
            self._hand_out()
            most -= 1

    def advance(self, *, wait: bool) -> None:
        """Move finished work on; with `wait`, until records are ready or the lane has ended."""
        self._move_finished()
        while wait and not self.ready and not self.ended:
            if not (self._ordered or self._packed or self._documents or self._rows):
                self.fill()
            # The work nearest to the exit is the oldest; everything behind it goes on meanwhile.
            if self._ordered:
                self._out(self._ordered.popleft())
            elif self._packed:
                self._order(self._packed.popleft())
            elif self._documents:
                self._pack(self._documents.popleft())
                self.fill()
            else:
                self._push(self._rows.popleft())
                self.fill()
            self._move_finished()

    def take(self, count: int) -> RecordBlock:
        """The next `count` records; at most `ready`, at least one."""
        parts = []
        need = count
        while need:
            block = self._blocks.popleft()
            if len(block) > need:
                self._blocks.appendleft(block.slice(need, len(block)))
                block = block.slice(0, need)
            parts.append(block)
            need -= len(block)
        self.ready -= count
        return RecordBlock.concat(parts)

    def _move_finished(self) -> None:
        while self._ordered and _finished(self._ordered[0]):
            self._out(self._ordered.popleft())
        while self._packed and _finished(self._packed[0]):
            self._order(self._packed.popleft())
        while self._runner.looks_ahead and self._documents and _finished(self._documents[0]):
            self._pack(self._documents.popleft())
        while self._runner.looks_ahead and self._rows and _finished(self._rows[0]):
            self._push(self._rows.popleft())

    def _hand_out(self) -> None:
        """Start the next piece of work, or note that there is none."""
        piece = next(self._work)
        queue = self._rows if self._stage else self._documents
        if not isinstance(piece, tuple):
            queue.append(piece)
            self._exhausted = isinstance(piece, _LaneEnd)
            return
        # A block counts for more than its text where that is tiny, else small chunks would mean endless blocks.
        estimate = max(float(self._plan.row_bytes[piece[0]].sum()), self._largest_block / 8)
        plan, submit = self._plan, self._runner.submit
        work = self._stage.prepare if self._stage else plan.tokenize
        if plan.fetch_apart:
            task = submit("tokenize", _work_on_fetched, work, submit("fetch", plan.fetch, *piece))
        else:
            task = submit("tokenize", _fetch_and_work, work, plan, piece)
        queue.append(task)
        if not self._stage:
            self._passed.append(piece[2] == self._start_chunk and piece[3] < self._start_position)
        self._estimates.append(estimate)
        self._under_way += estimate

    def _push(self, item: Pending | _WindowEnd | _LaneEnd) -> None:
        """The next rows, or a mark, into the stateful transform; what it gives goes on to the workers."""
        stage, window, plan = self._stage, self._window, self._plan
        assert stage and window
        chunk = plan.window_first(self._stage_window)
        if isinstance(item, _WindowEnd | _LaneEnd):
            self._estimates.append(0.0)
            emitted = stage.flush(window, chunk, self._lane, self._stage_window)
            self._stage_window += 1
            if not isinstance(item, _LaneEnd):
                self._window = stage.begin(self._lane, self._stage_window)
        else:
            emitted = stage.push(window, item.result(), chunk)
        # Of the window that the lane is entered in, rows up to its place have been packed before.
        self._passed.append(chunk == self._start_chunk and 0 < window.emitted <= self._start_position)
        self._documents.append(self._runner.submit("tokenize", _tokenize_emitted, plan, emitted))
        if isinstance(item, _LaneEnd) or (isinstance(item, _WindowEnd) and not isinstance(item, _ReplayEnd)):
            self._documents.append(item)

    def _pack(self, item: Pending | _WindowEnd | _LaneEnd) -> None:
        """The next documents, or a mark, into the packer."""
        if isinstance(item, _WindowEnd):
            self._cut(self._packer.flush())
            self._packer_window += 1
            self._totals.end_window(self._lane, self._window_tokens)
            self._window_tokens = np.zeros_like(self._window_tokens)
            self._note_window()
            self._packed.append(item)
        elif isinstance(item, _LaneEnd):
            self._cut(self._packer.finish())
            self._totals.left_out += self._packer.tokens_left_out
            self._packed.append(item)
        else:
            block: TokenBlock = item.result()
            self._under_way -= self._estimates.popleft()
            passed = self._passed.popleft()
            if block.chunk == self._start_chunk and len(block.position) and block.position[0] < self._start_position:
                block = block.from_position(self._start_position)
            self._window_tokens += self._totals.add(block)
            counts = self._totals.packing
            kept, dropped = counts.documents - counts.dropped, counts.dropped
            jobs = self._packer.push(block)
            # Rows before the end of a record that was used have been told of when it was made.
            told = passed or self._packer.records < self.told_records
            for chunk, faults in block.faults:
                whole = self._plan.curriculum.chunk(self._lane, chunk)
                self._budget_of_faults.add(chunk, len(whole) if whole else 0, faults, told=told)
            self._cut(jobs)
            barren = counts.documents - counts.dropped == kept
            self._barren_rows = self._barren_rows + int(block.rows_read.sum()) if barren else 0
            if self._barren_rows > self._plan.barren_limit:
                raise DataError(self._why_barren(counts.dropped > dropped))

    def _cut(self, jobs: list[Job]) -> None:
        """The packer's jobs on their way."""
        for job in jobs:
            self._packed.append((self._start(job), job))
            self._made_bytes += job.nbytes

    def _why_barren(self, dropped: bool) -> str:
        rows, names = f"{self._barren_rows:,} rows in a row", ", ".join(self._plan.dataset_names)
        if dropped:
            return (
                f"{rows} were blank or longer than a record of {self._plan.pack.record_length:,} tokens, which is "
                f"every row of {names}; take a longer sequence length, or split long documents before or in packing."
            )
        return (
            f"{rows} were null, empty or only white space{self._or_left_out()}, which is every row of {names}; "
            f"{self._plan.remedy}."
        )

    def _or_left_out(self) -> str:
        totals = self._totals
        return ", or left out by the operators" if (totals.dropped + totals.failed).any() else ""

    def _note_window(self) -> None:
        """Tell where the window begins that the packer has reached."""
        if self._on_window:
            window = self._packer_window
            carry = self._packer.carry() or Pointer(self._plan.window_first(window), 0, 0)
            before = self._records_packed + self._packer.records
            start = LaneStart(window, before, carry.chunk, carry.position, carry.token, skips=carry.skips)
            self._on_window(self._lane, start)

    def _order(self, item: tuple[Pending, Job] | _WindowEnd | _LaneEnd) -> None:
        """The next records, or a mark, into the orderer."""
        if isinstance(item, tuple):
            task, job = item
            self._made_bytes -= job.nbytes
            made = self._orderer.push(task.result(), job.origins, job.fresh)
        else:
            made = self._orderer.flush()
        for ordered in made:
            for chunk, position, token, *skips in ordered.origin.tolist():
                window, before = self._orderer_window, self._records_ordered
                self.starts.append(LaneStart(window, before, chunk, position, token, ordered.buffer, tuple(skips)))
            self._records_ordered += ordered.records
            self._ordered.append(self._start(ordered))
        if isinstance(item, _WindowEnd):
            self._orderer_window += 1
        elif isinstance(item, _LaneEnd):
            self._ordered.append(item)

    def _out(self, item: Pending | _WindowEnd | _LaneEnd) -> None:
        """The next records, in their final order, to the exit."""
        if isinstance(item, _LaneEnd):
            self.ended = True
        elif not isinstance(item, _WindowEnd):  # which goes no further than the orderer
            block: RecordBlock = item.result()
            used = min(self._skip, len(block))
            self._skip -= used
            if used < len(block):
                self._blocks.append(block.slice(used, len(block)) if used else block)
                self.ready += len(block) - used

    def _start(self, job: Job | Ordered) -> Pending:
        return self._runner.submit("pack", job.run) if job.nbytes > _SMALL_JOB_BYTES else _Now(job)

    def _announced(
        self, pieces: Iterator[_Piece | _WindowEnd | _LaneEnd], bytes_ahead: int
    ) -> Iterator[_Piece | _WindowEnd | _LaneEnd]:
        """`pieces`, with stores told of what is wanted as many bytes of text before it is handed out."""
        ahead: deque[tuple[_Piece | _WindowEnd | _LaneEnd, float]] = deque()
        waiting = 0.0
        while True:
            # Two in for one out, until all of that is announced: the first piece must not wait for the rest.
            for piece in itertools.islice(pieces, 2 if waiting <= bytes_ahead else 0):
                size = 0.0
                if isinstance(piece, tuple):
                    self._plan.fetch.announce(piece[0], piece[1])
                    size = float(self._plan.row_bytes[piece[0]].sum())
                ahead.append((piece, size))
                waiting += size
            if not ahead:
                return
            piece, size = ahead.popleft()
            waiting -= size
            yield piece

    def _pieces(self, start: LaneStart) -> Iterator[_Piece | _WindowEnd | _LaneEnd]:
        """The lane's rows in pieces of about one block of text, with marks at the ends of windows."""
        plan = self._plan
        index, position = start.chunk, start.position
        window = plan.window_at(index)  # of the rows that are read; before the first record's there may be others
        # A stateful transform, and the account of faults, begin where their window or chunk does.
        if self._stage:
            index, position = plan.window_first(window), 0
        elif plan.faults.skips:
            position = 0
        while (chunk := self._plan.curriculum.chunk(self._lane, index)) is not None:
            due = np.cumsum(self._plan.row_bytes[chunk.dataset])
            while position < len(chunk):
                done = due[position - 1] if position else 0.0
                stop = max(position + 1, int(np.searchsorted(due, done + self._block_bytes, side="right")))
                if not self._stage and index == start.chunk and position < start.position:
                    stop = min(stop, start.position)
                yield chunk.dataset[position:stop], chunk.row[position:stop], index, position
                position = stop
                self._block_bytes = min(2 * self._block_bytes, self._largest_block)
            index, position = index + 1, 0
            if index == plan.window_first(window + 1):
                window += 1
                if window > start.window:
                    yield _WINDOW_END
                elif self._stage:
                    yield _REPLAY_END
        yield _LANE_END


def _finished(item: Pending | tuple[Pending, Job] | _WindowEnd | _LaneEnd) -> bool:
    if isinstance(item, tuple):
        return item[0].done()
    return isinstance(item, _WindowEnd | _LaneEnd) or item.done()


def _fetch_and_work(work: Callable[[RowBlock], Any], plan: Plan, piece: _Piece) -> Any:
    return work(plan.fetch(*piece))


def _work_on_fetched(work: Callable[[RowBlock], Any], rows: Pending) -> Any:
    return work(rows.result())


def _tokenize_emitted(plan: Plan, emitted: Emitted) -> TokenBlock:
    """The documents of rows that a stateful transform gave, with the account of those that went into it."""
    block = plan.tokenize(emitted.rows)
    block.rows_read, block.rows_dropped = emitted.rows_read, emitted.rows_dropped
    block.rows_skipped = np.zeros_like(emitted.rows_read)
    block.rows_failed = emitted.rows_failed
    block.faults = (*emitted.faults, *block.faults)
    return block
