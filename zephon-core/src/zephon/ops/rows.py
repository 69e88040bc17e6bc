"""Rows on their way through operators, and what all row operators have in common.

A row operator is a frozen description that is also its own worker: `apply` takes some rows of one dataset and replaces
them by its result, which depends on nothing but these rows. Where blocks are cut is the engine's business, so an
operator must give the same rows wherever they are cut; `zephon.ops.trial` checks that it does.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import bool_array, int64_array
from zephon.columns.faults import reason_of
from zephon.columns.template import text_of
from zephon.config.keys import key, settings_of
from zephon.errors import PipelineError
from zephon.ops.identity import identity_of, name_of
from zephon.ops.typing import in_halves

_log = logging.getLogger("zephon")

ROW_COLUMN = "_row"
"""Where a function of tables that drops or multiplies rows finds, and must keep, the place of each row in its table."""

FAILED: Any = object()
"""In place of what a function gives, where it raised."""


class RowFailure(Exception):
    """The first row that cannot be used, where that ends the run. Never leaves this package."""

    def __init__(self, place: int, operator: str, reason: str) -> None:
        super().__init__(place, operator, reason)  # all of them, for pickle
        self.place, self.operator, self.reason = place, operator, reason


@dataclass(slots=True)
class Rows:
    """Rows of one dataset on their way through the operators.

    Attributes:
        table: the columns, m rows.
        places: int64[m], ascending: which row of the block each came from; several may come from one.
        skips: leave rows out that cannot be used, rather than raise.
        failed: (place, operator, reason) of the rows left out; of one place the first counts.
    """

    table: pa.Table
    places: np.ndarray
    skips: bool = False
    failed: list[tuple[int, str, str]] = field(default_factory=list)

    def take(self, indices: np.ndarray) -> None:
        """Go on with the rows `indices` int64[k], ascending."""
        if len(indices) != len(self.places) or (indices != np.arange(len(indices))).any():
            self.table = self.table.take(int64_array(indices))
            self.places = self.places[indices]

    def keep(self, mask: np.ndarray) -> None:
        """Go on with the rows where `mask` bool[m] is true."""
        self.take(np.flatnonzero(mask))

    def fail(self, index: int, operator: str, error: BaseException | str) -> None:
        """Row `index` cannot be used; the caller takes it out.

        Raises:
            RowFailure: the first such row ends the run.
        """
        place, reason = int(self.places[index]), error if isinstance(error, str) else reason_of(error)
        if not self.skips:
            raise RowFailure(place, operator, reason) from (error if isinstance(error, BaseException) else None)
        self.failed.append((place, operator, reason))

    def set_column(self, name: str, column: pa.Array) -> None:
        """Add or replace a column."""
        at = self.table.schema.get_field_index(name)
        self.table = self.table.append_column(name, column) if at < 0 else self.table.set_column(at, name, column)

    def as_dicts(self, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The rows as Python values, all columns or some."""
        return dicts_of(self.table if columns is None else self.table.select(list(columns)))


def dicts_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table as Python values."""
    if not table.num_columns:
        return [{} for _ in range(table.num_rows)]
    names, values = table.column_names, [column.to_pylist() for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


class RowOperator:
    """What all of them have in common.

    Attributes:
        kind: the name of the method of `Pipeline` that adds it.
        columns: columns it reads; None where it may read any.
        makes: columns it adds; None where nobody knows before it has run.
        datasets: names of the datasets it is for; None where it is for all.
        runner: "process" where it is to run in worker processes, "threads" where in this one; None where it runs as
            the pipeline's runner says. Decides no data.
    """

    kind: ClassVar[str]
    columns: Sequence[str] | None
    datasets: Sequence[str] | None
    runner: str | None = None

    @property
    def makes(self) -> tuple[str, ...] | None:
        return ()

    @property
    def label(self) -> str:
        """Its name in messages and `explain()`."""
        return self.kind if self.function is None else f"{self.kind}({name_of(self.function)})"

    @property
    def function(self) -> Any:
        """The user's own code in it, or None."""
        return None

    @property
    def code(self) -> str:
        """What `function` does, as it was when first asked: what an object keeps while it works is not part of it."""
        known: str | None = self.__dict__.get("_code")
        if known is None:
            known, opaque = identity_of(self.function)
            object.__setattr__(self, "_code", known)
            if opaque:
                _log.warning(
                    "%s has parts that a fingerprint cannot describe (%s), so a restore does not notice a change of "
                    "them; give the function, or its class, an attribute version, a text that changes with them.",
                    self.label,
                    ", ".join(opaque),
                )
        return known

    def apply(self, rows: Rows) -> None:
        """Do it, in place."""
        raise NotImplementedError

    def identity(self) -> str:
        """Its kind and all settings that decide data, as text that is the same in every process; for fingerprints."""
        values = (value for value in settings_of(self).values() if value != ())
        shown = (self.code if callable(value) or hasattr(value, "push") else value for value in values)
        return " ".join(map(str, (self.kind, *shown)))

    def is_for(self, dataset: str) -> bool:
        """Whether rows of this dataset go through it."""
        return self.datasets is None or dataset in self.datasets


