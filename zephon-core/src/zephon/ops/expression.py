"""Filter expressions: a small language over columns, evaluated by Arrow a block at a time.

    length(text) >= 200 and language in ["en", "de"] and not contains(url, "spam") and score > 0.5

The words, from the loosest to the tightest binding: `or`, `and`, `not`, comparisons (`==`, `!=`, `<`, `<=`, `>`, `>=`,
`in [...]`, `not in [...]`, `is null`, `is not null`), `+ -`, `* /`, a sign. Columns are bare names, names in backticks,
or paths into structs with dots; values are numbers, texts in quotes of either kind (with \\ before a quote or a
backslash, and \\n and \\t), `true`, `false` and `null`. Functions: see `FUNCTIONS`. A comparison with null is null, and
a row is kept only where the whole is true; a column that holds nothing but nulls is null in every place. Whole numbers
next to others than whole ones count as floats do, rounded where they are beyond 2**53. Nothing is ever given to
Python's own evaluator.

What a row holds can make a computation impossible (a product beyond 64 bits): then that row alone cannot be used. What
the types of the columns make impossible is refused before the run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import column_of, one_chunk, string_array, true_mask
from zephon.columns.damage import shown_value
from zephon.errors import PipelineError

__all__ = ["FUNCTIONS", "Expression"]

_MAX_CHARS = 8192
_MAX_DEPTH = 40
_MAX_OPERATORS = 200

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    | (?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    | `(?P<quoted>[^`]+)`
    | (?P<sign>==|!=|<=|>=|<|>|\(|\)|\[|\]|,|\+|-|\*|/)
    )""",
    re.VERBOSE,
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_ESCAPES = {"n": "\n", "t": "\t"}
_LEAST_INTEGER, _MOST_INTEGER = -(1 << 63), (1 << 64) - 1
_WORDS = frozenset({"and", "or", "not", "in", "is", "null", "true", "false"})

_Columns = Mapping[str, Any]
_Eval = Callable[[_Columns], Any]


def _length(value: Any) -> Any:
    kind = value.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pc.list_value_length(value)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(value)
    return pc.utf8_length(_text(value))


def _text(value: Any) -> Any:
    """Nothing but nulls as null texts, which the functions for text take."""
    return pc.cast(value, pa.large_string()) if pa.types.is_null(value.type) else value


