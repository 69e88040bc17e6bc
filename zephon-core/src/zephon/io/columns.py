"""Decoded columns: which types hold text, and turning what a format decoded into sound, single-chunk Arrow columns.

Text always comes out as `large_string`: the cast from `string` copies 8 bytes per row and no text (8 us for 4,096
rows), `take` and `concat` are as fast on it as on `string`, and it has no 2 GiB limit that a block could run into.
Every column is validated in full once, when its group is decoded: that is the UTF-8 check (21 GB/s measured), and it
is what makes the later, unchecked column code safe on damaged files.
"""

import difflib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyarrow import types

from zephon.errors import DataError

__all__ = ["check_columns", "sound_table"]


def check_columns(schema: pa.Schema, columns: Sequence[str], text_column: str | None, path: str) -> None:
    """Raises `DataError` unless `schema` has each of `columns` exactly once and `text_column`, if any, holds text."""
    for name in columns:
        count = len(schema.get_all_field_indices(name))
        if count > 1:
            raise DataError(f"'{path}' has {count} columns named '{name}', and one was expected; rename them")
        if count == 0:
            raise missing_column(name, schema.names, path)
    kind = schema.field(text_column).type if text_column is not None and text_column in columns else pa.null()
    if not _is_text(kind):
        raise DataError(
            f"column '{text_column}' of '{path}' has the type {kind}, but documents must be text (string, or binary "
            f"that holds UTF-8); name a text column with text_field{_named_text_columns(schema)}"
        )


def missing_column(name: str, existing: Sequence[str], path: str) -> DataError:
    """The error for a column that is not there; lists the ones that are."""
    close = difflib.get_close_matches(name, existing, n=1)
    shown = ", ".join(f"'{column}'" for column in existing[:20]) + (", ..." if len(existing) > 20 else "")
    hint = f"did you mean '{close[0]}'?" if close else "name one of them, for documents with text_field"
    return DataError(f"no column '{name}' in '{path}', which has {shown or 'no columns'}; {hint}")


def sound_table(
    table: pa.Table, columns: Sequence[str], text_column: str | None, path: str, first_row: int
) -> pa.Table:
    """`columns` of a decoded group in that order, validated, one chunk each, text as `large_string`.

    Strings of any Arrow kind become `large_string`, binary becomes `large_binary`, dictionaries their values, the text
    column is `large_string` from any type that holds text; other types stay as they are. `first_row` is the group's
    first row in its shard.

    Raises:
        DataError: invalid UTF-8 (names file and row), or a column whose bytes do not fit together.
    """
    arrays = [_sound(table.column(name), name, name == text_column, path, first_row) for name in columns]
    return pa.Table.from_arrays(arrays, names=list(columns))


def _sound(column: pa.ChunkedArray, name: str, is_text: bool, path: str, first_row: int) -> pa.Array:
    chunks = []
    for chunk in column.chunks:
        try:
            chunk.validate(full=True)
            chunks.append(_normal(chunk, is_text))
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise _unsound(chunk, name, path, first_row, error) from error
        first_row += len(chunk)
    if len(chunks) == 1:
        return chunks[0]
    kind = _normal(pa.nulls(0, column.type), is_text).type
    return pa.chunked_array(chunks, kind).combine_chunks()


def _normal(chunk: pa.Array, is_text: bool) -> pa.Array:
    kind = chunk.type
    if isinstance(kind, pa.BaseExtensionType):
        return _normal(chunk.storage, is_text)
    if types.is_dictionary(kind):
        return _normal(chunk.dictionary_decode(), is_text)
    if is_text or types.is_string(kind) or types.is_string_view(kind):
        return chunk.cast(pa.large_string())  # checks UTF-8 when it comes from binary
    if types.is_binary(kind) or types.is_binary_view(kind):
        return chunk.cast(pa.large_binary())
    return chunk


def _is_text(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_text(kind.storage_type)
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_null(kind)  # a shard in which every document is missing
    )


def _named_text_columns(schema: pa.Schema) -> str:
    names = [f"'{field.name}'" for field in schema if _is_text(field.type)]
    return f": {', '.join(names[:10])}" if names else ""


def _unsound(chunk: pa.Array, name: str, path: str, first_row: int, error: Exception) -> DataError:
    """Names the row whose text is not UTF-8, if that is what is wrong; slow, and only on the way to an error."""
    try:
        raw = chunk.storage if isinstance(chunk.type, pa.BaseExtensionType) else chunk
        if types.is_dictionary(raw.type):
            # Each part is checked before the next step looks at it: decoding bad indices reads foreign memory.
            indices, values = raw.indices, _as_binary(raw.dictionary)
            indices.validate(full=True)
            values.validate(full=True)
            raw = pa.DictionaryArray.from_arrays(indices, values, safe=True)
            raw.validate(full=True)
            raw = raw.dictionary_decode()
        else:
            raw = _as_binary(raw)
        raw.validate(full=True)
        for row, value in enumerate(raw):
            if value.is_valid:
                try:
                    value.as_py().decode()
                except UnicodeDecodeError as bad:
                    return DataError(
                        f"'{path}' row {first_row + row}, column '{name}', is not valid UTF-8 (byte "
                        f"{bad.object[bad.start]:#04x} at {bad.start}); repair or drop that row, or read another column"
                    )
    except (pa.ArrowException, TypeError, ValueError, AttributeError):
        pass
    reason = " ".join(str(error).split())
    return DataError(f"column '{name}' of '{path}', rows from {first_row} on, is damaged ({reason}); restore the file")


def _as_binary(chunk: pa.Array) -> pa.Array:
    if types.is_string(chunk.type):
        return chunk.view(pa.binary())
    if types.is_large_string(chunk.type):
        return chunk.view(pa.large_binary())
    if types.is_string_view(chunk.type):
        return chunk.view(pa.binary_view())
    return chunk
