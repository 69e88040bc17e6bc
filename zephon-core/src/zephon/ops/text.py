"""Operators that make text: out of bytes, and out of several columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import column_of, one_chunk
from zephon.columns.template import Template, fill_in, template_of
from zephon.errors import PipelineError, RecipeError
from zephon.ops.rows import FAILED, RowOperator, Rows, check_operator, each_row, require, text_or_faults

__all__ = ["DecodeText", "TextTemplate"]


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
            b"a".decode(self.encoding)  # refuses codecs that are of no text, such as zlib
        except (LookupError, TypeError, ValueError):
            raise PipelineError(
                f"decode_text encoding is {self.encoding!r}; the name of a text encoding is needed."
            ) from None
        check_operator(self)

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.field,)

    @property
    def label(self) -> str:
        return f"decode_text({self.field})"

    def identity(self) -> str:
        return f"decode_text {self.field} {self.encoding} {self.errors} {self.datasets}"

    def apply(self, rows: Rows) -> None:
        require(rows, self)
        column = one_chunk(rows.table.column(self.field))
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
            return
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise PipelineError(f"{self.label}: the column holds {kind}; bytes or text is needed.")
        if self.encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
            with suppress(pa.ArrowInvalid):
                # Looks at every byte, much faster than Python.
                return rows.set_column(self.field, column.cast(pa.large_string()))

        def decode(value: bytes | None) -> str | None:
            text = None if value is None else value.decode(self.encoding, self.errors)
            if text is not None and not text.isascii():
                text.encode()  # some encodings know half surrogate pairs
            return text

        texts = each_row(rows, self, decode, column.to_pylist())
        sound = np.array([text is not FAILED for text in texts], dtype=bool)
        made = column_of([None if text is FAILED else text for text in texts])
        rows.set_column(self.field, made.cast(pa.large_string()))
        return rows.keep(sound)


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
            raise PipelineError(f'the text template is {self.template!r}; a text such as "{{title}}" is needed.')
        if not isinstance(self.into, str) or not self.into:
            raise PipelineError(f"text_template into is {self.into!r}; the name of a column is needed.")
        try:
            if template_of(self.template) is None:
                raise RecipeError(f"the text template {self.template!r} names no column; write {{name}} for one")
        except RecipeError as error:
            raise PipelineError(f"{error}.") from None
        check_operator(self)

    @property
    def pieces(self) -> Template:
        """(text, column after it or None) for each piece."""
        return template_of(self.template) or ()

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(column for _, column in self.pieces if column is not None))

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.into,)

    def identity(self) -> str:
        return f"text_template {self.template} {self.into} {self.datasets}"

    def apply(self, rows: Rows) -> None:
        require(rows, self)
        bad = np.zeros(rows.table.num_rows, dtype=bool)
        texts = {}
        for name in self.columns:
            column = one_chunk(rows.table.column(name))
            text = text_or_faults(rows, self.label, name, column, bad)
            if text is None:
                raise PipelineError(f'{self.label}: column "{name}" holds {column.type}, which is no text.')
            texts[name] = text
        rows.set_column(self.into, fill_in(self.pieces, texts))
        rows.keep(~bad)
