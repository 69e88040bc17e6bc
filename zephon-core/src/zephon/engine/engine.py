"""The engine of one data-parallel group: the records of its lanes, interleaved round by round.

`Engine.rounds()` is a plain generator. `Ahead` runs it in a thread of its own, so that the training thread finds
records ready; what is ahead is bounded, and dropping the iterator ends the thread.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from zephon.columns.faults import RowFault
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import RecordBlock
from zephon.engine.lane import LaneStream, Totals
from zephon.engine.plan import Plan
from zephon.engine.processes.pool import WorkerPool
from zephon.engine.runners.base import Runner

__all__ = ["Ahead", "Engine"]


class Engine:
    """Runs the lanes of one group.

    Args:
        plan: the compiled pipeline.
        runner: where work runs; closed with the engine.
        starts: where each owned lane begins, and how many records after that to leave out.
        block_records: records to give out at a time, about.
        on_window: told of every window that a lane reaches, from the thread that runs `rounds`.
        on_fault: told, from there too, of lane, chunk and fault for every row left out as unusable.
        pool: worker processes that the plan's work goes to; closed with the engine.
    """

    def __init__(
        self,
        plan: Plan,
        runner: Runner,
        starts: Mapping[int, tuple[LaneStart, int]],
        block_records: int,
        on_window: Callable[[int, LaneStart], None] | None = None,
        on_fault: Callable[[int, int, RowFault], None] | None = None,
        pool: WorkerPool | None = None,
    ) -> None:
        self.totals = Totals(len(plan.dataset_names))
        self.looks_ahead = runner.looks_ahead
        self._plan, self._runner, self._pool = plan, runner, pool
        self._rounds = max(1, block_records // plan.topology.width)
        share = plan.lookahead_bytes // plan.topology.width
        self.lanes = {
            lane: LaneStream(plan, lane, *starts[lane], runner, self.totals, share, on_window, on_fault)
            for lane in plan.topology.owned
        }

    def rounds(self) -> Iterator[RecordBlock]:
        """Blocks of whole rounds, one record per owned lane and round, in lane order.

        Where a lane has ended and another has not, the place of its record is taken by one without real tokens.
        """
        plan = self._plan
        lanes = list(self.lanes.values())
        for lane in lanes:
            # The first round waits for a block of every lane, and not for all that the lanes before it look ahead.
            lane.fill(1)
        while True:
            for lane in lanes:
                lane.fill()
            for lane in lanes:
                lane.advance(wait=True)
            live = [lane.ready for lane in lanes if lane.ready]
            if not live:
                return
            count = min(*live, self._rounds)
            parts = [
                lane.take(count) if lane.ready else RecordBlock.filler(count, plan.pack.record_length, plan.pad_token)
                for lane in lanes
            ]
            if len(parts) == 1:
                yield parts[0]
            else:
                # [lane, round] to [round, lane]
                order = np.arange(len(parts) * count, dtype=np.int64).reshape(len(parts), count).T.reshape(-1)
                yield RecordBlock.arrange(parts, order)

    def close(self) -> None:
        """End all work; does not wait for it."""
        self._runner.close()
        self.leave_workers()

    def leave_workers(self) -> None:
        """End worker processes, so that nobody waits for them any longer; what is asked of them raises."""
        if self._pool:
            self._pool.close()


class _Channel:
    """A bounded queue between the engine's thread and the consumer, which either side can shut."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[RecordBlock] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._shut = False
        self._ended = False
        self._error: BaseException | None = None

    def put(self, block: RecordBlock) -> bool:
        """Wait for room and add `block`; False where the consumer has gone."""
        with self._changed:
            while len(self._items) >= self._capacity and not self._shut:
                self._changed.wait()
            if self._shut:
                return False
            self._items.append(block)
            self._changed.notify_all()
            return True

    def end(self, error: BaseException | None) -> None:
        """No block will follow; after the last one the consumer gets `error`, if any."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def get(self) -> RecordBlock | None:
        """The next block, or None at the end."""
        with self._changed:
            while not self._items and not self._ended:
                self._changed.wait()
            if self._items:
                block = self._items.popleft()
                self._changed.notify_all()
                return block
            if self._error is not None:
                raise self._error
            return None

    def shut(self) -> None:
        """The consumer has gone."""
        with self._changed:
            self._shut = True
            self._items.clear()
            self._changed.notify_all()


_running: dict[threading.Thread, tuple[_Channel, Engine]] = {}


def _produce(engine: Engine, channel: _Channel) -> None:
    error: BaseException | None = None
    try:
        for block in engine.rounds():
            if not channel.put(block):
                break
    except BaseException as caught:
        error = caught
    finally:
        engine.close()
        channel.end(error)
        _running.pop(threading.current_thread(), None)


@atexit.register
def _end_all() -> None:
    # A thread inside native code when the interpreter goes away takes the process down with it.
    for thread, (channel, engine) in list(_running.items()):
        _shut(channel, engine)
        thread.join()


def _shut(channel: _Channel, engine: Engine) -> None:
    """The consumer has gone, and with it the need for what is under way."""
    channel.shut()
    engine.leave_workers()


class Ahead:
    """An engine's rounds, made in a thread of their own.

    Args:
        engine: the engine to run; closed when the thread ends.
        blocks: how many blocks may be ready.
    """

    def __init__(self, engine: Engine, blocks: int) -> None:
        self._channel = _Channel(blocks)
        thread = threading.Thread(target=_produce, args=(engine, self._channel), name="zephon-engine", daemon=True)
        # Ends the thread when the iterator is dropped.
        self.close = weakref.finalize(self, _shut, self._channel, engine)
        _running[thread] = self._channel, engine
        thread.start()

    def __iter__(self) -> Iterator[RecordBlock]:
        return self

    def __next__(self) -> RecordBlock:
        block = self._channel.get()
        if block is None:
            raise StopIteration
        return block
