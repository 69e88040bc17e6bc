"""JSON lines, plain or compressed with gzip, zstd or bzip2: a row is a line, a group is a run of whole lines.

A run is as many whole lines as fit into `RUN_BYTES`; a longer line is a run of its own. Blank lines are rows whose
values are null, so row r is always line r + 1 of the file. A scan is one pass for newlines; only the first rows are
parsed by it. Offsets and lengths of groups count uncompressed bytes.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from zephon.columns.arrow import column_of
from zephon.columns.damage import Damaged, rescued, shown_value
from zephon.columns.template import template_of
from zephon.data.columns import common_types, has_column, missing_column, physical_columns, sound_table
from zephon.data.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors
from zephon.data.formats.sequential import CODECS, SequentialBytes, codec_of, open_stream, read_range
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["RUN_BYTES", "JsonLines"]

RUN_BYTES = 1 << 20
# A line is parsed as a whole, in several times its memory. One beyond this is a file without newlines.
_MAX_LINE_BYTES = 256 << 20
# Rows whose keys stand for those of the file when a column is looked for.
_HEAD_ROWS = 64
_SHOWN_BYTES = 1 << 14  # of a line that cannot be read, for people to look at
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
# Integers of any length must not be refused (int() stops at 4,300 digits), and their value is not needed.
_DECODER = json.JSONDecoder(parse_int=float)


class JsonLines:
    """The `Format` of JSON lines files.

    A column of documents is read as text. Others are read as what the first rows of the dataset hold: text, numbers
    (float64, since JSON knows one kind of number) or flags. What is nested comes as its JSON, as it stands in the file,
    and so do numbers and flags that are mixed, or are among texts.
    """

    name = "jsonl"
    suffixes = tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in ("", *CODECS))

    def is_sequential(self, name: str) -> bool:
        return codec_of(name) is not None

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        digest = hashlib.sha256()
        groups: list[tuple[int, int, int, int]] = []
        offset = 0
        with corrupt_data_errors(file, self.name):
            for checksum, length, rows in _runs(file):
                digest.update(b"%d %d %d;" % (checksum, length, rows))
                groups.append((rows, length, offset, length))
                offset += length
        name = digest.hexdigest()[:32]
        try:
            keys = _keys_of_head(file, groups, size_column, is_text) if groups else {}
        except Damaged as error:
            error.rest = lambda: ShardScan.of(name, _keys_of_head(file, groups, size_column, is_text, True), groups)
            raise
        return ShardScan.of(name, keys, groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name):
            lines = list(enumerate(_head(file)))

        def found(skips: bool) -> dict[str, str | None]:
            kinds = _kinds_of(_sound_rows(lines, lambda row, line: _object(line, file, row), skips))
            return {key: "json" if kind == "null" else kind for key, kind in kinds.items()}

        try:
            return found(False)
        except Damaged as error:
            error.rest = lambda: found(True)
            raise

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        return _JsonLinesReader(file, columns, text_column, kinds)


class _JsonLinesReader:
    def __init__(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None,
    ) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        self._physical = physical_columns(columns)
        # Without kinds all is text, and anything else is refused.
        self._kinds = None
        if kinds is not None:
            # Of what the first rows do not hold nothing is known; as text anything can be read.
            self._kinds = {name: _known_kind(kinds.get(name)) for name in self._physical}
            if text_column in self._kinds:
                self._kinds[text_column] = "document"
        codec = codec_of(file.path)
        self._packed = SequentialBytes(file, codec) if codec else None

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        return [] if self._packed is not None else [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        with corrupt_data_errors(self._file, JsonLines.name):
            data = read_range(self._file, group.offset, group.length, self._packed)
            try:
                return self._table(data, group)
            except Damaged as error:
                error.rest = lambda: self._rescued(data, group)
                raise

    def _table(self, data: pa.Buffer, group: Group) -> pa.Table:
        table = _parse(data, self._physical, self._file, group, self._kinds)
        return sound_table(table, self._columns, self._text_column, self._file.path, group.first_row)

    def _rescued(self, data: pa.Buffer, group: Group) -> pa.Table:
        """The lines of a run that are good, and the others marked."""
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
        bounds = [0, *ends.tolist()]
        if bounds[-1] != len(data):
            bounds.append(len(data))

        def read(low: int, high: int) -> pa.Table:
            start, length = bounds[low], bounds[high] - bounds[low]
            part = Group(group.offset + start, length, high - low, group.first_row + low)
            return self._table(data.slice(start, length), part)

        def content(row: int) -> str:
            line = data.slice(bounds[row], min(bounds[row + 1] - bounds[row], _SHOWN_BYTES))
            return shown_value(line.to_pybytes().rstrip(b"\r\n"))

        return rescued(group.rows, read, content, self._columns, group.first_row)

    def close(self) -> None:
        if self._packed is not None:
            self._packed.close()


def _runs(file: StoredFile) -> Iterator[tuple[int, int, int]]:
    """(CRC-32, bytes, rows) of each run of the file.

    CRC-32 because it is the fastest checksum of the standard library (7 GB/s here, SHA-256 2 GB/s); one per run and
    a SHA-256 over them make the digest of the shard. Counting newlines in NumPy runs at 15 GB/s without the GIL.
    """
    block = bytearray(RUN_BYTES)
    view, filled = memoryview(block), 0
    array = np.frombuffer(block, np.uint8)
    long_crc, long_bytes = 0, 0  # what has gone by of a line longer than a block
    before = 0  # lines, those of earlier runs

    with open_stream(file, codec_of(file.path)) as source:
        at_end = False
        while not at_end or filled:
            while filled < RUN_BYTES and not at_end:
                count = source.readinto(view[filled:])
                filled += count
                at_end = count == 0
            # A long line ends at the first newline; otherwise the run takes all lines that are whole.
            end = (block.find if long_bytes else block.rfind)(b"\n", 0, filled) + 1
            if at_end and (end == 0 or not long_bytes):
                end = filled  # the last line may lack its newline
            if end == 0:
                long_crc, long_bytes, filled = zlib.crc32(view[:filled], long_crc), long_bytes + filled, 0
                if long_bytes > _MAX_LINE_BYTES:
                    _refuse_length(file, before)
                continue
            if long_bytes and long_bytes + end - (block[end - 1] == _NEWLINE) > _MAX_LINE_BYTES:
                _refuse_length(file, before)
            rows = int(np.count_nonzero(array[:end] == _NEWLINE)) + (block[end - 1] != _NEWLINE)
            yield zlib.crc32(view[:end], long_crc), long_bytes + end, rows
            long_crc, long_bytes, before = 0, 0, before + rows
            block[: filled - end] = block[end:filled]
            filled -= end
        if long_bytes:  # the file ends with a long line that fills its last block exactly and has no newline
            yield long_crc, long_bytes, 1


def _head(file: StoredFile) -> list[bytes]:
    """The first lines of the file, at most `_HEAD_ROWS`, at least one where there is any."""
    blocks: list[bytes] = []
    size = ends = 0
    with open_stream(file, codec_of(file.path)) as source:
        while ends < _HEAD_ROWS and not (ends and size >= RUN_BYTES):
            block = source.read(RUN_BYTES)
            if not ends and size + (block.find(b"\n") if b"\n" in block else len(block)) > _MAX_LINE_BYTES:
                _refuse_length(file, 0)
            if not block:
                ends += 1  # that of the last line
                break
            blocks.append(block)
            size += len(block)
            ends += block.count(b"\n")
    return b"".join(blocks).split(b"\n", _HEAD_ROWS)[: min(ends, _HEAD_ROWS)]


def _refuse_length(file: StoredFile, row: int) -> NoReturn:
    _refuse(
        file,
        row,
        f"is longer than {_MAX_LINE_BYTES:,} bytes, the most that are read as one document",
        "JSON lines hold one document per line, so check that it is such a file",
    )


def _keys_of_head(
    file: StoredFile, groups: list[tuple[int, int, int, int]], size_column: str, is_text: bool, skips: bool = False
) -> dict[str, str]:
    """The keys of the first rows, sorted, and what they hold, with what `size_column` needs of later rows ("null").

    `DataError` when the file has no `size_column`. With `skips`, rows that are no good are passed over.
    """
    _, _, offset, length = groups[0]
    codec = codec_of(file.path)
    packed = SequentialBytes(file, codec) if codec else None
    with corrupt_data_errors(file, JsonLines.name):
        data = read_range(file, offset, length, packed)
    if packed is not None:
        packed.close()
    sized, template = physical_columns([size_column]), template_of(size_column)

    def read(row: int, line: bytes) -> dict[str, Any]:
        parsed = _object(line, file, row)
        if is_text and template is None:
            value = _lookup(
                parsed, size_column, lambda v: v if isinstance(v, dict) else None, _no_object(size_column, file, row)
            )
            _text(value, size_column, file, row)
        return parsed

    lines = enumerate(data.to_pybytes().split(b"\n", _HEAD_ROWS)[:_HEAD_ROWS])
    kinds = _kinds_of(_sound_rows(lines, read, skips))
    late = [name for name in sized if kinds and not has_column(name, kinds)]
    if late:
        kinds.update(dict.fromkeys(_later_keys(file, late), "null"))
        # What a template names may be missing in a file; whether it is in none is known when all are.
        for name in late if template is None else ():
            if not has_column(name, kinds):
                raise missing_column(name, sorted(kinds), file.path)
    return dict(sorted(kinds.items()))


def _later_keys(file: StoredFile, names: Sequence[str]) -> list[str]:
    """Which of `names`, or what they are paths into, a file of JSON lines may have as a key anywhere.

    Looks for the key in quotes, as it is or with what is not ASCII escaped. So a text that is the key's name counts
    too, and a key that is escaped in another way does not.
    """
    keys = {top for name in names for top in (name, name.split(".")[0])}
    wanted = {
        json.dumps(key, ensure_ascii=escaped).encode("utf-8", "surrogatepass"): key
        for key in keys
        for escaped in (False, True)
    }
    overlap = max(map(len, wanted)) - 1
    found: set[str] = set()
    last = b""
    with corrupt_data_errors(file, JsonLines.name), open_stream(file, codec_of(file.path)) as source:
        while found != keys and (block := source.read(RUN_BYTES)):
            last += block
            found.update(key for quoted, key in wanted.items() if key not in found and quoted in last)
            last = last[-overlap:]
    return sorted(found)


def _sound_rows(
    lines: Iterable[tuple[int, bytes]], read: Callable[[int, bytes], dict[str, Any]], skips: bool
) -> list[dict[str, Any]]:
    """The numbered lines as `read` reads them; with `skips`, those that it cannot read are left out."""
    rows = []
    for row, line in lines:
        try:
            rows.append(read(row, line))
        except Damaged:
            if not skips:
                raise
    return rows


def _kinds_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What each key holds in `rows`: text, number, flag, json or null (nothing), see `common_types`."""
    kinds: dict[str, set[str]] = {}
    for parsed in rows:
        for key, value in parsed.items():
            found = kinds.setdefault(key, set())
            if value is not None:
                found.add(_KINDS.get(type(value), "json"))
    return {key: common_types(found) or "json" for key, found in kinds.items()}


