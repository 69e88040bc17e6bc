"""The columns that move through the engine: rows read, documents as tokens, packed records.

Nothing in this module decides data. A block is a few arrays over thousands of rows, and every operation is a few
array operations over a whole block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import ragged_take
from zephon.columns.damage import Lost
from zephon.columns.faults import RowFault
from zephon.columns.fields import FieldForm, Fields
from zephon.columns.images import Images


def positions_from(starts: tuple[np.ndarray, np.ndarray], n: int, width: int, dtype: Any) -> np.ndarray:
    """Distance from the last start in each of `n` records of `width` places: dtype[n, width].

    `starts` are those of `RecordBlock.starts`; each record has one at place 0.
    """
    record, place = starts
    within = place < width
    if not within.all():
        record, place = record[within], place[within]
    flat = np.empty(len(place) + 1, dtype=np.int64)
    np.add(record * width, place, out=flat[:-1])
    flat[-1] = n * width
    start = np.repeat(place.astype(dtype), flat[1:] - flat[:-1]).reshape(n, width)
    return np.subtract(np.arange(width, dtype=dtype), start, out=start)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A token of a lane: which chunk, which row of that chunk, which token of that row's document.

    With ensure_mixture, `skips` and `token` have the meaning described in `LaneStart`.
    """

    chunk: int
    position: int
    token: int
    skips: tuple[int, ...] = ()


@dataclass(slots=True)
class RowPart:
    """The rows of one dataset in a block, or of several that no operator can tell apart.

    Attributes:
        dataset: index of the dataset, or of the first of them.
        table: the columns that the operators need, m rows.
        places: int64[m], ascending: which rows of the block they are.
    """

    dataset: int
    table: pa.Table
    places: np.ndarray


@dataclass(slots=True)
class RowBlock:
    """Neighbouring rows of one chunk of one lane, as read.

    Attributes:
        parts: the rows, by dataset where each has columns or operators of its own.
        dataset: int32[n], index of the row's dataset.
        row: int64[n], number of the row within its dataset.
        chunk: index of the chunk within the lane.
        position: int64[n], place of each row within the chunk.
        lost: (place, why) of the rows that could not be read, which are in no part.
    """

    parts: list[RowPart]
    dataset: np.ndarray
    row: np.ndarray
    chunk: int
    position: np.ndarray
    lost: tuple[tuple[int, Lost], ...] = ()


