"""The engine of one data-parallel group: the records of its lanes, interleaved round by round.

`Engine.parts()` is a plain generator. `Ahead` runs it in a thread of its own, so that the training thread finds
records ready; look-ahead is bounded, and dropping the iterator ends the thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from zephon.columns.faults import RowFault
from zephon.columns.fields import FieldsAhead
from zephon.columns.lane_start import LaneStart
from zephon.columns.progress import progress_of
from zephon.columns.records import RecordBlock
from zephon.config.options import RaySettings
from zephon.engine.lane import LaneStream
from zephon.engine.plan import Plan
from zephon.engine.processes.pool import WorkerPool
from zephon.engine.runners import ENGINES, Runner
from zephon.engine.totals import Totals

_PART_TOKENS = 1 << 18  # with their fields 7 MB
_PARTS_READY = 4
Part = tuple[RecordBlock, np.ndarray]
"""Records, and their `RecordBlock.tokens_before`."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings of an engine.

    Attributes:
        plan: the compiled pipeline.
        runner: name of the runner.
        ray: the cluster for the runner "ray".
        workers: number of workers by kind of work.
        starts: by feed of this group, its start and the number of records to leave out after it.
        passed: records of this group, of the first round, to leave out.
        microbatch: records of a microbatch.
        ready_records: finished records that may wait for the consumer.
        on_window: called with feed and start of every window that a feed reaches, from the thread that runs `parts`.
        on_fault: called, from the same thread, with feed, chunk and fault for every row left out as unusable; of a feed
            that several groups read, in the first of them.
    """

    plan: Plan
    runner: str
    ray: RaySettings
    workers: Mapping[str, int]
    starts: Mapping[int, tuple[LaneStart, int]]
    passed: int
    microbatch: int
    ready_records: int
    on_window: Callable[[int, LaneStart], None] | None = None
    on_fault: Callable[[int, int, RowFault], None] | None = None

    @property
    def part_records(self) -> int:
        """Records handed over at once: whole microbatches."""
        return self.microbatch * max(1, _PART_TOKENS // (self.microbatch * self.plan.pack.record_length))

    @property
    def parts_ready(self) -> int:
        """How many parts may wait for the consumer."""
        return max(2, min(_PARTS_READY, self.ready_records // self.part_records))


class Engine:
    """Runs the lanes of one group.

    Args:
        setup: what to run.
        runner: where work runs; closed with the engine.
        pool: worker processes of the plan; closed with the engine.
    """

    def __init__(self, setup: EngineSetup, runner: Runner, pool: WorkerPool | None = None) -> None:
        plan = self._plan = setup.plan
        self.totals = Totals(len(plan.dataset_names))
        self.looks_ahead, self.parts_ready = runner.looks_ahead, setup.parts_ready
        self._passed, self._part_records = setup.passed, setup.part_records
        self._runner, self._pool = runner, pool
        topology = plan.topology
        self._rounds = max(1, setup.ready_records // 2 // (len(topology.owned_feeds) * topology.lanes_per_feed))
        share = plan.lookahead_bytes // len(topology.owned_feeds)
        self.lanes = {}
        for feed in topology.owned_feeds:
            # What several groups read is counted and reported by the first of them.
            first = feed * topology.lanes_per_feed in topology.owned
            totals = self.totals if first else Totals(len(plan.dataset_names))
            on_fault = setup.on_fault if first else None
            self.lanes[feed] = LaneStream(
                plan, feed, *setup.starts[feed], runner, totals, share, setup.on_window, on_fault
            )

    def parts(self, fields: FieldsAhead | None = None) -> Iterator[Part]:
        """The records of `rounds` that are not passed over, a few microbatches at a time.

        The end of a block cuts a part in two, so that each microbatch falls into one part.

        Args:
            fields: the form in which their fields are made at once; None where they are not.
        """
        room, passed = self._part_records, self._passed
        for block in self.rounds():
            start, passed = min(passed, len(block)), max(0, passed - len(block))
            while start < len(block):
                part = block.slice(start, min(start + room, len(block)))
                if fields and fields.form:
                    part.fields = part.fields_in(fields.form)
                yield part, part.tokens_before(len(self._plan.dataset_names))
                start += len(part)
                room = room - len(part) or self._part_records

    def rounds(self) -> Iterator[RecordBlock]:
        """The records of this group in their order: blocks of whole rounds, or, where there are images, single records
        with their pixels."""
        blocks = self._packed_rounds()
        pixels = self._plan.pixels
        return blocks if pixels is None else pixels.ahead(blocks, self._runner)

    def _packed_rounds(self) -> Iterator[RecordBlock]:
        """Blocks of whole rounds, one record per owned lane and round, in lane order.

        A lane that has ended before others contributes filler records, which have no real tokens.
        """
        topology, per_round = self._plan.topology, self._plan.topology.lanes_per_feed
        lanes = list(self.lanes.values())
        # In turn: the first round of all lanes must not wait for a second one of the first lanes.
        wanting = lanes
        with progress_of(lambda: f"filling lanes: {sum(lane.has_round for lane in lanes)} of {len(lanes)} done"):
            while wanting:
                for lane in wanting:
                    lane.begin()
                wanting = [lane for lane in wanting if not lane.settle()]
        while True:
            for lane in lanes:
                lane.advance()
            # The last round of a shared feed may be short.
            live = [(lane.ready + lane.ended * (per_round - 1)) // per_round for lane in lanes if lane.ready]
            if not live:
                return
            count = min(*live, self._rounds)
            parts = [self._taken(lane, count * per_round) for lane in lanes]
            if len(parts) == 1 and topology.width == per_round:
                yield parts[0]
            else:
                # [feed, round, lane of the feed] to [round, owned lane]
                order = np.arange(len(parts) * count * per_round, dtype=np.int64).reshape(len(parts), count, per_round)
                first = topology.owned.start - topology.owned_feeds.start * per_round
                rounds = order.transpose(1, 0, 2).reshape(count, -1)
                yield RecordBlock.arrange(parts, rounds[:, first : first + topology.width].reshape(-1))
            # In turn, for the same reason.
            wanting = lanes
            while wanting:
                wanting = [lane for lane in wanting if lane.fill()]

    def _taken(self, lane: LaneStream, count: int) -> RecordBlock:
        """The next `count` records, filled up where the lane has ended."""
        if lane.ready >= count:
            return lane.take(count)
        fill = RecordBlock.filler(count - lane.ready, self._plan.pack.record_length, self._plan.pad_token)
        return RecordBlock.concat([lane.take(lane.ready), fill]) if lane.ready else fill

    def close(self) -> None:
        """End all work; does not wait for it."""
        self._runner.close()
        self.close_pool()

    def close_pool(self) -> None:
        """End worker processes; pending calls raise, so that no thread keeps waiting."""
        if self._pool:
            self._pool.close()


class Ahead:
    """The parts of an engine, made in a background thread.

    Args:
        engine: the engine to run; closed when the thread ends.
        fields: see `Engine.parts`.
    """

    def __init__(self, engine: Engine, fields: FieldsAhead | None) -> None:
        self._handover = _Handover(engine, fields)
        # Ends the thread when the iterator is dropped.
        self.close = weakref.finalize(self, self._handover.close)
        thread = threading.Thread(target=self._handover.produce, name="zephon-engine", daemon=True)
        ENGINES[thread] = self._handover.close
        thread.start()

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        return self._handover.get()


class _Handover:
    """Between the engine's thread and the consumer: parts, then the exception that ended them."""

    def __init__(self, engine: Engine, fields: FieldsAhead | None) -> None:
        self._engine, self._fields = engine, fields
        self._ready: queue.SimpleQueue[Part | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(engine.parts_ready)
        self._closed = False

    def produce(self) -> None:
        """Run the engine to its end, or until the consumer has gone."""
        end: BaseException = StopIteration()
        try:
            for part in self._engine.parts(self._fields):
                self._room.acquire()
                if self._closed:
                    break
                self._ready.put(part)
        except BaseException as error:
            end = error
        finally:
            self._engine.close()
            self._ready.put(end)
            ENGINES.pop(threading.current_thread(), None)

    def get(self) -> Part:
        """The next part; after the last one, raises the exception that ended the engine."""
        part = self._ready.get()
        if isinstance(part, BaseException):
            self._ready.put(part)
            raise part
        self._room.release()
        return part

    def close(self) -> None:
        """Called when the consumer is gone: stop the engine and drop finished parts."""
        self._closed = True
        self._room.release()
        self._engine.close_pool()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(StopIteration())
