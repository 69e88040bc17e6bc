"""An engine in a process of its own, so that the interpreter lock of the training process stays free.

The child runs ahead of the consumer. With each part it sends the places where lanes can be entered, counts and log
records since the last one. The parent acknowledges every part, and says in which form it wants the fields of others.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zephon.columns.faults import RowFault
from zephon.columns.fields import FieldsAhead
from zephon.columns.lane_start import LaneStart
from zephon.engine.engine import Engine, EngineSetup, Part
from zephon.engine.processes.channel import Channel, Closed
from zephon.engine.processes.child import Child, log_records, pickle_task, portable_error, replay_logs
from zephon.engine.start import start_engine
from zephon.engine.totals import Totals


@dataclass(slots=True)
class _Message:
    """A part, and all that happened since the last one.

    Attributes:
        part: see `Engine.parts`; None in the last message.
        starts: by lane, places where it can be entered.
        totals: counts so far.
        windows, faults: arguments of the calls of `on_window` and `on_fault`.
        records: log records.
        error: the exception that ended the engine; None at the end of the data.
    """

    part: Part | None = None
    starts: dict[int, list[LaneStart]] = field(default_factory=dict)
    totals: Totals | None = None
    windows: list[tuple[int, LaneStart]] = field(default_factory=list)
    faults: list[tuple[int, int, RowFault]] = field(default_factory=list)
    records: list[logging.LogRecord] = field(default_factory=list)
    error: Any = None


@dataclass(frozen=True, slots=True)
class _Run:
    """The task of the child.

    Attributes:
        setup: of the engine, without callbacks.
        wants_windows, wants_faults: whether the parent has an `on_window` and an `on_fault`.
    """

    setup: EngineSetup
    wants_windows: bool
    wants_faults: bool

    def run(self, channels: Sequence[Channel]) -> None:
        (channel,) = channels
        last = _Message()
        try:
            self._send_parts(channel, last)
        except Closed:
            raise
        except BaseException as error:
            last.error = portable_error(error)
        last.records = log_records()
        channel.send(last)
        while True:  # until the parent closes
            channel.receive()

    def _send_parts(self, channel: Channel, message: _Message) -> None:
        """Run the engine; at its end `message` has what happened since the last part."""

        def on_window(lane: int, start: LaneStart) -> None:
            message.windows.append((lane, start))

        def on_fault(lane: int, chunk: int, fault: RowFault) -> None:
            message.faults.append((lane, chunk, fault))

        engine = start_engine(
            replace(
                self.setup,
                on_window=on_window if self.wants_windows else None,
                on_fault=on_fault if self.wants_faults else None,
            )
        )
        try:
            for lane in engine.lanes.values():
                lane.starts.clear()  # the parent has the first ones
            ready, fields = 0, FieldsAhead()
            for part in engine.parts(fields):
                if ready > engine.parts_ready:
                    fields.form = channel.receive()
                    ready -= 1
                message.part = part
                self._add_counts(message, engine)
                message.records = log_records()
                channel.send(message)
                ready += 1
                message.windows.clear()
                message.faults.clear()
            message.part = None
            self._add_counts(message, engine)
        finally:
            message.part = None
            engine.close()

    @staticmethod
    def _add_counts(message: _Message, engine: Engine) -> None:
        message.starts = {number: list(lane.starts) for number, lane in engine.lanes.items() if lane.starts}
        for lane in engine.lanes.values():
            lane.starts.clear()
        message.totals = engine.totals


@dataclass(slots=True)
class _Lane:
    """The parent's view of a lane; `starts` as in `LaneStream`."""

    starts: deque[LaneStart]


class IsolatedEngine:
    """Like `Engine`, but in a child process; its `parts` wait for the child and nothing else.

    Args:
        setup: what to run; sent to the child.

    Raises:
        PipelineError: the setup cannot be pickled.
        WorkerError: the child cannot be started.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.totals = Totals(len(setup.plan.dataset_names))
        self.lanes = {lane: _Lane(deque([start])) for lane, (start, _) in setup.starts.items()}
        self._on_window, self._on_fault = setup.on_window, setup.on_fault
        task = _Run(
            replace(setup, on_window=None, on_fault=None), setup.on_window is not None, setup.on_fault is not None
        )
        self._child = Child(pickle_task(task), 1, "the pipeline's process")
        self._end = weakref.finalize(self, self._child.close)

    def parts(self, fields: FieldsAhead | None = None) -> Iterator[Part]:
        """The parts of the child's engine."""
        while (part := self._next_part(fields)) is not None:
            yield part

    def close(self) -> None:
        """End the child; does not wait for it."""
        self._end()

    def _next_part(self, fields: FieldsAhead | None) -> Part | None:
        (channel,) = self._child.channels
        try:
            self._child.wait_until_started()
            message: _Message = channel.receive()
            if message.part is not None:
                channel.send(fields and fields.form)
        except Closed:
            death = self._child.death()
            self.close()
            raise death from None
        replay_logs(message.records)
        for fault in message.faults:
            self._on_fault(*fault)  # type: ignore[misc]
        if message.error:
            raise message.error
        for lane, starts in message.starts.items():
            self.lanes[lane].starts.extend(starts)
        if message.totals:
            self.totals = message.totals
        for window in message.windows:
            self._on_window(*window)  # type: ignore[misc]
        return message.part
