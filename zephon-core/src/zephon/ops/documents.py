"""From rows to documents of tokens: the stateless worker of everything that comes before packing.

A block's rows go through the row operators dataset by dataset, since datasets differ in their columns and may have
operators of their own. Then encoders make tokens of them: one for text, one for conversations, one for tokens that are
there already. What comes out is in the order of the rows that went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.columns.damage import shown_value
from zephon.columns.faults import RowFault, reason_of
from zephon.columns.records import RowBlock, RowPart, TokenBlock, ragged_take
from zephon.config.options import FaultPolicy
from zephon.errors import DataError
from zephon.ops.rows import RowFailure, RowOperator, Rows, apply_all

__all__ = ["DocumentWorker", "Documents", "Emitted", "Encoder"]


@dataclass(slots=True)
class Documents:
    """Documents as tokens, in ascending order of the rows they came from.

    Attributes:
        tokens: uint32[n_tokens].
        offsets: int64[n_docs + 1].
        places: int64[n_docs], ascending: the row of the block that each came from.
        blank: int64[m], places of rows without any content.
        loss, positions: as in `TokenBlock`.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    places: np.ndarray
    blank: np.ndarray
    loss: np.ndarray | None = None
    positions: np.ndarray | None = None

    @staticmethod
    def merged(parts: Sequence[Documents]) -> Documents:
        """All documents in the order of their places; those of one place stay in their order."""
        if len(parts) == 1:
            return parts[0]
        places = np.concatenate([part.places for part in parts])
        ends = np.cumsum([part.offsets[-1] for part in parts])
        offsets = np.concatenate(
            [parts[0].offsets, *(part.offsets[1:] + end for part, end in zip(parts[1:], ends[:-1], strict=True))]
        )
        order = np.argsort(places, kind="stable")
        items, new_offsets = ragged_take(offsets, order)
        loss = positions = None
        if any(part.loss is not None for part in parts):
            filled = [np.ones(len(p.tokens), dtype=bool) if p.loss is None else p.loss for p in parts]
            loss = np.concatenate(filled)[items]
        if any(part.positions is not None for part in parts):
            counted = [_counted(p) if p.positions is None else p.positions for p in parts]
            positions = np.concatenate(counted)[items]
        return Documents(
            tokens=np.concatenate([part.tokens for part in parts])[items],
            offsets=new_offsets,
            places=places[order],
            blank=np.concatenate([part.blank for part in parts]),
            loss=loss,
            positions=positions,
        )


def _counted(documents: Documents) -> np.ndarray:
    """-1 stands for a position that counts from the start of the document, see `WrapPacker`."""
    return np.full(len(documents.tokens), -1, dtype=np.int32)


@dataclass(slots=True)
class Emitted:
    """Rows on their way to the encoders, and the account of those they were made from.

    Attributes:
        rows: the rows.
        rows_read, rows_dropped, rows_failed, faults: as in `TokenBlock`.
        failed: places of the rows that are in `rows_failed`.
    """

    rows: RowBlock
    rows_read: np.ndarray
    rows_dropped: np.ndarray
    rows_failed: np.ndarray
    faults: tuple[tuple[int, tuple[RowFault, ...]], ...] = ()
    failed: frozenset[int] = frozenset()


class Encoder(Protocol):
    """Makes documents of rows. Stateless; used by any number of threads; pickles."""

    columns: tuple[str, ...]
    """What it reads."""
    joins: bool
    """Whether rows of several datasets may be encoded together, once `columns` have been made alike by `alike`."""

    def alike(self, rows: Rows) -> Rows:
        """`columns` alone, in types that are the same for every dataset; without rows whose values do not fit."""

    def encode(self, rows: Rows) -> Documents:
        """The documents of some rows."""

    def texts(self, rows: Rows) -> list[str]:
        """Texts as the tokenizer gets them, for its self-check."""


