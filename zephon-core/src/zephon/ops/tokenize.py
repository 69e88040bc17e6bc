"""Tokenizing: text into documents of tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import byte_lengths, int64_array, mask_of, one_chunk
from zephon.config.options import check_workers
from zephon.errors import PipelineError
from zephon.ops.documents import Documents, column_type_error, shortened, split_up
from zephon.ops.rows import Rows, check_names, missing_column, text_or_faults
from zephon.tokenizer.tokenizer import Tokenizer

__all__ = ["TextEncoder", "Tokenize", "add_special_tokens"]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turn a text column into tokens.

    Attributes:
        tokenizer_id: a folder with a tokenizer.json, such a file, or a name on the Hub.
        field: the column with the text; a dataset's own `text_field` takes its place for that dataset.
        special_tokens: "auto" (EOS, and BOS where the tokenizer has one of its own), "bos_eos", "bos", "eos" or "none".
        backend: "auto", or the library to insist on.
        parallelism: worker threads, or None for the default.
        max_length: most tokens of a document, special tokens included; None is no limit. A longer one is cut off (its
            EOS is kept), or, with `split_long_samples`, cut into several documents.
        split_long_samples: see max_length.
        datasets: names of the datasets with such documents, or None for all.
    """

    kind: ClassVar[str] = "tokenize"
    extra_columns: ClassVar[tuple[str, ...]] = ()
    optional_columns: ClassVar[tuple[str, ...]] = ()
    tokenizer_id: str | os.PathLike[str]
    field: str = "text"
    special_tokens: str = "auto"
    backend: str = "auto"
    parallelism: int | None = None
    max_length: int | None = None
    split_long_samples: bool = False
    datasets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise PipelineError(f"tokenize field is {self.field!r}; the name of a text column is needed.")
        check_workers("tokenize", self.parallelism)
        check_limit("tokenize", self.max_length, self.split_long_samples)
        object.__setattr__(self, "datasets", check_names("tokenize", "datasets", self.datasets))

    def encoder(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> TextEncoder:
        """The worker, for a tokenizer that is loaded and checked."""
        return TextEncoder(tokenizer, self.field, bos, eos, self.max_length, self.split_long_samples)

    def identity(self) -> str:
        """What decides the tokens besides tokenizer and special tokens, for fingerprints."""
        limit = f" max_length={self.max_length} split={self.split_long_samples}" if self.max_length else ""
        return f"text {self.datasets or 'all'}{limit}"


def check_limit(operator: str, max_length: object, split_long_samples: object) -> None:
    """Refuse a limit of tokens that is none."""
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1):
        raise PipelineError(f"{operator} max_length is {max_length!r}; a number of tokens, or None, is needed.")
    if not isinstance(split_long_samples, bool):
        raise PipelineError(f"{operator} split_long_samples is {split_long_samples!r}; True or False is needed.")
    if split_long_samples and max_length is None:
        raise PipelineError(f"{operator} split_long_samples needs max_length, the tokens of a piece.")


def add_special_tokens(
    tokens: np.ndarray, offsets: np.ndarray, bos: int | None, eos: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Put BOS before and EOS after every document, where they are not None.

    Args:
        tokens: uint32[n_tokens].
        offsets: int64[n_docs + 1].

    Returns:
        The same two arrays for the longer documents.
    """
    extra = (bos is not None) + (eos is not None)
    if not extra:
        return tokens, offsets
    longer = offsets + extra * np.arange(len(offsets), dtype=np.int64)
    out = np.empty(int(longer[-1]), dtype=np.uint32)
    content = np.ones(len(out), dtype=bool)
    if bos is not None:
        content[longer[:-1]] = False
    if eos is not None:
        content[longer[1:] - 1] = False
    out[content] = tokens
    if bos is not None:
        out[longer[:-1]] = bos
    if eos is not None:
        out[longer[1:] - 1] = eos
    return out, longer


class TextEncoder:
    """The worker of `Tokenize`: a stateless function over rows, used by any number of threads.

    Args:
        tokenizer: loaded and checked.
        field: the text column.
        bos, eos: ids to put round each document, or None.
        max_length, split: see `Tokenize`.
    """

    joins = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        field: str,
        bos: int | None,
        eos: int | None,
        max_length: int | None = None,
        split: bool = False,
    ) -> None:
        self.columns = (field,)
        self._tokenizer = tokenizer
        self._field = field
        self._bos, self._eos = bos, eos
        self._limit, self._split = max_length, split
        extra = (bos is not None) + (eos is not None)
        if max_length is not None and max_length <= extra:
            raise PipelineError(
                f"tokenize max_length is {max_length}, which leaves no room for text besides {extra} special token(s)."
            )

    def alike(self, rows: Rows) -> Rows:
        """The text alone, as `large_string`; rows with bytes that are no UTF-8 are left out."""
        table, places = rows.table, rows.places
        if self._field not in table.column_names:
            raise PipelineError(f"tokenize {missing_column(self._field, table.column_names)}")
        column = table.column(self._field)
        bad = np.zeros(table.num_rows, dtype=bool)
        if not pa.types.is_large_string(column.type):
            text = None
            if _holds_text(column.type):
                text = text_or_faults(rows, "tokenize", self._field, one_chunk(column), bad)
            if text is None:
                raise PipelineError(column_type_error("tokenize", self._field, column.type, "text"))
            column = text
        made = Rows(pa.table({self._field: column}), places, rows.skips, rows.failed)
        made.keep(~bad)
        return made

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows as `alike` gives them."""
        text, kept = self._with_text(rows.table)
        tokens, offsets = self._tokenizer.encode(text)
        places = rows.places[kept]
        if self._limit is not None and not self._split:
            room = self._limit - (self._bos is not None) - (self._eos is not None)
            tokens, offsets, _ = shortened(tokens, offsets, room)
        tokens, offsets = add_special_tokens(tokens, offsets, self._bos, self._eos)
        if self._limit is not None and self._split:
            offsets, document = split_up(offsets, self._limit)
            places = places[document]
        return Documents(tokens, offsets, places, rows.places[~kept])

    def texts(self, rows: Rows) -> list[str]:
        """The texts as they are."""
        column = self.alike(rows).table.column(self._field)
        return [text for text in column.to_pylist() if text]

    def _with_text(self, table: pa.Table) -> tuple[pa.Array, np.ndarray]:
        """The texts that are more than null, nothing or white space, and which rows they are (bool[n])."""
        text = one_chunk(table.column(self._field))
        kept = (byte_lengths(text) > 0) & ~mask_of(pc.utf8_is_space(text))  # nulls have no bytes
        return (text if kept.all() else text.take(int64_array(np.flatnonzero(kept)))), kept


def _holds_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_null(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_string_view(kind)
    )