def _lookup(
    fields: Mapping[str, Any],
    name: str,
    below: Callable[[Any], Mapping[str, Any] | None],
    refuse: Callable[[str, Any], NoReturn],
) -> Any:
    """The value of a key or, for "meta.text" where that key is missing or null, of a key inside of objects.

    `below` gives the fields of a value, None where it is no object; `refuse` is told the path to such a value.
    """
    value = fields.get(name)
    if value is not None or "." not in name:
        return value
    parts = name.split(".")
    for place, part in enumerate(parts):
        value = fields.get(part)
        if value is None or place == len(parts) - 1:
            return value
        inside = below(value)
        if inside is None:
            refuse(".".join(parts[: place + 1]), value)
        fields = inside


def _no_object(name: str, file: StoredFile, row: int) -> Callable[[str, Any], NoReturn]:
    def refuse(inside: str, value: Any) -> NoReturn:
        _refuse(file, row, f"holds {_kind(value)} in '{inside}', where '{name}' needs an object", "repair that line")

    return refuse


def _parse(
    data: pa.Buffer, columns: list[str], file: StoredFile, group: Group, kinds: Mapping[str, str] | None = None
) -> pa.Table:
    """The rows of a run. Fast by Arrow's parser where that is certain to give one row per line, else line by line."""
    lines, one_object_each = _line_shape(np.frombuffer(data, np.uint8))
    if len(data) != group.length or lines != group.rows:
        raise DataError(
            f"'{file.path}' holds {lines} lines at byte {group.offset}, not {group.rows} as when it was listed; "
            "a dataset must not change during a run, so restore the file or start a new run"
        )
    known = {name: kinds[name] if kinds is not None else "document" for name in columns}
    if one_object_each and "json" not in known.values():
        schema, paths = _schema_of(known)
        try:
            table = pa.json.read_json(
                pa.BufferReader(data),
                read_options=pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowException:
            pass  # read again below, which names the row or, for what only Arrow refuses, reads it
        else:
            if table.num_rows == lines:
                return _found_below(table, paths) if paths else table
    return _parse_line_by_line(data, known, file, group)


def _schema_of(kinds: Mapping[str, str]) -> tuple[pa.Schema, list[str]]:
    """What Arrow is told to look for, and which of the names may be paths: those it looks for both ways."""

    def kind_of(tree: Any) -> pa.DataType:
        if isinstance(tree, dict):
            return pa.struct([(key, kind_of(below)) for key, below in tree.items()])
        return _TYPES[tree]

    tree = _tree_of(kinds)
    if tree is None:
        raise DataError(f"the columns {', '.join(kinds)} contain each other; ask for the outer one alone")
    return pa.schema([(name, kind_of(below)) for name, below in tree.items()]), [name for name in kinds if "." in name]


def _tree_of(kinds: Mapping[str, str]) -> dict[str, Any] | None:
    """The keys of a line that matter, those of `kinds` first: each with a kind or, for paths, with the keys below it.

    None where one of the columns lies inside of another.
    """
    trees: dict[str, Any] = {}
    for name in kinds:
        if "." in name:
            *parts, last = name.split(".")
            tree = trees
            for part in parts:
                tree = tree.setdefault(part, {})
                if not isinstance(tree, dict):
                    return None
            if last in tree:
                return None
            tree[last] = kinds[name]
    return None if trees.keys() & kinds.keys() else {**kinds, **trees}


def _found_below(table: pa.Table, paths: Sequence[str]) -> pa.Table:
    """`table` with each path's column from where it was found: a key of that name, or inside of objects."""
    for name in paths:
        below = table.column(name.split(".")[0])
        for part in name.split(".")[1:]:
            below = pc.struct_field(below, part)
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pc.coalesce(table.column(name), below))
    return table


