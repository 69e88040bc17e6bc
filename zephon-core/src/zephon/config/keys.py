"""One declaration per key: type, default and documentation; checks, messages and the key reference come from it.

A key is a field of a dataclass::

    seed: Annotated[int, Meta(ge=0)] = key(0, "Seed of every permutation of the run.")

`msgspec` holds a value against the type; the messages are made here: `KEY is VALUE; expected EXPECTATION.`
"""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from zephon.errors import RecipeError, ZephonError

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
_MAX_FLOAT = sys.float_info.max


# ---------------------------------------------------------------------------------------------------------------------
# Types of values. Their titles say what a message expects; `extra` has "units" of numbers, "auto" as a word for None,
# and "path" for what a recipe takes from its folder.

_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def _scaled(value: Any, units: Mapping[str, int]) -> Any:
    """The integer of a number with a unit; other values stay as they are, for the type to refuse."""
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    unit = units.get(match[2].lower()) if match else None
    return value if match is None or unit is None else int(Fraction(match[1]) * unit)


_SIZE = 'a number of bytes, as an integer or with a unit as in "500gb"'
_COUNT = 'an integer of at least 0, or a number with a unit as in "500m" or "1.5b"'

Whole = Annotated[int, Meta(ge=0, le=MAX_INT32, title="an integer of at least 0")]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT32, title="an integer of at least 1")]
Limit = Annotated[int, Meta(ge=1, le=1 << 16, title="an integer from 1 to 65536")]
Share = Annotated[float, Meta(ge=0, le=1, title="a number from 0 to 1")]
Weight = Annotated[float, Meta(ge=0, le=_MAX_FLOAT, title="a finite number of at least 0")]
Weights = Annotated[
    dict[str, Annotated[float, Meta(ge=0, le=_MAX_FLOAT)]],
    Meta(min_length=1, title="a table of weights by source: finite numbers of at least 0, at least one above 0"),
]
Size = Annotated[int, Meta(ge=1, le=MAX_INT64, title=_SIZE, extra={"units": _UNITS})]
AutoSize = Annotated[int, Meta(ge=1, le=MAX_INT64, title=f'{_SIZE}, or "auto"', extra={"units": _UNITS, "auto": True})]
Count = Annotated[int, Meta(ge=0, le=MAX_INT64 // 4, title=_COUNT, extra={"units": _COUNTS})]
Workers = Annotated[int, Meta(ge=1, le=1024, title='an integer from 1 to 1024, or "auto"', extra={"auto": True})]
Name = Annotated[
    str,
    Meta(pattern=r"^(?!\s)[^\x00-\x1f\x7f]+(?<!\s)\Z", max_length=255, title="a name, without blanks at its ends"),
]
Column = Annotated[str, Meta(pattern=r"^\S(?s:.*\S)?\Z", title="the name of a column")]
Names = Annotated[tuple[Column, ...], Meta(title="a list of names of columns")]
Prose = Annotated[str, Meta(pattern=r"\S", title="a text that is not blank")]
Location = Annotated[
    str,
    Meta(pattern=r"\S", title="the path of a file or folder, a glob, or the URI of a store", extra={"path": True}),
]
MediaRoot = Annotated[
    str,
    Meta(pattern=r"\S", title="a folder, a tar archive, or the URI of a store", extra={"path": True}),
]
Folder = Annotated[
    str,
    Meta(
        pattern=r"^(?![A-Za-z][A-Za-z0-9+.-]+://)(?s:.*\S)",
        title="a path on this machine, not a store",
        extra={"path": True},
    ),
]


def _parts(kind: Any) -> list[Any]:
    """The alternatives of a type, without None."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [part for part in parts if part is not NoneType]


def _metas(kind: Any) -> list[Meta]:
    return [each for part in _parts(kind) for each in getattr(part, "__metadata__", ())]


def _extra(kind: Any) -> dict[str, Any]:
    return {name: value for meta in _metas(kind) for name, value in (meta.extra or {}).items()}


def expectation(kind: Any) -> str:
    """The values that a type takes, in words."""
    words = [meta.title or "" for meta in _metas(kind)]
    for part in _parts(kind):
        words += map(quote, get_args(part)) if get_origin(part) is Literal else ["true or false"] * (part is bool)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


# ---------------------------------------------------------------------------------------------------------------------
# Declarations


def key(default: Any = MISSING, doc: str = "", *, decides_data: bool = True) -> Any:
    """The field of a key.

    Args:
        default: the value where the key is not given, which None stands for; a key without it has to be given.
        doc: what the key means.
        decides_data: whether another value gives other records; else the key is about speed, memory or reports. Of
            an operator all fields decide data, keys or not, that do not say otherwise.
    """
    return field(default=default, metadata={"doc": doc, "decides_data": decides_data})


@dataclass(frozen=True)
class Key:
    """A declared key; see `key`."""

    name: str
    kind: Any
    default: Any
    doc: str
    decides_data: bool

    @property
    def required(self) -> bool:
        """Whether it has to be given."""
        return self.default is MISSING

    @property
    def is_path(self) -> bool:
        """Whether its values are paths."""
        return "path" in _extra(self.kind)

    @property
    def plain(self) -> Any:
        """The type without constraints, as a command line can read it."""
        plain = [get_args(part)[0] if get_origin(part) is Annotated else part for part in _parts(self.kind)]
        plain += [str] if _extra(self.kind).keys() & {"units", "auto"} else []
        return Union[(*plain, *([None] if self.default is None else []))]


_KEYS: dict[type, dict[str, Key]] = {}


def keys_of(cls: type) -> dict[str, Key]:
    """The keys that a dataclass declares or inherits, by name."""
    if cls not in _KEYS:
        hints = get_type_hints(cls, include_extras=True)
        _KEYS[cls] = {f.name: Key(f.name, hints[f.name], f.default, **f.metadata) for f in fields(cls) if f.metadata}
    return _KEYS[cls]


def settings_of(instance: Any) -> dict[str, Any]:
    """The settings of an operator that decide data, by name: for fingerprints."""
    return {f.name: getattr(instance, f.name) for f in fields(instance) if f.metadata.get("decides_data", True)}


def check(kind: Any, value: Any, name: str, error: type[ZephonError] = RecipeError) -> Any:
    """The value in normal form: paths and NumPy scalars as plain data, numbers with a unit as integers.

    Raises:
        ZephonError: (as `error`) the value is not of the type.
    """
    extra = _extra(kind)
    if "auto" in extra and value == "auto":
        return None
    plain = value.item() if isinstance(value, np.generic) else value
    plain = os.fspath(plain) if isinstance(plain, os.PathLike) else plain
    if "units" in extra:
        plain = _scaled(plain, extra["units"])
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError:
        words = [word for part in _parts(kind) if get_origin(part) is Literal for word in get_args(part)]
        near = nearest(value, words) if isinstance(value, str) else None
        remedy = (
            f" Did you mean {quote(near)}?" if near else " Write it without quotes." if _is_quoted(plain, kind) else ""
        )
        raise error(f"{name} is {seen(value)}; expected {expectation(kind)}.{remedy}") from None


def _is_quoted(value: Any, kind: Any) -> bool:
    """Whether a text spells a value of the type."""
    try:
        return isinstance(value, str) and msgspec.convert(value, kind, strict=False) is not None
    except msgspec.ValidationError:
        return False


def check_keys(instance: Any, error: type[ZephonError] = RecipeError, prefix: str = "") -> None:
    """Put the keys of a new instance of a frozen dataclass into normal form; messages name them behind `prefix`.

    Raises:
        ZephonError: (as `error`) a value is not of its key's type.
    """
    for each in keys_of(type(instance)).values():
        value = getattr(instance, each.name)
        if value is None and not each.required:
            value = each.default
            object.__setattr__(instance, each.name, value)
        if value is not each.default:
            object.__setattr__(instance, each.name, check(each.kind, value, prefix + each.name, error))


def refuse_unknown(
    given: Iterable[Any],
    known: Iterable[str],
    what: str = "key",
    error: type[ZephonError] = RecipeError,
    reason: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Refuse names that are not known, with the reason for that, or the nearest known name.

    Raises:
        ZephonError: (as `error`) a name is unknown.
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = nearest(str(name), known)
            remedy = f"Did you mean {quote(near)}?" if near else f"Expected one of {', '.join(known)}."
            raise error(f"unknown {what} {seen(name)}. {reason(str(name)) or remedy}")


@contextmanager
def within(where: str) -> Iterator[None]:
    """Put the place in front of what is said of a recipe."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error.__cause__


# ---------------------------------------------------------------------------------------------------------------------
# Words


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like this one, or None where none is."""
    matches = difflib.get_close_matches(normal(word), list(known), n=1)
    return matches[0] if matches else None


def normal(word: str) -> str:
    """A word in lower case, with underscores."""
    return re.sub(r"[\s.-]+", "_", word.strip().lower())


def quote(text: str) -> str:
    """The text in double quotes, on one line of bounded length."""
    line = json.dumps(text, ensure_ascii=False)
    return line if len(line) <= 120 else f'{line[:116]}..."'


def seen(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "missing" if value is None else quote(value) if isinstance(value, str) else reprlib.repr(value)
