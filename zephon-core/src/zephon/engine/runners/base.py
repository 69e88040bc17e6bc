"""What a runner owes the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Runner", "Task"]


class Task(Protocol):
    """A result to come."""

    def done(self) -> bool:
        """Whether `result` would not wait for another thread."""

    def result(self) -> Any:
        """The result, or the exception of the function."""


class Runner(Protocol):
    """Runs functions; kinds of work ("fetch", "tokenize", "pack") may have workers of their own."""

    looks_ahead: bool
    """Whether work handed over goes on while nobody waits for it."""

    def submit(self, kind: str, function: Callable[..., Any], *args: Any) -> Task:
        """Run `function(*args)`. Tasks of one kind start in the order in which they were handed over."""

    def close(self) -> None:
        """Drop what has not started and let workers end; does not wait."""