def _line_shape(data: Any) -> tuple[int, bool]:
    """The number of lines of uint8[n] `data`, and whether each begins with ``{`` and ends with ``}``.

    No JSON value holds ``}`` newline ``{`` outside of a string, and no string holds a bare newline. So where every
    line has that shape, values end where lines end, and as many values as lines means one value on each line.
    """
    ends = np.flatnonzero(data == _NEWLINE)
    if len(data) and data[-1] != _NEWLINE:
        ends = np.append(ends, len(data))
    if not len(ends):
        return 0, False
    starts = np.concatenate(([0], ends[:-1] + 1))
    last = ends - 1
    last -= data[last] == _RETURN
    shaped = (last > starts).all() and (data[starts] == _OPEN).all() and (data[last] == _CLOSE).all()
    return len(ends), bool(shaped)


def _parse_line_by_line(data: pa.Buffer, kinds: Mapping[str, str], file: StoredFile, group: Group) -> pa.Table:
    """Any columns, blank lines, odd spacing, and errors that name the row; about a tenth of the speed.

    A line is read by msgspec where each value is of its column's kind, else, or where that finds no sound JSON, by the
    standard library, which decides. Both give the same.
    """
    read = _typed_reader(kinds)
    columns: list[list[Any]] = [[] for _ in kinds]
    for row, line in enumerate(data.to_pybytes().split(b"\n")[: group.rows], group.first_row):
        try:
            values = read(line)
        except (ValueError, RecursionError):
            values = _exactly(line, kinds, file, row)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return pa.table(
        {name: column_of(column).cast(_TYPES[kinds[name]]) for name, column in zip(kinds, columns, strict=True)}
    )


