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

import numpy as np

from zephon.columns.records import Pointer, RecordBlock, TokenBlock


@dataclass(frozen=True, slots=True)
class Job:
    """Work for any worker."""

    run: Callable[[], RecordBlock]
    # About how many bytes it moves; small jobs are not worth handing over.
    nbytes: int
    # int64[n, 3]: for each of the n records, chunk, position and token from which it and all that follow can be made
    # with nothing before it, or -1; with ensure_mixture, the `skips` of a `Pointer` besides.
    origins: np.ndarray
    # Nothing was held when the first of these records was begun: the orderer ends its buffer before it, and the lane
    # can be entered there.
    fresh: bool = False


@dataclass(slots=True)
class PackCounts:
    """How documents were packed.

    Attributes:
        records: records cut.
        tokens: real tokens in them; the other places are padding.
        documents: documents taken that have tokens.
        oversized: those of them that are longer than a record.
        split: those of them that are in more than one record.
        dropped: those of them that were kept out, being longer than a record.
        dropped_tokens: tokens of the dropped ones.
        slots: places for tokens in the records; counted once the packers are asked for a report.
    """

    records: int = 0
    tokens: int = 0
    documents: int = 0
    oversized: int = 0
    split: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    slots: int = 0

    @property
    def efficiency(self) -> float:
        """Real tokens per place; 1 before the first record."""
        return self.tokens / self.slots if self.slots else 1.0

    @property
    def padding(self) -> float:
        """Share of places that are padded."""
        return 1.0 - self.efficiency


class Packer(Protocol):
    """Accumulator that cuts a lane's documents into records."""

    records: int  # cut so far
    tokens_left_out: int  # tokens that did not fill a last record

    def push(self, block: TokenBlock) -> list[Job]:
        """Take the next documents."""

    def flush(self) -> list[Job]:
        """A window ends: give out what must not go over its end."""

    def carry(self) -> Pointer | None:
        """The first token not yet in a record, or None where there is none: all that a window hands to the next.

        Asked after `flush`.
        """

    def finish(self) -> list[Job]:
        """No document will follow."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Work for any worker: records in their final order."""

    run: Callable[[], RecordBlock]
    nbytes: int  # as in `Job`
    records: int  # how many
    # Where buffers begin that the lane can be entered at: the record, the number of the buffer in the window, and the
    # line of it in the `origins` of its `Job`.
    begins: list[tuple[int, int, list[int]]]


class Orderer(Protocol):
    """Accumulator that puts records into their final order."""

    def push(self, block: RecordBlock, origins: np.ndarray, fresh: bool = False) -> list[Ordered]:
        """Take the next records and their origins, as in `Job`; where `fresh`, a buffer begins there."""

    def flush(self) -> list[Ordered]:
        """The window ends: give out everything and start the next one empty."""
