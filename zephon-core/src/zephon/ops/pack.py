"""Packing: documents of tokens into records of a fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PipelineError
from ..records import Pointer, RecordBlock, TokenBlock
from .base import Job, check_workers

__all__ = ["PACK_ALGORITHMS", "PackFlat", "WrapPacker"]

PACK_ALGORITHMS = ("wrap",)


@dataclass(frozen=True, slots=True)
class PackFlat:
    """Cut the concatenated documents of a lane into records of `max_length + 1` tokens.

    The extra token is the label of the last input, so a record trains `max_length` positions. With "wrap" a record
    starts with the token after the last one of the record before: every token is in exactly one record, a document may
    go on in the next record, and no place is padded.

    Attributes:
        max_length: the sequence length that the model sees, in tokens.
        algorithm: "wrap".
        parallelism: worker threads that assemble records, or None for the default.
    """

    max_length: int
    algorithm: str = "wrap"
    parallelism: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_length, bool) or not isinstance(self.max_length, int) or self.max_length < 1:
            raise PipelineError(f"pack_flat max_length is {self.max_length!r}; a whole number of at least 1 is needed.")
        check_workers("pack_flat", self.parallelism)
        if self.algorithm not in PACK_ALGORITHMS:
            raise PipelineError(f"pack_flat algorithm is {self.algorithm!r}; this version has {list(PACK_ALGORITHMS)}.")

    @property
    def record_length(self) -> int:
        """Tokens per record."""
        return self.max_length + 1


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens and what goes with them, as in `TokenBlock`; a position of -1 is one to be counted."""

    tokens: np.ndarray
    loss: np.ndarray | None = None
    positions: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, stop: int) -> _Part:
        """Tokens `start:stop`, as views."""
        return _Part(
            self.tokens[start:stop],
            None if self.loss is None else self.loss[start:stop],
            None if self.positions is None else self.positions[start:stop],
        )

    def copy(self) -> _Part:
        """The same in memory of its own."""
        return _Part(
            self.tokens.copy(),
            None if self.loss is None else self.loss.copy(),
            None if self.positions is None else self.positions.copy(),
        )

    @staticmethod
    def concat(parts: Sequence[_Part]) -> _Part:
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
        return _Part(np.concatenate([part.tokens for part in parts]), loss, positions)


