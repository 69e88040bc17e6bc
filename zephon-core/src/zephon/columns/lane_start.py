"""Where a lane of a run can be entered: the whole state of a lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LaneStart"]


@dataclass(frozen=True, slots=True)
class LaneStart:
    """Where a lane can begin: all there is to the state of a lane.

    Attributes:
        window: the window it is in.
        records_before: records the lane gave before.
        chunk, position, token: the first token of the next record: a chunk, a row of it, a token of the row's document.
            At the start of a window it lies before the window where a record went over its end.
        buffer: which shuffle buffer of the window comes next.
        skips: with ensure_mixture, for each dataset by name, its tokens from `chunk` and `position` on that earlier
            records have used; `token` is then the row before which rows are only those still held, chunk * 2**32 +
            position.
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
        """From what `as_list` gave."""
        window, before, chunk, position, token, buffer, *skips = map(int, numbers)
        return LaneStart(window, before, chunk, position, token, buffer, tuple(skips))
