"""Functions of the user's own over rows: of a row at a time, or of an Arrow table at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array, one_chunk, values_of
from zephon.columns.faults import reason_of
from zephon.config.keys import key
from zephon.errors import PipelineError
from zephon.ops.identity import name_of
from zephon.ops.rows import FAILED, ROW_COLUMN, Rows, UserOperator, each_row, python_rows, require_columns
from zephon.ops.typing import Types, column_as, columns_of, in_halves


@dataclass(frozen=True)
class MapTransform(UserOperator):
    """Change rows one by one with a function: as slow as Python is, and no slower.

    The function gets a row, a dict of Python values, and gives a dict of columns to replace or add (what it does not
    name stays), None to drop the row, or a list of dicts to make several rows of it.

    Attributes:
        types: types of columns that it makes, by name; pyarrow's, or their names as text. Those of others are found
            before the run, from some rows of each dataset (see `zephon.ops.trial`). A row with a value that does not
            fit, or with a column that none of those rows has, cannot be used.
        probed: `types` are those of all columns, as found before the run; else what is missing in them is found from
            the rows at hand.
    """

    kind: ClassVar[str] = "map_transform"
    types: Mapping[str, pa.DataType | str] | Types = ()
    probed: bool = key(False, decides_data=False)

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise PipelineError(f"map_transform takes a function of a row; {self.transform!r} is given.")
        object.__setattr__(self, "types", _checked_types(self.types))
        super().__post_init__()

    def apply(self, rows: Rows) -> None:
        results = each_row(rows, self, self.transform, python_rows(rows, self))
        given, source = results, np.arange(len(results))
        # A look at all names together is quicker than one at those of each row, and mostly enough.
        if set(map(type, results)) != {dict} or not _are_names(set().union(*results)):
            given = []
            places: list[int] = []
            for index, result in enumerate(results):
                try:
                    given += [] if result is FAILED else rows_given(result)
                except TypeError as error:
                    rows.fail(index, self.label, str(error))
                places += [index] * (len(given) - len(places))
            source = np.array(places, dtype=np.int64)
            rows.take(source)
        unfit: set[int] = set()

        def fail(index: int, reason: str) -> None:
            unfit.add(int(source[index]))
            rows.fail(index, self.label, reason)

        columns = columns_of(given, dict(self.types), fail, before=rows.table, complete=self.probed)
        for name, column in columns.items():
            rows.set_column(name, column)
        if unfit:
            rows.keep(~np.isin(source, list(unfit)))


def _checked_types(types: Any) -> Types:
    """Names and Arrow types; PipelineError for anything else."""
    try:
        kinds = {name: pa.type_for_alias(kind) if isinstance(kind, str) else kind for name, kind in dict(types).items()}
        if not all(isinstance(name, str) and isinstance(kind, pa.DataType) for name, kind in kinds.items()):
            raise TypeError
    except (TypeError, ValueError):
        raise PipelineError(
            f"map_transform types is {types!r}; expected types of Arrow by the names of columns, such as "
            '{"score": "float64"}.'
        ) from None
    return tuple((name, pa.large_string() if pa.types.is_string(kind) else kind) for name, kind in kinds.items())


def rows_given(result: Any) -> list[Mapping[str, Any]]:
    """The rows in the result of a function of a row."""
    rows = [] if result is None else result if isinstance(result, list) else [result]
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"it gave {type(row).__name__}; expected a dict, a list of dicts or None")
        if not _are_names(row):
            wrong = next(name for name in row if not _are_names([name]))
            raise TypeError(f"it gave a column named {wrong!r:.40}; expected a text other than {ROW_COLUMN!r}")
    return rows


def _are_names(names: Any) -> bool:
    return ROW_COLUMN not in names and set(map(type, names)) <= {str}


class Operator:
    """Base of functions of a table written as a class, with a set-up of its own in every worker.

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _PerThread, (self.prototype,)


