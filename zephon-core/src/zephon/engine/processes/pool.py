"""Worker processes for stateless functions: any worker can run any call, and a call can be repeated.

Each worker has two seats: channels for one call each. While it works on one call, the next one already waits in the
other seat, and the previous result is being read.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from zephon.engine.processes.channel import Channel, Closed
from zephon.engine.processes.child import Child, log_records, pickle_task, portable_error, replay_logs
from zephon.errors import WorkerError

_log = logging.getLogger("zephon")

SEATS = 2
"""Calls that a worker may have at a time, the one it works on included."""


class _Serve:
    """The task of a worker: run functions by number."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions

    def run(self, channels: Sequence[Channel]) -> None:
        while True:
            for channel in connection.wait(channels):  # type: ignore[arg-type]
                self._answer(channel)  # type: ignore[arg-type]

    def _answer(self, channel: Channel) -> None:
        number, args = channel.receive()
        try:
            done, result = True, self._functions[number](*args)
        except Exception as error:
            done, result = False, portable_error(error)
        del args  # so that the answer also releases its shared memory
        try:
            channel.send((done, result, log_records()))
        except Closed:
            raise
        except Exception as error:  # the result cannot be pickled
            channel.send((False, portable_error(error), []))


@dataclass(eq=False)
class _Worker:
    """A worker and its free seats."""

    child: Child
    free: list[int] = field(default_factory=lambda: list(range(SEATS)))


class WorkerPool:
    """Runs calls in worker processes. Any number of threads may use it.

    Args:
        workers: number of processes.
    """

    def __init__(self, workers: int) -> None:
        self.functions: list[Callable[..., Any]] = []
        self._count = workers
        self._task = b""
        self._changed = threading.Condition()
        self._closed = False
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _close, self._workers)

    def add(self, function: Callable[..., Any]) -> int:
        """Add a function for the workers, before `start`; returns its number."""
        self.functions.append(function)
        return len(self.functions) - 1

    def start(self) -> None:
        """Start the processes, if any function was added."""
        if self.functions:
            self._task = pickle_task(_Serve(self.functions))
            for _ in range(self._count):
                self._workers.append(self._new_worker())

    def call(self, number: int, *args: Any, about: Callable[[], str]) -> Any:
        """The result, or the exception, of a function.

        If a worker dies, it is replaced and the call is repeated once, alone in a worker.

        Args:
            number: of the function.
            args: its arguments.
            about: describes the arguments, for messages.

        Raises:
            WorkerError: two workers died during this call, or the pool is closed.
        """
        for seats in (1, SEATS):
            worker, taken = self._take(seats)
            try:
                return _ask(worker.child, worker.child.channels[taken[0]], number, args)
            except Closed:
                death = self._replace(worker)
            finally:
                self._give_back(worker, taken)
            if seats == 1:
                _log.warning("%s A new worker process repeats its calls.", death)
        raise WorkerError(f"{death} It was working on {about()}, as was the worker process that died before it.")

    def close(self) -> None:
        """End the workers; calls under way raise. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end()

    def _new_worker(self) -> _Worker:
        return _Worker(Child(self._task, SEATS, "a worker process of the pipeline"))

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError("the pipeline was closed while a worker process was busy.")

    def _take(self, seats: int) -> tuple[_Worker, list[int]]:
        """Reserve `seats` seats of the worker with the most free ones."""
        with self._changed:
            while True:
                self._check_open()
                worker = max(self._workers, key=lambda worker: len(worker.free))
                if len(worker.free) >= seats:
                    taken, worker.free = worker.free[:seats], worker.free[seats:]
                    return worker, taken
                self._changed.wait()

    def _give_back(self, worker: _Worker, seats: list[int]) -> None:
        with self._changed:
            worker.free += seats
            self._changed.notify_all()

    def _replace(self, worker: _Worker) -> WorkerError:
        """Replace a worker that has died; returns the error that describes its death."""
        self._check_open()
        death = worker.child.death()
        with self._changed:
            self._check_open()
            if worker in self._workers:
                self._workers[self._workers.index(worker)] = self._new_worker()
                self._changed.notify_all()
        worker.child.close()
        return death


def _ask(child: Child, channel: Channel, number: int, args: tuple[Any, ...]) -> Any:
    child.wait_until_started()
    channel.send((number, args))
    done, result, records = channel.receive()
    replay_logs(records)
    if not done:
        raise result
    return result


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.child.close()
