"""Stretches of tokens with the columns that go with them, as packers hold them between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zephon.columns.records import RecordBlock


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens and what goes with them, as in `TokenBlock`; a position of -1 is one to be counted."""

    tokens: np.ndarray
    loss: np.ndarray | None = None
    positions: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, stop: int) -> Part:
        """Tokens `start:stop`, as views."""
        return Part(
            self.tokens[start:stop],
            None if self.loss is None else self.loss[start:stop],
            None if self.positions is None else self.positions[start:stop],
        )

    def copy(self) -> Part:
        """The same in memory of its own."""
        return Part(
            self.tokens.copy(),
            None if self.loss is None else self.loss.copy(),
            None if self.positions is None else self.positions.copy(),
        )

    @staticmethod
    def concat(parts: Sequence[Part]) -> Part:
        """All parts, end to end; a column that only some have is filled up."""
        if len(parts) == 1:
            return parts[0]
        loss = positions = None
        if any(part.loss is not None for part in parts):
            loss = np.concatenate([np.ones(len(p), dtype=bool) if p.loss is None else p.loss for p in parts])
        if any(part.positions is not None for part in parts):
            positions = np.concatenate(
                [np.full(len(p), -1, dtype=np.int32) if p.positions is None else p.positions for p in parts]
            )
        return Part(np.concatenate([part.tokens for part in parts]), loss, positions)


def fill_columns(block: RecordBlock, flat: Part) -> RecordBlock:
    """Put the tokens of `flat`, and what goes with them, into `block`, whose other columns are there already."""
    shape = len(block.lengths), -1
    block.tokens = flat.tokens.reshape(shape)
    block.loss = None if flat.loss is None else flat.loss.reshape(shape)
    if flat.positions is not None:
        given = flat.positions.reshape(shape)
        block.positions = np.where(given < 0, block.counted_positions(), given)
    return block
