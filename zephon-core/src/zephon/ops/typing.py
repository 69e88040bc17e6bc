"""Python values into Arrow columns whose types are fixed before the run.

What a user's function gives has no type until it is written into a column, and a type found block by block would depend
on where blocks are cut: 1 would be a whole number next to 2 and a float next to 0.5. So types are found once, from the
rows that operators are tried on (`common_type`), and every later value must fit (`column_as`): it is kept as it is, or
its row cannot be used. A whole number fits among floats that hold it exactly, null fits anywhere, and nothing else is
converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import column_of
from zephon.columns.damage import shown_value

__all__ = ["Types", "column_as", "columns_of", "common_type", "one_line", "types_of", "wanting"]

Types = tuple[tuple[str, pa.DataType], ...]
"""Names and types of columns."""

Fail = Callable[[int, str], None]
"""Told of the number of a row that cannot be used, and why."""

_PLAIN = {str: pa.large_string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def types_of(table: pa.Table) -> Types:
    """Names and types of the columns of a table."""
    return tuple(zip(table.schema.names, table.schema.types, strict=True))


def one_line(error: BaseException) -> str:
    """The text of an Arrow exception, shortened."""
    return " ".join(str(error).split())[:200]


def common_type(values: Iterable[Any], before: pa.DataType | None = None) -> pa.DataType:
    """The type of a column of `values`: that of the first which is not null, made wider where a later one asks for it.

    Wider is a float for whole numbers, and a struct or list that lacks what others have. A value that does not go
    together with those before it changes nothing.

    Args:
        values: Python values.
        before: the type of the column that they replace. Nulls alone leave it as it is, and so do values of it that are
            more than a text, a number or a flag.
    """
    before = pa.null() if before is None else before
    kind, plain, seen = before, set(), False
    for value in values:
        if value is None or type(value) in plain:
            continue
        if type(value) in _PLAIN:
            plain.add(type(value))
        try:
            other = _type_of(value)
        except _ERRORS:
            continue
        if not seen and other in _PLAIN.values():
            kind = other
        seen = True
        try:
            kind = _wider(kind, other)
        except _ERRORS:
            kind = other if kind is before else kind
    return kind


def wanting(kind: pa.DataType) -> int:
    """What more rows could tell of a type found from some: 2 where there is only null, 1 of fields of structs, else 0."""
    inner = max((wanting(kind.field(n).type) for n in range(kind.num_fields)), default=0)
    return max(inner, 2 * pa.types.is_null(kind), int(pa.types.is_struct(kind)))


def columns_of(
    given: Sequence[Mapping[str, Any]],
    types: Mapping[str, pa.DataType],
    fail: Fail,
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
    names = dict.fromkeys(name for row in given for name in row)
    others = [name for name in names if name not in types]
    columns = {}
    for name in [*types, *(sorted(others) if complete else others)]:
        here = before.schema.field(name).type if name in before.column_names else None
        kind = types.get(name) or (here if complete else None)
        if name not in names and kind is not None and here == kind:
            continue
        if here is None:
            values = [row.get(name) for row in given]
        else:
            values = [row.get(name, _MISSING) for row in given]
            if any(value is _MISSING for value in values):
                kept = before.column(name).to_pylist()
                values = [old if new is _MISSING else new for old, new in zip(kept, values, strict=True)]
        if kind is None and complete:
            for row, value in enumerate(values):
                if value is not None:
                    fail(row, _fitted(name, value, common_type([value]))[0] or _not_seen(name))
            continue
        columns[name] = column_as(name, values, common_type(values, here) if kind is None else kind, fail)
    return columns


_MISSING: Any = object()


def _not_seen(name: str) -> str:
    return (
        f'it gave a column "{name}", which no row tried before the run has; give it in every row, None where there is '
        "none, or name its type in types"
    )


def column_as(name: str, values: Sequence[Any], kind: pa.DataType, fail: Fail) -> pa.Array:
    """`values` as a column of type `kind`, null where `fail` was called because a value does not fit."""
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.nulls(len(values), kind)
    try:
        if len(kinds) == 1 and _PLAIN.get(next(iter(kinds))) == kind:
            return column_of(values)
        if kind not in _PLAIN.values():
            made = pa.array(list(map(_plain, values)), kind)
            if all(map(_same, values, made.to_pylist())):
                return made
    except _ERRORS:
        pass
    fitting: list[Any] = []
    for place, value in enumerate(values):
        reason, fitted = _fitted(name, value, kind)
        if reason is not None:
            fail(place, reason)
        fitting.append(fitted)
    plain = kind in _PLAIN.values() and any(value is not None for value in fitting)
    return column_of(fitting) if plain else pa.array(fitting, kind)


def _fitted(name: str, value: Any, kind: pa.DataType) -> tuple[str | None, Any]:
    """(None, a value that fits), or (why it does not, None)."""
    value = _plain(value)
    if value is None or (type(value) is int and kind == pa.float64() and _is_exact(value)):
        return None, value if value is None else float(value)
    try:
        if type(value) not in _PLAIN or kind not in _PLAIN.values():
            fits = not pa.types.is_null(kind) and _same(value, pa.array([value], kind)[0].as_py())
        else:
            fits = _PLAIN[type(value)] == kind and len(column_of([value])) == 1
        if fits:
            return None, value
        _type_of(value)
    except UnicodeEncodeError:
        return "it gave text with half a surrogate pair, which is no Unicode", None
    except _ERRORS as error:
        if type(value) not in _PLAIN:
            of = type(value).__name__
            return f'what it gave for column "{name}" ({of}) is no value for Arrow: {one_line(error)}', None
    try:
        shown = shown_value(value)
    except Exception:  # whatever the value's own code does
        shown = "something"
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    if type(value) is int and kind == pa.int64():
        return f'it gave {shown} for column "{name}"; a whole number of 64 bits is needed, -2**63 to 2**63 - 1', None
    was = "null in every row" if pa.types.is_null(kind) else str(kind)[:80]
    return (
        f'it gave {shown!r} ({type(value).__name__}) for column "{name}", which is {was} in the rows tried first',
        None,
    )


def _is_exact(value: int) -> bool:
    return abs(value) < 1 << 1000 and int(float(value)) == value


def _type_of(value: Any) -> pa.DataType:
    value = _plain(value)
    if type(value) in _PLAIN:
        return _PLAIN[type(value)]
    kind = pa.array([value]).type
    return pa.large_string() if pa.types.is_string(kind) else kind


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type that holds values of both; pa.ArrowException where there is none."""
    if one == other or pa.types.is_null(other):
        return one
    plain = [kind for kind in (one, other) if kind in _PLAIN.values()]
    if plain and {one, other} != {pa.int64(), pa.float64()} and not pa.types.is_null(one):
        raise pa.ArrowTypeError(f"{one} and {other}")
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
    if isinstance(value, bool) != isinstance(back, bool):
        return False
    return bool(value == back) or (value != value and back != back)