def _typed_reader(kinds: Mapping[str, str]) -> Callable[[bytes], list[Any]]:
    """What gives a line's values, nested ones as they stand there; ValueError for a line that it cannot read.

    Among those are lines that hold a value of another kind, and all lines where one column lies inside of another.
    """

    def type_of(tree: Mapping[str, Any]) -> Any:
        # What was not written is told from null by nobody, and msgspec takes `Raw | None` for null alone.
        fields: Any = [
            (f"f{n}", type_of(below) | None if isinstance(below, dict) else _READ_AS[below], None)
            for n, below in enumerate(tree.values())
        ]
        return msgspec.defstruct("Line", fields, rename={f"f{n}": key for n, key in enumerate(tree)}.get)

    def unreadable(_: bytes) -> list[Any]:
        raise ValueError

    tree = _tree_of(kinds)
    if tree is None:
        return unreadable
    try:
        decoder = msgspec.json.Decoder(type_of(tree))
    except ValueError:  # keys with quotes or backslashes
        return unreadable
    # (column, its kind, the fields that lead to it below other keys)
    odd: list[tuple[int, str, list[str]]] = []
    for column, (name, kind) in enumerate(kinds.items()):
        fields, below = [], tree
        for part in name.split(".") if "." in name else ():
            fields.append(f"f{list(below).index(part)}")
            below = below[part]
        if fields or kind == "json":
            odd.append((column, kind, fields))

    def read(line: bytes) -> list[Any]:
        parsed = decoder.decode(line)
        values = list(msgspec.structs.astuple(parsed)[: len(kinds)])
        for column, kind, fields in odd:
            value = _json_text(values[column]) if kind == "json" else values[column]
            if value is None and fields:
                value = parsed
                for field in fields:
                    value = None if value is None else getattr(value, field)
                value = _json_text(value) if kind == "json" else value
            values[column] = value
        if b"-0" in line and 0.0 in values:
            raise ValueError  # msgspec takes -0 for 0
        return values

    return read


