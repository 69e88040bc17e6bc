"""Everything in the calling thread, at the moment its result is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["InlineRunner"]


class _Deferred:
    __slots__ = ("_args", "_function")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._function(*self._args)


class InlineRunner:
    """No threads and no look-ahead: for debugging, profiling and as the reference for the others."""

    looks_ahead = False

    def __init__(self, **_workers: int) -> None: ...

    def submit(self, _kind: str, function: Callable[..., Any], *args: Any) -> _Deferred:
        """Remember the call; it runs when its result is asked for."""
        return _Deferred(function, args)

    def close(self) -> None:
        """Nothing to end."""
