"""What the operators that make documents have in common: their options, special tokens and limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from string import Formatter
from typing import Any, ClassVar, Literal, Self

import numpy as np

from zephon.columns.arrow import ragged_take
from zephon.columns.images import Images
from zephon.config.keys import Names, Positive, Workers, check_keys, key, quote, settings_of
from zephon.config.settings import SpecialTokens
from zephon.errors import PipelineError
from zephon.ops.rows import Rows, check_names, missing_column
from zephon.tokenizer.load import portable_tokenizer
from zephon.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `Tokenize`, `TokenizeChat` and `Pretokenized`.

    Attributes:
        layout: the head of its text in fingerprints.
        resolved_settings: those that fingerprints have in another form: as digest of the tokenizer, as ids, as
            `Encoder.details`.
    """

    kind: ClassVar[str]
    layout: ClassVar[str]
    resolved_settings: ClassVar[frozenset[str]] = frozenset(["tokenizer_id", "special_tokens"])
    special_tokens: SpecialTokens = key(
        "auto",
        'Tokens round each document: "bos_eos", "bos", "eos", "none", or "auto": for text EOS, and BOS where the '
        "tokenizer has one of its own; none for conversations and token ids.",
    )
    backend: Literal["auto", "fastokens", "gigatoken", "tokenizers"] = key(
        "auto", "The library to insist on.", decides_data=False
    )
    parallelism: Workers | None = key(None, "Worker threads; None is the default.", decides_data=False)
    max_length: Positive | None = key(
        None,
        "Most tokens of a document, special tokens included. A longer one is cut off (its EOS is kept), or, with "
        "split_long_samples, cut into several documents.",
    )
    split_long_samples: bool = key(False, "See max_length.")
    datasets: Sequence[str] | None = None
    """Names of the datasets with such documents, or None for all."""

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, f"{self.kind} ")
        if (tokenizer := getattr(self, "tokenizer_id", None)) is not None:
            object.__setattr__(self, "tokenizer_id", portable_tokenizer(tokenizer))
        if self.split_long_samples and self.max_length is None:
            raise PipelineError(f"{self.kind} split_long_samples needs max_length, the tokens of a piece.")
        object.__setattr__(self, "datasets", check_names(self.kind, "datasets", self.datasets))

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns that it reads besides `field`."""
        return ()

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns that it reads where they exist."""
        return ()

    def identity(self) -> str:
        """All settings that decide data, as text, for fingerprints: those of the layout, and others that are set."""
        settings = settings_of(self)
        layout = (
            f"{self.layout} max_length={{max_length}} split={{split_long_samples}}" if self.max_length else self.layout
        )
        named = {name for _, name, _, _ in Formatter().parse(layout)}
        others = (f for f in fields(self) if f.name in settings.keys() - named - self.resolved_settings)
        more = (f" {f.name}={settings[f.name]}" for f in others if settings[f.name] != f.default)
        return layout.format(**settings | {"datasets": self.datasets or "all"}) + "".join(more)


