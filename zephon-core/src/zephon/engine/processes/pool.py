"""Worker processes for stateless functions: any of them can run any call, and a call can be run again.

Each worker has two seats, connections with shared memory of their own. While it works on what came through one, the
next call already waits in the other, and the result before that is being read.
"""

from __future__ import annotations

import logging
import select
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zephon.engine.processes.channel import Channel, Stretch
from zephon.engine.processes.child import Child, logged, pickled, portable, replay, revived
from zephon.errors import WorkerError

__all__ = ["SEATS", "WorkerPool"]

_log = logging.getLogger("zephon")

_CLOSED = "the pipeline has been closed while a worker process was at work."

SEATS = 2
"""Calls that a worker may have at a time, the one it works on included."""


class _Serve:
    """The task of a worker: run functions by name."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions

    def run(self, channels: Sequence[Channel], stretches: Sequence[Stretch]) -> None:
        control, *seats = channels
        control.send(None)
        poll = select.poll()
        for seat in seats:
            poll.register(seat.fileno(), select.POLLIN)
        by_fd = {seat.fileno(): n for n, seat in enumerate(seats)}
        while True:
            for fd, _ in poll.poll():
                n = by_fd[fd]
                name, args = seats[n].receive(stretches[2 * n])
                try:
                    answer = True, self._functions[name](*args)
                except Exception as error:
                    answer = False, portable(error)
                del args
                _answer(seats[n], answer, stretches[2 * n + 1])

    @staticmethod
    def fail(error: BaseException, channels: Sequence[Channel]) -> None:
        channels[0].send(portable(error))


def _answer(seat: Channel, answer: tuple[bool, Any], stretch: Stretch) -> None:
    try:
        seat.send((*answer, logged()), stretch)
    except OSError:
        raise
    except Exception as error:  # the result cannot be sent
        seat.send((False, portable(error), []))


@dataclass(eq=False)
class _Worker:
    """A worker and which of its seats are free.

    Attributes:
        greeted: its first words have been heard.
        failure: why it cannot work, if that is what they were.
        lock: guards these two.
    """

    child: Child
    free: list[int] = field(default_factory=lambda: list(range(SEATS)))
    greeted: bool = False
    failure: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class WorkerPool:
    """Runs calls in worker processes. Any number of threads may use it.

    Args:
        functions: by name; pickled once.
        workers: how many processes.

    Raises:
        PipelineError: the functions cannot be sent.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], workers: int) -> None:
        self._task = pickled(_Serve(functions))
        self._changed = threading.Condition()
        self._closed = False
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _close, self._workers)
        for _ in range(workers):
            self._workers.append(self._start())

    def call(self, name: str, *args: Any, about: Callable[[], str] | None = None) -> Any:
        """The result, or the exception, of a function.

        Where a worker dies, another takes its place and the call is run once more, in a worker of its own.

        Args:
            about: what is worked on, for a message.

        Raises:
            WorkerError: the worker died twice over this call, or the pool is closed.
        """
        worker, seat = self._take(1)
        try:
            return self._ask(worker, seat, name, args)
        except _Died:
            _log.warning("%s Its work is done again by a new one.", self._replace(worker))
        finally:
            self._give_back(worker, [seat])
        worker, seat = self._take(SEATS)
        try:
            return self._ask(worker, seat, name, args)
        except _Died:
            error = self._replace(worker)
            where = f" It was working on {about()}." if about else ""
            raise WorkerError(f"{error} So had another before it, over the same rows.{where}") from None
        finally:
            self._give_back(worker, list(range(SEATS)))

    def close(self) -> None:
        """End the workers; calls under way raise. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end()

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [worker.child.pid for worker in self._workers]

    def _start(self) -> _Worker:
        # One channel for the first words.
        return _Worker(
            Child(_Serve, self._task, channels=1 + SEATS, stretches=2 * SEATS, what="a worker process of the pipeline")
        )

    def _take(self, seats: int) -> tuple[_Worker, int]:
        """A worker with so many free seats, the one with most of them."""
        with self._changed:
            while not self._closed:
                best = max(self._workers, key=lambda worker: len(worker.free))
                if len(best.free) >= seats:
                    seat = best.free.pop(0)
                    if seats > 1:
                        best.free.clear()
                    return best, seat
                self._changed.wait()
        raise WorkerError(_CLOSED)

    def _give_back(self, worker: _Worker, seats: list[int]) -> None:
        with self._changed:
            worker.free += seats
            self._changed.notify_all()

    def _ask(self, worker: _Worker, seat: int, name: str, args: tuple[Any, ...]) -> Any:
        child = worker.child
        channel = child.channels[1 + seat]
        try:
            with worker.lock:
                if not worker.greeted:
                    worker.failure, worker.greeted = child.channels[0].receive(), True
            if worker.failure is None:
                channel.send((name, args), child.stretches[2 * seat])
                done, value, records = channel.receive(child.stretches[2 * seat + 1])
            else:
                done, value, records = False, worker.failure, []
        except (EOFError, OSError) as error:
            raise _Died from error
        replay(records)
        if not done:
            raise revived(value)
        return value

    def _replace(self, worker: _Worker) -> WorkerError:
        """Another worker for one that has died; gives what it died of."""
        if self._closed:
            raise WorkerError(_CLOSED)
        error = worker.child.died()
        with self._changed:
            if self._closed:
                raise WorkerError(_CLOSED)
            if worker in self._workers:
                self._workers[self._workers.index(worker)] = self._start()
                self._changed.notify_all()
        worker.child.close()
        return error


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.child.close()


class _Died(Exception):
    """A worker is gone."""