def _json_text(raw: msgspec.Raw | None) -> str | None:
    text = None if raw is None else bytes(raw).decode()
    return None if text == "null" else text


def _exactly(line: bytes, kinds: Mapping[str, str], file: StoredFile, row: int) -> list[Any]:
    """A line's values as the standard library reads them; refuses what is no JSON or does not fit its column."""
    _object(line, file, row)
    fields = _fields(_content(line, row))

    def value(name: str, kind: str) -> Any:
        refuse = _no_object(name, file, row)
        text = _lookup(
            fields,
            name,
            lambda inside: _fields(inside) if inside[0] == "{" else None,
            lambda inside, value: refuse(inside, _DECODER.decode(value)),
        )
        return None if text is None else _typed(text, kind, name, file, row)

    return [value(name, kind) for name, kind in kinds.items()]


def _fields(text: str) -> dict[str, str | None]:
    """The values of a sound JSON object, as they stand there; None for null, and nothing for a blank line."""
    found: dict[str, str | None] = {}
    at = _space(text, 1)
    while at < len(text) and text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _space(text, _space(text, at) + 1)  # over the colon
        value, end = _DECODER.raw_decode(text, at)
        found[key] = None if value is None else text[at:end]
        at = _space(text, end)
        if text[at] == ",":
            at = _space(text, at + 1)
    return found