@dataclass(frozen=True, kw_only=True)
class PartsOptions(EncodeOptions):
    """Options of operators whose documents have parts in several columns, of which none is left out silently.

    Attributes:
        whole: what the columns belong to, for messages.
        unless: what to do with a column that no option takes.
    """

    whole: ClassVar[str]
    unless: ClassVar[str]
    ignored: Names = key((), "Columns that belong to the documents and are left out on purpose.", decides_data=False)

    @property
    def named_columns(self) -> tuple[str, ...]:
        """Columns that its options name."""
        raise NotImplementedError

    def parts(self) -> Mapping[str, str]:
        """Columns that change what documents say or train on, with the option that takes each, or ""."""
        raise NotImplementedError

    @property
    def unused_columns(self) -> tuple[str, ...]:
        """Columns of `parts`, beside `field` or what holds it, that are neither used nor ignored."""
        field: str = settings_of(self)["field"]
        folder = field.rpartition(".")[0]
        names = [*self.parts(), *(f"{folder}.{name}" for name in (self.parts() if folder else ()))]
        used = {field, *self.extra_columns, *self.optional_columns, *self.ignored}
        return tuple(name for name in names if name not in used)

    def resolved(self, present: Sequence[str], dataset: str, read: Collection[str] = ()) -> Self:
        """The same for a dataset with these columns, of which other operators read some.

        Raises:
            PipelineError: a column that is named is missing, or one that belongs to documents is not used.
        """
        found = replace(self, ignored=(*self.ignored, *sorted(read)))
        found.check_used(present, dataset)
        return found

    def check_used(self, present: Iterable[str], dataset: str) -> None:
        """PipelineError for a column that is not used."""
        present = {*present}
        for name in self.unused_columns:
            if name in present:
                raise PipelineError(f'dataset "{dataset}": {self.refusal(name)}.')

    def refusal(self, name: str) -> str:
        """The words for a column that is not used."""
        option = self.parts()[name if name in self.parts() else name.rpartition(".")[2]]
        remedy = f"name it ({option}={quote(name)}, in a recipe {option}_field)" if option else self.unless
        return (
            f'{self.kind} does not use column "{name}", which belongs to {self.whole}; {remedy}, or leave it out by '
            f"name (ignored=[{quote(name)}], in a recipe ignored_fields)"
        )


