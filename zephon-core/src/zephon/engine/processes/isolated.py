"""An engine in a process of its own, so that the interpreter lock of the training process is left alone.

The child makes rounds ahead of the consumer, puts each block into one of a few shared stretches of memory and tells
the parent, which looks into the block where it lies; a stretch goes back to the child when nothing refers to its block
any longer. With each block comes what the consumer's end needs beside it: where lanes can be started, and counts.
"""

from __future__ import annotations

import queue
import select
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from zephon.columns.faults import RowFault
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import RecordBlock
from zephon.engine.lane import Totals
from zephon.engine.plan import Plan
from zephon.engine.processes.channel import Channel, Stretch
from zephon.engine.processes.child import Child, Logged, logged, pickled, portable, replay, revived

__all__ = ["IsolatedEngine"]

_READY = 2  # blocks that wait for the consumer, as with an engine in a thread
_LOOKED_INTO = 2  # blocks that it uses, where they lie
_STRETCHES = _READY + 1 + _LOOKED_INTO  # the child writes to one


@dataclass(slots=True)
class _News:
    """What the child tells; the last one has no block.

    Attributes:
        block: the records.
        starts: by lane, places where it can be started, those before aside.
        totals: counts so far, but for the windows, of which there are those that have ended since the last news.
        windows, faults: what `on_window` and `on_fault` were told.
        records: what was logged.
        error: what ended the engine, if it was not the end of the data.
    """

    block: RecordBlock | None = None
    starts: dict[int, list[LaneStart]] = field(default_factory=dict)
    totals: Totals | None = None
    windows: list[tuple[int, LaneStart]] = field(default_factory=list)
    faults: list[tuple[int, int, RowFault]] = field(default_factory=list)
    records: list[Logged] = field(default_factory=list)
    error: tuple[BaseException, str] | None = None


class _Run:
    """The task of the child.

    Args:
        plan, runner, workers, starts, block_records: as for `start_engine`.
        tell_windows, tell_faults: whether the parent wants to know of windows and of faults.
    """

    def __init__(
        self,
        plan: Plan,
        runner: str,
        workers: Mapping[str, int],
        starts: Mapping[int, tuple[LaneStart, int]],
        block_records: int,
        tell_windows: bool,
        tell_faults: bool,
    ) -> None:
        self._plan, self._runner, self._workers = plan, runner, dict(workers)
        self._starts, self._block_records = dict(starts), block_records
        self._tell_windows, self._tell_faults = tell_windows, tell_faults

    def run(self, channels: Sequence[Channel], stretches: Sequence[Stretch]) -> None:
        from zephon.engine.start import start_engine

        (channel,) = channels
        free = list(range(len(stretches)))
        under_way = 0
        news = _News()

        def on_window(lane: int, start: LaneStart) -> None:
            news.windows.append((lane, start))

        def on_fault(lane: int, chunk: int, fault: RowFault) -> None:
            news.faults.append((lane, chunk, fault))

        told: dict[int, np.ndarray] = {}
        engine = None
        try:
            engine = start_engine(
                self._plan,
                self._runner,
                self._workers,
                self._starts,
                self._block_records,
                on_window if self._tell_windows else None,
                on_fault if self._tell_faults else None,
            )
            for lane in engine.lanes.values():
                lane.starts.clear()  # the parent has the first ones
            for block in engine.rounds():
                while not free or under_way > _READY or _waits(channel):
                    used, freed = channel.receive()
                    under_way -= used
                    free += freed
                news.block = block
                _add_counts(news, engine.lanes, engine.totals, told)
                which = free.pop()
                channel.send(which)
                channel.send(news, stretches[which])
                under_way += 1
                news.windows.clear()
                news.faults.clear()
            news.block = None
            _add_counts(news, engine.lanes, engine.totals, told)
        except (EOFError, OSError) as error:
            if not _still_there(channel):
                raise
            news = _News(error=portable(error), records=logged(), faults=news.faults)
        except BaseException as error:
            news = _News(error=portable(error), records=logged(), faults=news.faults)
        finally:
            if engine:
                engine.close()
        channel.send(-1)
        channel.send(news)
        while True:  # until the parent closes
            channel.receive()

    @staticmethod
    def fail(error: BaseException, channels: Sequence[Channel]) -> None:
        channels[0].send(-1)
        channels[0].send(_News(error=portable(error)))


