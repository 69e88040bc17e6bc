"""Tokens that are there already: columns of token ids, with given positions and loss masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import column_of, int64_array, mask_of, one_chunk, ragged_take, valid_mask, values_of
from zephon.config.keys import Column, key
from zephon.errors import PipelineError
from zephon.ops.encode import Documents, Encoder, PartsOptions
from zephon.ops.rows import Rows
from zephon.tokenizer.load import TokenizerId
from zephon.tokenizer.tokenizer import Tokenizer

IGNORED_LABEL = -100
_PADDING = "attention_mask"
# Columns that change what is trained on, with the option that takes them where there is one.
_LOSS = ("loss", "loss_mask", "loss_masks", "assistant_masks", "assistant_mask", "completion_mask", "label_mask")
_PARTS = {
    **dict.fromkeys(_LOSS, "loss"),
    "labels": "labels",
    **dict.fromkeys(("positions", "position_ids"), "positions"),
    **dict.fromkeys(("segment_ids", "seq_lengths", "cu_seqlens", "pixel_values", "images", "image"), ""),
    **dict.fromkeys(("weight", "weights", "loss_weight", "loss_weights", "sample_weight", "token_weights"), ""),
}
_LARGEST = 1 << 62
_JSON_LIST = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | bool])


@dataclass(frozen=True)
class Pretokenized(PartsOptions):
    """Take token ids from a column of lists of integers (or, in JSON lines, arrays of them).

    Attributes:
        tokenizer_id: the tokenizer that made the ids; with it they are checked against its vocabulary, and
            `special_tokens` can be added.
    """

    kind: ClassVar[str] = "pretokenized"
    layout: ClassVar[str] = "tokens {datasets} {field} {loss} {labels} {positions}"
    whole: ClassVar[str] = "token ids"
    unless: ClassVar[str] = "no option takes it, so read it in a map"
    field: Column = key("input_ids", "The column of ids.")
    loss: Column | None = key(
        None, "Column of lists of flags, or of 0 and 1, as long as the ids: whether a token is trained on as a label."
    )
    labels: Column | None = key(
        None,
        "Instead of `loss`, a column of lists of labels, as long as the ids: -100 where a token is not trained on, "
        "elsewhere the id itself.",
    )
    positions: Column | None = key(
        None, "Column of lists of positions, from 0, as long as the ids, for `position_ids`."
    )
    tokenizer_id: TokenizerId | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss is not None and self.labels is not None:
            raise PipelineError("pretokenized has loss and labels, which say the same thing twice; name one of them.")
        if self.special_tokens not in ("none", "auto"):
            if self.tokenizer_id is None:
                raise PipelineError(
                    f"pretokenized special_tokens is {self.special_tokens!r}, which needs tokenizer_id to know the ids."
                )
            if self.positions is not None:
                raise PipelineError("pretokenized cannot add special tokens to rows whose positions are given.")

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns of loss or labels, and of positions."""
        return tuple(name for name in (self.loss, self.labels, self.positions) if name)

    @property
    def named_columns(self) -> tuple[str, ...]:
        """Columns that its options name."""
        return self.field, *self.extra_columns

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The column that says which ids are padding, beside the ids."""
        name = "".join([*self.field.rpartition(".")[:2], _PADDING])
        return () if {name, _PADDING} & {*self.ignored, *self.extra_columns} else (name,)

    def parts(self) -> dict[str, str]:
        """Columns that change what is trained on, with the option that takes each, or ""."""
        chosen = ("loss", "labels") if self.loss or self.labels else ()
        return {name: option for name, option in _PARTS.items() if option not in chosen}

    def encoder(self, tokenizer: Tokenizer | None, bos: int | None, eos: int | None) -> PretokenizedEncoder:
        """The worker."""
        return PretokenizedEncoder(self, tokenizer.vocab_size if tokenizer else 1 << 32, bos, eos)


class PretokenizedEncoder(Encoder):
    """The worker of `Pretokenized`; ids from `vocab_size` on are refused."""

    def __init__(self, spec: Pretokenized, vocab_size: int, bos: int | None, eos: int | None) -> None:
        super().__init__(spec, bos, eos)
        self._spec, self._vocab_size = spec, vocab_size

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        spec, last_id = self._spec, self._vocab_size - 1
        lists = _Lists(self, rows)
        ids, offsets = lists.read(spec.field)
        lists.refuse(
            offsets, (ids < 0) | (ids > last_id), lambda at: f"token id {ids[at]}; expected one from 0 to {last_id}"
        )
        for name in spec.optional_columns:
            if name in rows.table.column_names:
                lists.refuse_padding(name)
        loss = positions = None
        if spec.loss:
            flags = lists.beside(spec.loss, offsets)
            reason = f'"{spec.loss}" holds %s; expected 0 or 1'
            lists.refuse(offsets, (flags != 0) & (flags != 1), lambda at: reason % flags[at])
            loss = flags == 1
        if spec.labels:
            labels = lists.beside(spec.labels, offsets)
            loss = labels != IGNORED_LABEL
            reason = f'"{spec.labels}" holds %s for id %s; expected {IGNORED_LABEL} or the id'
            lists.refuse(offsets, loss & (labels != ids), lambda at: reason % (labels[at], ids[at]))
        if spec.positions:
            counted = lists.beside(spec.positions, offsets)
            reason = f'"{spec.positions}" holds the position %s; expected one from 0 to {(1 << 31) - 1}'
            lists.refuse(offsets, (counted < 0) | (counted >= 1 << 31), lambda at: reason % counted[at])
            positions = counted.astype(np.int32)
        empty = np.diff(offsets) == 0
        kept = np.flatnonzero(lists.good & ~empty)
        items, offsets = ragged_take(offsets, kept)
        loss, positions = (None if column is None else column[items] for column in (loss, positions))
        tokens, blank = ids[items].astype(np.uint32), rows.places[lists.good & empty]
        return self.finished(Documents(tokens, offsets, rows.places[kept], blank, loss, positions))


class _Lists:
    """The columns of lists of some rows.

    Attributes:
        good: bool[n_rows], which rows have had no fault so far.
    """

    def __init__(self, encoder: PretokenizedEncoder, rows: Rows) -> None:
        self._encoder, self._rows = encoder, rows
        self.good = np.ones(rows.table.num_rows, dtype=bool)

    def read(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The items of a column, int64[n_items], and their offsets int64[n_rows + 1]; nulls are empty lists."""
        column = one_chunk(self._encoder.column(self._rows, name))
        if pa.types.is_null(column.type):
            return np.empty(0, dtype=np.int64), np.zeros(len(column) + 1, dtype=np.int64)
        if pa.types.is_large_string(column.type) or pa.types.is_string(column.type):
            column = self._parsed(name, column.to_pylist())
        kind = column.type
        if not isinstance(kind, _LIST_TYPES) or not _holds_ids(kind.value_type):
            raise self._encoder.type_error(name, kind, "lists of whole numbers")
        lengths = pc.list_value_length(column)
        counts = values_of(lengths.fill_null(column_of([0]).cast(lengths.type)[0]))
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        items = column.flatten()  # without those of nulls, and without what a slice leaves out
        if pa.types.is_null(items.type):
            items = items.cast(pa.int64())
        if items.null_count:
            self.refuse(offsets, ~valid_mask(items), lambda at: f'"{name}" holds a null in its list')
            items = items.fill_null(False if pa.types.is_boolean(items.type) else column_of([0]).cast(items.type)[0])
        if pa.types.is_boolean(items.type):
            return mask_of(items).astype(np.int64), offsets
        values = values_of(items)
        if pa.types.is_uint64(items.type):
            values = np.minimum(values, np.uint64(_LARGEST))
        return values.astype(np.int64), offsets

    def beside(self, name: str, offsets: np.ndarray) -> np.ndarray:
        """The values of a column with one for each id, int64[n_ids]; 0 for rows that do not fit."""
        values, own_offsets = self.read(name)
        counts, own_counts = np.diff(offsets), np.diff(own_offsets)
        for index in np.flatnonzero(counts != own_counts).tolist():
            self._fail(
                index, f'"{name}" holds {own_counts[index]} values for {counts[index]} ids; expected one for each'
            )
        keep = np.flatnonzero(self.good)
        whole = np.zeros(int(offsets[-1]), dtype=np.int64)
        whole[ragged_take(offsets, keep)[0]] = values[ragged_take(own_offsets, keep)[0]]
        return whole

    def refuse_padding(self, name: str) -> None:
        """Fail the rows with a 0 in an attention mask."""
        reason = (
            f'"{name}" holds 0, so the id there is padding; expected 1 everywhere. Remove padding in a map, or leave '
            f'the column out by name (ignored=["{name}"], in a recipe ignored_fields)'
        )
        mask, offsets = self.read(name)
        self.refuse(offsets, mask == 0, lambda at: reason)

    def refuse(self, offsets: np.ndarray, wrong: np.ndarray, reason: Callable[[int], str]) -> None:
        """Fail the rows with wrong items, for the first of them."""
        items = np.flatnonzero(wrong)
        rows, first = np.unique(np.searchsorted(offsets, items, side="right") - 1, return_index=True)
        for index, item in zip(rows.tolist(), items[first].tolist(), strict=True):
            self._fail(index, reason(item))

    def _fail(self, index: int, reason: str) -> None:
        if self.good[index]:
            self._rows.fail(index, "pretokenized", reason)
            self.good[index] = False

    def _parsed(self, name: str, values: list[str | None]) -> pa.Array:
        """Arrays as JSON lines hold them."""
        lists: list[list[int]] = []
        for index, value in enumerate(values):
            try:
                lists.append([] if value is None else _JSON_LIST.decode(value))
            except (ValueError, RecursionError):
                lists.append([])
                self._fail(index, f'"{name}" is no list of whole numbers')
        ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        flat = np.array([item for each in lists for item in each], dtype=np.int64)
        return pa.LargeListArray.from_arrays(int64_array(ends), int64_array(flat))


_LIST_TYPES = pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType


def _holds_ids(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
