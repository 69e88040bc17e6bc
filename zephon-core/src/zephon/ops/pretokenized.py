"""Tokens that are there already: columns of token ids, with given positions and loss masks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import column_of, int64_array, mask_of, one_chunk, valid_mask, values_of
from zephon.columns.records import ragged_take
from zephon.config.options import check_workers
from zephon.errors import PipelineError
from zephon.ops.documents import Documents, column_type_error, shortened, split_up
from zephon.ops.rows import Rows, check_names, missing_column
from zephon.ops.tokenize import add_special_tokens, check_limit
from zephon.tokenizer.tokenizer import Tokenizer

__all__ = ["Pretokenized", "PretokenizedEncoder"]

IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Pretokenized:
    """Take token ids from a column of lists of whole numbers (or, in JSON lines, arrays of them).

    Attributes:
        field: the column of ids.
        loss: column of lists of flags, or of 0 and 1, as long as the ids: whether a token is trained on as a label.
        labels: instead of `loss`, a column of lists of labels, as long as the ids: -100 where a token is not trained
            on, elsewhere the id itself.
        positions: column of lists of positions, from 0, as long as the ids, for `position_ids`.
        tokenizer_id: the tokenizer that made the ids; with it they are checked against its vocabulary, and
            `special_tokens` can be added.
        special_tokens: as in `Tokenize`; "none" and "auto" take the ids as they are.
        backend, parallelism, max_length, split_long_samples: as in `Tokenize`.
        datasets: names of the datasets with such rows, or None for all.
    """

    kind: ClassVar[str] = "pretokenized"
    optional_columns: ClassVar[tuple[str, ...]] = ()
    field: str = "input_ids"
    loss: str | None = None
    labels: str | None = None
    positions: str | None = None
    tokenizer_id: str | os.PathLike[str] | None = None
    special_tokens: str = "none"
    backend: str = "auto"
    parallelism: int | None = None
    max_length: int | None = None
    split_long_samples: bool = False
    datasets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for what in ("field", "loss", "labels", "positions"):
            value = getattr(self, what)
            if (value is None and what == "field") or (value is not None and (not isinstance(value, str) or not value)):
                raise PipelineError(f"pretokenized {what} is {value!r}; the name of a column is needed.")
        if self.loss is not None and self.labels is not None:
            raise PipelineError("pretokenized has loss and labels, which say the same thing twice; name one of them.")
        if self.special_tokens not in ("none", "auto"):
            if self.tokenizer_id is None:
                raise PipelineError(
                    f"pretokenized special_tokens is {self.special_tokens!r}, which needs tokenizer_id to know the ids."
                )
            if self.positions is not None:
                raise PipelineError("pretokenized cannot add special tokens to rows whose positions are given.")
        check_workers("pretokenized", self.parallelism)
        check_limit("pretokenized", self.max_length, self.split_long_samples)
        object.__setattr__(self, "datasets", check_names("pretokenized", "datasets", self.datasets))

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns it reads besides `field`."""
        return tuple(name for name in (self.loss, self.labels, self.positions) if name)

    def encoder(self, tokenizer: Tokenizer | None, bos: int | None, eos: int | None) -> PretokenizedEncoder:
        """The worker."""
        return PretokenizedEncoder(self, tokenizer.vocab_size if tokenizer else 1 << 32, bos, eos)

    def identity(self) -> str:
        """What decides the tokens besides their special tokens, for fingerprints."""
        limit = f" max_length={self.max_length} split={self.split_long_samples}" if self.max_length else ""
        return f"tokens {self.datasets or 'all'} {self.field} {self.loss} {self.labels} {self.positions}{limit}"


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


