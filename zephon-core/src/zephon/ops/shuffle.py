"""Shuffling records inside a window."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PipelineError
from ..records import RecordBlock
from ..work.permute import derive_key, mix_key, shuffled_indices
from .base import Job

__all__ = ["Shuffle", "Shuffler"]


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Collect records in a buffer and give them out in random order.

    Attributes:
        buffer_size: records over all lanes together; each lane gets buffer_size / L, at least one.
        seed: keys the order.
    """

    buffer_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("buffer_size", self.buffer_size, 1), ("seed", self.seed, None)):
            if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
                bound = "" if least is None else f" of at least {least}"
                raise PipelineError(f"shuffle {name} is {value!r}; a whole number{bound} is needed.")


class Shuffler:
    """The accumulator of `Shuffle` for one lane.

    A full buffer is given out whole, in an order keyed by seed, lane, window and the number of the buffer in its
    window; so a window can be replayed from its start, and nothing is held across its end.
    """

    def __init__(self, spec: Shuffle, *, lane: int, lanes: int, window: int) -> None:
        self._size = max(1, spec.buffer_size // lanes)
        self._key = mix_key(derive_key("shuffle", spec.seed), lane)
        self._window = window
        self._buffer_number = 0
        self._parts: list[RecordBlock] = []
        self._held = 0

    def push(self, block: RecordBlock) -> list[Job]:
        """Take records; gives a job per full buffer."""
        jobs = []
        start = 0
        while start < len(block):
            stop = min(len(block), start + self._size - self._held)
            self._parts.append(block.slice(start, stop))
            self._held += stop - start
            start = stop
            if self._held == self._size:
                jobs.append(self._emit())
        return jobs

    def flush(self) -> list[Job]:
        """Give out an incomplete buffer; the next window starts."""
        jobs = [self._emit()] if self._held else []
        self._window += 1
        self._buffer_number = 0
        return jobs

    def _emit(self) -> Job:
        parts, count = self._parts, self._held
        key = mix_key(self._key, self._window, self._buffer_number)
        self._parts, self._held = [], 0
        self._buffer_number += 1
        return Job(
            lambda: RecordBlock.arrange(parts, shuffled_indices(key, count)),
            count * parts[0].tokens.shape[1] * 4,
        )
