"""Filters: rows are kept by an expression on columns, which Arrow evaluates, or by a function of a row.

    length(text) >= 200 and language in ["en", "de"] and not contains(url, "spam") and score > 0.5

The language is described in docs/operators.md. It is a part of Python's own grammar, so `ast` parses it; the tree is
turned into functions over columns, and nothing is ever evaluated as Python. A comparison with null is null, and a row
is kept only where the whole is true.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import column_of, one_chunk, string_array, true_mask
from zephon.columns.damage import shown_value
from zephon.config.keys import key
from zephon.errors import PipelineError
from zephon.ops.rows import FAILED, RowOperator, Rows, check_operator, each_row, one_line, python_rows, require_columns
from zephon.ops.typing import in_halves

_Columns = Mapping[str, Any]
_Compute = Callable[[_Columns], Any]

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_WORDS = {"and": "and", "or": "or", "not": "not", "in": "in", "is": "is"}
_WORDS |= {"true": "True", "false": "False", "null": "None"}
_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
      | `(?P<quoted>[^`]+)`
      | (?P<space>\s+)
      | (?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|==|!=|<=|>=|[<>()\[\],+*/-]""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True)
class Filter(RowOperator):
    """Keep the rows that pass.

    Attributes:
        condition: an expression on columns, which Arrow evaluates, or a function of one row, a dict.
        columns: what a function gets of a row; None gives it all columns of the dataset. Reading only what is needed
            is faster.
        datasets: names of the datasets to filter, or None for all.
        runner: where a function runs; see `RowOperator`.
    """

    kind: ClassVar[str] = "filter"
    condition: str | Expression | Callable[[dict[str, Any]], Any]
    columns: Sequence[str] | None = None
    datasets: Sequence[str] | None = None
    runner: str | None = key(None, decides_data=False)

    def __post_init__(self) -> None:
        if isinstance(self.condition, str):
            object.__setattr__(self, "condition", Expression(self.condition))
        if isinstance(self.condition, Expression):
            if self.columns is not None or self.runner is not None:
                raise PipelineError(
                    f"filter columns is {self.columns!r} and runner {self.runner!r}; expected None for both: they are "
                    "for functions, and an expression says itself which columns it reads."
                )
            object.__setattr__(self, "columns", self.condition.columns)
        elif not callable(self.condition):
            raise PipelineError(
                f"filter condition is {self.condition!r}; expected an expression or a function of a row."
            )
        check_operator(self)

    @property
    def label(self) -> str:
        return f'filter("{self.condition.text}")' if isinstance(self.condition, Expression) else super().label

    @property
    def function(self) -> Any:
        return None if isinstance(self.condition, Expression) else self.condition

    def apply(self, rows: Rows) -> None:
        if isinstance(self.condition, Expression):
            rows.take(self.condition.kept(rows.table, lambda row, reason: rows.fail(row, self.label, reason)))
            return
        results = each_row(rows, self, self.function, python_rows(rows, self))
        truths = each_row(rows, self, bool, results)  # an array, for example, is neither true nor false
        rows.keep(np.array([one is True and it is not FAILED for one, it in zip(truths, results, strict=True)], bool))


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
        if not text.strip():
            raise PipelineError(f"the filter is {text!r}; expected an expression such as 'length(text) > 100'.")
        self.text = text
        parser = _Parser(text)
        self._compute = parser.parse()
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(parser.columns))
        if not self.columns:
            raise PipelineError(f'the filter "{text}" names no column, so it is the same for every row.')

    def __reduce__(self) -> tuple[Any, ...]:
        return Expression, (self.text,)

    def __str__(self) -> str:
        return self.text

    def kept(self, table: pa.Table, on_fault: Callable[[int, str], None]) -> np.ndarray:
        """The rows of `table` to keep, int64[k], ascending.

        Args:
            table: the rows.
            on_fault: called for rows, ascending, whose values cannot be computed with; they are not kept.

        Raises:
            PipelineError: a column is missing, or columns of these types cannot be computed with.
        """
        require_columns(table, self.columns, f'the filter "{self.text}"')
        columns = {name: one_chunk(table.column(name)) for name in self.columns}

        def part(start: int, stop: int) -> np.ndarray:
            some = {name: column.slice(start, stop - start) for name, column in columns.items()}
            return start + np.flatnonzero(self._mask(some, stop - start))

        def fail(row: int, error: Exception) -> None:
            values = ", ".join(f"{name} {shown_value(column[row].as_py())[:40]}" for name, column in columns.items())
            on_fault(row, f"it cannot be computed ({one_line(error)}); {values}")

        try:
            nothing = part(0, 0)
        except pa.ArrowException as error:
            kinds = ", ".join(f"{name} {column.type}" for name, column in columns.items())
            raise PipelineError(
                f'the filter "{self.text}" cannot be computed ({one_line(error)}); its columns are {kinds}.'
            ) from None
        return np.concatenate([nothing, *in_halves(part, 0, table.num_rows, fail)])

    def _mask(self, columns: _Columns, count: int) -> np.ndarray:
        """bool[count]: which rows pass."""
        kept = _null_as(pa.bool_(), self._compute(columns))
        if not pa.types.is_boolean(kept.type):
            raise PipelineError(
                f'the filter "{self.text}" gives {kept.type} and not true or false; compare the value with something.'
            )
        return np.full(count, bool(kept.as_py())) if isinstance(kept, pa.Scalar) else true_mask(kept)


class _Parser:
    """From a text to a function from columns to an Arrow array or scalar.

    Names and texts are blanked before Python's parser sees them, character by character, so that words of Python are
    names like any others, escapes are the language's own, and places in the tree are places in the text.
    """

    def __init__(self, text: str) -> None:
        self.columns: list[str] = []
        self._text = text.strip()
        self._names: dict[int, list[str]] = {}
        self._texts: dict[tuple[int, int | None], str] = {}

    def parse(self) -> _Compute:
        try:
            tree = ast.parse(self._blanked(), mode="eval")
        except SyntaxError as error:
            at = error.offset - 1 if error.offset else len(self._text)
            self._refuse(at, f"this cannot be parsed ({error.msg})")
        return self._compiled(tree.body)

    def _blanked(self) -> str:
        parts, at = [], 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._refuse(at, "this does not belong in an expression")
            token, kind = match[0], match.lastgroup
            if kind == "text":
                self._texts[at, match.end()] = re.sub(
                    r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), token[1:-1], flags=re.DOTALL
                )
                token = f"'{'_' * (len(token) - 2)}'"
            elif kind == "name" and token.lower() in _WORDS:
                token = _WORDS[token.lower()]
            elif kind == "name":
                self._names[at] = token.split(".")
                token = "_" * len(token)
            elif kind == "quoted":
                apart = int(at > 0)  # from a word before it; at the start it would be an indentation
                self._names[at + apart] = [match["quoted"]]
                token = " " * apart + "_" * (len(token) - apart - 1) + " "
            elif kind == "space":
                token = " " * len(token)
            parts.append(token)
            at = match.end()
        return "".join(parts)

    def _refuse(self, place: ast.expr | int, why: str) -> NoReturn:
        at = place if isinstance(place, int) else place.col_offset
        match = _TOKEN.match(self._text, at)
        seen = repr(match[0] if match else self._text[at]) if at < len(self._text) else "the end"
        raise PipelineError(f'the filter "{self._text}" is not an expression: at character {at + 1} ({seen}) {why}.')

    def _compiled(self, node: ast.expr) -> _Compute:
        match node:
            case ast.BoolOp(op, values):
                function = pc.or_kleene if isinstance(op, ast.Or) else pc.and_kleene
                parts = [self._compiled(value) for value in values]
                return lambda columns: reduce(function, (_null_as(pa.bool_(), part(columns)) for part in parts))
            case ast.UnaryOp(ast.Not(), operand):
                negated = self._compiled(operand)
                return lambda columns: pc.invert(_null_as(pa.bool_(), negated(columns)))
            case ast.Constant() | ast.UnaryOp(ast.USub(), ast.Constant()):
                scalar = _scalar(self._value(node))
                return lambda columns: scalar
            case ast.UnaryOp(ast.USub(), operand):
                positive = self._compiled(operand)
                return lambda columns: pc.negate_checked(positive(columns))
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                return self._both(_ARITHMETIC[type(op)], left, right)
            case ast.Compare(left, [op], [right]):
                return self._comparison(op, left, right)
            case ast.Compare():
                self._refuse(node.comparators[1], "comparisons cannot be chained; join them with and")
            case ast.Call(ast.Name()):
                return self._call(node)
            case ast.Name():
                path = self._names[node.col_offset]
                self.columns.append(path[0])
                return lambda columns: _column(columns, path)
        self._refuse(node, "a column, a value or a parenthesis is needed")

    def _both(self, function: Callable[[Any, Any], Any], left: ast.expr, right: ast.expr) -> _Compute:
        one, other = self._compiled(left), self._compiled(right)
        return lambda columns: function(one(columns), other(columns))

    def _comparison(self, operator: ast.cmpop, left: ast.expr, right: ast.expr) -> _Compute:
        if type(operator) in _COMPARE:
            function = _COMPARE[type(operator)]
            return self._both(lambda one, other: _compared(function, one, other), left, right)
        value = self._compiled(left)
        if isinstance(operator, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                self._refuse(right, '"null" is needed after is')
            check = pc.is_null if isinstance(operator, ast.Is) else pc.is_valid
            return lambda columns: check(value(columns))
        among = [self._value(item) for item in right.elts] if isinstance(right, ast.List) else []
        kinds = {str if isinstance(item, str) else type(item) in (int, float) for item in among}
        if kinds not in ({str}, {True}):
            self._refuse(right, "a list needs values, all numbers or all texts")
        if isinstance(operator, ast.In):
            return lambda columns: _is_in(value(columns), among)
        return lambda columns: pc.invert(_is_in(value(columns), among))

    def _call(self, node: ast.Call) -> _Compute:
        name = ".".join(self._names[node.func.col_offset])
        if name not in _FUNCTIONS:
            near = difflib.get_close_matches(name, _FUNCTIONS, n=1)
            hint = f"did you mean {near[0]}" if near else f"there are {', '.join(_FUNCTIONS)}"
            self._refuse(node, f"there is no such function; {hint}")
        function, expected = _FUNCTIONS[name], 1 + (name in _WITH_TEXT)
        if len(node.args) != expected:
            self._refuse(
                node, f"{name} takes {expected} argument{'s' * (expected > 1)}, and {len(node.args)} are given"
            )
        value, options = self._compiled(node.args[0]), {}
        if name in _WITH_TEXT:
            options["pattern"] = self._value(node.args[1])
            try:
                function(column_of(["a"]), **options)
            except (pa.ArrowException, TypeError) as error:
                self._refuse(node.args[1], f"{name} cannot take this ({one_line(error)})")
        null_type = pa.int64() if name == "abs" else pa.large_string()
        return lambda columns: function(_null_as(null_type, value(columns)), **options)

    def _value(self, node: ast.expr) -> Any:
        """The value of a constant, with a sign or without."""
        value: Any = ...
        match node:
            case ast.Constant(str()):  # two texts next to each other are one for Python
                value = self._texts.get((node.col_offset, node.end_col_offset), ...)
            case ast.Constant(bool() | int() | float() | None):
                value = node.value
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)) if not isinstance(number, bool):
                value = -number
        if value is ...:
            self._refuse(node, "a column, a value or a parenthesis is needed")
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            self._refuse(node, "whole numbers go from -2**63 to 2**64 - 1; write a greater one as 1e30")
        return value


def _null_as(kind: pa.DataType, value: Any) -> Any:
    """A column of nothing but nulls as one of a type that Arrow's functions take."""
    return pc.cast(value, kind) if pa.types.is_null(value.type) else value


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _float(value: Any) -> Any:
    """Numbers as float64, rounded; Arrow's own conversion refuses whole numbers that floats cannot hold exactly."""
    kind = value.type
    if not (_is_number(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind)):
        raise pa.ArrowNotImplementedError(f"{kind} is no number")
    return pc.cast(value, pa.float64(), safe=False)


