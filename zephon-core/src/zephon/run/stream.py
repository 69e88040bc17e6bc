"""The consumer's end of a run: records cut into microbatches and counted, from any place on."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zephon.batch import SampleBatch
from zephon.columns.faults import FaultReport
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import RecordBlock
from zephon.engine.engine import Ahead, Engine
from zephon.run.compile import Compiled
from zephon.run.index import FlushIndexWriter
from zephon.run.ledger import LedgerWriter
from zephon.run.report import Account, mixture_line, mixture_of

__all__ = ["BatchStream"]

_log = logging.getLogger("zephon")
_BLOCKS_READY = 2
_DROPPED_AT_ONCE = 4096


class BatchStream:
    """Iterates over the batches of one group from a place in its stream.

    A finite run goes on, step by step, as long as any group has a record for the step (`combine_flag` asks them all);
    a group whose lanes have ended fills its places with records without real tokens. So all groups end at the same
    step and every document is used. Where steps are not counted, a group ends with its lanes.

    Args:
        compiled: the pipeline.
        starts: where each owned lane begins.
        cursor: records of this group used before.
        skipped: ranges of rounds [first, last) to leave out.
        agreed: a cursor at which all groups have said already that there is a step to come.
    """

    def __init__(
        self,
        compiled: Compiled,
        starts: Mapping[int, LaneStart],
        cursor: int,
        skipped: Sequence[tuple[int, int]] = (),
        agreed: int = -1,
    ) -> None:
        topology, options = compiled.topology, compiled.options
        self.failed = False
        self.process = os.getpid()
        self._cursor = self._begun = cursor
        self._given = np.zeros(len(compiled.plan.dataset_names), dtype=np.int64)
        self._finished = False
        self._left_records = 0
        self._agreed = agreed  # so that combine_flag is not called twice for a step
        self._compiled = compiled
        # The engine makes whole rounds; of a round begun, what has been used is passed over.
        rounds, self._pass_over = divmod(cursor, topology.width)
        positions = {lane: (start, rounds - start.records_before) for lane, start in starts.items()}
        self._windows = FlushIndexWriter(options.flush_index, compiled.digest) if options.flush_index else None
        self._ledger = LedgerWriter(options.ledger, self._ledger_header()) if options.ledger else None
        rank = f"dp{topology.dp_degree}-{topology.dp_group_id}"
        self._faults = FaultReport(options.error_report, rank) if options.error_report else None
        if self._faults:
            for dataset in compiled.datasets:
                for shard in dataset.lost:
                    self._faults.add_shard(dataset.name, shard.name, shard.reason)
        self._engine = compiled.engine(
            positions, self._windows.write if self._windows else None, self._faults.add if self._faults else None
        )
        self._ahead: Ahead | None = None
        if isinstance(self._engine, Engine) and self._engine.looks_ahead:
            self._ahead = Ahead(self._engine, _BLOCKS_READY)
        self._source: Iterator[RecordBlock] = self._ahead or self._engine.rounds()
        self._skipped = [(first * topology.width, last * topology.width) for first, last in skipped]
        self._log_at = topology.width  # windows
        self._reached = cursor  # within a batch not handed out yet
        self._held: deque[RecordBlock] = deque()
        self._microbatch = compiled.operators.batch.microbatch_size
        self._aligned = options.global_batch is not None or options.combine_flag is not None
        self._unit = options.global_batch // topology.dp_degree if options.global_batch else self._microbatch
        self._combine = options.combine_flag or bool

    def __iter__(self) -> Iterator[SampleBatch]:
        return self

    def __next__(self) -> SampleBatch:
        if self._finished:
            raise StopIteration
        self._reached = self._cursor
        try:
            batch = self._next_batch()
            if batch is not None and self._ledger:
                self._ledger.write(batch)
        except BaseException:
            self.failed = True
            self.close()
            raise
        if batch is None:
            self._finished = True
            self._report_end()
            self.close()
            raise StopIteration
        self._cursor = self._reached
        self._given += batch.tokens_by_dataset()
        if self._engine.totals.windows_ended >= self._log_at:
            # Once all lanes have ended another window, about.
            self._log_at += self._compiled.topology.width
            _log.info("mixture: %s", mixture_line(mixture_of(self._compiled, self.account())))
        return batch

    def account(self) -> Account:
        """The place of the stream after the last batch, and its counts."""
        return Account(
            starts=self._starts(),
            cursor=self._cursor,
            begun=self._begun,
            agreed=self._agreed,
            finished=self._finished,
            given=self._given,
            totals=self._engine.totals,
            left_records=self._left_records,
        )

    def _starts(self) -> dict[int, LaneStart]:
        starts = {}
        for number, lane in self._engine.lanes.items():
            used = self._compiled.topology.rounds_of_lane(self._cursor, number)
            # The last one before the last record used. Which later ones are known already depends on how far the engine
            # is ahead, so they are left alone even where they begin right here.
            while len(lane.starts) > 1 and lane.starts[1].records_before < used:
                lane.starts.popleft()
            starts[number] = lane.starts[0]
        return starts

    def close(self) -> None:
        """End the threads behind this stream."""
        if self.process != os.getpid():
            # They did not come along into this process, and the lock they share may have been held when it was made.
            if self._ahead:
                self._ahead.close.detach()
            return
        if self._ahead:
            self._ahead.close()
        else:
            self._engine.close()
        self._held.clear()
        for file in (self._ledger, self._windows, self._faults):
            if file:
                file.close()

    def _next_batch(self) -> SampleBatch | None:
        """The next microbatch, or None at the end of the data."""
        topology = self._compiled.topology
        parts: list[RecordBlock] = []
        numbers: list[np.ndarray] = []
        missing = self._microbatch
        while missing:
            self._leave_out()
            room = self._room(missing)
            pulled = self._pull(room) if room else []
            got = sum(len(part) for part in pulled)
            if self._aligned and got < room:
                plan = self._compiled.plan
                assert plan.finite
                pulled.append(RecordBlock.filler(room - got, plan.pack.record_length, plan.pad_token))
                got = room
            if not got:
                break
            parts += pulled
            numbers.append(topology.sequence_numbers(self._reached, got))
            self._reached += got
            missing -= got
        # Steps that all groups have agreed on are handed out whole, in a shorter batch where it does not come out even.
        if missing and (not parts or (self._compiled.operators.batch.drop_last and not self._aligned)):
            self._left_records = self._microbatch - missing
            return None
        return SampleBatch(RecordBlock.concat(parts), np.concatenate(numbers), self._compiled.info)

    def _room(self, wanted: int) -> int:
        """How many records to take at once: not beyond the step of a finite run, nor into a range that is left out."""
        room = wanted
        for first, _ in self._skipped:
            if self._reached < first:
                room = min(room, first - self._reached)
        if self._compiled.plan.finite:
            into_step = self._reached % self._unit
            if into_step == 0 and self._reached != self._agreed:
                if not self._combine(self._fetch()):
                    return 0
                self._agreed = self._reached
            room = min(room, self._unit - into_step)
        return room

    def _leave_out(self) -> None:
        """Pass over a range of rounds that the run leaves out."""
        for first, last in self._skipped:
            if first <= self._reached < last:
                while self._reached < last and (dropped := self._pull(min(last - self._reached, _DROPPED_AT_ONCE))):
                    self._reached += sum(len(block) for block in dropped)
                self._reached = last

    def _pull(self, wanted: int) -> list[RecordBlock]:
        """Up to `wanted` records, fewer only at the end."""
        parts = []
        while wanted and self._fetch():
            block = self._held.popleft()
            if len(block) > wanted:
                self._held.appendleft(block.slice(wanted, len(block)))
                block = block.slice(0, wanted)
            parts.append(block)
            wanted -= len(block)
        return parts

    def _fetch(self) -> bool:
        """Whether there is a record, waiting for the engine if need be."""
        if not self._held:
            block = next(self._source, None)
            if block is None:
                return False
            if self._pass_over:
                block = block.slice(self._pass_over, len(block))
                self._pass_over = 0
                if not len(block):
                    return self._fetch()
            self._held.append(block)
            self._starts()  # drops those that are passed
        return True

    def _report_end(self) -> None:
        left = self._engine.totals.left_out
        _log.log(
            logging.INFO if self._cursor else logging.WARNING,
            "the data has ended after %d records of this group; left out: %d tokens that fill no record, "
            "%d records that fill no microbatch",
            self._cursor,
            left,
            self._left_records,
        )

    def _ledger_header(self) -> dict[str, Any]:
        topology = self._compiled.topology
        return {
            "lanes": topology.lanes,
            "global_batch": topology.global_batch,
            "dp_degree": topology.dp_degree,
            "dp_group_id": topology.dp_group_id,
            "datasets": list(self._compiled.plan.dataset_names),
        }