@dataclass(frozen=True)
class UserOperator(RowOperator):
    """A function, or object, of the user's own over rows.

    Attributes:
        transform: the function.
        columns: what it gets of a row or table; None gives it all columns of the dataset.
        datasets, runner: as in `RowOperator`.
    """

    transform: Any
    columns: Sequence[str] | None = None
    datasets: Sequence[str] | None = None
    runner: str | None = key(None, decides_data=False)

    def __post_init__(self) -> None:
        check_operator(self)

    @property
    def makes(self) -> tuple[str, ...] | None:
        return None

    @property
    def function(self) -> Any:
        return self.transform


def apply_all(operators: Iterable[RowOperator], rows: Rows) -> None:
    """Send rows through operators, as long as there are any: of no rows a function would give no columns."""
    for operator in operators:
        if not rows.table.num_rows:
            return
        operator.apply(rows)


def check_operator(operator: Any) -> None:
    """Checks the fields that row operators have in common; PipelineError for an invalid value."""
    check_runner(operator.kind, operator.runner)
    for what in ("columns", "datasets"):
        if what in operator.__dataclass_fields__:
            object.__setattr__(operator, what, check_names(operator.kind, what, getattr(operator, what)))


def check_names(operator: str, what: str, names: Any) -> tuple[str, ...] | None:
    """A list of names, or None; PipelineError for anything else."""
    if names is None:
        return None
    listed = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise PipelineError(f"{operator} {what} is {names!r}; expected a list of names.")
    return listed


def check_runner(operator: str, runner: Any) -> None:
    """PipelineError for an unknown runner of an operator."""
    if runner not in (None, "process", "threads"):
        raise PipelineError(f'{operator} runner is {runner!r}; expected "process", "threads" or None.')


def one_line(error: BaseException) -> str:
    """The text of an Arrow exception, shortened."""
    return " ".join(str(error).split())[:200]


def missing_column(name: str, existing: Sequence[str]) -> str:
    """The words for a column that is not there."""
    near = difflib.get_close_matches(name, existing, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else f"; there are {', '.join(existing[:20]) or 'none'}."
    return f'needs the column "{name}", which is not there{hint}'


def require_columns(table: pa.Table, columns: Iterable[str] | None, label: str) -> None:
    """PipelineError unless a table has the columns that an operator reads."""
    for name in columns or ():
        if name not in table.column_names:
            raise PipelineError(f"{label} {missing_column(name, table.column_names)}")


def python_rows(rows: Rows, operator: RowOperator) -> list[dict[str, Any]]:
    """The rows as Python values, for a function; without those that have none, such as a date in the year 30,000."""
    require_columns(rows.table, operator.columns, operator.label)
    table = rows.table if operator.columns is None else rows.table.select(list(operator.columns))
    bad: list[int] = []

    def fail(row: int, error: Exception) -> None:
        bad.append(row)
        rows.fail(row, operator.label, error)

    parts = in_halves(lambda start, stop: dicts_of(table.slice(start, stop - start)), 0, table.num_rows, fail)
    if bad:
        rows.take(np.delete(np.arange(table.num_rows), bad))
    return list(chain.from_iterable(parts))


def each_row(rows: Rows, operator: RowOperator, function: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    """`function` of every value; `FAILED` where it raised."""
    results: list[Any] = []
    append = results.append
    while len(results) < len(values):
        try:
            # Nothing but the call and the append: what a bare loop costs.
            for value in values[len(results) :] if results else values:
                append(function(value))
        except MemoryError:  # which no row is to blame for
            raise
        except Exception as error:
            rows.fail(len(results), operator.label, error)
            append(FAILED)
    return results


def text_or_faults(rows: Rows, operator: str, name: str, column: pa.Array, bad: np.ndarray) -> pa.Array | None:
    """A column of `rows` as `large_string`; None where its type is no text at all.

    Rows whose value is no text, being bytes that are no UTF-8, fail: `bad` bool[m] is set, and the text null there.
    """
    kind = pa.large_string()
    try:
        column.slice(0, 0).cast(kind)
    except pa.ArrowException:
        return None
    is_bytes = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    sound = np.ones(len(column), dtype=bool)

    def fail(row: int, error: Exception) -> None:
        sound[row] = False
        if not bad[row]:
            why = f'bytes that are no UTF-8; decode_text("{name}") before it takes care of them'
            rows.fail(row, operator, f'column "{name}" holds {why if is_bytes else f"no text ({one_line(error)})"}')

    parts = in_halves(lambda start, stop: text_of(column.slice(start, stop - start)), 0, len(column), fail)
    bad |= ~sound
    return parts[0] if sound.all() else pc.if_else(bool_array(sound), column, pa.nulls(1, column.type)[0]).cast(kind)