class PretokenizedEncoder:
    """The worker of `Pretokenized`.

    Args:
        spec: the description.
        vocab_size: ids from here on are refused.
        bos, eos: ids to put round each document, or None.
    """

    joins = False

    def __init__(self, spec: Pretokenized, vocab_size: int, bos: int | None, eos: int | None) -> None:
        self.columns = (spec.field, *spec.extra_columns)
        self._spec = spec
        self._vocab_size = vocab_size
        self._bos, self._eos = bos, eos

    def alike(self, rows: Rows) -> Rows:
        """As it is: every dataset is encoded by itself."""
        return rows

    def texts(self, rows: Rows) -> list[str]:
        """There are none."""
        return []

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        spec, label = self._spec, self._spec.kind
        good = np.ones(rows.table.num_rows, dtype=bool)
        ids, offsets = self._lists(rows, spec.field, good)
        self._blame(rows, good, offsets, (ids < 0) | (ids >= self._vocab_size), label, self._wrong_id(ids))
        columns: list[np.ndarray | None] = [None, None]
        for nth, name in ((0, spec.loss or spec.labels), (1, spec.positions)):
            if name is None:
                continue
            values, their_offsets = self._lists(rows, name, good)
            counts, theirs = np.diff(offsets), np.diff(their_offsets)
            for index in np.flatnonzero(good & (counts != theirs)).tolist():
                reason = f'"{name}" holds {theirs[index]} values for {counts[index]} ids; one for each is needed'
                rows.fail(index, label, reason)
                good[index] = False
            # Where the counts differ nothing fits together any longer: go on with the rows that are left.
            keep = np.flatnonzero(good & (counts == theirs))
            values = values[ragged_take(their_offsets, keep)[0]]
            whole = np.zeros(len(ids), dtype=np.int64)
            whole[ragged_take(offsets, keep)[0]] = values
            columns[nth] = self._checked(rows, good, offsets, whole, ids, nth, name)
        blank = good & (np.diff(offsets) == 0)
        kept = np.flatnonzero(good & ~blank)
        items, offsets = ragged_take(offsets, kept)
        tokens = ids[items].astype(np.uint32)
        loss, positions = (None if column is None else column[items] for column in columns)
        places = rows.places[kept]
        extra = (self._bos is not None) + (self._eos is not None)
        if spec.max_length is not None and not spec.split_long_samples:
            room = max(1, spec.max_length - extra)
            tokens, offsets, (loss, positions) = shortened(tokens, offsets, room, loss, positions)
        if extra:
            plain = offsets
            tokens, offsets = add_special_tokens(tokens, offsets, self._bos, self._eos)
            if loss is not None:
                ones = [None if token is None else 1 for token in (self._bos, self._eos)]
                loss = add_special_tokens(loss.astype(np.uint32), plain, *ones)[0].astype(bool)
        if spec.split_long_samples and spec.max_length is not None:
            offsets, document = split_up(offsets, spec.max_length)
            places = places[document]
        return Documents(tokens, offsets, places, rows.places[blank], loss, positions)

    def _wrong_id(self, ids: np.ndarray) -> Any:
        return lambda at: f"token id {ids[at]} is none of 0 to {self._vocab_size - 1}"

    def _checked(
        self,
        rows: Rows,
        good: np.ndarray,
        offsets: np.ndarray,
        values: np.ndarray,
        ids: np.ndarray,
        nth: int,
        name: str,
    ) -> np.ndarray:
        """The values of a column as they are used: bool for the loss, int32 for positions."""
        label = self._spec.kind
        if nth == 1:
            wrong = (values < 0) | (values >= 1 << 31)
            self._blame(rows, good, offsets, wrong, label, lambda at: f'"{name}" holds the position {values[at]}')
            return values.astype(np.int32)
        if self._spec.labels is not None:
            wrong = (values != IGNORED_LABEL) & (values != ids)
            why = f"{IGNORED_LABEL} or the id is needed"
            self._blame(
                rows, good, offsets, wrong, label, lambda at: f'"{name}" holds {values[at]} for id {ids[at]}; {why}'
            )
            return values != IGNORED_LABEL
        wrong = (values != 0) & (values != 1)
        self._blame(rows, good, offsets, wrong, label, lambda at: f'"{name}" holds {values[at]}; 0 or 1 is needed')
        return values == 1

    def _blame(
        self, rows: Rows, good: np.ndarray, offsets: np.ndarray, wrong: np.ndarray, label: str, reason: Any
    ) -> None:
        """Fail the rows with wrong values, once each."""
        if not wrong.any():
            return
        for index in np.unique(np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1).tolist():
            if good[index]:
                at = int(offsets[index] + np.argmax(wrong[offsets[index] : offsets[index + 1]]))
                rows.fail(index, label, reason(at))
                good[index] = False

    def _lists(self, rows: Rows, name: str, good: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items of a column of lists, int64[n_items], and their offsets int64[n + 1]; nulls are empty lists."""
        if name not in rows.table.column_names:
            raise PipelineError(f"{self._spec.kind} {missing_column(name, rows.table.column_names)}")
        column = one_chunk(rows.table.column(name))
        if pa.types.is_null(column.type):
            return np.empty(0, dtype=np.int64), np.zeros(len(column) + 1, dtype=np.int64)
        if pa.types.is_large_string(column.type) or pa.types.is_string(column.type):
            column = self._parsed(rows, name, column.to_pylist(), good)
        kind = column.type
        if not _is_list(kind) or not _holds_ids(kind.value_type):
            raise PipelineError(column_type_error(self._spec.kind, name, kind, "lists of whole numbers"))
        lengths = pc.list_value_length(column)
        offsets = np.zeros(len(column) + 1, dtype=np.int64)
        np.cumsum(values_of(lengths.fill_null(column_of([0]).cast(lengths.type)[0])), out=offsets[1:])
        items = column.flatten()  # without those of nulls, and without what a slice leaves out
        if pa.types.is_null(items.type):
            items = items.cast(pa.int64())
        if items.null_count:
            missing = ~valid_mask(items)
            self._blame(rows, good, offsets, missing, self._spec.kind, lambda at: f'"{name}" holds a null in its list')
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
