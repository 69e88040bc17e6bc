"""Worker threads. Reading, tokenizing and gathering release the GIL, so threads run side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["ThreadsRunner"]


class ThreadsRunner:
    """One pool per kind of work.

    Args:
        workers: threads by kind, for example `fetch=2, tokenize=4, pack=1`.
    """

    looks_ahead = True

    def __init__(self, **workers: int) -> None:
        self._pools = {
            kind: ThreadPoolExecutor(count, thread_name_prefix=f"zephon-{kind}") for kind, count in workers.items()
        }

    def submit(self, kind: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue the call for the pool of `kind`."""
        return self._pools[kind].submit(function, *args)

    def close(self) -> None:
        """Cancel what waits; threads end after what they are at."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
