"""The threads of this process that keep worker processes busy: they read rows, hand them over and wait."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["ProcessRunner"]

_Item = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class ProcessRunner:
    """One pool of threads per kind of work.

    Unlike those of `ThreadsRunner` they do not keep the interpreter from ending until all work that waits is done: what
    is slow enough for processes may take minutes.

    Args:
        workers: threads by kind.
    """

    looks_ahead = True

    def __init__(self, **workers: int) -> None:
        self._queues: dict[str, queue.SimpleQueue[_Item | None]] = {kind: queue.SimpleQueue() for kind in workers}
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
        """Queue the call for the pool of `kind`."""
        future: Future[Any] = Future()
        self._queues[kind].put((future, function, args))
        if self._closed.is_set():  # perhaps too late for any thread to see it
            future.cancel()
        return future

    def close(self) -> None:
        """Cancel what waits; threads end after what they are at."""
        self._closed.set()
        for waiting in self._queues.values():
            for _ in self.threads:
                waiting.put(None)


def _work(items: queue.SimpleQueue[_Item | None], closed: threading.Event) -> None:
    while (item := items.get()) is not None:
        future, function, args = item
        del item
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


_running: weakref.WeakSet[ProcessRunner] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    # Whatever waits for a worker process has been told by now that there is none any longer.
    for runner in list(_running):
        runner.close()
        for thread in runner.threads:
            thread.join(5)
