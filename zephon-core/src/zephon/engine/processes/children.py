"""Workers that are child processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from zephon.engine.processes.channel import Channel, Closed
from zephon.engine.processes.child import Child, pickle_task, portable_error
from zephon.engine.processes.pool import SEATS, Answer, OnChange, answer
from zephon.errors import WorkerError


class _Serve:
    """The task of a child: run functions by number."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions

    def run(self, channels: Sequence[Channel]) -> None:
        while True:
            for channel in connection.wait(channels):  # type: ignore[arg-type]
                self._answer(channel)  # type: ignore[arg-type]

    def _answer(self, channel: Channel) -> None:
        number, args = channel.receive()
        made = answer(self._functions, number, args)
        del args  # so that the answer also releases its shared memory
        try:
            channel.send(made)
        except Closed:
            raise
        except Exception as error:  # the result cannot be pickled
            channel.send((False, portable_error(error), []))


class ChildWorker:
    """A child process; see `Worker`."""

    is_ready = True

    def __init__(self, task: bytes, kind: str) -> None:
        self.free = list(range(SEATS))
        self._child = Child(task, SEATS, f"a {kind} of the pipeline")

    def begin(self, _on_change: OnChange) -> None:
        """Nothing to wait for: calls wait."""

    def ask(self, seat: int, number: int, args: tuple[Any, ...]) -> Answer:
        self._child.wait_until_started()
        channel = self._child.channels[seat]
        channel.send((number, args))
        made: Answer = channel.receive()
        return made

    def death(self) -> tuple[WorkerError, bool]:
        return self._child.death(), True

    def close(self) -> None:
        self._child.close()


class ChildWorkers:
    """Starts child processes; see `Workers`."""

    kind = "worker process"

    def __init__(self) -> None:
        self._task = b""

    def prepare(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._task = pickle_task(_Serve(functions))

    def worker(self, _number: int) -> ChildWorker:
        return ChildWorker(self._task, self.kind)

    def waiting(self) -> str:
        return ""
