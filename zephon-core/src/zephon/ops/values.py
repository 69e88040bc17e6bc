"""Python values into Arrow columns whose types are known beforehand.

What a function of the user's gives has no type until it is written into a column, and a type found block by block
would depend on where blocks are cut: 1 would be a whole number next to 2 and a float next to 0.5. So types are found
once, from the rows that operators are tried on before the run (`common_type`), and every later value must fit
(`column_as`): it is kept as it is, or its row cannot be used. A whole number fits among floats that hold it exactly,
null fits anywhere, and nothing else is converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import column_of
from zephon.columns.damage import shown_value
from zephon.ops.expression import one_line

__all__ = ["column_as", "common_type", "could_widen", "is_open", "unfit_anywhere"]

_PLAIN: dict[type, pa.DataType] = {
    str: pa.large_string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    type(None): pa.null(),
}
NOT_TEXT = "it gave text with half a surrogate pair, which is no Unicode"


def common_type(values: Iterable[Any], before: pa.DataType | None = None) -> pa.DataType:
    """The type of a column of `values`: that of the first which is not null, made wider where a later one asks for it.

    Wider is a float for whole numbers, and a struct or list that lacks what others have. A value that does not go
    together with those before it changes nothing.

    Args:
        values: Python values.
        before: the type of the column that they take the place of. Nulls alone leave it as it is, and so do values of
            it that are more than a text, a number or a flag.
    """
    before = pa.null() if before is None else before
    kind, plain, found = before, set(), False
    for value in values:
        if value is None or type(value) in plain:
            continue
        if type(value) in _PLAIN:
            plain.add(type(value))
        try:
            other = _type_of(value)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
        if not found and other in _PLAIN.values():
            kind = other
        found = True
        try:
            kind = _wider(kind, other)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            kind = other if kind is before else kind
    return kind


def is_open(kind: pa.DataType) -> bool:
    """Whether it is nothing but null somewhere, so that later values may not fit."""
    return pa.types.is_null(kind) or any(map(is_open, _inner(kind)))


def could_widen(kind: pa.DataType) -> bool:
    """Whether there are structs in it, of which more rows may show more fields."""
    return pa.types.is_struct(kind) or any(map(could_widen, _inner(kind)))


def _inner(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(n).type for n in range(kind.num_fields)]


def column_as(name: str, values: Sequence[Any], kind: pa.DataType, on_fault: Callable[[int, str], None]) -> pa.Array:
    """`values` as a column of type `kind`.

    Args:
        name: of the column, for messages.
        values: Python values.
        kind: the type.
        on_fault: told of places whose value does not fit, and why; they are null.
    """
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if not kinds:
        return pa.nulls(len(values), kind)
    only = next(iter(kinds)) if len(kinds) == 1 else None
    try:
        if only in _PLAIN and _PLAIN[only] == kind:
            return column_of(values)
        if _is_exact(kind):
            # No conversion can hide in these: where Arrow finds this very type, everything fits.
            made = pa.array(values)
            if made.type == kind:
                return made
        if kind not in _PLAIN.values():
            made = pa.array([_plain(value) for value in values], kind)
            if all(map(_same, values, made.to_pylist())):
                return made
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    fitting: list[Any] = []
    for place, value in enumerate(values):
        reason, fitted = _fitted(name, _plain(value), kind)
        if reason is not None:
            on_fault(place, reason)
        fitting.append(fitted)
    plain = kind in _PLAIN.values() and any(value is not None for value in fitting)
    return column_of(fitting) if plain else pa.array(fitting, kind)


@lru_cache(maxsize=256)
def _is_exact(kind: pa.DataType) -> bool:
    """Whether it is a list or struct of texts, numbers, flags and nulls alone."""
    inner = _inner(kind)
    if pa.types.is_struct(kind) or pa.types.is_list(kind):
        return all(_is_exact(one) or one in (*_PLAIN.values(), pa.string()) for one in inner)
    return False


def _fitted(name: str, value: Any, kind: pa.DataType) -> tuple[str | None, Any]:
    """(None, a value that fits), or (why it does not, None)."""
    if value is None:
        return None, None
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return NOT_TEXT, None
    if kind == pa.float64() and type(value) is int:
        if abs(value) < 1 << 1000 and int(float(value)) == value:
            return None, float(value)
    elif type(value) in _PLAIN:
        if _PLAIN[type(value)] == kind and (type(value) is not int or -(1 << 63) <= value < 1 << 63):
            return None, value
        if kind in _PLAIN.values():
            return _why(name, value, kind), None
    try:
        if not pa.types.is_null(kind) and _same(value, pa.array([value], kind)[0].as_py()):
            return None, value
        _type_of(value)
    except UnicodeEncodeError:
        return NOT_TEXT, None
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if type(value) not in _PLAIN:
            return (
                f'what it gave for column "{name}" ({type(value).__name__}) is no value for Arrow: {one_line(error)}',
                None,
            )
    return _why(name, value, kind), None


def unfit_anywhere(name: str, value: Any) -> str | None:
    """Why no column can hold a value, whatever its type; None where one can."""
    return _fitted(name, _plain(value), common_type([value]))[0]


def _why(name: str, value: Any, kind: pa.DataType) -> str:
    try:
        shown = shown_value(value)
    except Exception:  # whatever the value's own code does
        shown = "something"
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    if type(value) is int and kind == pa.int64():
        return f'it gave {shown} for column "{name}"; a whole number of 64 bits is needed, -2**63 to 2**63 - 1'
    was = "null in every row" if pa.types.is_null(kind) else str(kind)[:80]
    return f'it gave {shown!r} ({type(value).__name__}) for column "{name}", which is {was} in the rows tried first'


def _type_of(value: Any) -> pa.DataType:
    value = _plain(value)
    if type(value) in _PLAIN:
        return _PLAIN[type(value)]
    kind = pa.array([value]).type
    return pa.large_string() if pa.types.is_string(kind) else kind


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type that holds values of both.

    Raises:
        pa.ArrowException: there is none.
    """
    if one == other or pa.types.is_null(other):
        return one
    plain = [kind for kind in (one, other) if kind in _PLAIN.values() and not pa.types.is_null(kind)]
    if plain and {one, other} != {pa.int64(), pa.float64()} and not pa.types.is_null(one):
        raise pa.ArrowTypeError(f"{one} and {other}")
    schemas = [pa.schema([("value", kind)]) for kind in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy's as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


def _same(value: Any, back: Any) -> bool:
    """Whether a value is what was read back from its column; a key with null is as good as none."""
    if type(value) is str:
        return type(back) is str and value == back
    value = _plain(value)
    if isinstance(value, Mapping):
        if not isinstance(back, dict):
            return False
        return all(_same(value.get(key), item) for key, item in back.items()) and all(
            key in back or item is None for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return isinstance(back, list) and len(value) == len(back) and all(map(_same, value, back))
    if isinstance(value, float) and math.isnan(value):
        return isinstance(back, float) and math.isnan(back)
    return isinstance(value, bool) == isinstance(back, bool) and bool(value == back)
