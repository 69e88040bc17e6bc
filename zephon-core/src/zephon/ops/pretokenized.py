"""Tokens that are there already: columns of token ids, with given positions and loss masks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import column_of, int64_array, mask_of, one_chunk, valid_mask, values_of
from zephon.columns.records import ragged_take
from zephon.errors import PipelineError
from zephon.ops.documents import Documents
from zephon.ops.encode import DocumentEncoder, EncodeOptions, check_column_name, column_type_error
from zephon.ops.rows import Rows
from zephon.tokenizer.tokenizer import Tokenizer

__all__ = ["Pretokenized", "PretokenizedEncoder"]

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Pretokenized(EncodeOptions):
    """Take token ids from a column of lists of whole numbers (or, in JSON lines, arrays of them).

    Attributes:
        field: the column of ids.
        loss: column of lists of flags, or of 0 and 1, as long as the ids: whether a token is trained on as a label.
        labels: instead of `loss`, a column of lists of labels, as long as the ids: -100 where a token is not trained
            on, elsewhere the id itself.
        positions: column of lists of positions, from 0, as long as the ids, for `position_ids`.
        tokenizer_id: the tokenizer that made the ids; with it they are checked against its vocabulary, and
            `special_tokens` can be added.
    """

    kind: ClassVar[str] = "pretokenized"
    field: str = "input_ids"
    loss: str | None = None
    labels: str | None = None
    positions: str | None = None
    tokenizer_id: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for key in ("field", "loss", "labels", "positions"):
            check_column_name("pretokenized", key, getattr(self, key), required=key == "field")
        if self.loss is not None and self.labels is not None:
            raise PipelineError("pretokenized has loss and labels, which say the same thing twice; name one of them.")
        if self.special_tokens not in ("none", "auto"):
            if self.tokenizer_id is None:
                raise PipelineError(
                    f"pretokenized special_tokens is {self.special_tokens!r}, which needs tokenizer_id to know the ids."
                )
            if self.positions is not None:
                raise PipelineError("pretokenized cannot add special tokens to rows whose positions are given.")
        super().__post_init__()

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns of loss or labels, and of positions."""
        return tuple(name for name in (self.loss, self.labels, self.positions) if name)

    def encoder(self, tokenizer: Tokenizer | None, bos: int | None, eos: int | None) -> PretokenizedEncoder:
        """The worker."""
        return PretokenizedEncoder(self, tokenizer.vocab_size if tokenizer else 1 << 32, bos, eos)

    def identity(self) -> str:
        """What decides the tokens besides their special tokens, for fingerprints."""
        return (
            f"tokens {self.datasets or 'all'} {self.field} {self.loss} {self.labels} {self.positions}"
            f"{self.limit_identity}"
        )


