"""Operators on rows, before they become tokens: filters, maps, templates, decoding, and code of the user's own.

Each is a frozen description that is also its own worker: `apply` takes some rows of one dataset and gives what becomes
of them, and depends on nothing else. Where blocks are cut is the engine's business, so an operator must give the same
rows however it is fed; `zephon.ops.checks` looks whether it does.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import column_of, int64_array, one_chunk, valid_mask, values_of
from zephon.columns.faults import reason_of
from zephon.errors import PipelineError
from zephon.ops.expression import Expression, missing_column, one_line
from zephon.ops.identity import Identity, identity_of, name_of
from zephon.ops.values import column_as, common_type, unfit_anywhere

__all__ = [
    "ROW_COLUMN",
    "AddOp",
    "DecodeText",
    "Filter",
    "MapBatches",
    "MapTransform",
    "Operator",
    "RowFailure",
    "RowOperator",
    "Rows",
    "TextTemplate",
]

_log = logging.getLogger("zephon")

ROW_COLUMN = "_row"
"""Where a batch function that drops or multiplies rows finds, and must keep, the place of each row in its table."""


class RowFailure(Exception):
    """The first row that could not be used, where that ends the run. Never leaves this package."""

    def __init__(self, place: int, operator: str, reason: str) -> None:
        super().__init__(reason)
        self.place, self.operator, self.reason = place, operator, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return RowFailure, (self.place, self.operator, self.reason)


@dataclass(slots=True)
class Rows:
    """Rows of one dataset on their way through the operators.

    Attributes:
        table: the columns, m rows.
        places: int64[m], ascending: which row of the block each came from; several may come from one.
        skips: leave rows out that cannot be used, rather than raise.
        failed: (place, operator, reason) of the rows left out.
    """

    table: pa.Table
    places: np.ndarray
    skips: bool = False
    failed: list[tuple[int, str, str]] = field(default_factory=list)

    def take(self, indices: np.ndarray) -> None:
        """Go on with the rows `indices` int64[k], ascending."""
        self.table = self.table.take(int64_array(indices))
        self.places = self.places[indices]

    def keep(self, mask: np.ndarray) -> None:
        """Go on with the rows where `mask` bool[m] is true."""
        if not mask.all():
            self.take(np.flatnonzero(mask))

    def fail(self, index: int, operator: str, error: BaseException | str) -> None:
        """Row `index` cannot be used; the caller takes it out.

        Raises:
            RowFailure: the first such row ends the run.
        """
        reason = error if isinstance(error, str) else reason_of(error)
        place = int(self.places[index])
        if not self.skips:
            raise RowFailure(place, operator, reason) from (error if isinstance(error, BaseException) else None)
        self.failed.append((place, operator, reason))

    def as_dicts(self, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The rows as Python values."""
        names = list(columns) if columns is not None else self.table.column_names
        if not self.table.num_rows:
            return []
        if not names:
            return [{} for _ in range(self.table.num_rows)]
        values = [self.table.column(name).to_pylist() for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def apply_all(operators: Iterable[RowOperator], rows: Rows) -> None:
    """Send rows through operators, as long as there are any: of no rows a function would give no columns."""
    for operator in operators:
        if not rows.table.num_rows:
            return
        operator.apply(rows)


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
        """What messages and `explain()` call it."""
        return self.kind

    @property
    def function(self) -> Any:
        """The user's own code in it, or None."""
        return None

    @property
    def code(self) -> Identity:
        """What `function` does, as it was when first asked: what an object keeps while it works is not part of it."""
        known: Identity | None = self.__dict__.get("_code")
        if known is None:
            known = identity_of(self.function)
            object.__setattr__(self, "_code", known)
            if known.unseen or known.unsourced:
                _log.warning("%s %s.", self.label, " ".join(_not_described(known)))
        return known

    def apply(self, rows: Rows) -> None:
        """Do it, in place."""
        raise NotImplementedError

    def identity(self) -> str:
        """What decides its result, as text that is the same in every process; for fingerprints."""
        raise NotImplementedError

    def is_for(self, dataset: str) -> bool:
        """Whether rows of this dataset go through it."""
        return self.datasets is None or dataset in self.datasets


def _not_described(code: Identity) -> Iterator[str]:
    """In words, what a fingerprint does not tell of a function, and what to do."""
    if code.unseen:
        yield (
            f"carries what a fingerprint cannot describe ({'; '.join(code.unseen)}), so a restore will not notice when "
            "that is another one;"
        )
    if code.unsourced:
        python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        yield (
            f"{'and ' if code.unseen else ''}has code whose source is not to be found ({', '.join(code.unsourced)}), "
            f"so its bytecode counts, which only {python} makes like that;"
        )
    yield "give the function, or the class, an attribute version, a text that changes with it"


def check_names(operator: str, what: str, names: Any) -> tuple[str, ...] | None:
    """A list of names, or None; PipelineError for anything else."""
    if names is None:
        return None
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, Iterable):
        raise PipelineError(f"{operator} {what} is {names!r}; a list of names is needed.")
    made = tuple(given)
    if not made or not all(isinstance(name, str) and name for name in made):
        raise PipelineError(f"{operator} {what} is {names!r}; a list of names is needed.")
    return made


