"""Text templates over columns, "{title}\\n\\n{meta.text}": parsing, and filling in by Arrow.

`{{` and `}}` are literal braces. A null value is empty text; where all named columns are null, so is the result.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import column_of
from zephon.errors import RecipeError

Template = tuple[tuple[str, str | None], ...]
"""(text, name of the column that follows or None) for each piece."""


@lru_cache(maxsize=256)
def template_of(name: str) -> Template | None:
    """The pieces of a template; None for a plain column name.

    Raises:
        RecipeError: unbalanced braces, or a field that is more than a column's name.
    """
    if "{" not in name:
        return None
    try:
        pieces = list(string.Formatter().parse(name))
    except ValueError as error:
        raise RecipeError(
            f"the text template {name!r} is invalid ({error}); write {{column}} for a column and {{{{ for a brace"
        ) from None
    if any(field is not None and (not field.strip() or spec or conversion) for _, field, spec, conversion in pieces):
        raise RecipeError(
            f"the text template {name!r} has a field that is not just a column's name; write {{column}} for a column, "
            "and {{ for a brace"
        )
    if all(field is None for _, field, _, _ in pieces):
        raise RecipeError(f"the text template {name!r} names no column; write {{column}} for a column")
    return tuple((text, None if field is None else field.strip()) for text, field, _, _ in pieces)


def text_name(column: str) -> str:
    """The column that holds the text of a column of JSON as templates print it: numbers as the file writes them, texts
    without quotes also where others are lists or objects."""
    return f"{{{column}}}"


def number_text(values: pa.Array) -> pa.Array:
    """float64 as text, whole numbers below 2**53 without an exponent."""
    size, text = pc.abs(values), values.cast(pa.large_string())
    if (pc.max(size).as_py() or 0) < 1e10:  # from here on Arrow prints an exponent
        return text
    whole = reduce(pc.and_, [pc.equal(pc.floor(values), values), pc.greater_equal(size, 1e10), pc.less(size, 2.0**53)])
    digits = pc.if_else(whole, values, 0.0).cast(pa.int64(), safe=False).cast(pa.large_string())
    return pc.if_else(whole, digits, text)


def text_of(values: pa.Array) -> pa.Array:
    """What a template prints for each value; ArrowException for types that it cannot print."""
    return number_text(values) if pa.types.is_float64(values.type) else values.cast(pa.large_string())


def is_rounded(values: pa.Array) -> pa.BooleanArray:
    """Which float64 may be those of other whole numbers, of 2**53 or more."""
    return pc.and_(pc.greater_equal(pc.abs(values), 2.0**53), pc.is_finite(values))


def fill_in(template: Template, columns: Mapping[str, pa.Array]) -> pa.Array:
    """large_string[n]: the template's text with the values of columns, which are large_string[n]."""
    pieces: Sequence[Any] = [
        part
        for text, column in template
        for part in (column_of([text])[0], *([] if column is None else [columns[column]]))  # pa.scalar imports pandas
    ]
    joined = pc.binary_join_element_wise(*pieces, column_of([""])[0], null_handling="replace", null_replacement="")
    if not all(column.null_count for column in columns.values()):
        return joined
    some = reduce(pc.or_, [column.is_valid() for column in columns.values()])
    return pc.if_else(some, joined, pa.nulls(1, pa.large_string())[0])
