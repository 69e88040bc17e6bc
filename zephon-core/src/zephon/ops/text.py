"""Operators that make text: out of bytes, and out of several columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import column_of, one_chunk, true_mask
from zephon.columns.template import Template, fill_in, is_rounded, number_text, template_of, text_name
from zephon.config.keys import Column, Prose, check_keys, key
from zephon.errors import PipelineError, RecipeError
from zephon.ops.rows import FAILED, RowOperator, Rows, check_operator, each_row, require_columns, text_or_faults


@dataclass(frozen=True)
class DecodeText(RowOperator):
    """Turn a column of bytes into text."""

    kind: ClassVar[str] = "decode_text"
    field: Column = key("text", "The column.")
    encoding: str = key("utf-8", "An encoding that Python knows.")
    errors: Literal["replace", "ignore", "strict"] = key(
        "replace",
        'Bytes that are not such text: "replace" puts U+FFFD in their place, "ignore" leaves them out, "strict" makes '
        "the row one that cannot be used.",
    )
    datasets: Sequence[str] | None = None
    """Names of the datasets to decode, or None for all."""

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, "decode_text ")
        try:
            "a".encode(self.encoding)  # refuses codecs that are of no text, such as zlib
        except (LookupError, ValueError):
            raise PipelineError(
                f"decode_text encoding is {self.encoding!r}; expected the name of a text encoding."
            ) from None
        check_operator(self)

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.field,)

    @property
    def label(self) -> str:
        return f"decode_text({self.field})"

    def apply(self, rows: Rows) -> None:
        require_columns(rows.table, self.columns, self.label)
        column = one_chunk(rows.table.column(self.field))
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
            return
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise PipelineError(f"{self.label}: the column holds {kind}; expected bytes or text.")
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
        decoded = column_of([None if text is FAILED else text for text in texts])
        rows.set_column(self.field, decoded.cast(pa.large_string()))
        return rows.keep(np.array([text is not FAILED for text in texts], dtype=bool))


@dataclass(frozen=True)
class TextTemplate(RowOperator):
    """Make the text of a document from several columns: `"# {title}\\n\\n{body}"`."""

    kind: ClassVar[str] = "text_template"
    template: Prose = key(
        doc="Text in which {name} stands for the value of a column, {{ and }} for braces. A null is no text; where all "
        "columns named are null, so is the result.",
    )
    into: Column = key("text", "The column to make.")
    datasets: Sequence[str] | None = None
    """Names of the datasets to use it on, or None for all."""
    floats: bool = key(False, decides_data=False)
    """Numbers of JSON have come through a function: as floats, of which whole ones are printed as such."""
    last: bool = key(True, decides_data=False)
    """No later template prints what files have, see `text_name`."""

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, "text_template ")
        try:
            pieces = template_of(self.template)
        except RecipeError as error:
            raise PipelineError(f"{error}.") from None
        if pieces is None:
            raise PipelineError(f"the text template {self.template!r} names no column; write {{name}} for one.")
        check_operator(self)

    @property
    def pieces(self) -> Template:
        return template_of(self.template) or ()

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(column for _, column in self.pieces if column is not None))

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.into,)

    def apply(self, rows: Rows) -> None:
        require_columns(rows.table, self.columns, self.label)
        bad = np.zeros(rows.table.num_rows, dtype=bool)
        texts = {}
        for name in self.columns:
            exact = text_name(name)
            column = one_chunk(rows.table.column(exact if exact in rows.table.column_names else name))
            if self.floats and pa.types.is_float64(column.type):
                texts[name] = number_text(column)
                for row in np.flatnonzero(true_mask(is_rounded(column)) & ~bad).tolist():
                    why = "which may be another whole number, rounded to a float; write it as text in the function"
                    rows.fail(row, self.label, f'column "{name}" holds {column[row]}, {why}')
                    bad[row] = True
                continue
            text = text_or_faults(rows, self.label, name, column, bad)
            if text is None:
                raise PipelineError(f'{self.label}: column "{name}" holds {column.type}, which is no text.')
            texts[name] = text
        rows.set_column(self.into, fill_in(self.pieces, texts))
        if self.last:
            rows.table = rows.table.select([name for name in rows.table.column_names if name != text_name(name[1:-1])])
        rows.keep(~bad)