def check_runner(operator: str, runner: Any) -> None:
    """Refuse a place that there is none of."""
    if runner not in (None, "process", "threads"):
        raise PipelineError(f'{operator} runner is {runner!r}; "process", "threads" or None is needed.')


def _checked_names(instance: Any) -> None:
    check_runner(instance.kind, instance.runner)
    for what in ("columns", "datasets"):
        if what in getattr(instance, "__dataclass_fields__", {}):
            object.__setattr__(instance, what, check_names(instance.kind, what, getattr(instance, what)))


def _require(rows: Rows, operator: RowOperator, columns: Iterable[str]) -> None:
    for name in columns:
        if name not in rows.table.column_names:
            raise PipelineError(f"{operator.label} {missing_column(name, rows.table.column_names)}")


# ---------------------------------------------------------------------------------------------------------------------
# Filters


@dataclass(frozen=True)
class Filter(RowOperator):
    """Keep the rows that pass.

    Attributes:
        condition: an expression on columns (see `zephon.ops.expression`), which Arrow evaluates, or a function of one
            row, a dict.
        columns: what a function gets of a row; None gives it all columns of the dataset. Reading only what is needed
            is faster.
        datasets: names of the datasets to filter, or None for all.
        runner: where a function runs; see `RowOperator`.
    """

    kind: ClassVar[str] = "filter"
    condition: str | Expression | Callable[[dict[str, Any]], Any]
    columns: Sequence[str] | None = None
    datasets: Sequence[str] | None = None
    runner: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.condition, str):
            object.__setattr__(self, "condition", Expression(self.condition))
        if isinstance(self.condition, Expression):
            if self.columns is not None:
                raise PipelineError(
                    "filter columns is for functions; an expression says itself which columns it reads."
                )
            if self.runner is not None:
                raise PipelineError("filter runner is for functions; Arrow evaluates an expression where the rows are.")
            object.__setattr__(self, "columns", self.condition.columns)
        elif not callable(self.condition):
            raise PipelineError(f"filter takes an expression or a function of a row; {self.condition!r} is given.")
        _checked_names(self)

    @property
    def label(self) -> str:
        if isinstance(self.condition, Expression):
            return f'filter("{self.condition.text}")'
        return f"filter({name_of(self.condition)})"

    @property
    def function(self) -> Any:
        return None if isinstance(self.condition, Expression) else self.condition

    def identity(self) -> str:
        text = self.condition.text if isinstance(self.condition, Expression) else self.code.text
        return f"filter {text} {self.columns} {self.datasets}"

    def apply(self, rows: Rows) -> None:
        if isinstance(self.condition, Expression):
            rows.keep(self.condition.keep(rows.table, lambda index, reason: rows.fail(index, self.label, reason)))
            return
        _require(rows, self, self.columns or ())
        results = _each(rows, self, self.function, _python_rows(rows, self))
        try:
            kept = [result is not _FAILED and bool(result) for result in results]
        except Exception:
            kept = []
            for index, result in enumerate(results):
                try:
                    kept.append(result is not _FAILED and bool(result))
                except Exception as error:  # an array, for example, is neither true nor false
                    rows.fail(index, self.label, error)
                    kept.append(False)
        rows.keep(np.array(kept, dtype=bool))


