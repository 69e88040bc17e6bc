"""Trying row operators before the run: which columns, of which types, the functions of the user's make.

The types of what a `MapTransform` gives are found here, once, from some rows of each dataset, the same in every process
of the run. They are looked for in more rows where the first ones do not tell: where a filter lets none of them through,
where a column is nothing but null, where there are structs whose fields may be missing in some rows. How many rows, and
bytes, are read for that is bounded.

A column that is null in all of these rows is of the type that it had before; a new one holds text, or what else the
filters behind it can be computed with: numbers, or flags. An operator that no row gets to is not tried; a map that is
not may make columns only whose types it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array, one_chunk
from zephon.errors import PipelineError
from zephon.ops.expression import Expression
from zephon.ops.identity import name_of
from zephon.ops.rows import Filter, MapBatches, MapTransform, RowOperator, Rows, types_of
from zephon.ops.stateful import StatefulTransform
from zephon.ops.values import could_widen, is_open

__all__ = ["Probed", "Sample", "probe"]

_KEPT = 64
_NULL_KINDS = (pa.large_string(), pa.float64(), pa.bool_())


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a dataset.

    Attributes:
        rows: int64[n], which they are.
        table: their columns, as operators know them.
    """

    rows: np.ndarray
    table: pa.Table

    def take(self, indices: np.ndarray) -> Sample:
        """Those at `indices` int64[k]."""
        return Sample(self.rows[indices], self.table.take(int64_array(indices)))

    @staticmethod
    def joined(samples: Sequence[Sample]) -> Sample:
        """All of them as one."""
        if len(samples) == 1:
            return samples[0]
        table = pa.concat_tables([sample.table for sample in samples], promote_options="permissive")
        return Sample(np.concatenate([sample.rows for sample in samples]), table.combine_chunks())


@dataclass(frozen=True, slots=True)
class Probed:
    """What came of it.

    Attributes:
        operators: the operators, with their types.
        sample: rows to look closer at: the first ones, and where none of those come through all operators, some that
            do, or get furthest.
        warning: what was not tried, or None.
    """

    operators: tuple[RowOperator, ...]
    sample: Sample
    warning: str | None


def probe(operators: Sequence[RowOperator], samples: Iterable[Sample], name: str) -> Probed:
    """Find the types of what `operators` make of the rows of a dataset.

    Args:
        operators: those for the dataset, in order.
        samples: the first rows; then more of them, each asked for only where those before do not tell enough: one for
            fields that may be missing, any number for columns of null and where no row is left.
        name: of the dataset.

    Raises:
        PipelineError: an operator does not fit the columns.
    """
    taken: list[Sample] = []
    first = None
    for sample in samples:
        if sample.table.num_rows or not taken:
            taken.append(sample)
        whole = Sample.joined(taken)
        try:
            made, reached, emptied, wanting = _tried(operators, whole.table)
        except PipelineError as error:
            raise PipelineError(f'dataset "{name}": {error}') from error.__cause__
        first = first or whole
        if emptied is None and (not wanting or (wanting == 1 and len(taken) > 1)):
            break
    assert first is not None
    seen = len(whole.rows)
    if not (reached < len(first.rows)).any():
        first = Sample.joined([first, whole.take(np.unique(reached)[:_KEPT])])
    warning = None
    if emptied is not None:
        warning = (
            f'dataset "{name}": {emptied} leaves none of the {seen:,} rows that were tried before the run, so what '
            "comes after it is not checked"
        )
    return Probed(made, first, warning)


def _tried(
    operators: Sequence[RowOperator], table: pa.Table
) -> tuple[tuple[RowOperator, ...], np.ndarray, str | None, int]:
    """The operators with types, which rows got furthest, which operator left none of them, and what more could tell.

    The last is 0 for nothing, 1 for fields of structs, 2 for columns that are null.
    """
    rows = Rows(table, np.arange(table.num_rows, dtype=np.int64), skips=True)
    made: list[RowOperator] = []
    reached, emptied, wanting = rows.places, None, 0
    for nth, operator in enumerate(operators):
        had_rows = rows.table.num_rows > 0
        if had_rows:
            reached = rows.places
            found, more = _typed(operator, rows, operators[nth + 1 :])
            wanting = max(wanting, more)
        else:
            found = operator
        if not rows.table.num_rows:
            emptied = emptied or (operator.label if had_rows else None)
            found = replace(operator, probed=True) if isinstance(operator, MapTransform) else operator
        made.append(found)
    return tuple(made), reached if emptied else rows.places, emptied, wanting


def _typed(operator: RowOperator, rows: Rows, later: Sequence[RowOperator]) -> tuple[RowOperator, int]:
    """Apply `operator`, and give it with the types of what came of that; the number is as in `_tried`."""
    before = rows.table.schema
    if isinstance(operator, StatefulTransform):
        bare = replace(operator, transform=_Pushing(operator.transform))
        bare.apply(rows)
        if not rows.table.num_rows:
            return operator, 0
        wanting = _settled(rows, before, (), later)
        operator = replace(operator, types=types_of(rows.table))
        for worker in operator.workers():
            if isinstance(worker, MapTransform):
                _, more = _typed(worker, rows, later)
                operator, wanting = replace(operator, made=types_of(rows.table)), max(wanting, more)
        return operator, wanting
    operator.apply(rows)
    if not rows.table.num_rows or not isinstance(operator, MapTransform | MapBatches):
        return operator, 0
    wanting = _settled(rows, before, operator.types if isinstance(operator, MapTransform) else (), later)
    if isinstance(operator, MapTransform):
        return replace(operator, types=types_of(rows.table), probed=True), wanting
    return replace(operator, types=types_of(rows.table)), wanting


class _Pushing:
    """A stateful transform of which only the memory works."""

    def __init__(self, transform: Any) -> None:
        self.init_state, self.push, self.flush = transform.init_state, transform.push, transform.flush
        self.__qualname__ = name_of(transform)


def _settled(rows: Rows, before: pa.Schema, told: Any, later: Sequence[RowOperator]) -> int:
    """Give columns that are nothing but null a type; the number is as in `_tried`."""
    wanting = 0
    for name, kind in types_of(rows.table):
        at = before.get_field_index(name)
        if (at >= 0 and before.field(at).type == kind) or name in dict(told):
            continue
        if is_open(kind):
            wanting = 2
        elif could_widen(kind):
            wanting = max(wanting, 1)
        if pa.types.is_null(kind):
            column = one_chunk(rows.table.column(name)).cast(_kind_for(name, later, rows.table))
            rows.table = rows.table.set_column(rows.table.schema.get_field_index(name), name, column)
    return wanting


def _kind_for(name: str, later: Sequence[RowOperator], table: pa.Table) -> pa.DataType:
    """The type of a column of which only nulls are known."""
    empty = table.slice(0, 0)
    at = empty.schema.get_field_index(name)
    conditions = [
        operator.condition
        for operator in later
        if isinstance(operator, Filter)
        and isinstance(operator.condition, Expression)
        and name in operator.condition.columns
        and set(operator.condition.columns) <= set(table.column_names)
    ]
    for kind in _NULL_KINDS:
        try:
            for condition in conditions:
                condition.keep(empty.set_column(at, name, pa.nulls(0, kind)))
        except PipelineError:
            continue
        return kind
    return _NULL_KINDS[0]