def _waits(channel: Channel) -> bool:
    """Whether something can be received without waiting."""
    return bool(select.select([channel.fileno()], [], [], 0)[0])


def _still_there(channel: Channel) -> bool:
    """Whether the parent is: an error of the system may be of the engine's own making."""
    try:
        while _waits(channel):
            channel.receive()
    except (EOFError, OSError):
        return False
    return True


def _add_counts(news: _News, lanes: Mapping[int, Any], totals: Totals, told: dict[int, np.ndarray]) -> None:
    news.starts = {}
    for number, lane in lanes.items():
        if lane.starts:
            news.starts[number] = list(lane.starts)
            lane.starts.clear()
    fresh = {lane: tokens for lane, tokens in totals.windows.items() if told.get(lane) is not tokens}
    told.update(fresh)
    sent = Totals(0)
    sent.__dict__.update(totals.__dict__)
    sent.windows = fresh
    news.totals, news.records = sent, logged()


@dataclass(slots=True)
class _Lane:
    """What the parent knows of a lane; as `LaneStream.starts`."""

    starts: deque[LaneStart]


class IsolatedEngine:
    """Like `Engine`, but in a child process; its `rounds` wait for the child and nothing else.

    Args:
        plan: the compiled pipeline, sent to the child.
        runner, workers: where work runs there.
        starts, block_records, on_window, on_fault: as for `Engine`.

    Raises:
        PipelineError: the plan cannot be sent.
        WorkerError: the child cannot be started.
    """

    def __init__(
        self,
        plan: Plan,
        runner: str,
        workers: Mapping[str, int],
        starts: Mapping[int, tuple[LaneStart, int]],
        block_records: int,
        on_window: Callable[[int, LaneStart], None] | None = None,
        on_fault: Callable[[int, int, RowFault], None] | None = None,
    ) -> None:
        self.totals = Totals(len(plan.dataset_names))
        self.lanes = {lane: _Lane(deque([start])) for lane, (start, _) in starts.items()}
        self._on_window, self._on_fault = on_window, on_fault
        self._freed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._looked_into = 0  # stretches that blocks handed out lie in
        self._free: list[int] = []  # stretches to tell the child of
        self._child = Child(
            _Run,
            pickled(_Run(plan, runner, workers, starts, block_records, on_window is not None, on_fault is not None)),
            channels=1,
            stretches=_STRETCHES,
            what="the pipeline's process",
        )
        self._end = weakref.finalize(self, self._child.close)

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def rounds(self) -> Iterator[RecordBlock]:
        """The blocks of the child's engine.

        Raises:
            WorkerError: the child died.
        """
        while (news := self._next()).block is not None:
            yield news.block

    def close(self) -> None:
        """End the child; does not wait for it."""
        self._end()

    def _next(self) -> _News:
        child = self._child
        (channel,) = child.channels
        try:
            self._tell(channel, 0)
            which = channel.receive()
            if which < 0:
                news: _News = channel.receive()
            else:
                # Whoever keeps blocks for longer gets copies, so that the child has stretches to write to.
                keeps = self._looked_into >= _LOOKED_INTO
                self._looked_into += not keeps
                news = channel.receive(child.stretches[which], None if keeps else partial(self._freed.put, which))
                if keeps:
                    self._free.append(which)
                self._tell(channel, 1)
        except (EOFError, OSError):
            error = child.died()
            self.close()
            raise error from None
        replay(news.records)
        if self._on_fault:
            for fault in news.faults:
                self._on_fault(*fault)
        if news.error:
            raise revived(news.error)
        for lane, starts in news.starts.items():
            self.lanes[lane].starts.extend(starts)
        if news.totals:
            windows = {**self.totals.windows, **news.totals.windows}
            self.totals.__dict__.update(news.totals.__dict__)
            self.totals.windows = windows
        if self._on_window:
            for lane, start in news.windows:
                self._on_window(lane, start)
        return news

    def _tell(self, channel: Channel, used: int) -> None:
        """Say how many blocks have been taken, and which stretches are free again."""
        # Arrays end in whichever thread drops them, so that is only noted there and told here.
        while not self._freed.empty():
            self._free.append(self._freed.get())
            self._looked_into -= 1
        if used or self._free:
            channel.send((used, self._free))
            self._free = []
