"""Tokenizing: text into documents of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import byte_lengths, int64_array, mask_of, one_chunk
from zephon.config.keys import Column, key
from zephon.ops.encode import Documents, EncodeOptions, Encoder
from zephon.ops.rows import Rows, text_or_faults
from zephon.tokenizer.load import TokenizerId
from zephon.tokenizer.tokenizer import Tokenizer

_TEXT_TYPES = (pa.string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.null())


@dataclass(frozen=True)
class Tokenize(EncodeOptions):
    """Turn a text column into tokens; see `load_tokenizer` for `tokenizer_id`."""

    kind: ClassVar[str] = "tokenize"
    layout: ClassVar[str] = "text {datasets}"
    resolved_settings: ClassVar[frozenset[str]] = EncodeOptions.resolved_settings | {"field"}
    tokenizer_id: TokenizerId
    field: Column = key("text", "The column with the text; a dataset's own `text_field` takes its place there.")

    def encoder(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> TextEncoder:
        """The worker, for a tokenizer that is loaded and checked."""
        return TextEncoder(self, tokenizer, bos, eos)


class TextEncoder(Encoder):
    """The worker of `Tokenize`."""

    joins = True

    def __init__(self, spec: Tokenize, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
        super().__init__(spec, bos, eos)
        self._field, self._tokenizer = spec.field, tokenizer

    def alike(self, rows: Rows) -> Rows:
        """The text alone, as `large_string`; rows with bytes that are no UTF-8 are left out."""
        column = self.column(rows, self._field)
        bad = np.zeros(rows.table.num_rows, dtype=bool)
        if not pa.types.is_large_string(column.type):
            text = None
            if column.type in _TEXT_TYPES:
                text = text_or_faults(rows, "tokenize", self._field, one_chunk(column), bad)
            if text is None:
                raise self.type_error(self._field, column.type, "text")
            column = text
        texts = Rows(pa.table({self._field: column}), rows.places, rows.skips, rows.failed)
        texts.keep(~bad)
        return texts

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows as `alike` gives them; null, empty and white space alone are blank."""
        text = one_chunk(rows.table.column(self._field))
        kept = (byte_lengths(text) > 0) & ~mask_of(pc.utf8_is_space(text))  # nulls have no bytes
        if not kept.all():
            text = text.take(int64_array(np.flatnonzero(kept)))
        return self.finished(Documents(*self._tokenizer.encode(text), rows.places[kept], rows.places[~kept]))

    def texts(self, rows: Rows) -> list[str]:
        """The texts as they are."""
        return [text for text in self.alike(rows).table.column(self._field).to_pylist() if text]