@dataclass(frozen=True)
class MapBatches(UserOperator):
    """Change many rows at once with a function from an Arrow table to an Arrow table, or an `Operator`: the fast way.

    As many rows as it gets, it may give back in any columns; to drop or multiply rows it keeps the column "_row", which
    says for each row which one of those it got it came from (a filter or take of the table does that by itself). Rows
    must stay in order.

    Attributes:
        types: names and types of its columns, as found before the run (see `zephon.ops.trial`): a column that a table
            has in another type is converted, and a row whose value does not fit cannot be used.
    """

    kind: ClassVar[str] = "map_batches"
    types: Types = key((), decides_data=False)

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise PipelineError(f"{self.kind} takes a function of an Arrow table; {self.transform!r} is given.")
        if isinstance(self.transform, Operator):
            if self.columns is None:
                object.__setattr__(self, "columns", self.transform.columns)
            object.__setattr__(self, "transform", _PerThread(self.transform))
        super().__post_init__()

    @property
    def function(self) -> Any:
        return self.transform.prototype if isinstance(self.transform, _PerThread) else self.transform

    def apply(self, rows: Rows) -> None:
        require_columns(rows.table, self.columns, self.label)
        table = rows.table if self.columns is None else rows.table.select(list(self.columns))
        if ROW_COLUMN in table.column_names:
            raise PipelineError(f"{self.label}: the data has a column {ROW_COLUMN}, which is kept for its own use.")
        numbered = table.append_column(ROW_COLUMN, int64_array(np.arange(table.num_rows, dtype=np.int64)))

        def part(start: int, stop: int) -> tuple[pa.Table, np.ndarray]:
            return self._checked(self.transform(numbered.slice(start, stop - start)), start, stop)

        parts = in_halves(part, 0, table.num_rows, lambda row, error: rows.fail(row, self.label, error))
        typed = [self._typed(rows, *one) for one in parts] or [(table.slice(0, 0), np.empty(0, dtype=np.int64))]
        result = pa.concat_tables([table for table, _ in typed], promote_options="permissive")
        others = [name for name in rows.table.column_names if name not in {*table.column_names, *result.column_names}]
        rows.take(np.concatenate([source for _, source in typed]))
        for name in others:  # what it does not get stays as it is
            result = result.append_column(name, rows.table.column(name))
        rows.table = result

    def _checked(self, result: Any, start: int, stop: int) -> tuple[pa.Table, np.ndarray]:
        """(the table, int64[m] the row that each of its rows came from) that the function gave for rows start to stop.

        Raises:
            PipelineError: it is no table, or does not say which rows its rows came from.
        """
        if not isinstance(result, pa.Table):
            raise PipelineError(f"{self.label} gave {type(result).__name__}; expected a pyarrow.Table.")
        if ROW_COLUMN not in result.column_names:
            if result.num_rows != stop - start:
                raise PipelineError(
                    f"{self.label} got {stop - start} rows and gave {result.num_rows}; one that drops or multiplies "
                    f'rows must keep the column "{ROW_COLUMN}" with the place that each row came from.'
                )
            return result, np.arange(start, stop)
        column = one_chunk(result.column(ROW_COLUMN))
        is_valid = pa.types.is_integer(column.type) and not column.null_count
        source = values_of(column.cast(pa.int64())) if is_valid else np.array([stop])
        if len(source) and not (source[0] >= start and source[-1] < stop and (np.diff(source) >= 0).all()):
            raise PipelineError(
                f'{self.label} gave a column "{ROW_COLUMN}" with other values than it got, or in another order; '
                "expected those of its rows, ascending."
            )
        return result.drop_columns([ROW_COLUMN]), source

    def _typed(self, rows: Rows, result: pa.Table, source: np.ndarray) -> tuple[pa.Table, np.ndarray]:
        """A table with its columns in the types found before the run, without rows of which anything does not fit."""
        unfit: set[int] = set()

        def fail(index: int, reason: str) -> None:
            unfit.add(int(source[index]))
            rows.fail(int(source[index]), self.label, reason)

        for name, kind in self.types:
            at = result.schema.get_field_index(name)
            if at >= 0 and result.schema.field(at).type != kind:
                result = result.set_column(at, name, column_as(name, result.column(at).to_pylist(), kind, fail))
        if unfit:
            kept = np.flatnonzero(~np.isin(source, list(unfit)))
            result, source = result.take(int64_array(kept)), source[kept]
        return result, source
