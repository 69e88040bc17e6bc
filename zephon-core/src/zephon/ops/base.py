"""What an operator owes the engine.

An operator is written down as a frozen description (what `Pipeline` collects and `explain()` prints) and comes to
life in two halves:

accumulator
    One object per lane, used by one thread. It sees the lane's blocks in order and takes every decision that
    depends on what came before. It answers with jobs.
job
    A function without arguments that depends on nothing but what it closes over, so that any worker may run it at
    any time. The engine puts results back in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..records import Pointer, RecordBlock, TokenBlock

__all__ = ["Accumulator", "Job", "Packer"]


@dataclass(frozen=True, slots=True)
class Job:
    """Work for any worker.

    Attributes:
        run: makes the block.
        nbytes: about how many bytes it moves; small jobs are not worth handing over.
    """

    run: Callable[[], RecordBlock]
    nbytes: int


class Packer(Protocol):
    """Accumulator that cuts a lane's documents into records."""

    records: int
    """Records cut so far."""

    def push(self, block: TokenBlock) -> list[Job]:
        """Take the next documents."""

    def carry(self) -> Pointer | None:
        """The first token not yet in a record, or None where there is none: all a window hands to the next."""

    def finish(self) -> list[Job]:
        """No document will follow."""


class Accumulator(Protocol):
    """Accumulator over records."""

    def push(self, block: RecordBlock) -> list[Job]:
        """Take the next records."""

    def flush(self) -> list[Job]:
        """The window ends: give out everything and start the next one empty."""
