"""Checks of configuration values, and the words in which a refusal is told.

A check is called with a value and returns it in normal form, or raises `Refused`; its `repr` says what it expects.
`checked` turns a refusal into the one sentence that the user reads.
"""

import difflib
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zephon.errors import RecipeError

__all__ = [
    "Check",
    "Choice",
    "Count",
    "Flag",
    "Integer",
    "Location",
    "LongText",
    "Refused",
    "Share",
    "Size",
    "Text",
    "Weight",
    "Weights",
    "checked",
    "clip",
    "is_uri",
    "nearest",
    "one_of",
    "quote",
    "seen",
]

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}b"] = 1000**_power
    _UNITS[f"{_prefix}ib"] = 1024**_power
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([kmbt]?)\s*", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([a-z]{1,3})\s*", re.ASCII | re.IGNORECASE)
_URI = re.compile(r"[a-z][a-z0-9+.-]+://", re.ASCII | re.IGNORECASE)

Check = Callable[[object], Any]


class Refused(Exception):
    """The value does not pass; the text, if any, says more than the check's own expectation."""


def checked(check: Check, value: object, key: str, where: str) -> Any:
    """The value in normal form.

    Raises: `RecipeError` that names `where`, `key`, the value and what was expected.
    """
    try:
        return check(value)
    except Refused as refusal:
        expectation = str(refusal) or repr(check)
    words = getattr(check, "words", ())
    near = nearest(value, words) if isinstance(value, str) else None
    remedy = f"; did you mean {quote(near)}?" if near else "."
    raise RecipeError(f'{where}: key "{key}" is {seen(value)}; expected {expectation}{remedy}')


# ---------------------------------------------------------------------------------------------------------------------
# Checks


@dataclass(frozen=True)
class Integer:
    """An integer from `low` to `high`, or one of `words`."""

    low: int
    high: int = MAX_INT32
    words: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"an integer from {self.low} to {self.high}{_or(self.words)}"

    def __call__(self, value: object) -> int | str:
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise Refused
        number = int(value)
        if not self.low <= number <= self.high:
            raise Refused
        return number


@dataclass(frozen=True)
class Size:
    """A number of bytes, as an integer or as text with a unit, or one of `words`.

    "kb", "mb", "gb", "tb" are powers of 1000, "kib", "mib", "gib", "tib" powers of 1024, "b" is one byte.
    """

    words: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f'a positive number of bytes, as an integer or with a unit as in "500gb"{_or(self.words)}'

    def __call__(self, value: object) -> int | str:
        if isinstance(value, str):
            if value in self.words:
                return value
            match = _SIZE.fullmatch(value)
            unit = _UNITS.get(match.group(2).lower()) if match else None
            if match is None or unit is None:
                raise Refused
            value = int(Fraction(match.group(1)) * unit)
        return Integer(1, MAX_INT64)(value)


class Count:
    """A number of things, as an integer or as text such as "2.5b"; "k", "m", "b" and "t" are powers of 1000."""

    def __repr__(self) -> str:
        return 'a number of at least 0, as an integer or with a unit as in "500m" or "1.5b"'

    def __call__(self, value: object) -> int:
        if isinstance(value, str):
            match = _COUNT.fullmatch(value)
            if match is None:
                raise Refused
            value = int(Fraction(match.group(1)) * _COUNTS[match.group(2).lower()])
        number = Integer(0, MAX_INT64 // 4)(value)
        assert isinstance(number, int)
        return number


class Weights:
    """A table of finite numbers of at least 0 by name, not all of them 0."""

    def __repr__(self) -> str:
        return "a table of weights by the names of sources, numbers of at least 0 of which one is above 0"

    def __call__(self, value: object) -> dict[str, float]:
        if not isinstance(value, Mapping) or not value:
            raise Refused
        made: dict[str, float] = {}
        for name, weight in value.items():
            if not isinstance(name, str) or isinstance(weight, bool) or not isinstance(weight, numbers.Real):
                raise Refused
            try:
                made[name] = float(weight)
            except OverflowError:
                raise Refused from None
            if not (math.isfinite(made[name]) and made[name] >= 0):
                raise Refused(f"{self!r}; {quote(name)} has {seen(weight)}")
        if not 0 < sum(made.values()) < math.inf:
            raise Refused(f"{self!r}; these add up to {sum(made.values()):g}")
        return made


@dataclass(frozen=True)
class Choice:
    """One of `words`; those in `later` are known, but not to be had yet."""

    words: tuple[str, ...]
    later: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return one_of(self.words)

    def __call__(self, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, str) and value in self.later:
            raise Refused(f"{self!r}, as this version of Zephon does not have {quote(value)} yet")
        raise Refused


class Flag:
    """True or false, and nothing that merely counts as either."""

    def __repr__(self) -> str:
        return "true or false"

    def __call__(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise Refused
        return value


@dataclass(frozen=True)
class Text:
    """A name: printable, without blanks at its ends that nobody can see, since it goes into logs and metric names."""

    what: str

    def __repr__(self) -> str:
        return f"{self.what}, 1 to 255 printable characters without blanks at the ends"

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or not value.isprintable() or value != value.strip() or not 0 < len(value) <= 255:
            raise Refused
        return value


@dataclass(frozen=True)
class LongText:
    """Any text that says something, of bounded length: templates, expressions."""

    what: str
    limit: int = 1 << 20

    def __repr__(self) -> str:
        return f"{self.what}, a text of 1 to {self.limit} characters"

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > self.limit or "\0" in value:
            raise Refused
        return value


@dataclass(frozen=True)
class Share:
    """A number from 0 to 1."""

    def __repr__(self) -> str:
        return "a number from 0 to 1"

    def __call__(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise Refused
        return float(value)


class Weight:
    """A finite number above 0; integers become floats."""

    def __repr__(self) -> str:
        return "a finite number above 0"

    def __call__(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise Refused
        try:
            weight = float(value)
        except OverflowError:
            raise Refused from None
        if not (math.isfinite(weight) and weight > 0):
            raise Refused
        return weight


@dataclass(frozen=True)
class Location:
    """A path or, with `stores`, a URI; as text."""

    what: str
    stores: bool = True

    def __repr__(self) -> str:
        return self.what

    def __call__(self, value: object) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise Refused
        if not self.stores and is_uri(value):
            raise Refused(f"{self.what}, not a store")
        return value


def is_uri(path: str) -> bool:
    """Whether this names a store, as in s3://bucket/folder, and not a local path."""
    return _URI.match(path) is not None


# ---------------------------------------------------------------------------------------------------------------------
# Words


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that this one may be meant to be; None if it is like none of them."""
    # Cut first: comparing costs the square of the length, and the text may be anything.
    normal = re.sub(r"[\s.-]+", "_", word[:100].strip().lower())
    matches = difflib.get_close_matches(normal, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def quote(text: str) -> str:
    """The text in double quotes, as TOML writes it."""
    return f'"{clip(text)}"'


def one_of(words: Sequence[str]) -> str:
    """The words as an enumeration: "a", "b" or "c"."""
    quoted = [quote(word) for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def clip(text: str, length: int = 120) -> str:
    """One printable line of bounded length, whatever the text holds."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: length + 1])
    return line if len(line) <= length else f"{line[: length - 3]}..."


def seen(value: object) -> str:
    """A value as messages show it."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        # Python refuses to print very long integers.
        return repr(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a value of type {clip(type(value).__name__)}"


def _or(words: Sequence[str]) -> str:
    return "".join(f" or {quote(word)}" for word in words)