@dataclass(slots=True)
class TokenBlock:
    """Documents as tokens, special tokens included; rows without text are counted only.

    Attributes:
        tokens: uint32[n_tokens].
        offsets: int64[n_docs + 1].
        dataset, row, position: as in `RowBlock`, one per document; documents made of one row share their position.
        rows_read: int64[n_datasets], rows this block was made from.
        rows_skipped: int64[n_datasets], rows that were null, empty or only white space.
        loss: bool[n_tokens], True where the token is trained on as a label; None where all are.
        positions: int32[n_tokens], position ids from the data; None where they count from the start of the document, or
            of the part of it that a record holds.
        begin: int64[n_docs], tokens of the same row in earlier documents; None where every row is one document.
        rows_dropped: int64[n_datasets], rows that operators left out on purpose; None where none could.
        rows_failed: int64[n_datasets], rows left out because they could not be used; None where none could.
        faults: by chunk, the rows that could not be used, in order.
        images: those of each document; None where there are none.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    dataset: np.ndarray
    row: np.ndarray
    position: np.ndarray
    chunk: int
    rows_read: np.ndarray
    rows_skipped: np.ndarray
    loss: np.ndarray | None = None
    positions: np.ndarray | None = None
    begin: np.ndarray | None = None
    rows_dropped: np.ndarray | None = None
    rows_failed: np.ndarray | None = None
    faults: tuple[tuple[int, tuple[RowFault, ...]], ...] = ()
    images: Images | None = None

    def from_position(self, position: int) -> TokenBlock:
        """The documents of rows from place `position` of the chunk on."""
        first = int(np.searchsorted(self.position, position, side="left"))
        cut = int(self.offsets[first])
        return replace(
            self,
            tokens=self.tokens[cut:],
            offsets=self.offsets[first:] - cut,
            dataset=self.dataset[first:],
            row=self.row[first:],
            position=self.position[first:],
            loss=None if self.loss is None else self.loss[cut:],
            positions=None if self.positions is None else self.positions[cut:],
            begin=None if self.begin is None else self.begin[first:],
            images=None if self.images is None else self.images.slice(first, len(self.images)),
        )

    def take(self, docs: np.ndarray) -> TokenBlock:
        """Some of the documents, int64[m], in their order."""
        items, offsets = ragged_take(self.offsets, docs)
        return replace(
            self,
            tokens=self.tokens[items],
            offsets=offsets,
            dataset=self.dataset[docs],
            row=self.row[docs],
            position=self.position[docs],
            begin=None if self.begin is None else self.begin[docs],
            loss=None if self.loss is None else self.loss[items],
            positions=None if self.positions is None else self.positions[items],
            images=None if self.images is None else self.images.take(docs),
        )


@dataclass(slots=True)
class RecordBlock:
    """Packed records and where their tokens came from.

    Attributes:
        tokens: uint32[n, record_length].
        lengths: int32[n], how many tokens of each record are real; the rest is padding.
        span_offsets: int64[n + 1], the spans of record i being `span_offsets[i]:span_offsets[i + 1]`.
        span_start: int32[n_spans], where in its record a document, or the part of one, starts; 0 for a record's first.
        span_dataset: int32[n_spans].
        span_row: int64[n_spans], the document's row within its dataset.
        span_token: int64[n_spans], the first token of the document that the span holds.
        loss: bool[n, record_length], True where the token is trained on as a label; None where all are. Undefined at
            padding.
        positions: int32[n, record_length], the position of each token; None where they are `counted_positions`.
        images: those of each span; None where there are none.
        fields: what a trainer takes of them, made ahead; None where it is not.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    span_offsets: np.ndarray
    span_start: np.ndarray
    span_dataset: np.ndarray
    span_row: np.ndarray
    span_token: np.ndarray
    loss: np.ndarray | None = None
    positions: np.ndarray | None = None
    images: Images | None = None
    fields: Fields | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, stop: int) -> RecordBlock:
        """Records `start:stop`, as views."""
        low, high = int(self.span_offsets[start]), int(self.span_offsets[stop])
        return RecordBlock(
            tokens=self.tokens[start:stop],
            lengths=self.lengths[start:stop],
            span_offsets=self.span_offsets[start : stop + 1] - low,
            span_start=self.span_start[low:high],
            span_dataset=self.span_dataset[low:high],
            span_row=self.span_row[low:high],
            span_token=self.span_token[low:high],
            loss=None if self.loss is None else self.loss[start:stop],
            positions=None if self.positions is None else self.positions[start:stop],
            images=None if self.images is None else self.images.slice(low, high),
            fields=None if self.fields is None else self.fields.slice(start, stop),
        )

    def fields_in(self, form: FieldForm) -> Fields:
        """What a trainer takes of the records; input_ids and labels may be views of the tokens."""
        n, length = self.tokens.shape
        width = length - form.shift_labels
        arrays = {
            "input_ids": self.tokens[:, :width].astype(form.dtype, copy=False),
            "labels": self.tokens[:, -width:].astype(form.dtype, copy=False),
        }
        if form.position_mode == "sequence":
            arrays["position_ids"] = np.tile(np.arange(width, dtype=form.dtype), (n, 1))
        elif form.position_mode == "preserve" and self.positions is not None:
            arrays["position_ids"] = self.positions[:, :width].astype(form.dtype)
        elif form.position_mode == "preserve":
            arrays["position_ids"] = positions_from(self.starts(), n, width, form.dtype)
        return Fields(form, arrays)

    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """(record, place), integers: where documents, parts of documents and the padding start, in order."""
        n, length = self.tokens.shape
        record = np.repeat(np.arange(n, dtype=np.int64), self.span_offsets[1:] - self.span_offsets[:-1])
        short = np.flatnonzero(self.lengths < length)
        if not len(short):
            return record, self.span_start
        padding = short * length + self.lengths[short]
        return np.divmod(np.unique(np.concatenate([record * length + self.span_start, padding])), length)

    def counted_positions(self) -> np.ndarray:
        """Distance of each token from the start of its span, or of the padding: int32[n, record_length]."""
        n, length = self.tokens.shape
        return positions_from(self.starts(), n, length, np.int32)

    def span_lengths(self) -> np.ndarray:
        """Tokens of each span, int32[n_spans]."""
        ends = np.empty_like(self.span_start)
        if len(ends):
            ends[:-1] = self.span_start[1:]
            # The last span of a record ends where the record's real tokens end.
            filled = np.flatnonzero(self.span_offsets[1:] > self.span_offsets[:-1])
            ends[self.span_offsets[filled + 1] - 1] = self.lengths[filled]
        return ends - self.span_start

    def tokens_before(self, n_datasets: int) -> np.ndarray:
        """Real tokens of each dataset in the records before each record, and in all: int64[n + 1, n_datasets]."""
        n = len(self)
        record = np.repeat(np.arange(1, n + 1, dtype=np.int64), np.diff(self.span_offsets))
        place = record * n_datasets + self.span_dataset
        counts = np.bincount(place, weights=self.span_lengths(), minlength=(n + 1) * n_datasets)
        return counts.astype(np.int64).reshape(n + 1, n_datasets).cumsum(axis=0)

    @staticmethod
    def empty(record_length: int) -> RecordBlock:
        """No records."""
        return RecordBlock.filler(0, record_length, 0)

    @staticmethod
    def filler(count: int, record_length: int, token: int) -> RecordBlock:
        """`count` records without a real token, every place holding `token`."""
        columns: dict[str, Any] = {name: np.empty(0, dtype=dtype) for name, dtype in PER_SPAN.items()}
        return RecordBlock(
            tokens=np.full((count, record_length), token, dtype=np.uint32),
            lengths=np.zeros(count, dtype=np.int32),
            span_offsets=np.zeros(count + 1, dtype=np.int64),
            **columns,
        )

    @staticmethod
    def concat(blocks: Sequence[RecordBlock]) -> RecordBlock:
        """All records of `blocks` in order. At least one block is needed."""
        if len(blocks) == 1:
            return blocks[0]
        losses, positions = _losses(blocks), _positions(blocks)
        return RecordBlock(
            tokens=np.concatenate([block.tokens for block in blocks]),
            lengths=np.concatenate([block.lengths for block in blocks]),
            span_offsets=_joined_offsets([block.span_offsets for block in blocks]),
            loss=np.concatenate(losses) if losses else None,
            positions=np.concatenate(positions) if positions else None,
            images=_images(blocks),
            fields=Fields.concat([block.fields for block in blocks]),
            **{name: np.concatenate([getattr(block, name) for block in blocks]) for name in PER_SPAN},
        )

    @staticmethod
    def arrange(blocks: Sequence[RecordBlock], order: np.ndarray) -> RecordBlock:
        """The records `order` int64[n], each at most once, of all `blocks`, numbered consecutively.

        Tokens, which are nearly all of the bytes, are copied once: from their block to their place.
        """
        place = np.full(sum(map(len, blocks)), -1, dtype=np.int64)
        place[order] = np.arange(len(order), dtype=np.int64)
        items, span_offsets = ragged_take(_joined_offsets([block.span_offsets for block in blocks]), order)
        losses, positions, images = _losses(blocks), _positions(blocks), _images(blocks)
        return RecordBlock(
            tokens=_scattered([block.tokens for block in blocks], place, len(order)),
            lengths=np.concatenate([block.lengths for block in blocks])[order],
            span_offsets=span_offsets,
            loss=_scattered(losses, place, len(order)) if losses else None,
            positions=_scattered(positions, place, len(order)) if positions else None,
            images=None if images is None else images.take(items),
            **{name: np.concatenate([getattr(block, name) for block in blocks])[items] for name in PER_SPAN},
        )