def _of_text(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value: function(_text(value))


def _with_text(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, pattern: function(_text(value), pattern=pattern)


def _contains(value: Any, text: str) -> Any:
    """By the engine for regular expressions, which finds plain texts five times faster than the one made for them."""
    value = _text(value)
    if "\\E" in text or not text:
        return pc.match_substring(value, pattern=text)
    return pc.match_substring_regex(value, pattern=f"\\Q{text}\\E")


FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "length": (("value",), _length),
    "bytes": (("value",), _of_text(pc.binary_length)),
    "lower": (("value",), _of_text(pc.utf8_lower)),
    "upper": (("value",), _of_text(pc.utf8_upper)),
    "trim": (("value",), _of_text(pc.utf8_trim_whitespace)),
    "abs": (("value",), pc.abs),
    "contains": (("value", "text"), _contains),
    "starts_with": (("value", "text"), _with_text(pc.starts_with)),
    "ends_with": (("value", "text"), _with_text(pc.ends_with)),
    "matches": (("value", "text"), _with_text(pc.match_substring_regex)),
    "count": (("value", "text"), _with_text(pc.count_substring)),
}
"""By name: what the arguments are ("value": anything, "text": a text in quotes), and what computes it. `length` counts
characters of text and items of lists, `bytes` bytes of UTF-8; `matches` takes a regular expression in RE2's syntax,
found anywhere; `count` counts occurrences."""


@dataclass(frozen=True)
class _Token:
    kind: str
    value: Any
    at: int


class Expression:
    """A checked filter expression.

    Args:
        text: the expression.

    Attributes:
        columns: top-level columns it reads, in order of appearance.

    Raises:
        PipelineError: it is not an expression; names the place.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text.strip():
            raise PipelineError(f"the filter is {text!r}; an expression such as 'length(text) > 100' is needed.")
        if len(text) > _MAX_CHARS:
            raise PipelineError(f"the filter has {len(text)} characters; at most {_MAX_CHARS} are allowed.")
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise PipelineError(f"the filter {text!r} holds half a surrogate pair, which is no Unicode.")
        self.text = text
        parser = _Parser(text)
        self._evaluate: _Eval = parser.whole()
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(parser.columns))
        if not self.columns:
            raise PipelineError(f'the filter "{text}" names no column, so it is the same for every row.')

    def __getstate__(self) -> str:
        return self.text

    def __setstate__(self, text: str) -> None:
        self.__init__(text)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def keep(self, table: pa.Table, on_fault: Callable[[int, str], None] | None = None) -> np.ndarray:
        """Which rows of `table` are to be kept, bool[n].

        Args:
            table: the rows.
            on_fault: told of rows, ascending, whose values cannot be computed with, and why; they are not kept. Where
                it is None they are an error.

        Raises:
            PipelineError: a column is missing, or columns of these types cannot be compared as the expression wants it.
        """
        columns = {}
        for name in self.columns:
            if name not in table.column_names:
                raise PipelineError(f'the filter "{self.text}" {missing_column(name, table.column_names)}')
            columns[name] = one_chunk(table.column(name))
        try:
            return self._kept(columns, table.num_rows)
        except pa.ArrowException as error:
            if on_fault is None or not table.num_rows:
                raise self._cannot(columns, error) from None
        try:
            self._kept({name: column.slice(0, 0) for name, column in columns.items()}, 0)
        except pa.ArrowException as error:
            raise self._cannot(columns, error) from None
        return self._kept_of(columns, 0, table.num_rows, on_fault)

    def _kept(self, columns: _Columns, count: int) -> np.ndarray:
        kept = self._evaluate(columns)
        if pa.types.is_null(kept.type):
            return np.zeros(count, dtype=bool)
        if not pa.types.is_boolean(kept.type):
            raise PipelineError(
                f'the filter "{self.text}" gives {kept.type} and not true or false; compare the value with something.'
            )
        if isinstance(kept, pa.Scalar):
            return np.full(count, bool(kept.as_py()), dtype=bool)
        return true_mask(kept)

    def _kept_of(self, columns: _Columns, first: int, count: int, on_fault: Callable[[int, str], None]) -> np.ndarray:
        """As `keep`, in halves, so that a row that fails takes no other with it."""
        try:
            return self._kept(columns, count)
        except pa.ArrowException as error:
            if count == 1:
                values = ", ".join(f"{name} {shown_value(column[0].as_py())[:40]}" for name, column in columns.items())
                on_fault(first, f"it cannot be computed ({one_line(error)}); {values}")
                return np.zeros(1, dtype=bool)
        half = count // 2
        parts = []
        for start, length in ((0, half), (half, count - half)):
            part = {name: column.slice(start, length) for name, column in columns.items()}
            parts.append(self._kept_of(part, first + start, length, on_fault))
        return np.concatenate(parts)

    def _cannot(self, columns: _Columns, error: BaseException) -> PipelineError:
        kinds = ", ".join(f"{name} {column.type}" for name, column in columns.items())
        return PipelineError(
            f'the filter "{self.text}" cannot be computed ({one_line(error)}); its columns are {kinds}.'
        )


def one_line(error: BaseException) -> str:
    """What an exception of Arrow's says, shortened."""
    return " ".join(str(error).split())[:200]


def missing_column(name: str, existing: list[str]) -> str:
    """The words for a column that is not there."""
    near = difflib.get_close_matches(name, existing, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else f"; there are {', '.join(existing[:20]) or 'none'}."
    return f'needs the column "{name}", which is not there{hint}'


class _Parser:
    """Recursive descent; every method gives a function from columns to an Arrow array or scalar."""

    def __init__(self, text: str) -> None:
        self.columns: list[str] = []
        self._text = text
        self._tokens = self._split(text)
        self._next = 0
        self._depth = 0
        self._operators = 0

    def whole(self) -> _Eval:
        made = self._or()
        if self._peek().kind != "end":
            self._refuse(self._peek(), "the expression should end here")
        return made

    def _split(self, text: str) -> list[_Token]:
        tokens, at = [], 0
        end = len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                start = at + len(text[at:]) - len(text[at:].lstrip())
                self._refuse(_Token("sign", text[start], start), "this does not belong in an expression")
            kind = str(match.lastgroup)
            value: Any = match[kind]
            if kind == "name" and value.lower() in _WORDS:
                kind, value = "word", value.lower()
            elif kind == "number" and any(c in value for c in ".eE"):
                value = float(value)
            elif kind == "number":
                token = _Token(kind, value, match.start(kind))
                value = self._integer(token, int(value[:40]) if len(value.lstrip("0")) < 40 else _MOST_INTEGER + 1)
            elif kind == "text":
                value = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), value[1:-1], flags=re.DOTALL)
            tokens.append(_Token(kind, value, match.start(match.lastgroup or 0)))
            at = match.end()
        return [*tokens, _Token("end", "", end)]

    def _integer(self, token: _Token, value: int) -> int:
        if not _LEAST_INTEGER <= value <= _MOST_INTEGER:
            shown = token.value if len(token.value) <= 40 else f"{token.value[:37]}..."
            self._refuse(
                replace(token, value=shown), "whole numbers go from -2**63 to 2**64 - 1; write a greater one as 1e30"
            )
        return value

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next += token.kind != "end"
        return token

    def _has(self, kind: str, *values: str) -> bool:
        token = self._peek()
        if token.kind == kind and token.value in values:
            self._next += 1
            return True
        return False

    def _want(self, sign: str) -> None:
        if not self._has("sign", sign):
            self._refuse(self._peek(), f'"{sign}" is needed here')

    def _refuse(self, token: _Token, why: str) -> NoReturn:
        seen = "the end" if token.kind == "end" else repr(token.value)
        raise PipelineError(
            f'the filter "{self._text}" is not an expression: at character {token.at + 1} ({seen}) {why}.'
        )

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(self._peek(), f"it is nested more than {_MAX_DEPTH} deep")

    def _pair(self, function: Callable[[Any, Any], Any], left: _Eval, right: _Eval) -> _Eval:
        self._operators += 1
        if self._operators > _MAX_OPERATORS:
            self._refuse(self._peek(), f"it has more than {_MAX_OPERATORS} operators")
        return lambda columns: function(left(columns), right(columns))

    def _or(self) -> _Eval:
        self._deeper()
        made = self._and()
        while self._has("word", "or"):
            made = self._pair(_logical(pc.or_kleene), made, self._and())
        self._depth -= 1
        return made

    def _and(self) -> _Eval:
        made = self._not()
        while self._has("word", "and"):
            made = self._pair(_logical(pc.and_kleene), made, self._not())
        return made

    def _not(self) -> _Eval:
        if self._has("word", "not"):
            self._deeper()
            inner = self._not()
            self._depth -= 1
            return lambda columns: pc.invert(_flag(inner(columns)))
        return self._comparison()

    def _comparison(self) -> _Eval:
        left = self._sum()
        token = self._peek()
        if token.kind == "sign" and token.value in _COMPARE:
            self._take()
            made = self._pair(_compared(_COMPARE[token.value]), left, self._sum())
            after = self._peek()
            if after.kind == "sign" and after.value in _COMPARE:
                self._refuse(after, "comparisons cannot be chained; join them with and")
            return made
        if self._has("word", "is"):
            negated = self._has("word", "not")
            if not self._has("word", "null"):
                self._refuse(self._peek(), '"null" is needed after is')
            check = pc.is_valid if negated else pc.is_null
            return lambda columns: check(left(columns))
        negated = token.kind == "word" and token.value == "not"
        if negated:
            self._take()
        if self._has("word", "in"):
            values = self._list()
            if negated:
                return lambda columns: pc.invert(_is_in(left(columns), values))
            return lambda columns: _is_in(left(columns), values)
        if negated:
            self._refuse(self._peek(), '"in" is needed after not')
        return left

    def _list(self) -> list[Any]:
        self._want("[")
        values: list[Any] = []
        while not self._has("sign", "]"):
            if values:
                self._want(",")
            negative = self._has("sign", "-")
            token = self._take()
            if token.kind not in (("number",) if negative else ("number", "text")):
                self._refuse(token, "lists hold numbers or texts in quotes")
            values.append(self._negative(token) if negative else token.value)
        if not values or len({isinstance(value, str) for value in values}) != 1:
            self._refuse(self._tokens[self._next - 1], "a list needs values, all numbers or all texts")
        return values

    def _negative(self, number: _Token) -> Any:
        if isinstance(number.value, float):
            return -number.value
        return self._integer(replace(number, value=f"-{number.value}"), -number.value)

    def _sum(self) -> _Eval:
        made = self._product()
        while self._peek().kind == "sign" and self._peek().value in "+-":
            function = pc.add_checked if self._take().value == "+" else pc.subtract_checked
            made = self._pair(_computed(function), made, self._product())
        return made

    def _product(self) -> _Eval:
        made = self._value()
        while self._peek().kind == "sign" and self._peek().value in "*/":
            function = _computed(pc.multiply_checked) if self._take().value == "*" else _divided
            made = self._pair(function, made, self._value())
        return made

    def _value(self) -> _Eval:
        token = self._take()
        if token.kind == "sign" and token.value == "(":
            made = self._or()
            self._want(")")
            return made
        if token.kind == "sign" and token.value == "-":
            if self._peek().kind == "number":
                return _constant(self._negative(self._take()))
            self._deeper()
            inner = self._value()
            self._depth -= 1
            return lambda columns: pc.negate_checked(inner(columns))
        if token.kind in ("number", "text"):
            return _constant(token.value)
        if token.kind == "word" and token.value in ("true", "false", "null"):
            return _constant({"true": True, "false": False, "null": None}[token.value])
        if token.kind == "name" and self._has("sign", "("):
            return self._call(token)
        if token.kind in ("name", "quoted"):
            path = token.value.split(".") if token.kind == "name" else [token.value]
            self.columns.append(path[0])
            return _column(path)
        self._refuse(token, "a column, a value or a parenthesis is needed")

    def _call(self, name: _Token) -> _Eval:
        if name.value not in FUNCTIONS:
            near = difflib.get_close_matches(name.value, FUNCTIONS, n=1)
            hint = f"; did you mean {near[0]}" if near else f"; there are {', '.join(FUNCTIONS)}"
            self._refuse(name, f"there is no such function{hint}")
        kinds, function = FUNCTIONS[name.value]
        values: list[Any] = []
        for nth, kind in enumerate(kinds):
            if nth:
                self._want(",")
            if kind == "value":
                values.append(self._or())
                continue
            token = self._take()
            if token.kind != "text":
                self._refuse(token, f"{name.value} takes a text in quotes here")
            if name.value == "matches":
                try:
                    pc.match_substring_regex(column_of([""]), pattern=token.value)
                except pa.ArrowException as error:
                    self._refuse(token, f"this is no regular expression ({' '.join(str(error).split())[:120]})")
            values.append(token.value)
        self._want(")")
        first, rest = values[0], values[1:]
        return lambda columns: function(first(columns), *rest)


