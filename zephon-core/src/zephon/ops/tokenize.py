"""Tokenizing: rows with text into documents of tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .._arrow import byte_lengths, int64_array, mask_of, string_array
from ..errors import PipelineError
from ..records import RowBlock, TokenBlock
from ..tokenizer import Tokenizer
from .base import check_workers

__all__ = ["Tokenize", "TokenizeWorker", "add_special_tokens"]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turn a text column into tokens.

    Attributes:
        tokenizer_id: a folder with a tokenizer.json, such a file, or a name on the Hub.
        field: the column with the text; a dataset's own `text_field` takes its place for that dataset.
        special_tokens: "auto" (EOS, and BOS where the tokenizer has one of its own), "bos_eos", "bos", "eos" or "none".
        backend: "auto", or the library to insist on.
        parallelism: worker threads, or None for the default.
    """

    tokenizer_id: str | os.PathLike[str]
    field: str = "text"
    special_tokens: str = "auto"
    backend: str = "auto"
    parallelism: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise PipelineError(f"tokenize field is {self.field!r}; the name of a text column is needed.")
        check_workers("tokenize", self.parallelism)


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


class TokenizeWorker:
    """The worker of `Tokenize`: a stateless function over blocks of rows, used by any number of threads.

    Args:
        tokenizer: loaded and checked.
        field: the text column.
        bos, eos: ids to put round each document, or None.
        n_datasets: for the counts per dataset.
    """

    def __init__(self, tokenizer: Tokenizer, field: str, bos: int | None, eos: int | None, n_datasets: int) -> None:
        self._tokenizer = tokenizer
        self._field = field
        self._bos, self._eos = bos, eos
        self._n_datasets = n_datasets

    def count(self, table: pa.Table) -> int:
        """Tokens that the rows of `table` make, special tokens included."""
        text, _ = self._with_text(table)
        offsets = self._tokenizer.encode(text)[1]
        return int(offsets[-1]) + len(text) * ((self._bos is not None) + (self._eos is not None))

    def __call__(self, block: RowBlock) -> TokenBlock:
        text, kept = self._with_text(block.table)
        tokens, offsets = add_special_tokens(*self._tokenizer.encode(text), self._bos, self._eos)
        dropped = np.bincount(block.dataset[~kept], minlength=self._n_datasets)
        return TokenBlock(
            tokens=tokens,
            offsets=offsets,
            dataset=block.dataset[kept],
            row=block.row[kept],
            position=block.position[kept],
            chunk=block.chunk,
            rows_read=np.bincount(block.dataset, minlength=self._n_datasets),
            rows_skipped=dropped,
        )

    def _with_text(self, table: pa.Table) -> tuple[pa.Array, np.ndarray]:
        """The texts that are more than null, nothing or white space, and which rows they are (bool[n])."""
        column = table.column(self._field)
        text = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(text, pa.ChunkedArray):  # no chunk at all
            text = string_array([], column.type)
        kept = (byte_lengths(text) > 0) & ~mask_of(pc.utf8_is_space(text))  # nulls have no bytes
        return (text if kept.all() else text.take(int64_array(np.flatnonzero(kept)))), kept
