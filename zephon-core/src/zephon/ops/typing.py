"""Python values into Arrow columns whose types are fixed before the run.

What a user's function gives has no type until it is written into a column, and a type found block by block would depend
on where blocks are cut: 1 would be a whole number next to 2 and a float next to 0.5. So types are found once, from the
rows that operators are tried on (`common_type`), and every later value must fit (`column_as`): a number fits where the
type holds it exactly, null fits anywhere, and nothing else is converted. A row with another value cannot be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import column_of
from zephon.errors import PipelineError

_T = TypeVar("_T")
Types = tuple[tuple[str, pa.DataType], ...]
"""Names and types of columns."""

_PLAIN = {str: pa.large_string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def types_of(table: pa.Table) -> Types:
    """Names and types of the columns of a table."""
    return tuple(zip(table.schema.names, table.schema.types, strict=True))


def common_type(values: Iterable[Any], before: pa.DataType | None = None) -> pa.DataType:
    """The type of a column of `values`: that of the first which is not null, made wider where a later one asks for it.

    Wider is a float for whole numbers, and a struct or list that lacks what others have. A value that does not go
    together with those before it changes nothing. Nulls alone leave the type `before`, of the column that they replace,
    and structs and lists keep what it has besides.
    """
    kind, seen = pa.null(), set()
    for value in values:
        if value is not None and type(value) not in seen:
            seen |= {type(value)} & _PLAIN.keys()
            try:
                kind = _wider(kind, _type_of(value))
            except _ERRORS:
                continue
    if before is None or kind in _PLAIN.values():
        return kind
    try:
        return _wider(before, kind)
    except _ERRORS:
        return kind


def wanting(kind: pa.DataType) -> int:
    """What more rows could tell of a type: 2 where there is only null, 1 of fields that structs may have, else 0."""
    inner = max((wanting(kind.field(n).type) for n in range(kind.num_fields)), default=0)
    return max(inner, 2 * pa.types.is_null(kind), int(pa.types.is_struct(kind)))


def columns_of(
    given: Sequence[Mapping[str, Any]],
    types: Mapping[str, pa.DataType],
    fail: Callable[[int, str], None],
    *,
    before: pa.Table | None = None,
    complete: bool = False,
) -> dict[str, pa.Array]:
    """Columns of rows that a function gave.

    Args:
        given: the rows, n dicts.
        types: types of columns, by name; where they are not `complete`, those of others are found from the rows.
        fail: called for rows with a value that does not fit, or with a column that complete types do not have.
        before: the rows they replace, n; where a row does not name a column, its value stays. Columns that stay as a
            whole are left out of the result.
        complete: see types.
    """
    before = pa.table({}) if before is None else before
    names: set[str] = set().union(*given)
    columns = {}
    for name in [*types, *sorted(names - types.keys())]:
        here = before.schema.field(name).type if name in before.column_names else None
        kind = types.get(name) or (here if complete else None)
        if name not in names and kind is not None and here == kind:
            continue
        try:
            values = [row[name] for row in given]
        except KeyError:
            kept = [None] * len(given) if here is None else before.column(name).to_pylist()
            values = [row.get(name, old) for row, old in zip(given, kept, strict=True)]
        if kind is None and complete:
            why = f'it gave a column "{name}", which no row tried before the run has; name its type in types'
            for row, value in enumerate(values):
                if value is not None:
                    fail(row, why)
            continue
        columns[name] = column_as(name, values, common_type(values, here) if kind is None else kind, fail)
    return columns


def column_as(name: str, values: Sequence[Any], kind: pa.DataType, fail: Callable[[int, str], None]) -> pa.Array:
    """`values` as a column of type `kind`, null where `fail` was called because a value does not fit."""

    def unfit(row: int, error: Exception) -> None:
        fitting[row] = None
        value = values[row]
        if isinstance(error, UnicodeEncodeError):
            return fail(row, "it gave text with half a surrogate pair, which is no Unicode")
        is_shown = type(value) in {*_PLAIN, bytes, dict, list}
        shown = f"{repr(value)[:60]} ({type(value).__name__})" if is_shown else f"a {type(value).__name__}"
        was = "null in every row" if pa.types.is_null(kind) else str(kind)[:80]
        return fail(row, f'it gave {shown} for column "{name}", which is {was} in the rows tried first')

    fitting = list(values)
    parts = in_halves(lambda start, stop: _exactly(values[start:stop], kind), 0, len(values), unfit)
    return parts[0] if parts and len(parts[0]) == len(values) else _exactly(fitting, kind)


def _exactly(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """`values` as they are in a column of type `kind`; one of `_ERRORS` where that is not possible."""
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.nulls(len(values), kind)
    if len(kinds) == 1 and _PLAIN.get(next(iter(kinds))) == kind:
        return column_of(values)
    if kind == pa.float64() and kinds <= {int, float}:
        made = column_of([value if value is None else float(value) for value in values])
    else:
        made = pa.array(list(map(_plain, values)), kind)
    if not all(map(_same, values, made.to_pylist())):
        raise TypeError(f"not {kind}")
    return made


def _type_of(value: Any) -> pa.DataType:
    value = _plain(value)
    if type(value) in _PLAIN:
        return _PLAIN[type(value)]
    kind = pa.array([value]).type
    return pa.large_string() if pa.types.is_string(kind) else kind


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type that holds values of both; one of `_ERRORS` where there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} & set(_PLAIN.values()) and {one, other} != {pa.int64(), pa.float64()}:
        raise TypeError(f"{one} and {other}")
    schemas = [pa.schema([("value", kind)]) for kind in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy's as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _same(value: Any, back: Any) -> bool:
    """Whether a value is what was read back from its column; a key with null is as good as none."""
    value = _plain(value)
    if isinstance(value, Mapping):
        return isinstance(back, dict) and all(_same(value.get(key), back.get(key)) for key in {**value, **back})
    if isinstance(value, list | tuple):
        return isinstance(back, list) and len(value) == len(back) and all(map(_same, value, back))
    if isinstance(value, float) and math.isnan(value):
        return isinstance(back, float) and math.isnan(back)
    return isinstance(value, bool) == isinstance(back, bool) and bool(value == back)


def in_halves(
    attempt: Callable[[int, int], _T], start: int, stop: int, fail: Callable[[int, Exception], None]
) -> list[_T]:
    """The results of `attempt(start, stop)` over rows, cut in halves as long as it raises.

    So `fail(row, error)` is called for the rows over which it raises alone, ascending, and all others have a result.
    What no row is to blame for, errors of memory or of the pipeline, is raised.
    """
    try:
        return [attempt(start, stop)]
    except (MemoryError, PipelineError):
        raise
    except Exception as error:
        if stop - start <= 1:
            fail(start, error)
            return []
    middle = (start + stop) // 2
    return [*in_halves(attempt, start, middle, fail), *in_halves(attempt, middle, stop, fail)]
