"""A place where a lane can be entered: the complete state of a lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneStart:
    """A place where a lane can be entered: the complete state of a lane.

    Attributes:
        window: index of the window.
        records_before: records of the lane (of its feed) before this place.
        chunk, position, token: first token of the next record: chunk, row of the chunk, token of the row's document.
            At the start of a window it lies before the window where a record crosses the boundary.
        buffer: index of the next shuffle buffer of the window.
        skips: with ensure_mixture, for each dataset, sorted by name, the tokens from `chunk` and `position` on that
            earlier records have used. `token` is then a row, as chunk * 2**32 + position: of the rows before it, only
            tokens still in the stock are unused.
    """

    window: int = 0
    records_before: int = 0
    chunk: int = 0
    position: int = 0
    token: int = 0
    buffer: int = 0
    skips: tuple[int, ...] = ()

    def as_list(self) -> list[int]:
        """The six numbers, in order, and the skips."""
        return [self.window, self.records_before, self.chunk, self.position, self.token, self.buffer, *self.skips]

    @staticmethod
    def of(numbers: Sequence[int]) -> LaneStart:
        """The inverse of `as_list`."""
        window, before, chunk, position, token, buffer, *skips = map(int, numbers)
        return LaneStart(window, before, chunk, position, token, buffer, tuple(skips))
