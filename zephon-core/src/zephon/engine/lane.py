"""The stream of one lane: rows of its chunks in, records out, in order, with bounded look-ahead.

    curriculum -> [fetch, tokenize]  -> packer -> orderer -> ready
                   workers, ahead       one thread (whoever calls `advance`)

With a stateful transform there is one queue more: [fetch] -> its accumulator -> [tokenize] -> packer.

Queues hold pending work in the order of the lane. Results that are finished early wait there; accumulators take
only the head. The end of a window travels through the queues as a mark between blocks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np

from zephon.columns.faults import FaultBudget, RowFault
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import Pointer, RecordBlock, RowBlock, TokenBlock
from zephon.engine.plan import Piece, Plan
from zephon.engine.runners import InlineRunner, Pending, Runner
from zephon.engine.totals import Totals
from zephon.errors import DataError
from zephon.ops.base import Job, Ordered
from zephon.ops.documents import Emitted

# Each block has an overhead of about a millisecond, so blocks are as large as the look-ahead allows; a lane starts with
# small ones, so that its first record does not wait for a large one.
_MAX_BLOCK_BYTES = 2 << 20
_FIRST_BLOCK_BYTES = 128 << 10
_FIRST_ROWS = 256  # of a chunk; many lanes take long to order the rows of whole chunks
_BLOCKS_AHEAD = 2
_SMALL_JOB_BYTES = 1 << 20  # runs in the calling thread


class _Mark(Enum):
    """Stands between blocks in the queues."""

    WINDOW_END = auto()
    REPLAY_END = auto()
    """The end of a window before the one that the lane starts in, for a stateful transform alone."""
    LANE_END = auto()


_Queue = deque[Pending | _Mark]

_inline = InlineRunner()


class LaneStream:
    """The records of one lane from `start` on.

    Args:
        plan: the compiled pipeline.
        lane: which lane, or which feed of several lanes.
        start: where the lane is entered.
        skip: records after `start` that have been used already.
        runner: runs the work.
        totals: where to count.
        lookahead_bytes: bytes of text that this lane may have in progress or ready.
        on_window: called with the lane and the start of every window that the lane reaches.
        on_fault: called with lane, chunk and fault for every row left out as unusable.
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
        """Places where the lane can be entered, ascending; the stream that takes checkpoints drops obsolete ones."""
        self.ready = 0
        """Records that can be taken now."""
        self.ended = False
        """Whether no records will follow those that are ready."""
        self._plan, self._lane, self._start, self._runner, self._totals = plan, lane, start, runner, totals
        self._on_window = on_window
        self._skip = skip
        self._fault_budget = FaultBudget(plan.faults, plan.logged, partial(on_fault, lane) if on_fault else None)
        # Rows on their way to the packer.
        self._lookahead_bytes = lookahead_bytes
        buffer = plan.shuffle.buffer_size // plan.topology.lanes if plan.shuffle else 0
        # Text of the records that are needed for the first one to be given out.
        self._first_bytes = min(3 * plan.pack.record_length * max(1, buffer), lookahead_bytes)
        self._block_bytes = min(_FIRST_BLOCK_BYTES, 2 * self._first_bytes)
        self._max_block_bytes = max(_FIRST_BLOCK_BYTES, min(_MAX_BLOCK_BYTES, self._first_bytes // 8))
        self._pieces = self._cut_into_pieces()
        if plan.readahead_bytes and runner.looks_ahead:
            self._pieces = self._announced(self._pieces, plan.readahead_bytes // len(plan.topology.owned_feeds))
        self._exhausted = False
        self._bytes_under_way = 0.0  # of text submitted and not yet packed, by the catalogs' estimate
        self._estimates: deque[float] = deque()
        # The stateful transform.
        self._stage = plan.stateful
        self._stage_window = plan.window_at(start.chunk)
        self._window = self._stage.begin(lane, self._stage_window) if self._stage else None
        # Documents into records.
        self._packer = plan.packer(lane, start, totals.packing)
        self._packer_window = start.window
        self._rows_without_tokens = 0  # consecutive
        self._packed_bytes = 0  # of records on their way from the packer to the orderer
        # Records into their final order.
        self._orderer = plan.orderer(lane, start)
        self._orderer_window = start.window
        self._records_ordered = start.records_before
        self._blocks: deque[RecordBlock] = deque()
        # Work under way, the oldest in the last queues.
        self._rows: _Queue = deque()  # for the stateful transform
        self._documents: _Queue = deque()
        self._packed: deque[tuple[Pending, Job] | _Mark] = deque()
        self._ordered: _Queue = deque()
        self._steps: list[tuple[deque[Any], Callable[[Any], None]]] = [
            (self._ordered, self._give_out),
            (self._packed, self._order),
            (self._documents, self._pack),
            (self._rows, self._push),
        ]

    def begin(self) -> None:
        """Submit what a first round is likely to need and no more, in small blocks; at least one."""
        self._hand_out()
        while self._runner.looks_ahead and self._bytes_under_way < self._first_bytes and not self._exhausted:
            self._hand_out()

    def settle(self) -> bool:
        """Process the work under way; whether the records of a round are ready or the lane has ended."""
        while not self.has_round and any(queue for queue, _ in self._steps):
            self._step()
        return self.has_round

    def fill(self) -> bool:
        """Submit a piece of work if the look-ahead has room, or none is pending and no round ready; whether it did."""
        self._max_block_bytes = min(_MAX_BLOCK_BYTES, max(_FIRST_BLOCK_BYTES, self._lookahead_bytes // _BLOCKS_AHEAD))
        # Ready records count too, so that they do not accumulate with a slow consumer.
        waiting_bytes = self.ready * self._plan.record_bytes + self._packed_bytes
        if self._exhausted or not (
            not (self._documents or self._rows or self.ready >= self._plan.topology.lanes_per_feed)
            or (self._runner.looks_ahead and self._bytes_under_way + waiting_bytes < self._lookahead_bytes)
        ):
            return False
        self._hand_out()
        return True

    def advance(self) -> None:
        """Process finished work until the records of a round are ready or the lane has ended."""
        self._move_finished()
        while not self.has_round:
            if self._step():  # a piece was taken, so another can be submitted
                self.fill()
            self._move_finished()

    def take(self, count: int) -> RecordBlock:
        """The next `count` records; at most `ready`, at least one."""
        parts = []
        missing = count
        while missing:
            block = self._blocks.popleft()
            if len(block) > missing:
                self._blocks.appendleft(block.slice(missing, len(block)))
                block = block.slice(0, missing)
            parts.append(block)
            missing -= len(block)
        self.ready -= count
        return RecordBlock.concat(parts)

    @property
    def has_round(self) -> bool:
        """Whether the records of a round are ready, or none will follow."""
        return self.ready >= self._plan.topology.lanes_per_feed or self.ended

    def _step(self) -> bool:
        """Process the oldest work, which is in the last queues, while workers go on; whether no records were there."""
        for queue, step in self._steps:
            if queue:
                step(queue.popleft())
                break
        return queue is self._documents or queue is self._rows

    def _move_finished(self) -> None:
        # Without look-ahead, calls run when their result is requested, so they are left until needed.
        for queue, step in self._steps if self._runner.looks_ahead else self._steps[:2]:
            while queue and _is_finished(queue[0]):
                step(queue.popleft())

    def _hand_out(self) -> None:
        """Submit the next piece of work, or queue the next mark."""
        piece = next(self._pieces)
        queue = self._rows if self._stage else self._documents
        if isinstance(piece, _Mark):
            queue.append(piece)
            self._exhausted = piece is _Mark.LANE_END
            return
        plan, submit = self._plan, self._runner.submit
        # A minimum per block bounds the number of pending blocks where chunks are tiny.
        estimate = max(float(plan.row_bytes[piece[0]].sum()), self._max_block_bytes / 8)
        work = self._stage.prepare if self._stage else plan.tokenize
        if plan.chain is not None:
            queue.append(submit("tokenize", plan.chain, self._lane, piece))
        elif plan.fetch_apart:
            queue.append(submit("tokenize", _work_on_fetched, work, submit("fetch", plan.fetch, *piece)))
        else:
            queue.append(submit("tokenize", _fetch_and_work, work, plan, piece))
        self._estimates.append(estimate)
        self._bytes_under_way += estimate

    def _push(self, item: Pending | _Mark) -> None:
        """The next rows, or a mark, into the stateful transform; its output goes to the workers."""
        stage, window, plan = self._stage, self._window, self._plan
        assert stage and window
        chunk = plan.window_first(self._stage_window)
        if isinstance(item, _Mark):
            self._estimates.append(0.0)
            emitted = stage.flush(window, chunk, self._lane, self._stage_window)
            self._stage_window += 1
            if item is not _Mark.LANE_END:
                self._window = stage.begin(self._lane, self._stage_window)
        else:
            emitted = stage.push(window, item.result(), chunk)
        self._documents.append(self._runner.submit("tokenize", _tokenize_emitted, plan, emitted))
        if isinstance(item, _Mark) and item is not _Mark.REPLAY_END:
            self._documents.append(item)

    def _pack(self, item: Pending | _Mark) -> None:
        """The next documents, or a mark, into the packer."""
        if item is _Mark.WINDOW_END:
            self._start_jobs(self._packer.flush())
            self._packer_window += 1
            self._report_window()
            self._packed.append(item)
        elif isinstance(item, _Mark):
            self._start_jobs(self._packer.finish())
            self._totals.left_out += self._packer.tokens_left_out
            self._packed.append(item)
        else:
            self._pack_block(item.result())

    def _pack_block(self, block: TokenBlock) -> None:
        start, counts = self._start, self._totals.packing
        self._bytes_under_way -= self._estimates.popleft()
        if block.chunk == start.chunk and len(block.position) and block.position[0] < start.position:
            block = block.from_position(start.position)
        self._totals.add(block)
        kept = counts.documents - counts.dropped
        jobs = self._packer.push(block)
        for chunk, faults in block.faults:
            rows = self._plan.curriculum.chunk(self._lane, chunk)
            self._fault_budget.add(chunk, len(rows) if rows else 0, faults)
        self._start_jobs(jobs)
        without_tokens = counts.documents - counts.dropped == kept
        self._rows_without_tokens = self._rows_without_tokens + int(block.rows_read.sum()) if without_tokens else 0
        if self._rows_without_tokens > self._plan.barren_limit:
            plan, count = self._plan, self._rows_without_tokens
            raise DataError(
                f"no row of {', '.join(plan.dataset_names)} has tokens to pack: all {count:,} rows were null, empty or "
                "only white space, or left out by the operators, or longer than a record of "
                f"{plan.pack.record_length:,} tokens; {plan.remedy}. Where documents are too long, use a longer "
                "sequence length, or split them before or in packing."
            )

    def _start_jobs(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._packed.append((self._submit(job), job))
            self._packed_bytes += job.nbytes

    def _submit(self, job: Job | Ordered) -> Pending:
        apart = self._plan.pack_apart and job.nbytes > _SMALL_JOB_BYTES
        return (self._runner if apart else _inline).submit("pack", job.run)

    def _report_window(self) -> None:
        """Report the start of the window that the packer has reached."""
        if self._on_window:
            window = self._packer_window
            carry = self._packer.carry() or Pointer(self._plan.window_first(window), 0, 0)
            before = self._start.records_before + self._packer.records
            start = LaneStart(window, before, carry.chunk, carry.position, carry.token, skips=carry.skips)
            self._on_window(self._lane, start)

    def _order(self, item: tuple[Pending, Job] | _Mark) -> None:
        """The next records, or a mark, into the orderer."""
        if isinstance(item, _Mark):
            ordered_jobs = self._orderer.flush()
        else:
            pending, job = item
            self._packed_bytes -= job.nbytes
            ordered_jobs = self._orderer.push(pending.result(), job.origins, job.fresh)
        for ordered in ordered_jobs:
            for first, buffer, (chunk, position, token, *skips) in ordered.begins:
                window, before = self._orderer_window, self._records_ordered + first
                self.starts.append(LaneStart(window, before, chunk, position, token, buffer, tuple(skips)))
            self._records_ordered += ordered.records
            self._ordered.append(self._submit(ordered))
        if item is _Mark.WINDOW_END:
            self._orderer_window += 1
        elif item is _Mark.LANE_END:
            self._ordered.append(_Mark.LANE_END)

    def _give_out(self, item: Pending | _Mark) -> None:
        """The next records, in their final order, to the exit."""
        if isinstance(item, _Mark):
            self.ended = True
            return
        block: RecordBlock = item.result()
        used = min(self._skip, len(block))
        self._skip -= used
        if used < len(block):
            self._blocks.append(block.slice(used, len(block)) if used else block)
            self.ready += len(block) - used

    def _announced(self, pieces: Iterator[Piece | _Mark], bytes_ahead: int) -> Iterator[Piece | _Mark]:
        """`pieces`, each announced to stores when `bytes_ahead` bytes of text or less precede it."""
        ahead: deque[tuple[Piece | _Mark, float]] = deque()
        waiting = 0.0
        while True:
            # Two announced for one yielded, up to `bytes_ahead`: the first piece must not wait for the rest.
            for piece in itertools.islice(pieces, 2 if waiting <= bytes_ahead else 0):
                size = 0.0
                if not isinstance(piece, _Mark):
                    self._plan.fetch.announce(piece[0], piece[1])
                    size = float(self._plan.row_bytes[piece[0]].sum())
                ahead.append((piece, size))
                waiting += size
            if not ahead:
                return
            piece, size = ahead.popleft()
            waiting -= size
            yield piece

    def _cut_into_pieces(self) -> Iterator[Piece | _Mark]:
        """The lane's rows in pieces of about one block of text, with marks at the ends of windows."""
        plan, start = self._plan, self._start
        index, position = start.chunk, start.position
        window = plan.window_at(index)  # of the first row to read; it may precede `start.window`
        # A stateful transform restarts at the start of its window, the fault budget at the start of its chunk.
        if plan.stateful:
            index, position = plan.window_first(window), 0
        elif plan.faults.skips:
            position = 0
        most = position + _FIRST_ROWS
        while (chunk := plan.curriculum.chunk(self._lane, index, most)) is not None:
            due = np.cumsum(plan.row_bytes[chunk.dataset])
            while position < len(chunk):
                done = due[position - 1] if position else 0.0
                stop = max(position + 1, int(np.searchsorted(due, done + self._block_bytes, side="right")))
                yield chunk.dataset[position:stop], chunk.row[position:stop], index, position
                position = stop
                self._block_bytes = min(2 * self._block_bytes, self._max_block_bytes)
            if len(chunk) == most:
                most *= 4
                continue  # perhaps the first rows only
            index, position = index + 1, 0
            if index == plan.window_first(window + 1):
                window += 1
                if window > start.window:
                    yield _Mark.WINDOW_END
                elif plan.stateful:
                    yield _Mark.REPLAY_END
        yield _Mark.LANE_END


def _is_finished(item: Pending | tuple[Pending, Job] | _Mark) -> bool:
    if isinstance(item, tuple):
        item = item[0]
    return isinstance(item, _Mark) or item.done()


def _fetch_and_work(work: Callable[[RowBlock], Any], plan: Plan, piece: Piece) -> Any:
    return work(plan.fetch(*piece))


def _work_on_fetched(work: Callable[[RowBlock], Any], rows: Pending) -> Any:
    return work(rows.result())


def _tokenize_emitted(plan: Plan, emitted: Emitted) -> TokenBlock:
    """The documents of rows that a stateful transform emitted, with the counts of its input rows."""
    block = plan.tokenize(emitted.rows)
    block.rows_read, block.rows_dropped = emitted.rows_read, emitted.rows_dropped
    block.rows_skipped = np.zeros_like(emitted.rows_read)
    block.rows_failed = emitted.rows_failed
    block.faults = (*emitted.faults, *block.faults)
    return block
