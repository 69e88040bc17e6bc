"""Runners: where jobs run. The engine puts results back in order, so all runners give the same stream.

Worker processes have no runner of their own: threads hand jobs to them and wait.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol


class Pending(Protocol):
    """A result that may not be available yet."""

    def done(self) -> bool:
        """Whether `result` returns without waiting for another thread."""

    def result(self) -> Any:
        """The result, or the exception of the function."""


class Runner(Protocol):
    """Runs functions; kinds of work ("fetch", "tokenize", "pack") may have workers of their own."""

    looks_ahead: bool
    """Whether submitted calls run before their result is requested."""

    def submit(self, kind: str, function: Callable[..., Any], *args: Any) -> Pending:
        """Run `function(*args)`. Calls of one kind start in the order in which they were submitted."""

    def close(self) -> None:
        """Cancel calls that have not started and end the workers; does not wait."""


class _Deferred:
    __slots__ = ("_args", "_function")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._function(*self._args)


class InlineRunner:
    """Runs a call when its result is requested: for debugging, profiling and as the reference for others."""

    looks_ahead = False

    def submit(self, _kind: str, function: Callable[..., Any], *args: Any) -> _Deferred:
        """Remember the call."""
        return _Deferred(function, args)

    def close(self) -> None:
        """Nothing to end."""


_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class ThreadsRunner:
    """A pool of threads per kind of work. Reading, tokenizing and gathering release the interpreter lock.

    Unlike the threads of a `ThreadPoolExecutor` they do not keep the interpreter from ending until all queued work is
    done, which takes minutes where functions are slow.

    Args:
        workers: threads by kind, for example `fetch=2, tokenize=4, pack=1`.
    """

    looks_ahead = True

    def __init__(self, **workers: int) -> None:
        self._queues: dict[str, queue.SimpleQueue[_Call | None]] = {kind: queue.SimpleQueue() for kind in workers}
        self._closed = threading.Event()
        self.threads = [
            threading.Thread(
                target=_work, args=(self._queues[kind], self._closed), name=f"zephon-{kind}-{n}", daemon=True
            )
            for kind, count in workers.items()
            for n in range(count)
        ]
        for thread in self.threads:
            thread.start()
        _running.add(self)

    def submit(self, kind: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue the call for the threads of `kind`."""
        future: Future[Any] = Future()
        self._queues[kind].put((future, function, args))
        if self._closed.is_set():  # the threads may have ended already
            future.cancel()
        return future

    def close(self) -> None:
        """Cancel queued calls; threads end after their current call."""
        self._closed.set()
        for calls in self._queues.values():
            for _ in self.threads:
                calls.put(None)


def _work(calls: queue.SimpleQueue[_Call | None], closed: threading.Event) -> None:
    while (call := calls.get()) is not None:
        future, function, args = call
        del call
        if closed.is_set():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = function(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del future, function, args


_running: weakref.WeakSet[ThreadsRunner] = weakref.WeakSet()
ENGINES: dict[threading.Thread, Callable[[], object]] = {}
"""Threads of engines, and what ends each."""


@atexit.register
def end_all() -> None:
    """Ends all engines and runners of this process: a thread that is in native code while the interpreter shuts down
    crashes it."""
    for engine, close in list(ENGINES.items()):
        close()
        engine.join()
    for runner in list(_running):
        runner.close()
        for thread in runner.threads:
            thread.join(5)
