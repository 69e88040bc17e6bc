"""What the three operators that make documents have in common: their options, and limits and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zephon.config.options import check_workers
from zephon.errors import PipelineError
from zephon.ops.documents import Documents
from zephon.ops.rows import Rows, check_names, missing_column

__all__ = ["DocumentEncoder", "EncodeOptions", "add_special_tokens", "check_column_name", "column_type_error"]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `Tokenize`, `TokenizeChat` and `Pretokenized`.

    Attributes:
        special_tokens: "auto" (for text EOS, and BOS where the tokenizer has one of its own; nothing for conversations
            and given tokens), "bos_eos", "bos", "eos" or "none".
        backend: "auto", or the library to insist on.
        parallelism: worker threads, or None for the default.
        max_length: most tokens of a document, special tokens included; None is no limit. A longer one is cut off (its
            EOS is kept), or, with `split_long_samples`, cut into several documents.
        split_long_samples: see max_length.
        datasets: names of the datasets with such documents, or None for all.
    """

    kind: ClassVar[str]
    special_tokens: str = "auto"
    backend: str = "auto"
    parallelism: int | None = None
    max_length: int | None = None
    split_long_samples: bool = False
    datasets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        kind, limit, split = self.kind, self.max_length, self.split_long_samples
        check_workers(kind, self.parallelism)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise PipelineError(f"{kind} max_length is {limit!r}; expected a number of tokens, or None.")
        if not isinstance(split, bool):
            raise PipelineError(f"{kind} split_long_samples is {split!r}; expected True or False.")
        if split and limit is None:
            raise PipelineError(f"{kind} split_long_samples needs max_length, the tokens of a piece.")
        object.__setattr__(self, "datasets", check_names(kind, "datasets", self.datasets))

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns that it reads besides `field`."""
        return ()

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns that it reads where they exist."""
        return ()

    @property
    def limit_identity(self) -> str:
        """The limit of tokens, for fingerprints."""
        return f" max_length={self.max_length} split={self.split_long_samples}" if self.max_length else ""


class DocumentEncoder:
    """What the workers of these operators have in common. Stateless: any number of threads use one.

    Args:
        options: the description.
        columns: what it reads.
        bos, eos: ids to put round each document, or None.
        bos_trained: whether a BOS that is put in counts for the loss; an EOS does.

    Raises:
        PipelineError: the limit leaves no room for content.
    """

    joins = False

    def __init__(
        self, options: EncodeOptions, columns: Sequence[str], bos: int | None, eos: int | None, bos_trained: bool = True
    ) -> None:
        self.columns = tuple(columns)
        self._options = options
        self._bos, self._eos, self._bos_trained = bos, eos, bos_trained
        self._extra = (bos is not None) + (eos is not None)
        if options.max_length is not None and options.max_length <= self._extra:
            raise PipelineError(
                f"{options.kind} max_length is {options.max_length}, which leaves no room for content besides "
                f"{self._extra} special token(s)."
            )

    def alike(self, rows: Rows) -> Rows:
        """As it is: every dataset is encoded by itself."""
        return rows

    def texts(self, rows: Rows) -> list[str]:
        """Texts as the tokenizer gets them: none."""
        return []

    def column(self, rows: Rows, name: str) -> Any:
        """A column of the rows.

        Raises:
            PipelineError: it is missing.
        """
        if name not in rows.table.column_names:
            raise PipelineError(f"{self._options.kind} {missing_column(name, rows.table.column_names)}")
        return rows.table.column(name)

    def finished(self, documents: Documents) -> Documents:
        """Documents of content alone, cut to the limit and with their special tokens."""
        limit, split = self._options.max_length, self._options.split_long_samples
        tokens, offsets, places = documents.tokens, documents.offsets, documents.places
        loss, positions = documents.loss, documents.positions
        if limit is not None and not split:
            tokens, offsets, (loss, positions) = _shortened(tokens, offsets, limit - self._extra, loss, positions)
        if self._extra:
            plain = offsets
            tokens, offsets = add_special_tokens(tokens, plain, self._bos, self._eos)
            if loss is not None:
                ends = None if self._bos is None else int(self._bos_trained), None if self._eos is None else 1
                loss, _ = add_special_tokens(loss, plain, *ends)
        if limit is not None and split:
            offsets, document = _split_up(offsets, limit)
            places = places[document]
        return Documents(tokens, offsets, places, documents.blank, loss, positions)


def add_special_tokens(
    tokens: np.ndarray, offsets: np.ndarray, bos: int | None, eos: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Put BOS before and EOS after every document, where they are not None.

    Args:
        tokens: [n_tokens], ids or what goes with them.
        offsets: int64[n_docs + 1].

    Returns:
        The same two arrays for the longer documents.
    """
    extra = (bos is not None) + (eos is not None)
    if not extra:
        return tokens, offsets
    longer = offsets + extra * np.arange(len(offsets), dtype=np.int64)
    out = np.empty(int(longer[-1]), dtype=tokens.dtype)
    content = np.ones(len(out), dtype=bool)
    for token, places in ((bos, longer[:-1]), (eos, longer[1:] - 1)):
        if token is not None:
            out[places] = token
            content[places] = False
    out[content] = tokens
    return out, longer


def _shortened(
    tokens: np.ndarray, offsets: np.ndarray, limit: int, *columns: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]:
    """The first `limit` tokens of every document, and the same of `columns`, [n_tokens] each or None."""
    counts = np.minimum(np.diff(offsets), limit)
    if int(counts.sum()) == int(offsets[-1]):
        return tokens, offsets, list(columns)
    new_offsets = np.zeros(len(offsets), dtype=np.int64)
    np.cumsum(counts, out=new_offsets[1:])
    items = np.repeat(offsets[:-1] - new_offsets[:-1], counts) + np.arange(new_offsets[-1], dtype=np.int64)
    return tokens[items], new_offsets, [None if column is None else column[items] for column in columns]


def _split_up(offsets: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents cut into pieces of at most `limit` tokens.

    Returns:
        (offsets int64[n_pieces + 1], document int64[n_pieces] that each piece is of).
    """
    lengths = np.diff(offsets)
    pieces = np.maximum(1, -(-lengths // limit))
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    nth = np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(offsets[document] + nth * limit, offsets[-1]), document


def check_column_name(operator: str, key: str, name: object, *, required: bool = False) -> None:
    """Refuse what is not the name of a column."""
    if (name is None and required) or (name is not None and (not isinstance(name, str) or not name)):
        raise PipelineError(f"{operator} {key} is {name!r}; expected the name of a column.")


def column_type_error(operator: str, column: str, kind: Any, wanted: str) -> PipelineError:
    """For a column of a type that an encoder cannot use."""
    return PipelineError(f'{operator}: column "{column}" holds {kind}; expected {wanted}.')