class PretokenizedEncoder(DocumentEncoder):
    """The worker of `Pretokenized`.

    Args:
        spec: the description.
        vocab_size: ids from here on are refused.
        bos, eos: ids to put round each document, or None.
    """

    def __init__(self, spec: Pretokenized, vocab_size: int, bos: int | None, eos: int | None) -> None:
        super().__init__(spec, (spec.field, *spec.extra_columns), bos, eos)
        self._spec, self._vocab_size = spec, vocab_size

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        spec = self._spec
        good = np.ones(rows.table.num_rows, dtype=bool)
        ids, offsets = self._lists(rows, spec.field, good)
        wrong = (ids < 0) | (ids >= self._vocab_size)
        self._refuse(
            rows, good, offsets, wrong, lambda at: f"token id {ids[at]} is none of 0 to {self._vocab_size - 1}"
        )
        loss = positions = None
        if spec.loss:
            values = self._beside(rows, spec.loss, good, offsets)
            wrong = (values != 0) & (values != 1)
            self._refuse(rows, good, offsets, wrong, lambda at: f'"{spec.loss}" holds {values[at]}; expected 0 or 1')
            loss = values == 1
        if spec.labels:
            labels = self._beside(rows, spec.labels, good, offsets)
            wrong = (labels != IGNORED_LABEL) & (labels != ids)
            self._refuse(
                rows,
                good,
                offsets,
                wrong,
                lambda at: f'"{spec.labels}" holds {labels[at]} for id {ids[at]}; expected {IGNORED_LABEL} or the id',
            )
            loss = labels != IGNORED_LABEL
        if spec.positions:
            counted = self._beside(rows, spec.positions, good, offsets)
            wrong = (counted < 0) | (counted >= 1 << 31)
            self._refuse(rows, good, offsets, wrong, lambda at: f'"{spec.positions}" holds the position {counted[at]}')
            positions = counted.astype(np.int32)
        blank = good & (np.diff(offsets) == 0)
        kept = np.flatnonzero(good & ~blank)
        items, offsets = ragged_take(offsets, kept)
        loss, positions = (None if column is None else column[items] for column in (loss, positions))
        tokens = ids[items].astype(np.uint32)
        return self.finished(Documents(tokens, offsets, rows.places[kept], rows.places[blank], loss, positions))

    def _beside(self, rows: Rows, name: str, good: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The values of a column that holds one for each id, int64[n_ids]; 0 for rows that do not fit."""
        values, their_offsets = self._lists(rows, name, good)
        counts, theirs = np.diff(offsets), np.diff(their_offsets)
        for index in np.flatnonzero(good & (counts != theirs)).tolist():
            reason = f'"{name}" holds {theirs[index]} values for {counts[index]} ids; expected one for each'
            rows.fail(index, self._spec.kind, reason)
            good[index] = False
        keep = np.flatnonzero(good)
        whole = np.zeros(int(offsets[-1]), dtype=np.int64)
        whole[ragged_take(offsets, keep)[0]] = values[ragged_take(their_offsets, keep)[0]]
        return whole

    def _refuse(
        self, rows: Rows, good: np.ndarray, offsets: np.ndarray, wrong: np.ndarray, reason: Callable[[int], str]
    ) -> None:
        """Fail the rows with wrong values, once each."""
        if not wrong.any():
            return
        for index in np.unique(np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1).tolist():
            if good[index]:
                at = int(offsets[index] + np.argmax(wrong[offsets[index] : offsets[index + 1]]))
                rows.fail(index, self._spec.kind, reason(at))
                good[index] = False

    def _lists(self, rows: Rows, name: str, good: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items of a column of lists, int64[n_items], and their offsets int64[n + 1]; nulls are empty lists."""
        column = one_chunk(self.column(rows, name))
        if pa.types.is_null(column.type):
            return np.empty(0, dtype=np.int64), np.zeros(len(column) + 1, dtype=np.int64)
        if pa.types.is_large_string(column.type) or pa.types.is_string(column.type):
            column = self._parsed(rows, name, column.to_pylist(), good)
        kind = column.type
        if not _is_list(kind) or not _holds_ids(kind.value_type):
            raise column_type_error(self._spec.kind, name, kind, "lists of whole numbers")
        lengths = pc.list_value_length(column)
        offsets = np.zeros(len(column) + 1, dtype=np.int64)
        np.cumsum(values_of(lengths.fill_null(column_of([0]).cast(lengths.type)[0])), out=offsets[1:])
        items = column.flatten()  # without those of nulls, and without what a slice leaves out
        if pa.types.is_null(items.type):
            items = items.cast(pa.int64())
        if items.null_count:
            missing = ~valid_mask(items)
            self._refuse(rows, good, offsets, missing, lambda at: f'"{name}" holds a null in its list')
            items = items.fill_null(False if pa.types.is_boolean(items.type) else column_of([0]).cast(items.type)[0])
        if pa.types.is_boolean(items.type):
            return mask_of(items).astype(np.int64), offsets
        if pa.types.is_uint64(items.type):
            return np.minimum(values_of(items), np.uint64(1 << 62)).astype(np.int64), offsets
        return values_of(items).astype(np.int64), offsets

    def _parsed(self, rows: Rows, name: str, values: list[str | None], good: np.ndarray) -> pa.Array:
        """Arrays as JSON lines hold them."""
        decoder = msgspec.json.Decoder(list[int | bool])
        lists: list[list[int]] = []
        for index, value in enumerate(values):
            try:
                lists.append([] if value is None else decoder.decode(value))
            except (ValueError, RecursionError):
                lists.append([])
                if good[index]:
                    rows.fail(index, self._spec.kind, f'"{name}" is no list of whole numbers')
                    good[index] = False
        ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        try:
            flat = np.array([item for one in lists for item in one], dtype=np.int64)
        except OverflowError:
            flat = np.array([min(max(item, -(1 << 62)), 1 << 62) for one in lists for item in one], dtype=np.int64)
        return pa.LargeListArray.from_arrays(int64_array(ends), int64_array(flat))


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _holds_ids(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
