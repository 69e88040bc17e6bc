"""The consumer's end of a run: records cut into microbatches and counted, from any place on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from zephon.batch import BatchInfo, SampleBatch
from zephon.columns.faults import FaultReport
from zephon.columns.fields import FieldsAhead
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import RecordBlock
from zephon.config.topology import Topology
from zephon.engine.engine import Ahead, Engine, Part
from zephon.engine.pixels import ImageBudget
from zephon.run.compile import Compiled
from zephon.run.index import FlushIndexWriter
from zephon.run.ledger import LedgerWriter
from zephon.run.report import Account, mixture_line, mixture_of

_log = logging.getLogger("zephon")
_DROPPED_AT_ONCE = 4096
_MANY_PASSES = 100


class BatchStream:
    """Iterates over the batches of one group from a place in its stream.

    A finite run goes on, step by step, as long as any group has a record for the step (`combine_flag` asks them all);
    a group whose lanes have ended fills its places with records without real tokens. So all groups end at the same
    step and every document is used. Where steps are not counted, a group ends with its lanes.

    Args:
        compiled: the pipeline.
        starts: where each feed of this group begins.
        cursor: records of this group used before.
        images: of the lanes of this group before; see `Account`.
        skipped: ranges of rounds [first, last) to leave out.
        agreed: a cursor at which all groups have said already that there is a step to come.
        after: digest of the data of the state that the run goes on from; by default its own.
    """

    def __init__(
        self,
        compiled: Compiled,
        starts: Mapping[int, LaneStart],
        cursor: int,
        images: Mapping[int, tuple[int, int]],
        skipped: Sequence[tuple[int, int]] = (),
        agreed: int = -1,
        after: str = "",
    ) -> None:
        topology, options, plan = compiled.topology, compiled.options, compiled.plan
        self.failed = False
        self.process = os.getpid()
        self._compiled, self._plan, self._topology = compiled, plan, topology
        catalogs = tuple(dataset.catalog for dataset in compiled.datasets)
        shown = compiled.vision, compiled.image_id, options.digest_pixels
        ahead = plan.pixels.wanted if plan.pixels else None
        fields = None if plan.pixels or options.runner == "inline" else FieldsAhead()
        self._info = BatchInfo(plan.dataset_names, catalogs, compiled.special[1], *shown, ahead, fields)
        self._cursor = self._begun = cursor
        self._reached = cursor  # within a batch not handed out yet
        self._given = np.zeros(len(plan.dataset_names), dtype=np.int64)
        self._finished = False
        self._left_records = 0
        self._microbatch = compiled.operators.batch.microbatch_size
        self._aligned = options.global_batch is not None or options.combine_flag is not None
        self._unit = options.global_batch // topology.dp_degree if options.global_batch else self._microbatch
        self._combine = options.combine_flag or bool
        self._agreed = agreed  # so that combine_flag is not called twice for a step
        self._skipped = [(first * topology.width, last * topology.width) for first, last in skipped]
        self._logged = np.zeros_like(self._given)  # tokens by the last line of the log
        self._repeating: set[str] = set()
        self._ledger = (
            LedgerWriter(options.ledger, compiled, after or compiled.digest, cursor) if options.ledger else None
        )
        self._windows = (
            FlushIndexWriter(options.flush_index, compiled.digest, compiled.lane_history)
            if options.flush_index
            else None
        )
        self._faults = self._fault_report()
        on_grey = self._faults.add_grey if self._faults else None
        self._images = plan.pixels and ImageBudget(plan.pixels, topology.lanes, images, on_grey)
        if cursor:
            record, batch = cursor * topology.dp_degree, options.global_batch
            step = f", {'inside' if record % batch else 'in'} step {record // batch + 1}" if batch else ""
            _log.info("the data go on at record %d%s", record, step)
        # The engine makes whole rounds; of a round begun, what has been used is passed over.
        rounds, passed = divmod(cursor, topology.width)
        self._engine = compiled.engine(
            {feed: (start, rounds * topology.lanes_per_feed - start.records_before) for feed, start in starts.items()},
            passed,
            self._windows.write if self._windows else None,
            self._faults.add if self._faults else None,
        )
        self._window_logged = self._window()
        self._ahead: Ahead | None = None
        if isinstance(self._engine, Engine) and self._engine.looks_ahead:
            self._ahead = Ahead(self._engine, fields)
        self._parts: Iterator[Part] = self._ahead or self._engine.parts(fields)
        self._held: RecordBlock | None = None
        self._at = 0  # records of it that have been taken
        self._tokens_before = self._given[None]  # see `RecordBlock.tokens_before`

    def __iter__(self) -> Iterator[SampleBatch]:
        return self

    def __next__(self) -> SampleBatch:
        if self._finished:
            raise StopIteration
        self._reached, began = self._cursor, time.perf_counter()
        try:
            batch = self._next_batch()
            if batch is not None and self._images:
                self._images.add(batch.block, batch.sequence_numbers)
            if batch is not None and self._ledger:
                self._ledger.write(batch, self._reached, time.perf_counter() - began, self._engine.totals)
        except BaseException:
            self.failed = True
            self.close()
            raise
        if batch is None:
            self._finished = True
            _log.log(
                logging.INFO if self._cursor else logging.WARNING,
                "the data has ended after %d records of this group; left out: %d tokens that fill no record, "
                "%d records that fill no microbatch",
                self._cursor,
                self._engine.totals.left_out,
                self._left_records,
            )
            self.close()
            raise StopIteration
        self._cursor = self._reached
        self._given += batch.tokens_by_dataset()
        if self._window() > self._window_logged:
            self._log_mixture()
        return batch

    def _window(self) -> int:
        """The window of the first lane that the records handed out have come to."""
        lane: Any = next(iter(self._engine.lanes.values()))
        return int(lane.starts[0].window)

    def _log_mixture(self) -> None:
        """Log the shares handed out, and sources passed very often."""
        mixture = mixture_of(self._compiled, self.account())
        _log.info("mixture: %s", mixture_line(mixture, self._given - self._logged))
        self._window_logged, self._logged = self._window(), self._given.copy()
        for name, each in mixture.items():
            if each.passes >= _MANY_PASSES and name not in self._repeating:
                self._repeating.add(name)
                _log.warning(
                    "%s has had %.0f passes; lower its weight, or limit it with max_repeats", name, each.passes
                )

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
            images=self._images.counts if self._images else {},
        )

    def close(self) -> None:
        """End the threads behind this stream."""
        if self.process != os.getpid():
            # They did not come along into this process, and the lock they share may have been held when it was made.
            if self._ahead:
                self._ahead.close.detach()
            return
        (self._ahead or self._engine).close()
        self._held = None
        for file in (self._ledger, self._windows, self._faults):
            if file:
                file.close()

    def _fault_report(self) -> FaultReport | None:
        """The report of rows that are left out, with the shards that are lost as a whole."""
        folder, topology = self._compiled.options.error_report, self._topology
        if folder is None:
            return None
        report = FaultReport(folder, f"dp{topology.dp_degree}-{topology.dp_group_id}")
        for dataset in self._compiled.datasets:
            for shard in dataset.lost:
                report.add_shard(dataset.name, shard.name, shard.reason)
        return report

    def _starts(self) -> dict[int, LaneStart]:
        starts = {}
        for number, lane in self._engine.lanes.items():
            used = self._topology.records_of_feed(self._cursor, number)
            # The last one before the last record used. Which later ones are known already depends on how far the engine
            # is ahead, so they are left alone even where they begin right here.
            while len(lane.starts) > 1 and lane.starts[1].records_before < used:
                lane.starts.popleft()
            starts[number] = lane.starts[0]
        return starts

    def _next_batch(self) -> SampleBatch | None:
        """The next microbatch, or None at the end of the data."""
        parts: list[RecordBlock] = []
        places: list[tuple[int, int]] = []  # (first, count) of the records, as `sequence_numbers` takes them
        counts: list[np.ndarray] = []  # of tokens by dataset
        missing = self._microbatch
        while missing:
            self._leave_out()
            room = self._room(missing)
            pulled, counted = self._pull(room)
            got = sum(map(len, pulled))
            if self._aligned and got < room:
                assert self._plan.finite
                pulled.append(self._plan.filler(room - got))
                got = room
            if not got:
                break
            parts += pulled
            counts += counted
            places.append((self._reached, got))
            self._reached += got
            missing -= got
        # Steps that all groups have agreed on are handed out whole, in a shorter batch where it does not come out even.
        if missing and (not parts or (self._compiled.operators.batch.drop_last and not self._aligned)):
            self._left_records = self._microbatch - missing
            return None
        numbers = partial(_numbers, self._topology, places)
        tokens = counts[0] if len(counts) == 1 else sum(counts, np.zeros_like(self._given))
        return SampleBatch(RecordBlock.concat(parts), numbers, self._info, tokens)

    def _room(self, wanted: int) -> int:
        """How many records to take at once: not beyond the step of a finite run, nor into a range that is left out."""
        room = min([wanted, *(first - self._reached for first, _ in self._skipped if self._reached < first)])
        if self._plan.finite:
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
                while self._reached < last and (dropped := self._pull(min(last - self._reached, _DROPPED_AT_ONCE))[0]):
                    self._reached += sum(map(len, dropped))
                self._reached = last

    def _pull(self, wanted: int) -> tuple[list[RecordBlock], list[np.ndarray]]:
        """Up to `wanted` records, fewer only at the end, in parts, and the tokens by dataset of each."""
        parts, counts = list[RecordBlock](), list[np.ndarray]()
        while wanted and self._fetch():
            assert self._held is not None
            start, self._at = self._at, min(len(self._held), self._at + wanted)
            parts.append(self._held.slice(start, self._at))
            counts.append(self._tokens_before[self._at] - self._tokens_before[start])
            wanted -= self._at - start
        return parts, counts

    def _fetch(self) -> bool:
        """Whether there is a record, waiting for the engine if need be."""
        if self._held is not None and self._at == len(self._held):
            self._held = None
        if self._held is None and (part := next(self._parts, None)) is not None:
            (self._held, self._tokens_before), self._at = part, 0
            self._starts()  # drops those that are passed
        return self._held is not None


def _numbers(topology: Topology, places: Sequence[tuple[int, int]]) -> np.ndarray:
    """Sequence numbers of the (first, count) records `places` of a group."""
    return np.concatenate([topology.sequence_numbers(first, count) for first, count in places])
