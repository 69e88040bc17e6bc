"""Decoded columns: which types hold text, and turning what a format decoded into sound, single-chunk Arrow columns.

Text always comes out as `large_string`: the cast from `string` copies 8 bytes per row and no text (8 us for 4,096
rows), `take` and `concat` are as fast on it as on `string`, and it has no 2 GiB limit that a block could run into.
Every column is validated in full once, when its group is decoded: that is the UTF-8 check (21 GB/s measured), and it
is what makes the later, unchecked column code safe on damaged files.

A *column name* as users write it is one of three things, in this order: the name of a top-level column; a path into
structs, "meta.text"; a template over several columns, "{title}\\n\\n{meta.text}" (doubled braces stand for themselves).
Shards of one dataset may differ: columns that one lacks are null there; `common_types` says in which type each comes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from zephon.columns.arrow import int64_array
from zephon.columns.damage import Damaged, rescued, shown_value
from zephon.columns.template import fill_in, template_of, text_name, text_of
from zephon.errors import DataError


def physical_columns(columns: Iterable[str]) -> list[str]:
    """`columns` with templates replaced by what they are made of, each once."""
    found: dict[str, None] = {}
    for name in columns:
        template = template_of(name)
        found.update(dict.fromkeys([name] if template is None else [field for _, field in template if field]))
    return list(found)


def top_level(columns: Iterable[str], existing: Iterable[str]) -> list[str]:
    """Those of the `existing` top-level columns that are needed for `columns`, each once, in order of need."""
    known = set(existing)
    tops = (next((top for top, _ in _readings(name) if top in known), None) for name in physical_columns(columns))
    return list(dict.fromkeys(top for top in tops if top is not None))


def has_column(name: str, existing: Iterable[str]) -> bool:
    """Whether `existing` top-level columns may hold all that `name` is made of."""
    known = set(existing)
    return all(any(top in known for top, _ in _readings(part)) for part in physical_columns([name]))


def check_columns(
    schema: pa.Schema, columns: Sequence[str], text_column: str | None, path: str, *, strict: bool = True
) -> None:
    """Raises `DataError` unless `schema` has each of `columns` exactly once and `text_column`, if any, holds text.

    With `strict` off, columns other than `text_column` may be missing; those in a template always may, as other files
    may have them: `sound_table` gives nulls for them, and `require_somewhere` finds those that no file has.
    """
    wanted = (*columns, text_column, strict)
    if (before := _passed.get(wanted)) is not None and schema.equals(before):  # as of nearly every file of a dataset
        return
    needed = {name for name in columns if template_of(name) is None and (strict or name == text_column)}
    documents = physical_columns([text_column]) if text_column is not None and text_column in columns else []
    for name in physical_columns(columns):
        count = len(schema.get_all_field_indices(name))
        if count > 1:
            raise DataError(f"'{path}' has {count} columns named '{name}'; expected one. Rename them")
        found = _find(schema, name)
        if found is None:
            if name in needed:
                raise missing_column(name, schema.names, path)
            continue
        kind, expected = sound_type(found[2]), f"column '{name}' of '{path}' has the type {found[2]}; expected"
        try:
            _as_sound(pa.nulls(1, found[2]), kind).take(int64_array(np.zeros(1)))
        except (pa.ArrowNotImplementedError, KeyError) as error:
            raise DataError(
                f"{expected} one of which pyarrow {pa.__version__} can pick rows ({_reason(error)}). Write the column "
                "with another type, or do not ask for it"
            ) from error
        if name not in documents or _is_text(kind) or (name not in columns and _prints(kind)):
            continue
        if (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type):
            remedy = "Token ids are read by the operator pretokenized, in place of tokenize"
        else:
            names = ", ".join(f"'{field.name}'" for field in schema if _is_text(sound_type(field.type)))
            remedy = "Name a text column with text_field" + (f": {names}" if names else "")
        raise DataError(f"{expected} text (string, or binary that holds UTF-8). {remedy}")
    _passed[wanted] = schema


_passed: dict[tuple[object, ...], pa.Schema] = {}
"""The last schema that `check_columns` found to have some columns."""


def with_paths(schema: pa.Schema, column: str) -> pa.Schema:
    """`schema`, and below their own names the fields in structs that `column` is made of, where it has them.

    So that what a scan notes tells which files have them; see `require_somewhere`.
    """
    for name in physical_columns([column]):
        found = _find(schema, name)
        if found is not None and found[1] and not types.is_null(found[2]):
            schema = schema.append(pa.field(name, found[2]))
    return schema


def require_somewhere(column: str, existing: Iterable[str], path: str, *, is_exact: bool = True) -> None:
    """Raises `DataError` unless some file of a dataset has each of the columns that `column` is made of.

    `existing` are the columns of all files, `with_paths` where `is_exact`; none where nothing is known.
    """
    known = list(existing)
    for name in physical_columns([column]) if known else ():
        if not (name in known if is_exact else has_column(name, known)):
            raise missing_column(name, known, path)


def missing_column(name: str, existing: Sequence[str], path: str) -> DataError:
    """The error for a column that is not there; lists the ones that are."""
    close = difflib.get_close_matches(name, existing, n=1)
    shown = ", ".join(f"'{column}'" for column in existing[:20]) + (", ..." if len(existing) > 20 else "")
    hint = f"did you mean '{close[0]}'?" if close else "name one of them, for documents with text_field"
    return DataError(f"no column '{name}' in '{path}', which has {shown or 'no columns'}; {hint}")


def common_types(kinds: Iterable[str]) -> str | None:
    """What a column is read as whose type differs between shards; None leaves each as it is.

    `kinds` are what `ShardScan.columns` holds: Arrow's names for types (JSON lines: what the first rows hold), "" where
    there is no name.
    """
    found = set(kinds) - {"null"}
    if len(found) < 2:
        return next(iter(found), "null") or None
    if found <= {"text", "number", "flag", "json"}:
        # JSON lines: single values are printed as they are; with nested ones among them, all come as JSON.
        return "json" if "json" in found or "text" not in found else "text"
    unsigned = {"uint8", "uint16", "uint32", "uint64"}
    integers = unsigned | {"int8", "int16", "int32", "int64"}
    for kind, held in (
        ("uint64", unsigned),
        ("int64", integers),
        ("double", integers | {"halffloat", "float", "double"}),
        ("large_binary", {"large_string", "large_binary"}),
    ):
        if found <= held:
            return kind
    return None


def as_types(table: pa.Table, wanted: Mapping[str, pa.DataType], path: str, first_row: int) -> pa.Table:
    """`table` with the columns that `wanted` names in its types.

    Raises:
        Damaged: a value that does not fit; the rest are the other rows.
    """

    def read(part: pa.Table, at: int) -> pa.Table:
        for i, field in enumerate(part.schema):
            kind = wanted.get(field.name, field.type)
            if kind != field.type:
                try:
                    part = part.set_column(i, field.name, part.column(i).cast(kind))
                except pa.ArrowInvalid as error:
                    raise Damaged(
                        f"column '{field.name}' of '{path}', rows from {at} on, has the type {field.type} where other "
                        f"files have {kind}, and does not fit ({_reason(error)}); write the files with one type"
                    ) from error
        return part

    return _whole_or_by_row(table, read, table.column_names, first_row)


def sound_table(
    table: pa.Table,
    columns: Sequence[str],
    text_column: str | None,
    path: str,
    first_row: int,
    as_bytes: AbstractSet[str] = frozenset(),
) -> pa.Table:
    """`columns` of a decoded group in that order, validated, one chunk each, text as `large_string`.

    Strings of any Arrow kind become `large_string`, binary becomes `large_binary`, dictionaries their values, the text
    column is `large_string` from any type that holds text; other types stay as they are. What is missing is null. Text
    `as_bytes` is not looked at. `first_row` is the group's first row in its shard.

    Raises:
        Damaged: invalid UTF-8 (names file and row), or a column whose bytes do not fit together; the rest are the rows
            of which that is not so.
        DataError: a column of a kind that a template cannot print.
    """

    def read(part: pa.Table, at: int) -> pa.Table:
        def sound(name: str) -> pa.Array:
            column = _column(part, name, path, at)
            if name in as_bytes and types.is_large_string(column.type):
                column = pa.chunked_array([chunk.view(pa.large_binary()) for chunk in column.chunks])
            return _sound(column, name, name == text_column, path, at)

        arrays = []
        for name in columns:
            template = template_of(name)
            if template is None:
                arrays.append(sound(name))
                continue
            texts = {}
            for field in physical_columns([name]):
                values = sound(text_name(field) if text_name(field) in part.column_names else field)
                try:
                    texts[field] = text_of(values)
                except (pa.ArrowException, UnicodeDecodeError) as error:
                    raise DataError(
                        f"column '{field}' of '{path}', rows from {at} on, has the type {values.type}, which a text "
                        "template cannot print; leave it out of the template"
                    ) from error
            arrays.append(fill_in(template, texts))
        return pa.Table.from_arrays(arrays, names=list(columns))

    return _whole_or_by_row(table, read, columns, first_row)


def _whole_or_by_row(
    table: pa.Table, read: Callable[[pa.Table, int], pa.Table], columns: Sequence[str], first_row: int
) -> pa.Table:
    """`read(table, first_row)`; damage comes with what finds the rows that are sound, see `rescued`."""
    try:
        return read(table, first_row)
    except Damaged as error:
        error.rest = lambda: rescued(
            table.num_rows,
            lambda low, high: read(table.slice(low, high - low), first_row + low),
            lambda row: _shown_row(table, row),
            columns,
            first_row,
        )
        raise


def _shown_row(table: pa.Table, row: int) -> str:
    """A row that is not sound, for people: its columns as far as they can be looked at without harm."""
    shown = []
    for name in table.column_names:
        try:
            value = _as_binary(pa.concat_arrays(table.column(name).slice(row, 1).chunks))
            shown.append(f"{name}: {shown_value(value[0].as_py())}")
        except (pa.ArrowException, UnicodeDecodeError, ValueError, TypeError):
            continue
    return shown_value("\n".join(shown))


@lru_cache(maxsize=1024)
def readings_in_full(name: str) -> tuple[tuple[str, ...], ...]:
    """The keys for each way to read a dotted name, one below the other, the longest first."""
    below = {top: readings_in_full(".".join(rest)) if rest else ((),) for top, rest in _readings(name)}
    return tuple((top, *keys) for top, each in below.items() for keys in each)


def _readings(name: str) -> list[tuple[str, list[str]]]:
    """(top-level column, fields below it) for each way to read a dotted name, the longest column first."""
    parts = name.split(".")
    return [(".".join(parts[:cut]), parts[cut:]) for cut in range(len(parts), 0, -1)]


def _find(schema: pa.Schema, name: str) -> tuple[str, list[str], pa.DataType] | None:
    """(top-level column, fields below it, type) of a column; the type is null where the path leads through nulls."""
    for top, rest in _readings(name):
        if schema.get_field_index(top) >= 0:
            below = _below(schema.field(top).type, ".".join(rest)) if rest else ([], schema.field(top).type)
            return None if below is None else (top, *below)
    return None


def _below(kind: pa.DataType, name: str) -> tuple[list[str], pa.DataType] | None:
    """(fields, type) of a path in a struct, whose fields may have dots in their names as well."""
    if types.is_null(kind):
        return name.split("."), kind
    for top, rest in _readings(name) if types.is_struct(kind) else ():
        if kind.get_field_index(top) >= 0:
            inside = kind.field(top).type
            found = _below(inside, ".".join(rest)) if rest else ([], inside)
            return None if found is None else ([top, *found[0]], found[1])
    return None


def _column(table: pa.Table, name: str, path: str, first_row: int) -> pa.ChunkedArray:
    found = _find(table.schema, name)
    if found is None or types.is_null(found[2]):
        return pa.chunked_array([pa.nulls(table.num_rows)])
    top, fields, _ = found
    column = table.column(top)
    if fields:
        try:
            for chunk in column.chunks:  # before anything looks into it
                _validate(chunk)
        except pa.ArrowInvalid as error:
            raise Damaged(
                f"column '{top}' of '{path}', rows from {first_row} on, is damaged ({_reason(error)}); restore the file"
            ) from error
        column = pc.struct_field(column, fields)
    return column


def _sound(column: pa.ChunkedArray, name: str, is_text: bool, path: str, first_row: int) -> pa.Array:
    kind = pa.large_string() if is_text else sound_type(column.type)
    chunks = []
    for chunk in column.chunks:
        try:
            _validate(chunk)
            chunks.append(_as_sound(chunk, kind))  # checks UTF-8 when it comes from binary
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise _unsound(chunk, name, path, first_row, error) from error
        first_row += len(chunk)
    return chunks[0] if len(chunks) == 1 else pa.chunked_array(chunks, kind).combine_chunks()


def _validate(array: pa.Array) -> None:
    """Checks all of an array, but that date64 are whole days: libraries for JavaScript write other ones."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if (plain := _with_leaves(array.type, _plain_date)) == array.type:
            raise
        array.view(plain).validate(full=True)