# ---------------------------------------------------------------------------------------------------------------------
# Maps


@dataclass(frozen=True)
class MapTransform(RowOperator):
    """Change rows one by one with a function: as slow as Python is, and no slower.

    Attributes:
        transform: gets a row, a dict of Python values, and gives a dict of columns to replace or add (what it does not
            name stays), None to drop the row, or a list of dicts to make several rows of it.
        columns: what the function gets of a row; None gives it all columns of the dataset.
        datasets: names of the datasets to map, or None for all.
        runner: where the function runs; see `RowOperator`.
        types: types of columns that it makes, by name; pyarrow's, or their names as text. Those of others are found
            before the run, from some rows of each dataset (see `zephon.ops.probe`). A row with a value that does not
            fit, or with a column that none of those rows has, cannot be used.
        probed: `types` are those of all columns, as found before the run; else what is missing in them is found from
            the rows at hand.
    """

    kind: ClassVar[str] = "map_transform"
    transform: Callable[[dict[str, Any]], dict[str, Any] | list[dict[str, Any]] | None]
    columns: Sequence[str] | None = None
    datasets: Sequence[str] | None = None
    runner: str | None = None
    types: Mapping[str, pa.DataType | str] | tuple[tuple[str, pa.DataType], ...] = ()
    probed: bool = False

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise PipelineError(f"map_transform takes a function of a row; {self.transform!r} is given.")
        object.__setattr__(self, "types", _checked_types(self.types))
        _checked_names(self)

    @property
    def makes(self) -> None:
        return None

    @property
    def label(self) -> str:
        return f"map_transform({name_of(self.transform)})"

    @property
    def function(self) -> Any:
        return self.transform

    def identity(self) -> str:
        types = f" {self.types}" if self.types and not self.probed else ""
        return f"map_transform {self.code.text} {self.columns} {self.datasets}{types}"

    def apply(self, rows: Rows) -> None:
        _require(rows, self, self.columns or ())
        results = _each(rows, self, self.transform, _python_rows(rows, self))
        replace_rows(rows, self.label, results, dict(self.types or ()), known=self.probed)


def _checked_types(types: Any) -> tuple[tuple[str, pa.DataType], ...]:
    """Names and Arrow types; PipelineError for what is no such thing."""
    made = []
    try:
        for name, given in types.items() if isinstance(types, Mapping) else types or ():
            kind = pa.type_for_alias(given) if isinstance(given, str) else given
            if not isinstance(name, str) or not isinstance(kind, pa.DataType):
                raise TypeError
            made.append((name, pa.large_string() if pa.types.is_string(kind) else kind))
    except (TypeError, ValueError):
        raise PipelineError(
            f"map_transform types is {types!r}; types of Arrow by the names of columns are needed, such as "
            '{"score": "float64"}.'
        ) from None
    return tuple(made)


_FAILED: Any = object()


def _python_rows(rows: Rows, operator: RowOperator) -> list[dict[str, Any]]:
    """The rows as Python values; without those that have none, such as a date in the year 30,000."""
    try:
        return rows.as_dicts(operator.columns)
    except MemoryError:
        raise
    except Exception:
        bad = np.zeros(rows.table.num_rows, dtype=bool)
        for index in range(len(bad)):
            try:
                Rows(rows.table.slice(index, 1), rows.places[index : index + 1]).as_dicts(operator.columns)
            except Exception as error:
                rows.fail(index, operator.label, error)
                bad[index] = True
        rows.keep(~bad)
        return rows.as_dicts(operator.columns)