def _divided(left: Any, right: Any) -> Any:
    """True division; by zero it is infinite or no number, as floats are."""
    return pc.divide(_float(left), _float(right))


def _float(value: Any) -> Any:
    """Numbers as float64, rounded; Arrow's own conversion refuses whole numbers that floats cannot hold exactly."""
    if not (_is_number(value.type) or pa.types.is_null(value.type) or pa.types.is_boolean(value.type)):
        raise pa.ArrowNotImplementedError(f"{value.type} is no number")
    return pc.cast(value, pa.float64(), safe=False)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _flag(value: Any) -> Any:
    return pc.cast(value, pa.bool_()) if pa.types.is_null(value.type) else value


def _logical(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: function(_flag(left), _flag(right))


def _computed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Arithmetic in which whole numbers next to floats are floats."""

    def compute(left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if pa.types.is_floating(one) and pa.types.is_integer(other):
            return function(left, _float(right))
        if pa.types.is_integer(one) and pa.types.is_floating(other):
            return function(_float(left), right)
        return function(left, right)

    return compute


def _compared(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Comparisons of any numbers, and null where all there is are nulls."""
    exact = pa.decimal128(20, 0)  # holds every whole number of 64 bits, with a sign and without

    def compare(left: Any, right: Any) -> Any:
        if pa.types.is_null(left.type) and pa.types.is_null(right.type):
            left = pc.cast(left, pa.int64())
        one, other = left.type, right.type
        if pa.types.is_uint64(one) != pa.types.is_uint64(other) and _are(pa.types.is_integer, one, other):
            return function(pc.cast(left, exact), pc.cast(right, exact))
        return _computed(function)(left, right)

    return compare


def _are(check: Callable[[pa.DataType], bool], *kinds: pa.DataType) -> bool:
    return all(map(check, kinds))


def _constant(value: Any) -> _Eval:
    if isinstance(value, int) and value > _MOST_INTEGER >> 1:
        scalar = _numbers([value], pa.uint64())[0]
    else:
        scalar = column_of([value])[0]  # pa.scalar would import pandas
    return lambda columns: scalar


def _column(path: list[str]) -> _Eval:
    def get(columns: _Columns) -> Any:
        value = columns[path[0]]
        for name in path[1:]:
            if pa.types.is_null(value.type):
                return value
            if not pa.types.is_struct(value.type) or value.type.get_field_index(name) < 0:
                raise pa.ArrowNotImplementedError(f"{'.'.join(path)} is not there, since {path[0]} has no field {name}")
            value = pc.struct_field(value, indices=[value.type.get_field_index(name)])
        return _plain(value)

    return get


def _plain(value: Any) -> Any:
    """A column in one of the types that Arrow computes with."""
    kind = value.type
    if pa.types.is_dictionary(kind):
        return _plain(pc.cast(value, kind.value_type))
    if pa.types.is_string_view(kind):
        return pc.cast(value, pa.large_string())
    return pc.cast(value, pa.float32()) if pa.types.is_float16(kind) else value


def _is_in(value: Any, among: list[Any]) -> Any:
    """As a chain of == would have it: null where the value is null."""
    kind = value.type
    if pa.types.is_null(kind):
        return pc.cast(value, pa.bool_())
    if isinstance(among[0], str):
        allowed = string_array(among, kind if pa.types.is_large_string(kind) else pa.string())
    elif pa.types.is_integer(kind):
        # What no value of this type can be is in no row.
        low, high = (0, (1 << kind.bit_width) - 1)
        if pa.types.is_signed_integer(kind):
            low, high = -(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1
        allowed = _numbers([int(item) for item in among if low <= item <= high and item == int(item)], kind)
    else:
        value = _float(value)
        allowed = _numbers(among, pa.float64())
    return pc.if_else(pc.is_valid(value), pc.is_in(value, value_set=allowed), pa.nulls(1, pa.bool_())[0])


def _numbers(values: list[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array of numbers that fit, without pandas."""
    made = np.array(values, dtype="float64" if pa.types.is_floating(kind) else str(kind))
    return pa.Array.from_buffers(kind, len(made), [None, pa.py_buffer(made)])