def _space(text: str, at: int) -> int:
    """Where the white space that begins at `at`, if any, ends."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _typed(text: str, kind: str, name: str, file: StoredFile, row: int) -> Any:
    """The value whose JSON is `text`, as its column's kind."""
    if kind == "document" or (kind == "text" and text[0] == '"'):
        return _text(_DECODER.decode(text), name, file, row)
    if kind in ("text", "json"):
        return _text(text, name, file, row)
    if kind == "number" and text[0] in "-0123456789NI":
        return float(text)
    if kind == "flag" and text[0] in "tf":
        return text == "true"
    _refuse(
        file,
        row,
        f"holds {_kind(_DECODER.decode(text))} in '{name}', where the first rows of the dataset hold {_NAMES[kind]}",
        "give the column one type",
    )


def _known_kind(kind: str | None) -> str:
    return "text" if kind in (None, "null") else str(kind)


_KINDS = {str: "text", float: "number", bool: "flag"}
_READ_AS: dict[str, Any] = {
    "document": str | None,
    "text": str | None,
    "json": msgspec.Raw,
    "number": float | None,
    "flag": bool | None,
}
_NAMES = {"number": "numbers", "flag": "booleans"}
_TYPES = {
    "document": pa.large_string(),
    "text": pa.large_string(),
    "json": pa.large_string(),
    "number": pa.float64(),
    "flag": pa.bool_(),
}


def _object(line: bytes, file: StoredFile, row: int) -> dict[str, Any]:
    """The JSON object on one line; an empty one for a blank line."""
    text = _content(line, row)
    try:
        parsed = _DECODER.decode(text) if text else {}
    except (ValueError, RecursionError) as error:
        found = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        _refuse(file, row, f"is not valid JSON ({found})", "repair or drop that line")
    if not isinstance(parsed, dict):
        _refuse(file, row, f"holds {_kind(parsed)}, not a JSON object", "JSON lines hold one object per line")
    return parsed


def _content(line: bytes, row: int) -> str:
    """A line without the white space, and byte order mark, around it."""
    if row == 0:
        line = line.removeprefix(b"\xef\xbb\xbf")
    # Bytes that are not UTF-8 matter only in the wanted columns: they come back to light in `_text`.
    return line.decode("utf-8", "surrogateescape").strip(" \t\r\n")


def _text(value: Any, name: str, file: StoredFile, row: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        _refuse(file, row, f"holds {_kind(value)} in '{name}', and text was expected", "name a text column")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = ord(value[error.start])
        # `surrogateescape` brings byte b back as U+DC00 + b; anything else was written as an escape in the JSON.
        what = f"byte {bad - 0xDC00:#04x}" if 0xDC80 <= bad <= 0xDCFF else f"lone surrogate U+{bad:04X}"
        _refuse(
            file, row, f"is not valid UTF-8 in '{name}' ({what} at character {error.start})", "repair or drop that line"
        )
    return value


def _refuse(file: StoredFile, row: int, what: str, remedy: str) -> NoReturn:
    raise Damaged(f"'{file.path}' row {row} (line {row + 1}) {what}; {remedy}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