def _each(rows: Rows, operator: RowOperator, function: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    """`function` of every value; `_FAILED` where it raised."""
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
            append(_FAILED)
    return results


def replace_rows(rows: Rows, label: str, results: list[Any], types: Mapping[str, pa.DataType], *, known: bool) -> None:
    """Go on with what a function gave for each row: a dict, several, or None.

    Args:
        rows: the rows that it got.
        label: of the operator, for messages.
        results: what it gave for each, `_FAILED` where it raised.
        types: of its columns; where they are `known`, no others may come.
        known: see types.
    """
    kept: Sequence[int] = range(len(results))
    flat: Sequence[Mapping[str, Any]] = results
    named = dict.fromkeys(name for result in results for name in result) if set(map(type, results)) == {dict} else None
    if named is None or ROW_COLUMN in named or set(map(type, named)) - {str}:
        kept, flat = _flattened(rows, label, results)
        named = dict.fromkeys(name for result in flat for name in result)
    table, unfit = rows.table, np.zeros(rows.table.num_rows, dtype=bool)

    def fail(index: int, reason: str) -> None:
        row = kept[index]
        if not unfit[row]:
            unfit[row] = True
            rows.fail(row, label, reason)

    columns = {}
    others = [name for name in named if name not in types]
    for name in [*types, *(sorted(others) if known else others)]:
        here = name in table.column_names
        kind = types.get(name) or (table.schema.field(name).type if known and here else None)
        if name not in named and here and table.schema.field(name).type == kind:
            continue
        values = [result.get(name, _FAILED) for result in flat]
        if any(value is _FAILED for value in values):  # what a row's result does not name stays as it was
            before = table.column(name).to_pylist() if here else [None] * table.num_rows
            values = [before[n] if value is _FAILED else value for n, value in zip(kept, values, strict=True)]
        if known and kind is None:
            for index, value in enumerate(values):
                if value is not None:
                    fail(index, unfit_anywhere(name, value) or f'it gave a column "{name}", {_NOT_SEEN}')
            continue
        if kind is None:
            kind = common_type(values, table.schema.field(name).type if here else pa.null())
        columns[name] = column_as(name, values, kind, fail)
    source = np.array(kept, dtype=np.int64)
    if kept != range(table.num_rows):
        rows.take(source)
    table = rows.table
    for name, column in columns.items():
        at = table.schema.get_field_index(name)
        table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
    rows.table = table
    if unfit.any():
        rows.keep(~unfit[source])


_FIRST_ROWS = "in the rows tried first"
_NOT_SEEN = (
    "which no row tried before the run has; give it in every row, None where there is none, or name its type in types"
)


def _flattened(rows: Rows, label: str, results: list[Any]) -> tuple[list[int], list[Mapping[str, Any]]]:
    """(which row each came from, the dicts) of what a function gave; what is neither fails."""
    kept: list[int] = []
    flat: list[Mapping[str, Any]] = []
    for index, result in enumerate(results):
        if result is None or result is _FAILED:
            continue
        made = result if isinstance(result, list) else [result]
        wrong = _wrong_result(made)
        if wrong is not None:
            rows.fail(index, label, wrong)
            continue
        kept += [index] * len(made)
        flat += made
    return kept, flat


def _wrong_result(made: list[Any]) -> str | None:
    """Why what a function gave for a row cannot be used, or None."""
    for item in made:
        if not isinstance(item, Mapping):
            return f"it gave {type(item).__name__}; a dict, a list of dicts or None is needed"
        for name in item:
            if not isinstance(name, str) or name == ROW_COLUMN:
                return f"it gave a column named {name!r}; a text other than {ROW_COLUMN!r} is needed"
    return None


def columns_from(label: str, results: list[dict[str, Any]], types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """A table of rows given by a function; what a row lacks is null.

    Args:
        label: of the operator, for messages.
        results: the rows.
        types: of all its columns, where they are known; else they are found from the rows.

    Raises:
        PipelineError: the values of a column are not of one type, or no Unicode.
    """

    def refuse(index: int, reason: str) -> None:
        raise PipelineError(f"{label}: {reason}.")

    named = dict.fromkeys(name for result in results for name in result)
    columns = {}
    for name in [*types, *(name for name in named if name not in types)] if types else named:
        values = [row.get(name) for row in results]
        kind = types.get(name) if types else common_type(values)
        if kind is not None:
            columns[name] = column_as(name, values, kind, refuse)
        elif any(value is not None for value in values):
            raise PipelineError(f'{label}: it gave a column "{name}", {_NOT_SEEN}.')
    return pa.table(columns)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class Operator:
    """Base of operators written as a class: several rows at a time, with a set-up of its own in every worker.

    Each worker (thread or process) gets a copy of the object and calls `setup` on it once, before its first rows: the
    place to load a model or open a lexicon. What is kept there must not change what comes out: a row's result may
    depend on nothing but the row.

    Attributes:
        columns: columns that it reads, or None for all.
        version: part of the run's fingerprint; change it when the result changes in a way that the source of the class
            does not show.
    """

    columns: Sequence[str] | None = None
    version: str = ""

    def setup(self) -> None:
        """Called once per worker."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows that become of those in `table`; see `MapBatches` for what is asked of them."""
        raise NotImplementedError


class _PerThread:
    """Copies of an operator, one per thread that calls it; pickles as the operator alone."""

    def __init__(self, prototype: Operator) -> None:
        self.prototype = prototype
        self._own = threading.local()

    def __call__(self, table: pa.Table) -> pa.Table:
        worker = getattr(self._own, "worker", None)
        if worker is None:
            worker = copy.deepcopy(self.prototype)
            try:
                worker.setup()
            except Exception as error:
                raise PipelineError(
                    f"the setup of {name_of(self.prototype)} failed in a worker: {reason_of(error)}; without it no row "
                    "can be processed."
                ) from error
            self._own.worker = worker
        return worker(table)

    def __getstate__(self) -> Operator:
        return self.prototype

    def __setstate__(self, prototype: Operator) -> None:
        self.__init__(prototype)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> _PerThread:
        return _PerThread(self.prototype)


@dataclass(frozen=True)
class MapBatches(RowOperator):
    """Change many rows at once with a function from an Arrow table to an Arrow table: the fast way.

    Attributes:
        transform: the function. As many rows as it gets, it may give back in any columns; to drop or multiply rows it
            keeps the column "_row", which says for each row which one of those it got it came from (a filter or take of
            the table does that by itself). Rows must stay in order.
        columns: columns of the table; None gives all columns of the dataset.
        datasets: names of the datasets to map, or None for all.
        runner: where the function runs; see `RowOperator`.
        types: names and types of its columns, as found before the run (see `zephon.ops.probe`): a column that a table
            has in another type is converted, and a row whose value does not fit cannot be used.
    """

    kind: ClassVar[str] = "map_batches"
    transform: Callable[[pa.Table], pa.Table]
    columns: Sequence[str] | None = None
    datasets: Sequence[str] | None = None
    runner: str | None = None
    types: Types = ()

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise PipelineError(f"{self.kind} takes a function of an Arrow table; {self.transform!r} is given.")
        if isinstance(self.transform, Operator):
            if self.columns is None:
                object.__setattr__(self, "columns", self.transform.columns)
            object.__setattr__(self, "transform", _PerThread(self.transform))
        _checked_names(self)

    @property
    def makes(self) -> None:
        return None

    @property
    def label(self) -> str:
        return f"{self.kind}({name_of(self.function)})"

    @property
    def function(self) -> Any:
        return self.transform.prototype if isinstance(self.transform, _PerThread) else self.transform

    def identity(self) -> str:
        return f"{self.kind} {self.code.text} {self.columns} {self.datasets}"

    def apply(self, rows: Rows) -> None:
        _require(rows, self, self.columns or ())
        if not rows.table.num_rows:
            return
        table = rows.table if self.columns is None else rows.table.select(list(self.columns))
        # What it does not get stays as it is.
        others = [name for name in rows.table.column_names if name not in table.column_names]
        if ROW_COLUMN in table.column_names:
            raise PipelineError(f"{self.label}: the data has a column {ROW_COLUMN}, which is kept for its own use.")
        given = table.append_column(ROW_COLUMN, int64_array(np.arange(table.num_rows, dtype=np.int64)))
        result, source = self._call(rows, given, 0)
        untouched = rows.table.select(others)
        if source is not None:
            untouched = untouched.take(int64_array(source))
            rows.places = rows.places[source]
        for name in others:
            if name not in result.column_names:
                result = result.append_column(name, untouched.column(name))
        rows.table = result

    def _call(self, rows: Rows, given: pa.Table, first: int) -> tuple[pa.Table, np.ndarray | None]:
        """What the function makes of `given`, whose first row is row `first`, and where its rows came from."""
        try:
            result = self.transform(given)
        except (MemoryError, PipelineError):  # which no row is to blame for
            raise
        except Exception as error:
            return self._call_in_halves(rows, given, first, error)
        if not isinstance(result, pa.Table):
            raise PipelineError(f"{self.label} gave {type(result).__name__}; a pyarrow.Table is needed.")
        if ROW_COLUMN not in result.column_names:
            if result.num_rows != given.num_rows:
                raise PipelineError(
                    f"{self.label} got {given.num_rows} rows and gave {result.num_rows}; one that drops or multiplies "
                    f'rows must keep the column "{ROW_COLUMN}" with the place that each row came from.'
                )
            source = None if given.num_rows == rows.table.num_rows else np.arange(first, first + given.num_rows)
            return typed(rows, self.label, result, source, self.types)
        source = self._source_of(result, first, given.num_rows)
        return typed(rows, self.label, result.drop_columns([ROW_COLUMN]), source, self.types)

    def _source_of(self, result: pa.Table, first: int, count: int) -> np.ndarray:
        column = one_chunk(result.column(ROW_COLUMN))
        if not pa.types.is_integer(column.type) or column.null_count:
            raise PipelineError(
                f'{self.label} gave a column "{ROW_COLUMN}" of {column.type}; whole numbers are needed.'
            )
        source = values_of(column.cast(pa.int64()))
        if len(source) and not (source[0] >= first and source[-1] < first + count and (np.diff(source) >= 0).all()):
            raise PipelineError(
                f'{self.label} gave rows in another order, or of numbers it did not get in "{ROW_COLUMN}".'
            )
        return source

    def _call_in_halves(
        self, rows: Rows, given: pa.Table, first: int, error: Exception
    ) -> tuple[pa.Table, np.ndarray | None]:
        """Find the rows over which the function raises, and go on without them."""
        count = given.num_rows
        if count == 1:
            rows.fail(first, self.label, error)
            empty = given.slice(0, 0)
            return empty.drop_columns([ROW_COLUMN]), np.empty(0, dtype=np.int64)
        half, before = count // 2, len(rows.failed)
        parts = [self._call(rows, given.slice(0, half), first), self._call(rows, given.slice(half), first + half)]
        if len(rows.failed) == before:
            raise PipelineError(
                f"{self.label} raised over {count} rows together ({reason_of(error)}), but not over its halves; "
                "what it does may not depend on how rows are put together."
            ) from error
        tables = [table for table, _ in parts if table.num_rows] or [parts[0][0]]
        sources = [source if source is not None else np.arange(table.num_rows) for table, source in parts]
        return pa.concat_tables(tables, promote_options="permissive"), np.concatenate(sources)


@dataclass(frozen=True)
class AddOp(MapBatches):
    """An `Operator`, or a function, of the user's own; works as `MapBatches` does."""

    kind: ClassVar[str] = "add_op"


# ---------------------------------------------------------------------------------------------------------------------
# Types

Types = tuple[tuple[str, pa.DataType], ...]
"""Names and types of columns."""


def types_of(table: pa.Table) -> Types:
    """Those of a table."""
    return tuple(zip(table.schema.names, table.schema.types, strict=True))


def typed(
    rows: Rows, label: str, result: pa.Table, source: np.ndarray | None, types: Types
) -> tuple[pa.Table, np.ndarray | None]:
    """Columns of `result` in the types that they are to have, and the rows of it that fit.

    Args:
        rows: what it was made of.
        label: of the operator, for messages.
        result: a table.
        source: int64[m], for each of its rows that of `rows`; None for the same ones.
        types: names and types; other columns stay as they are.

    Returns:
        (the table, source), without what was made of a row of which anything does not fit.
    """
    unfit: set[int] = set()
    of = np.arange(result.num_rows) if source is None else source
    for name, kind in types:
        at = result.schema.get_field_index(name)
        if at < 0 or result.schema.field(at).type == kind:
            continue
        column = one_chunk(result.column(at))
        if not _may_become(column.type, kind):
            # Whether other values are of this type is for each of them to say.
            misfits: list[tuple[int, str]] = []
            made = column_as(name, column.to_pylist(), kind, lambda *fault, to=misfits: to.append(fault))
        else:
            why = f'it gave a value for column "{name}" that is not {kind}, which it is {_FIRST_ROWS}'
            misfits = [(index, f"{why} ({one_line(error)})") for index, error in _not_cast(column, kind, 0)]
            made = _without(column, [index for index, _ in misfits]).cast(kind)
        for index, reason in misfits:
            row = int(of[index])
            if row not in unfit:
                unfit.add(row)
                rows.fail(row, label, reason)
        result = result.set_column(at, name, made)
    if unfit:
        kept = np.flatnonzero(~np.isin(of, list(unfit)))
        result, source = result.take(int64_array(kept)), of[kept]
    return result, source


# ---------------------------------------------------------------------------------------------------------------------
# Text


@dataclass(frozen=True)
class DecodeText(RowOperator):
    """Turn a column of bytes into text.

    Attributes:
        field: the column.
        encoding: "utf-8", or any other that Python knows.
        errors: what happens to bytes that are no such text: "replace" puts U+FFFD in their place, "ignore" leaves them
            out, "strict" makes the row one that cannot be used.
        datasets: names of the datasets to decode, or None for all.
    """

    kind: ClassVar[str] = "decode_text"
    field: str = "text"
    encoding: str = "utf-8"
    errors: str = "replace"
    datasets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise PipelineError(f"decode_text field is {self.field!r}; the name of a column is needed.")
        if self.errors not in ("replace", "ignore", "strict"):
            raise PipelineError(f'decode_text errors is {self.errors!r}; "replace", "ignore" or "strict" is needed.')
        try:
            if not isinstance(b"a".decode(self.encoding), str):
                raise LookupError
        except (LookupError, TypeError, ValueError, UnicodeError):
            raise PipelineError(
                f"decode_text encoding is {self.encoding!r}; the name of a text encoding is needed."
            ) from None
        _checked_names(self)

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.field,)

    @property
    def label(self) -> str:
        return f"decode_text({self.field})"

    def identity(self) -> str:
        return f"decode_text {self.field} {self.encoding} {self.errors} {self.datasets}"

    def apply(self, rows: Rows) -> None:
        _require(rows, self, self.columns)
        column = one_chunk(rows.table.column(self.field))
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
            return
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise PipelineError(f"{self.label}: the column holds {kind}; bytes or text is needed.")
        bad = np.zeros(len(column), dtype=bool)
        try:
            if self.encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
                raise pa.ArrowInvalid
            text = column.cast(pa.large_string())  # looks at every byte, much faster than Python
        except pa.ArrowInvalid:
            text = column_of(self._decoded(rows, column.to_pylist(), bad))
            text = text.cast(pa.large_string())
        at = rows.table.schema.get_field_index(self.field)
        rows.table = rows.table.set_column(at, self.field, text)
        rows.keep(~bad)

    def _decoded(self, rows: Rows, values: list[bytes | None], bad: np.ndarray) -> list[str | None]:
        out: list[str | None] = []
        for index, value in enumerate(values):
            try:
                text = None if value is None else value.decode(self.encoding, self.errors)
                if text is not None and not text.isascii():
                    text.encode()  # some encodings know half surrogate pairs
                out.append(text)
            except UnicodeError as error:
                rows.fail(index, self.label, error)
                bad[index] = True
                out.append(None)
        return out


_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class TextTemplate(RowOperator):
    """Make the text of a document from several columns: `"# {title}\\n\\n{body}"`.

    Attributes:
        template: text in which {name} stands for the value of a column, {{ and }} for braces. A null is no text; where
            all columns named are null, so is the result.
        into: the column to make.
        datasets: names of the datasets to use it on, or None for all.
    """

    kind: ClassVar[str] = "text_template"
    template: str
    into: str = "text"
    datasets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.template, str):
            raise PipelineError(
                f'the text template is {self.template!r}; a text such as "{{title}} {{body}}" is needed.'
            )
        if not isinstance(self.into, str) or not self.into:
            raise PipelineError(f"text_template into is {self.into!r}; the name of a column is needed.")
        if not self.columns:
            raise PipelineError(f"the text template {self.template!r} names no column; write {{name}} for one.")
        _checked_names(self)

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """("text", ...) and ("column", ...) in turn."""
        made, last = [("text", "")], 0
        for match in _PLACE.finditer(self.template):
            text = self.template[last : match.start()]
            if match[0] in ("{", "}") or (match[1] is not None and not match[1].strip()):
                raise PipelineError(
                    f"the text template {self.template!r} has a stray {match[0]!r}; write {{{{ or }}}} for a brace."
                )
            if match[1] is None:
                made[-1] = ("text", made[-1][1] + text + match[0][0])
            else:
                made[-1] = ("text", made[-1][1] + text)
                made += [("column", match[1].strip()), ("text", "")]
            last = match.end()
        made[-1] = ("text", made[-1][1] + self.template[last:])
        return [piece for piece in made if piece[1]]

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(name for kind, name in self.pieces if kind == "column"))

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.into,)

    def identity(self) -> str:
        return f"text_template {self.template} {self.into} {self.datasets}"

    def apply(self, rows: Rows) -> None:
        _require(rows, self, self.columns)
        kind = pa.large_string()
        some = np.zeros(rows.table.num_rows, dtype=bool)
        bad = np.zeros(rows.table.num_rows, dtype=bool)
        parts = []
        for what, value in self.pieces:
            if what == "text":
                parts.append(column_of([value])[0])
                continue
            column = one_chunk(rows.table.column(value))
            text = text_or_faults(rows, self.label, value, column, bad)
            if text is None:
                raise PipelineError(f'{self.label}: column "{value}" holds {column.type}, which is no text.')
            some |= valid_mask(text)
            parts.append(text)
        joined = pc.binary_join_element_wise(*parts, column_of([""])[0], null_handling="replace", null_replacement="")
        if not some.all():
            joined = pc.if_else(_bool_array(some), joined, pa.nulls(1, kind)[0])
        at = rows.table.schema.get_field_index(self.into)
        table = rows.table
        rows.table = table.append_column(self.into, joined) if at < 0 else table.set_column(at, self.into, joined)
        rows.keep(~bad)