class DocumentWorker:
    """The worker of row operators and tokenizing: a function from a block of rows to a block of tokens.

    Args:
        operators: by dataset, the row operators for it in order.
        encoders: by dataset; those that are one object are used together.
        names: of the datasets.
        locate: shard and row within it, of a row of a dataset given by number, for messages.
        faults: what happens to rows that cannot be used.
    """

    def __init__(
        self,
        operators: Sequence[Sequence[RowOperator]],
        encoders: Sequence[Encoder],
        names: Sequence[str],
        locate: Callable[[int, int], tuple[str, int]],
        faults: FaultPolicy,
    ) -> None:
        self._operators = [tuple(chain) for chain in operators]
        self._encoders = list(encoders)
        self._names = list(names)
        self._locate = locate
        self._policy, self._skips, self._keeps = faults, faults.skips, faults.keeps

    def __call__(self, block: RowBlock) -> TokenBlock:
        """Raises `DataError` for the first row that cannot be used, unless those are left out."""
        try:
            documents, failed = self._documents(block.parts, self._skips)
        except RowFailure as failure:
            failure = self._first(failure, block.parts)
            raise self._told(block, failure) from failure.__cause__
        places, dataset = documents.places, block.dataset
        # What became of each row: nothing, without content, left out as faulty, documents.
        fate = np.zeros(len(dataset), dtype=np.int8)
        fate[documents.blank] = 1
        fate[[place for place, _, _ in failed] + [place for place, _ in block.lost]] = 2
        fate[places] = 3
        begin = None
        if len(places) > 1 and (np.diff(places) == 0).any():
            first = np.searchsorted(places, places, side="left")
            begin = documents.offsets[:-1] - documents.offsets[first]
        n = len(self._names)
        return TokenBlock(
            tokens=documents.tokens,
            offsets=documents.offsets,
            dataset=dataset[places],
            row=block.row[places],
            position=block.position[places],
            chunk=block.chunk,
            rows_read=np.bincount(dataset, minlength=n),
            rows_skipped=np.bincount(dataset[fate == 1], minlength=n),
            loss=documents.loss,
            positions=documents.positions,
            begin=begin,
            rows_dropped=np.bincount(dataset[fate == 0], minlength=n),
            rows_failed=np.bincount(dataset[fate == 2], minlength=n),
            faults=self._faults(block, failed),
        )

    def prepared(self, block: RowBlock) -> tuple[list[tuple[int, Rows]], Emitted]:
        """What the row operators make of a block, by dataset, and the account of it."""
        failed: list[tuple[int, str, str]] = []
        fate = np.zeros(len(block.dataset), dtype=np.int8)
        made = []
        try:
            for part in block.parts:
                rows = Rows(part.table, part.places, self._skips, failed)
                apply_all(self._operators[part.dataset], rows)
                fate[rows.places] = 3
                made.append((part.dataset, rows))
        except RowFailure as failure:
            raise self._told(block, failure) from failure.__cause__
        fate[[place for place, _, _ in failed] + [place for place, _ in block.lost]] = 2
        n = len(self._names)
        return made, Emitted(
            rows=block,
            rows_read=np.bincount(block.dataset, minlength=n),
            rows_dropped=np.bincount(block.dataset[fate == 0], minlength=n),
            rows_failed=np.bincount(block.dataset[fate == 2], minlength=n),
            faults=self._faults(block, failed),
            failed=frozenset(np.flatnonzero(fate == 2).tolist()),
        )

    def blame(self, block: RowBlock, place: int, operator: str, reason: str, error: Exception | None) -> NoReturn:
        """A row that cannot be used, where that ends the run."""
        raise self._told(block, RowFailure(place, operator, reason)) from error

    @property
    def skips(self) -> bool:
        """Whether rows that cannot be used are left out rather than ending the run."""
        return self._skips

    def faults_of(
        self, block: RowBlock, failed: Sequence[tuple[int, str, str]]
    ) -> tuple[tuple[int, tuple[RowFault, ...]], ...]:
        """By chunk, as in `TokenBlock`, the faults (place, operator, reason) of rows of a block."""
        return self._faults(replace(block, lost=()), failed)

    def count(self, dataset: int, table: pa.Table) -> int:
        """Tokens that rows of a dataset make, special tokens included; rows that cannot be used make none."""
        everything = np.arange(table.num_rows, dtype=np.int64)
        documents, _ = self._documents([RowPart(dataset, table, everything)], skips=True)
        return int(documents.offsets[-1])

    def rows(self, dataset: int, table: pa.Table, *, skips: bool) -> Rows:
        """What the row operators make of rows of a dataset, which they may change."""
        rows = Rows(table, np.arange(table.num_rows, dtype=np.int64), skips)
        apply_all(self._operators[dataset], rows)
        return rows

    def texts(self, dataset: int, table: pa.Table) -> list[str]:
        """Texts as the tokenizer gets them."""
        rows = self.rows(dataset, table, skips=True)
        return self._encoders[dataset].texts(rows) if rows.table.num_rows else []

    def describe(self, dataset: int, row: int) -> str:
        """Where a row of a dataset lies, in words."""
        shard, in_shard = self._locate(dataset, row)
        return f'dataset "{self._names[dataset]}", shard {shard}, row {in_shard}'

    @property
    def chains(self) -> list[tuple[RowOperator, ...]]:
        """By dataset, the row operators."""
        return self._operators

    @property
    def encoders(self) -> list[Encoder]:
        """By dataset, what makes documents."""
        return self._encoders

    def running(
        self, chains: Sequence[Sequence[RowOperator]], encoders: Sequence[Encoder] | None = None
    ) -> DocumentWorker:
        """The same with other row operators, and other encoders where given, which do the same."""
        return DocumentWorker(chains, encoders or self._encoders, self._names, self._locate, self._policy)

    def spoken(self, block: RowBlock) -> str:
        """Which rows a block holds, in words."""
        first, last = (self.describe(int(block.dataset[n]), int(block.row[n])) for n in (0, -1))
        return f"{len(block.row):,} rows, the first {first}, the last {last}"

    def operators_of(self, dataset: int) -> tuple[RowOperator, ...]:
        """The row operators for a dataset."""
        return self._operators[dataset]

    def _documents(self, parts: Sequence[RowPart], skips: bool) -> tuple[Documents, list[tuple[int, str, str]]]:
        """The documents of some rows, and (place, operator, reason) of those that cannot be used."""
        failed: list[tuple[int, str, str]] = []
        groups: dict[int, tuple[Encoder, list[Rows]]] = {}
        for part in parts:
            rows = Rows(part.table, part.places, skips, failed)
            apply_all(self._operators[part.dataset], rows)
            if self._operators[part.dataset] and not rows.table.num_rows:
                continue  # with the columns as they were, not as operators would have made them
            encoder = self._encoders[part.dataset]
            groups.setdefault(id(encoder), (encoder, []))[1].append(rows)
        made = []
        for encoder, pieces in groups.values():
            made += [encoder.encode(rows) for rows in ([_joined(encoder, pieces)] if encoder.joins else pieces)]
        if not made:
            none = np.empty(0, dtype=np.int64)
            made = [Documents(np.empty(0, dtype=np.uint32), np.zeros(1, dtype=np.int64), none, none)]
        return Documents.merged(made), sorted(failed, key=lambda item: item[0])

    def _first(self, failure: RowFailure, parts: Sequence[RowPart]) -> RowFailure:
        """The failure of the first row that fails: another row may have failed at an earlier operator, or dataset.

        So a run ends at the same row wherever its blocks are cut.
        """
        while failure.place:
            before = []
            for part in parts:
                count = int(np.searchsorted(part.places, failure.place))
                if count:
                    before.append(RowPart(part.dataset, part.table.slice(0, count), part.places[:count]))
            try:
                if before:
                    self._documents(before, skips=False)
                break
            except RowFailure as earlier:
                failure = earlier
        return failure

    def _told(self, block: RowBlock, failure: RowFailure) -> DataError:
        fault = self._fault(block, failure.place, failure.operator, failure.reason)
        return DataError(f'{fault}; repair it, or leave such rows out with on_error = "skip".')

    def _faults(
        self, block: RowBlock, failed: Sequence[tuple[int, str, str]]
    ) -> tuple[tuple[int, tuple[RowFault, ...]], ...]:
        """By chunk, as in `TokenBlock`."""
        if not failed and not block.lost:
            return ()
        # A row is told of once, whatever became of the several that it may have been made into.
        first = {place: why for place, *why in reversed(failed)}
        made = [(place, self._fault(block, place, *why)) for place, why in first.items()]
        for place, lost in block.lost:
            fault = self._fault(block, place, "read", lost.reason)
            made.append((place, replace(fault, first_row=lost.first_row, rows=lost.rows, content=lost.content)))
        made.sort(key=lambda item: item[0])
        return ((block.chunk, tuple(fault for _, fault in made)),)

    def _fault(self, block: RowBlock, place: int, operator: str, reason: str) -> RowFault:
        dataset = int(block.dataset[place])
        shard, row = self._locate(dataset, int(block.row[place]))
        content = _content(block, place) if self._keeps else ""
        return RowFault(operator, self._names[dataset], shard, row, reason, row, 1, content)


def _content(block: RowBlock, place: int) -> str:
    """What a row held before the operators, for people."""
    for part in block.parts:
        at = int(np.searchsorted(part.places, place))
        if at < len(part.places) and part.places[at] == place:
            try:
                row = part.table.slice(at, 1).to_pylist()[0]
            except Exception as error:  # a value that Python does not know, such as a date in the year 30,000
                return reason_of(error)
            return shown_value("\n".join(f"{name}: {shown_value(value)}" for name, value in row.items()))
    return ""


def _joined(encoder: Encoder, pieces: list[Rows]) -> Rows:
    """Rows of several datasets as one table, in the order of their places."""
    pieces = [encoder.alike(rows) for rows in pieces]
    if len(pieces) == 1:
        return pieces[0]
    # Without copying first: one gather puts the rows of all into their order.
    table = pa.concat_tables([rows.table for rows in pieces]).combine_chunks()
    places = np.concatenate([rows.places for rows in pieces])
    order = np.argsort(places, kind="stable")
    return Rows(table.take(int64_array(order)), places[order], pieces[0].skips, pieces[0].failed)
