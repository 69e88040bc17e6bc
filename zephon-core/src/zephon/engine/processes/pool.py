"""Workers for stateless functions: any worker can run any call, and a call can be repeated.

Each worker has two seats, for one call each. While it works on one call, the next one already waits in the other seat,
and the previous result is being read. Where workers run is not the pool's business: `Workers` starts them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from zephon.engine.processes.channel import Closed
from zephon.engine.processes.child import log_records, portable_error, replay_logs
from zephon.errors import WorkerError

_log = logging.getLogger("zephon")

SEATS = 2
"""Calls that a worker may have at a time, the one it works on included."""
_DEATHS = 2  # of workers, after which a call is at fault
_PATIENCE_SECONDS = 30.0  # before a warning that no worker has started

Answer = tuple[bool, Any, list[logging.LogRecord]]
"""Whether the function returned, its result or exception, and what was logged meanwhile."""


class Refused(Exception):
    """The worker would give other data, or cannot work at all."""


class Worker(Protocol):
    """A worker.

    Attributes:
        free: its free seats.
        is_ready: whether it has started, or whether calls may wait for it to start.
    """

    free: list[int]
    is_ready: bool

    def begin(self, on_change: OnChange) -> None:
        """Start it; `on_change` is called when it becomes ready later, or with the reason why it is not to be used."""

    def ask(self, seat: int, number: int, args: tuple[Any, ...]) -> Answer:
        """Run a function; raises `Closed` where the worker has died, `Refused` where it is not to be used."""

    def death(self) -> tuple[WorkerError, bool]:
        """The error that describes its death, and whether the call that it worked on may be the cause."""

    def close(self) -> None:
        """End it; does not wait."""


OnChange = Callable[[Worker, Refused | None], None]


class Workers(Protocol):
    """Starts workers of one kind."""

    kind: str
    """The name of one in messages."""

    def prepare(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Get ready to send the functions to workers."""

    def worker(self, number: int) -> Worker:
        """The worker with this number, a new one where it has died."""

    def waiting(self) -> str:
        """Why no worker may have started yet, in words."""


def answer(functions: Sequence[Callable[..., Any]], number: int, args: tuple[Any, ...]) -> Answer:
    """In a worker: run a function."""
    try:
        done, result = True, functions[number](*args)
    except Exception as error:
        done, result = False, portable_error(error)
    return done, result, log_records()


class WorkerPool:
    """Runs calls in workers. Any number of threads may use it.

    Args:
        count: number of workers.
        workers: starts them.
    """

    def __init__(self, count: int, workers: Workers) -> None:
        self.functions: list[Callable[..., Any]] = []
        self._count, self._kind = count, workers
        self._changed = threading.Condition()
        self._closed = self._has_warned = False
        self._refusal: Refused | None = None  # the last one
        self._workers: dict[int, Worker] = {}
        self._end = weakref.finalize(self, _close, self._workers)

    def add(self, function: Callable[..., Any]) -> int:
        """Add a function for the workers, before `start`; returns its number."""
        self.functions.append(function)
        return len(self.functions) - 1

    def start(self) -> None:
        """Start the workers, if any function was added."""
        if self.functions:
            self._kind.prepare(self.functions)
            with self._changed:
                for number in range(self._count):
                    self._begin(number)

    def call(self, number: int, *args: Any, about: Callable[[], str], near: int | None = None) -> Any:
        """The result, or the exception, of a function.

        If a worker dies, it is replaced and the call is repeated once, alone in a worker. A death that is known to be
        the loss of a whole machine does not count.

        Args:
            number: of the function.
            args: its arguments.
            about: describes the arguments, for messages.
            near: calls of one number use the same data, and go to the same worker unless it is busy and another idle.

        Raises:
            WorkerError: two workers died during this call, none can be used, or the pool is closed.
        """
        deaths = 0
        while True:
            worker, taken = self._take(SEATS if deaths else 1, near)
            try:
                done, result, records = worker.ask(taken[0], number, args)
            except Closed:
                death, counts = self._replace(worker)
            except Refused as refusal:
                self._on_change(worker, refusal)
                continue
            else:
                break
            finally:
                self._give_back(worker, taken)
            deaths += counts
            if deaths == _DEATHS:
                kind = self._kind.kind
                raise WorkerError(f"{death} It was working on {about()}, as was the {kind} that died before it.")
            _log.warning("%s A new %s repeats its calls.", death, self._kind.kind)
        replay_logs(records)
        if not done:
            raise result
        return result

    def close(self) -> None:
        """End the workers; calls under way raise. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end()

    def _begin(self, number: int) -> None:
        self._workers[number] = self._kind.worker(number)
        self._workers[number].begin(self._on_change)  # which it may call before it returns

    def _on_change(self, worker: Worker, refusal: Refused | None) -> None:
        with self._changed:
            number = self._number_of(worker)
            if refusal is not None and number is not None:
                _log.warning("%s It is not used.", refusal)
                self._refusal = refusal
                self._workers.pop(number).close()
            self._changed.notify_all()

    def _number_of(self, worker: Worker) -> int | None:
        return next((number for number, each in self._workers.items() if each is worker), None)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError(f"the pipeline was closed while a {self._kind.kind} was busy.")
        if not self._workers:
            raise WorkerError(f"no {self._kind.kind} of {self._count} can be used. {self._refusal}")

    def _take(self, seats: int, near: int | None) -> tuple[Worker, list[int]]:
        """Reserve `seats` seats of a worker."""
        with self._changed:
            while True:
                self._check_open()
                home = None if near is None else self._workers.get(near % self._count)
                if home is not None and home.is_ready:
                    # What it has read for calls of this number would be read again elsewhere.
                    able = [home] if len(home.free) >= seats else self._able(SEATS)
                else:
                    able = self._able(seats)
                if able:
                    worker = max(able, key=lambda worker: len(worker.free))
                    taken, worker.free = worker.free[:seats], worker.free[seats:]
                    return worker, taken
                in_time = self._changed.wait(_PATIENCE_SECONDS)
                if not (in_time or self._has_warned or any(each.is_ready for each in self._workers.values())):
                    self._has_warned = True
                    _log.warning("no %s has started yet: %s", self._kind.kind, self._kind.waiting())

    def _able(self, seats: int) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.is_ready and len(worker.free) >= seats]

    def _give_back(self, worker: Worker, seats: list[int]) -> None:
        with self._changed:
            worker.free += seats
            self._changed.notify_all()

    def _replace(self, worker: Worker) -> tuple[WorkerError, bool]:
        """Replace a worker that has died; returns the error that describes its death, and whether it counts."""
        with self._changed:
            self._check_open()
        death = worker.death()
        with self._changed:
            self._check_open()
            number = self._number_of(worker)
            if number is not None:
                self._begin(number)
                self._changed.notify_all()
        worker.close()
        return death


def _close(workers: dict[int, Worker]) -> None:
    for worker in workers.values():
        worker.close()