class WrapPacker:
    """The accumulator of "wrap" for one lane.

    What it holds between blocks is less than one record of tokens, and where their documents lie.

    Args:
        record_length: tokens per record.
        pad_token: fills up the last record of a run that ends, or None to leave incomplete records out.
        skip: tokens at the head of the first document that earlier records have used.
    """

    def __init__(self, record_length: int, *, pad_token: int | None = None, skip: int = 0) -> None:
        self.records = 0
        self.tokens_left_out = 0
        self._length = record_length
        self._pad_token = pad_token
        self._skip = skip
        self._parts: list[_Part] = []  # tokens held, in order
        self._held = 0
        self._start = np.empty(0, dtype=np.int64)  # where each held document begins among the held tokens
        self._dataset = np.empty(0, dtype=np.int32)
        self._row = np.empty(0, dtype=np.int64)
        self._token = np.empty(0, dtype=np.int64)  # the first token of the document that is held
        self._chunk = np.empty(0, dtype=np.int64)
        self._position = np.empty(0, dtype=np.int64)

    def push(self, block: TokenBlock) -> list[Job]:
        """Take documents; gives a job for the records that are now complete."""
        part = _Part(block.tokens, block.loss, block.positions)
        begins, ends = block.offsets[:-1], block.offsets[1:]
        # Tokens are counted within their row, which may have made several documents.
        first_token = np.zeros(len(begins), dtype=np.int64) if block.begin is None else block.begin.copy()
        dataset, row, position = block.dataset, block.row, block.position
        if self._skip and len(begins):
            part, begins, ends = part.slice(self._skip, len(part)), begins - self._skip, ends - self._skip
            used = int(np.searchsorted(ends, 0, side="right"))  # documents that earlier records have used up
            begins, ends, first_token = begins[used:], ends[used:], first_token[used:]
            dataset, row, position = dataset[used:], row[used:], position[used:]
            first_token[0] -= begins[0]
            begins[0] = 0
            self._skip = 0
        filled = ends > begins
        self._start = np.concatenate([self._start, self._held + begins[filled]])
        self._dataset = np.concatenate([self._dataset, dataset[filled]])
        self._row = np.concatenate([self._row, row[filled]])
        self._token = np.concatenate([self._token, first_token[filled]])
        self._chunk = np.concatenate([self._chunk, np.full(int(filled.sum()), block.chunk, dtype=np.int64)])
        self._position = np.concatenate([self._position, position[filled]])
        self._parts.append(part)
        self._held += len(part)
        count = self._held // self._length
        return [self._cut(count)] if count else []

    def carry(self) -> Pointer | None:
        """Where the first held token lies in the lane."""
        if not self._held:
            return None
        return Pointer(int(self._chunk[0]), int(self._position[0]), int(self._token[0]))

    def finish(self) -> list[Job]:
        """Pad what is held to one record, or count it as left out."""
        if not self._held:
            return []
        if self._pad_token is None:
            self.tokens_left_out += self._held
            return []
        real = self._held
        self._parts.append(_Part(np.full(self._length - real, self._pad_token, dtype=np.uint32)))
        return [self._cut(1, real)]

    def _cut(self, count: int, real: int | None = None) -> Job:
        """A job for the first `count` records of what is held, with `real` real tokens each; keeps the rest."""
        length, total = self._length, count * self._length
        # A span begins wherever a document or a record does.
        inside = self._start < total
        span = np.union1d(self._start[inside], np.arange(count, dtype=np.int64) * length)
        owner = np.searchsorted(self._start, span, side="right") - 1
        block = RecordBlock(
            tokens=np.empty((0, length), dtype=np.uint32),
            lengths=np.full(count, length if real is None else real, dtype=np.int32),
            span_offsets=np.searchsorted(span, np.arange(count + 1, dtype=np.int64) * length),
            span_start=(span % length).astype(np.int32),
            span_dataset=self._dataset[owner],
            span_row=self._row[owner],
            span_token=self._token[owner] + (span - self._start[owner]),
        )
        firsts = block.span_offsets[:-1]
        origins = np.stack(
            [self._chunk[owner[firsts]], self._position[owner[firsts]], block.span_token[firsts]], axis=1
        )
        parts = self._parts
        self._keep_from(total)
        self.records += count

        def run() -> RecordBlock:
            flat = _Part.concat(parts).slice(0, total)
            block.tokens = flat.tokens.reshape(count, length)
            block.loss = None if flat.loss is None else flat.loss.reshape(count, length)
            if flat.positions is not None:
                given = flat.positions.reshape(count, length)
                block.positions = np.where(given < 0, block.counted_positions(), given)
            return block

        return Job(run, total * 4, origins)

    def _keep_from(self, cut: int) -> None:
        """Hold only the tokens from place `cut` on; they all lie in the last part."""
        left = max(0, self._held - cut)
        # A copy, so that a few tokens do not keep a whole block alive.
        self._parts = [self._parts[-1].slice(len(self._parts[-1]) - left, len(self._parts[-1])).copy()] if left else []
        self._held = left
        first = int(np.searchsorted(self._start, cut, side="right")) - 1 if left else len(self._start)
        begun = max(0, cut - int(self._start[first])) if left else 0
        self._start = np.maximum(self._start[first:] - cut, 0)
        self._dataset, self._row = self._dataset[first:], self._row[first:]
        self._chunk, self._position = self._chunk[first:], self._position[first:]
        self._token = self._token[first:].copy()
        if left:
            self._token[0] += begun