@dataclass(slots=True)
class Documents:
    """Documents as tokens uint32[n_tokens] with offsets int64[n_docs + 1], in the order of the rows they came from.

    `places` int64[n_docs] are those rows of the block, `blank` the rows without any content; the others are as in
    `TokenBlock`.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    places: np.ndarray
    blank: np.ndarray
    loss: np.ndarray | None = None
    positions: np.ndarray | None = None
    images: Images | None = None

    @staticmethod
    def merged(parts: Sequence[Documents]) -> Documents:
        """All documents in the order of their places; those of one place stay in their order."""
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return Documents(np.zeros(0, dtype=np.uint32), np.zeros(1, dtype=np.int64), none, none)
        if len(parts) == 1:
            return parts[0]
        places = np.concatenate([part.places for part in parts])
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        order = np.argsort(places, kind="stable")
        items, offsets = ragged_take(np.concatenate([[0], np.cumsum(counts)]), order)

        def joined(name: str, default: int, kind: type) -> np.ndarray | None:
            columns = [getattr(part, name) for part in parts]
            if all(column is None for column in columns):
                return None
            pairs = zip(columns, parts, strict=True)
            return np.concatenate([np.full(len(p.tokens), default, kind) if c is None else c for c, p in pairs])[items]

        images = Images.concat([part.images for part in parts], [len(part.places) for part in parts])
        return Documents(
            tokens=np.concatenate([part.tokens for part in parts])[items],
            offsets=offsets,
            places=places[order],
            blank=np.concatenate([part.blank for part in parts]),
            loss=joined("loss", True, np.bool_),
            positions=joined("positions", -1, np.int32),  # -1 counts from the start of the document, see `WrapPacker`
            images=None if images is None else images.take(order),
        )


class Encoder:
    """Makes documents of rows, with `bos` and `eos` round each. Stateless: any number of threads use one; pickles.

    `joins` says whether rows of several datasets may be encoded together, once `alike` has made them so; `bos_trained`
    whether a BOS that is put in counts for the loss, as an EOS does.
    """

    joins = False

    def __init__(
        self, options: EncodeOptions, bos: int | None = None, eos: int | None = None, *, bos_trained: bool = True
    ) -> None:
        self._options = options
        self._bos, self._eos, self._bos_trained = bos, eos, bos_trained
        self._extra = (bos is not None) + (eos is not None)
        if options.max_length is not None and options.max_length <= self._extra:
            raise PipelineError(
                f"{options.kind} max_length is {options.max_length}; expected more than the {self._extra} special "
                "token(s) round each document."
            )

    def details(self, usual: tuple[int | None, int | None] = (None, None)) -> dict[str, str]:
        """Resolved settings for the fingerprint; BOS and EOS where they are not the usual ones."""
        own = self._bos, self._eos
        return {} if own == usual else {"special_tokens": "bos={} eos={}".format(*own)}

    def alike(self, rows: Rows) -> Rows:
        """The columns to encode, in types that are the same for every dataset; without rows that do not fit."""
        return rows

    def encode(self, rows: Rows) -> Documents:
        """The documents of some rows."""
        raise NotImplementedError

    def texts(self, rows: Rows) -> list[str]:
        """Texts as the tokenizer gets them, for its self-check."""
        return []

    def probe(self) -> str:
        """A digest of the tokens that this process gives for the probe texts; "" where it makes no tokens of text."""
        tokenizer: Tokenizer | None = getattr(self, "_tokenizer", None)
        return "" if tokenizer is None else tokenizer.probe()

    def check_used(self, columns: Iterable[str], dataset: str) -> None:
        """PipelineError for a column that operators made and that is not used, or that is named and was not made."""
        if isinstance(self._options, PartsOptions):
            self._options.check_used(columns := list(columns), dataset)
            for name in self._options.named_columns:
                if name not in columns:
                    raise PipelineError(f'dataset "{dataset}": {self._options.kind} {missing_column(name, columns)}')

    def column(self, rows: Rows, name: str) -> Any:
        """A column of the rows, or PipelineError."""
        if name not in rows.table.column_names:
            raise PipelineError(f"{self._options.kind} {missing_column(name, rows.table.column_names)}")
        return rows.table.column(name)

    def type_error(self, name: str, kind: Any, expected: str) -> PipelineError:
        """For a column of a type that cannot be encoded."""
        return PipelineError(f'{self._options.kind}: column "{name}" holds {kind}; expected {expected}.')

    def finished(self, documents: Documents) -> Documents:
        """Documents of content alone, cut to the limit and with their special tokens."""
        limit, split = self._options.max_length, self._options.split_long_samples
        tokens, offsets, places = documents.tokens, documents.offsets, documents.places
        loss, positions = documents.loss, documents.positions
        counts = np.diff(offsets)
        if limit is not None and not split and counts.max(initial=0) > limit - self._extra:
            kept = np.arange(len(tokens)) - np.repeat(offsets[:-1], counts) < limit - self._extra
            tokens = tokens[kept]
            loss, positions = (None if column is None else column[kept] for column in (loss, positions))
            offsets = np.concatenate([[0], np.cumsum(np.minimum(counts, limit - self._extra))])
        if self._extra:
            if loss is not None:
                trained = None if self._bos is None else int(self._bos_trained), None if self._eos is None else 1
                loss, _ = add_special_tokens(loss, offsets, *trained)
            tokens, offsets = add_special_tokens(tokens, offsets, self._bos, self._eos)
        if limit is not None and split:
            offsets, document = _split_up(offsets, limit)
            places = places[document]
        return replace(documents, tokens=tokens, offsets=offsets, places=places, loss=loss, positions=positions)


def add_special_tokens(
    tokens: np.ndarray, offsets: np.ndarray, bos: int | None, eos: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Put BOS and EOS, or what goes with them, round every document of a column, where they are not None."""
    extra = (bos is not None) + (eos is not None)
    longer = offsets + extra * np.arange(len(offsets), dtype=np.int64)
    out = np.empty(int(longer[-1]), dtype=tokens.dtype)
    content = np.ones(len(out), dtype=bool)
    for token, places in ((bos, longer[:-1]), (eos, longer[1:] - 1)):
        if token is not None:
            out[places] = token
            content[places] = False
    out[content] = tokens
    return out, longer


def _split_up(offsets: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of documents cut into pieces of at most `limit` tokens, and the document that each piece is of."""
    lengths = np.diff(offsets)
    pieces = np.maximum(1, -(-lengths // limit))
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    nth = np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(offsets[document] + nth * limit, offsets[-1]), document