PER_SPAN = {"span_start": np.int32, "span_dataset": np.int32, "span_row": np.int64, "span_token": np.int64}
"""Columns of a `RecordBlock` with a value per span."""


def _images(blocks: Sequence[RecordBlock]) -> Images | None:
    """The images of the spans of all blocks; None where no block has any."""
    return Images.concat([block.images for block in blocks], [len(block.span_row) for block in blocks])


def _losses(blocks: Sequence[RecordBlock]) -> list[np.ndarray]:
    """The loss masks of all blocks; empty where no block has one."""
    if all(b.loss is None for b in blocks):
        return []
    return [np.ones(b.tokens.shape, dtype=bool) if b.loss is None else b.loss for b in blocks]


def _positions(blocks: Sequence[RecordBlock]) -> list[np.ndarray]:
    """The positions of all blocks; empty where no block has any."""
    if all(b.positions is None for b in blocks):
        return []
    return [b.counted_positions() if b.positions is None else b.positions for b in blocks]


def _scattered(parts: Sequence[np.ndarray], place: np.ndarray, count: int) -> np.ndarray:
    """`count` of the rows of all parts, numbered consecutively: row i at `place[i]`, nowhere if that is negative."""
    out = np.empty((count, parts[0].shape[1]), dtype=parts[0].dtype)
    start = 0
    for part in parts:
        to = place[start : start + len(part)]
        out[to[to >= 0]] = part if (to >= 0).all() else part[to >= 0]
        start += len(part)
    return out


def _joined_offsets(offsets: Sequence[np.ndarray]) -> np.ndarray:
    """Offsets of lists put end to end, from the offsets of each part (all starting at 0)."""
    ends = np.cumsum([part[-1] for part in offsets])
    return np.concatenate([offsets[0], *(part[1:] + end for part, end in zip(offsets[1:], ends[:-1], strict=True))])
