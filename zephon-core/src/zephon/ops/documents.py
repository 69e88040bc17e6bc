"""From rows to documents of tokens: the stateless worker of everything that comes before packing.

A block's rows go through the row operators dataset by dataset, since datasets differ in their columns and may have
operators of their own. Then encoders make tokens of them: one for text, one for conversations, one for tokens that are
there already. Documents are in the order of the rows that they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.columns.damage import shown_value
from zephon.columns.faults import RowFault, reason_of
from zephon.columns.records import RowBlock, RowPart, TokenBlock
from zephon.config.options import FaultPolicy
from zephon.errors import DataError
from zephon.ops.encode import Documents, Encoder
from zephon.ops.rows import RowFailure, RowOperator, Rows, apply_all

_ROWS_WITH_FILES = 16  # that are looked at for their size
Failed = Sequence[tuple[int, str, str]]
"""(place, operator, reason) of rows that cannot be used."""
Faults = tuple[tuple[int, tuple[RowFault, ...]], ...]
"""By chunk, as in `TokenBlock`."""
# What became of a row: left out by an operator, without content, faulty, or passed on.
_DROPPED, _BLANK, _FAULTY, _PASSED = range(4)


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
    faults: Faults = ()
    failed: frozenset[int] = frozenset()


class DocumentWorker:
    """The worker of row operators and tokenizing: a function from a block of rows to a block of tokens.

    Args:
        chains: by dataset, the row operators for it in order.
        encoders: by dataset; those that are one object are used together.
        names: of the datasets.
        locate: shard and row within it, of a row of a dataset given by number, for messages.
        faults: what happens to rows that cannot be used.

    Attributes:
        skips: whether rows that cannot be used are left out rather than ending the run.
    """

    def __init__(
        self,
        chains: Sequence[Sequence[RowOperator]],
        encoders: Sequence[Encoder],
        names: Sequence[str],
        locate: Callable[[int, int], tuple[str, int]],
        faults: FaultPolicy,
    ) -> None:
        self.chains = [tuple(chain) for chain in chains]
        self.encoders = list(encoders)
        self.skips = faults.skips
        self._names, self._locate, self._policy = list(names), locate, faults

    def running(self, chains: Sequence[Sequence[RowOperator]], encoders: Sequence[Encoder]) -> DocumentWorker:
        """The same with other operators and encoders, which do the same."""
        return DocumentWorker(chains, encoders, self._names, self._locate, self._policy)

    def __call__(self, block: RowBlock) -> TokenBlock:
        """Raises `DataError` for the first row that cannot be used, unless those are left out."""
        try:
            documents, failed = self._documents(block.parts, self.skips)
        except RowFailure as failure:
            failure = self._first(failure, block.parts)
            raise self.error(block, failure) from failure.__cause__
        places = documents.places
        fate = self._fate(block, failed, places, documents.blank)
        begin = None
        if len(places) > 1 and (np.diff(places) == 0).any():
            first = np.searchsorted(places, places, side="left")
            begin = documents.offsets[:-1] - documents.offsets[first]
        return TokenBlock(
            tokens=documents.tokens,
            offsets=documents.offsets,
            dataset=block.dataset[places],
            row=block.row[places],
            position=block.position[places],
            chunk=block.chunk,
            rows_skipped=self._count(block, fate == _BLANK),
            loss=documents.loss,
            positions=documents.positions,
            images=documents.images,
            begin=begin,
            **self._account(block, fate, failed),
        )

    def prepared(self, block: RowBlock) -> tuple[list[tuple[int, Rows]], Emitted]:
        """What the row operators make of a block, by dataset, and the account of it."""
        failed: list[tuple[int, str, str]] = []
        try:
            parts = [(part.dataset, self._applied(part, self.skips, failed)) for part in block.parts]
        except RowFailure as failure:
            raise self.error(block, failure) from failure.__cause__
        passed = np.concatenate([np.zeros(0, dtype=np.int64), *(rows.places for _, rows in parts)])
        fate = self._fate(block, failed, passed)
        faulty = frozenset(np.flatnonzero(fate == _FAULTY).tolist())
        return parts, Emitted(block, **self._account(block, fate, failed), failed=faulty)

    def error(self, block: RowBlock, failure: RowFailure) -> DataError:
        """For a row that cannot be used, where that ends the run."""
        fault = self._fault(block, failure.place, failure.operator, failure.reason)
        return DataError(f'{fault}; repair it, or leave such rows out with on_error = "skip".')

    def faults_of(self, block: RowBlock, failed: Failed) -> Faults:
        """The faults of rows of a block."""
        if not failed and not block.lost:
            return ()
        # A row has one fault, whatever became of the several that it may have been made into.
        first = {place: why for place, *why in reversed(failed)}
        faults = [(place, self._fault(block, place, *why)) for place, why in first.items()]
        for place, lost in block.lost:
            fault = self._fault(block, place, "read", lost.reason)
            faults.append((place, replace(fault, first_row=lost.first_row, rows=lost.rows, content=lost.content)))
        faults.sort(key=lambda item: item[0])
        return ((block.chunk, tuple(fault for _, fault in faults)),)

    def count(self, dataset: int, table: pa.Table, failures: list[tuple[int, str, str]] | None = None) -> int:
        """Tokens that rows of a dataset make, special tokens included; rows that cannot be used are `failures`."""
        documents, failed = self._documents([_part(dataset, table)], skips=True)
        if failures is not None:
            failures += failed
        return int(documents.offsets[-1])

    def image_bytes(self, dataset: int, table: pa.Table) -> float:
        """Bytes of the files of images for each of the first few rows of a dataset."""
        some = table.slice(0, _ROWS_WITH_FILES)
        images = self._documents([_part(dataset, some)], skips=True)[0].images
        return 0.0 if images is None else images.nbytes / max(1, some.num_rows)

    def texts(self, dataset: int, table: pa.Table) -> list[str]:
        """Texts of rows of a dataset as the tokenizer gets them."""
        rows = self._applied(_part(dataset, table), True, [])
        return self.encoders[dataset].texts(rows) if rows.table.num_rows else []

    def describe(self, dataset: int, row: int) -> str:
        """Where a row of a dataset lies, in words."""
        shard, in_shard = self._locate(dataset, row)
        return f'dataset "{self._names[dataset]}", shard {shard}, row {in_shard}'

    def describe_block(self, block: RowBlock) -> str:
        """Which rows a block holds, in words."""
        return self.describe_rows(block.dataset, block.row)

    def describe_rows(self, dataset: np.ndarray, row: np.ndarray) -> str:
        """The rows `row` int64[n] of the datasets `dataset` int32[n], in words."""
        first, last = (self.describe(int(dataset[n]), int(row[n])) for n in (0, -1))
        return f"{len(row):,} rows, the first {first}, the last {last}"

    def _applied(self, part: RowPart, skips: bool, failed: list[tuple[int, str, str]]) -> Rows:
        rows = Rows(part.table, part.places, skips, failed)
        apply_all(self.chains[part.dataset], rows)
        return rows

    def _documents(self, parts: Sequence[RowPart], skips: bool) -> tuple[Documents, Failed]:
        """The documents of some rows, and those that cannot be used."""
        failed: list[tuple[int, str, str]] = []
        groups: dict[int, tuple[Encoder, list[Rows]]] = {}
        for part in parts:
            rows = self._applied(part, skips, failed)
            if self.chains[part.dataset] and not rows.table.num_rows:
                continue  # with the columns as they were, not as operators would have made them
            encoder = self.encoders[part.dataset]
            groups.setdefault(id(encoder), (encoder, []))[1].append(rows)
        documents = []
        for encoder, pieces in groups.values():
            documents += [encoder.encode(rows) for rows in ([_joined(encoder, pieces)] if encoder.joins else pieces)]
        return Documents.merged(documents), sorted(failed, key=lambda item: item[0])

    def _first(self, failure: RowFailure, parts: Sequence[RowPart]) -> RowFailure:
        """The failure of the first row that fails: another row may have failed at an earlier operator, or dataset.

        So a run ends at the same row wherever its blocks are cut.
        """
        while failure.place:
            counts = [int(np.searchsorted(part.places, failure.place)) for part in parts]
            before = [
                RowPart(part.dataset, part.table.slice(0, count), part.places[:count])
                for part, count in zip(parts, counts, strict=True)
                if count
            ]
            try:
                self._documents(before, skips=False)
                break
            except RowFailure as earlier:
                failure = earlier
        return failure

    def _fate(self, block: RowBlock, failed: Failed, passed: np.ndarray, blank: np.ndarray | None = None) -> np.ndarray:
        """int8[n_rows]: what became of each row of a block."""
        fate = np.full(len(block.dataset), _DROPPED, dtype=np.int8)
        if blank is not None:
            fate[blank] = _BLANK
        fate[[place for place, _, _ in failed] + [place for place, _ in block.lost]] = _FAULTY
        fate[passed] = _PASSED
        return fate

    def _account(self, block: RowBlock, fate: np.ndarray, failed: Failed) -> dict[str, Any]:
        return {
            "rows_read": self._count(block, slice(None)),
            "rows_dropped": self._count(block, fate == _DROPPED),
            "rows_failed": self._count(block, fate == _FAULTY),
            "faults": self.faults_of(block, failed),
        }

    def _count(self, block: RowBlock, rows: Any) -> np.ndarray:
        """int64[n_datasets]: how many of some rows are of each dataset."""
        return np.bincount(block.dataset[rows], minlength=len(self._names))

    def _fault(self, block: RowBlock, place: int, operator: str, reason: str) -> RowFault:
        dataset = int(block.dataset[place])
        shard, row = self._locate(dataset, int(block.row[place]))
        content = _content(block, place) if self._policy.keeps else ""
        return RowFault(operator, self._names[dataset], shard, row, reason, row, 1, content)


def _part(dataset: int, table: pa.Table) -> RowPart:
    return RowPart(dataset, table, np.arange(table.num_rows, dtype=np.int64))


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