def _plain_date(kind: pa.DataType) -> pa.DataType:
    return pa.int64() if types.is_date64(kind) else kind


def _as_sound(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    if types.is_dictionary(array.type):  # of views none can be picked, as decoding does
        array = array.cast(_with_large_text(array.type))
    return array.cast(kind)


def sound_type(kind: pa.DataType) -> pa.DataType:
    """The type in which `sound_table` gives a column."""
    if isinstance(kind, pa.BaseExtensionType):
        return sound_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return sound_type(kind.value_type)
    return _with_large_text(kind)


def _with_large_text(kind: pa.DataType) -> pa.DataType:
    """With large types for all text inside: Arrow picks no rows of views, and short types end at 2 GiB."""
    return _with_leaves(kind, _large_text)


def _large_text(kind: pa.DataType) -> pa.DataType:
    if types.is_string(kind) or types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if types.is_binary(kind) or types.is_binary_view(kind) else kind


def _with_leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with others in the place of those that hold values."""
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _with_leaves(kind.value_type, leaf), kind.ordered)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_with_leaves(field.type, leaf)) for field in kind])
    if types.is_map(kind):
        key, item = (field.with_type(_with_leaves(field.type, leaf)) for field in (kind.key_field, kind.item_field))
        return pa.map_(key, item, kind.keys_sorted)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inside = kind.value_field.with_type(_with_leaves(kind.value_type, leaf))
        if types.is_fixed_size_list(kind):
            return pa.list_(inside, kind.list_size)
        return pa.large_list(inside) if types.is_large_list(kind) else pa.list_(inside)
    return leaf(kind)


def _is_text(kind: pa.DataType) -> bool:
    """Whether a type of `sound_type` may hold text; null is a shard in which every document is missing."""
    return types.is_large_string(kind) or types.is_large_binary(kind) or types.is_null(kind)


def _prints(kind: pa.DataType) -> bool:
    return types.is_temporal(kind) or any(
        prints(kind) for prints in (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
    )


def _unsound(chunk: pa.Array, name: str, path: str, first_row: int, error: Exception) -> Damaged:
    """Names the row whose text is not UTF-8, if that is what is wrong; slow, and only on the way to an error."""
    try:
        for row, value in enumerate(_as_binary(chunk).to_pylist()):
            try:
                if value is not None:
                    value.decode()
            except UnicodeDecodeError as bad:
                return Damaged(
                    f"'{path}' row {first_row + row}, column '{name}', is not valid UTF-8 (byte "
                    f"{bad.object[bad.start]:#04x} at {bad.start}); repair or drop that row, or read another column"
                )
    except (pa.ArrowException, TypeError, ValueError, AttributeError):
        pass
    return Damaged(
        f"column '{name}' of '{path}', rows from {first_row} on, is damaged ({_reason(error)}); restore the file"
    )


_BINARY = {"string": pa.binary(), "large_string": pa.large_binary(), "string_view": pa.binary_view()}


def _as_binary(array: pa.Array) -> pa.Array:
    """Text as binary, which any bytes are, checked for all else."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _as_binary(array.storage)
    if types.is_dictionary(array.type):  # whose indices are checked before anything is decoded by them
        return pa.DictionaryArray.from_arrays(array.indices, _as_binary(array.dictionary)).dictionary_decode()
    array = array.view(_BINARY.get(str(array.type), array.type))
    array.validate(full=True)
    return array


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