def text_or_faults(rows: Rows, operator: str, name: str, column: pa.Array, bad: np.ndarray) -> pa.Array | None:
    """A column of `rows` as `large_string`; None where its type is no text at all.

    Rows whose value is no text, being bytes that are no UTF-8, fail: `bad` bool[m] is set, and the text null there.
    """
    kind = pa.large_string()
    try:
        return column.cast(kind)
    except pa.ArrowException:
        try:
            column.slice(0, 0).cast(kind)
        except pa.ArrowException:
            return None
    is_bytes = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    why = f'holds bytes that are no UTF-8; decode_text("{name}") before it takes care of them'
    found = _not_cast(column, kind, 0)
    for index, error in found:
        if not bad[index]:
            bad[index] = True
            rows.fail(index, operator, f'column "{name}" {why if is_bytes else f"holds no text ({one_line(error)})"}')
    return _without(column, [index for index, _ in found]).cast(kind)


def _without(column: pa.Array, places: list[int]) -> pa.Array:
    """`column` with nulls at `places`."""
    if not places:
        return column
    sound = np.ones(len(column), dtype=bool)
    sound[places] = False
    return pc.if_else(_bool_array(sound), column, pa.nulls(1, column.type)[0])


def _may_become(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type can be values of another, rather than be parsed or printed."""
    if pa.types.is_null(kind) or (_is_number(kind) and _is_number(wanted)):
        return True
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in texts) and any(check(wanted) for check in texts)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _not_cast(column: pa.Array, kind: pa.DataType, first: int) -> list[tuple[int, BaseException]]:
    """The places, counted from `first`, and errors of the values that cannot become of type `kind`."""
    try:
        column.cast(kind)
    except pa.ArrowException as error:
        if len(column) == 1:
            return [(first, error)]
        half = len(column) // 2
        return _not_cast(column.slice(0, half), kind, first) + _not_cast(column.slice(half), kind, first + half)
    return []


def _bool_array(mask: np.ndarray) -> pa.BooleanArray:
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits])