def _alike(left: Any, right: Any) -> tuple[Any, Any]:
    """Whole numbers next to floats as floats."""
    one, other = left.type, right.type
    for value in (left, right):
        if (pa.types.is_floating(one) or pa.types.is_floating(other)) and isinstance(value, pa.Scalar):
            _require_exact([value.as_py()])
    if pa.types.is_floating(one) and pa.types.is_integer(other):
        return left, _float(right)
    return (_float(left), right) if pa.types.is_integer(one) and pa.types.is_floating(other) else (left, right)


def _require_exact(numbers: list[Any]) -> None:
    """Refuses whole numbers that floats cannot tell from their neighbours."""
    for number in numbers:
        if isinstance(number, int) and abs(number) >= 1 << 53:
            raise pa.ArrowNotImplementedError(
                f"the column holds floats, as numbers of JSON lines are, and {number} is beyond 2**53, where these "
                f"are rounded; write ids as text, or {float(number)!r} for a float"
            )


def _compared(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if pa.types.is_null(right.type):
        left = _null_as(pa.int64(), left)
    one, other = left.type, right.type
    if pa.types.is_integer(one) and pa.types.is_integer(other) and pa.types.is_uint64(one) != pa.types.is_uint64(other):
        exact = pa.decimal128(20, 0)  # holds every whole number of 64 bits, with a sign and without
        left, right = pc.cast(left, exact), pc.cast(right, exact)
    return function(*_alike(left, right))


def _length(value: Any) -> Any:
    """Characters of text, bytes of binary, items of lists."""
    kind = value.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pc.list_value_length(value)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(value)
    return pc.utf8_length(value)


def _contains(value: Any, *, pattern: str) -> Any:
    """By the engine for regular expressions, which finds plain texts five times faster than the one made for them."""
    if "\\E" in pattern or not pattern:
        return pc.match_substring(value, pattern=pattern)
    return pc.match_substring_regex(value, pattern=f"\\Q{pattern}\\E")


def _column(columns: _Columns, path: Sequence[str]) -> Any:
    """A column, or a field of a struct, in one of the types that Arrow computes with."""
    value = columns[path[0]]
    for name in path[1:]:
        if pa.types.is_null(value.type):
            return value
        if not pa.types.is_struct(value.type) or value.type.get_field_index(name) < 0:
            is_text = pa.types.is_large_string(value.type)
            why = f"is text, perhaps JSON: then write `{'.'.join(path)}`" if is_text else f"has no field {name}"
            raise pa.ArrowNotImplementedError(f"{'.'.join(path)} is not there, since {path[0]} {why}")
        value = pc.struct_field(value, indices=[value.type.get_field_index(name)])
    if pa.types.is_dictionary(value.type):
        value = pc.cast(value, value.type.value_type)
    return pc.cast(value, pa.large_string()) if pa.types.is_string_view(value.type) else value


def _is_in(value: Any, among: list[Any]) -> Any:
    """As a chain of == would have it: null where the value is null."""
    kind = value.type
    if pa.types.is_null(kind):
        return _null_as(pa.bool_(), value)
    if isinstance(among[0], str):
        allowed = string_array(among, kind if pa.types.is_large_string(kind) else pa.string())
    elif pa.types.is_integer(kind):
        # What no value of this type can be is in no row.
        limits = np.iinfo(str(kind))
        whole = [int(item) for item in among if limits.min <= item <= limits.max and item == int(item)]
        allowed = _numbers(whole, kind)
    else:
        _require_exact(among)
        value = _float(value)
        allowed = _numbers(among, pa.float64())
    return pc.if_else(pc.is_valid(value), pc.is_in(value, value_set=allowed), pa.nulls(1, pa.bool_())[0])


def _scalar(value: Any) -> pa.Scalar:
    is_large = isinstance(value, int) and value > _MOST >> 1
    return (_numbers([value], pa.uint64()) if is_large else column_of([value]))[0]  # pa.scalar would import pandas


def _numbers(values: list[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array of numbers that fit, without pandas."""
    made = np.array(values, dtype="float64" if kind == pa.float64() else str(kind))
    return pa.Array.from_buffers(kind, len(made), [None, pa.py_buffer(made)])


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: pc.add_checked(*_alike(left, right)),
    ast.Sub: lambda left, right: pc.subtract_checked(*_alike(left, right)),
    ast.Mult: lambda left, right: pc.multiply_checked(*_alike(left, right)),
    # By zero it is infinite or no number, as floats are.
    ast.Div: lambda left, right: pc.divide(_float(left), _float(right)),
}
_WITH_TEXT: dict[str, Callable[..., Any]] = {
    "contains": _contains,
    "starts_with": pc.starts_with,
    "ends_with": pc.ends_with,
    "matches": pc.match_substring_regex,
    "count": pc.count_substring,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "length": _length,
    "bytes": pc.binary_length,
    "lower": pc.utf8_lower,
    "upper": pc.utf8_upper,
    "trim": pc.utf8_trim_whitespace,
    "abs": pc.abs,
    **_WITH_TEXT,  # of a text in quotes besides, `pattern`
}
