"""JSON lines, plain or compressed with gzip, zstd or bzip2: a row is a line, a group is a run of whole lines.

A run is as many whole lines as fit into `RUN_BYTES`; a longer line is a run of its own. Blank lines are rows whose
values are null, so row r is always line r + 1 of the file. A scan is one pass for newlines; only the first rows are
parsed by it. Offsets and lengths of groups count uncompressed bytes.

A run is parsed by Arrow where that is certain to give one row per line, else line by line by msgspec.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from zephon.columns.arrow import column_of
from zephon.columns.damage import Damaged, rescued, shown_value
from zephon.columns.template import is_rounded, number_text, template_of, text_name
from zephon.data.columns import common_types, has_column, missing_column, physical_columns, readings_in_full
from zephon.data.formats.base import Format, Group, Shard, ShardReader, ShardScan, corrupt_data_errors
from zephon.data.formats.content import require_json_lines
from zephon.data.formats.sequential import CODECS, codec_of, open_stream
from zephon.data.storage import StoredFile
from zephon.errors import DataError

RUN_BYTES = 1 << 20
# A line is parsed as a whole, in several times its memory. One beyond this is a file without newlines.
_MAX_LINE_BYTES = 256 << 20
# Rows whose keys stand for those of the file when a column is looked for.
_HEAD_ROWS = 64
_SHOWN_BYTES = 1 << 14  # of a line that cannot be read, for people to look at
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"

_Result = TypeVar("_Result")

Kinds = Mapping[str, str]
"""What each column is read as, by name: "document", "text", "number", "flag", "json" (the JSON as text), or, under the
name that `text_name` gives, "digits" (numbers as text) or "text"."""

Fields = Mapping[str, msgspec.Raw | bytes]
"""The JSON of each key of a line, as it stands there."""

_TYPES = {"number": pa.float64(), "flag": pa.bool_()}
_TYPES |= dict.fromkeys(("document", "text", "json", "digits"), pa.large_string())
_PRINTED = {"number": "digits", "json": "text"}
_WHOLE = re.compile(rb"-?[0-9]+")
_EXPECTED = {"document": "text was expected", "number": "the first rows of the dataset hold numbers"}
_EXPECTED |= {"flag": "the first rows of the dataset hold booleans"}
# What a value is by its first byte.
_NAMES = {"{": "an object", "[": "an array", '"': "a string", "t": "a boolean", "f": "a boolean", "n": "null"}
_KINDS = {"a string": "text", "a boolean": "flag", "a number": "number"}


class JsonLines(Format):
    """JSON lines files.

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
        lines: list[bytes] = []
        offset = 0
        with corrupt_data_errors(file, self.name):
            for run, rows in _runs(file):
                # CRC-32 is the fastest checksum of the standard library: 7 GB/s here, SHA-256 2 GB/s.
                digest.update(b"%d %d %d;" % (zlib.crc32(run), len(run), rows))
                groups.append((rows, len(run), offset, len(run)))
                lines = lines if offset else _head(run)
                offset += len(run)
            name = digest.hexdigest()[:32]

            def scan(skips: bool) -> ShardScan:
                return ShardScan(name, _columns(file, lines, size_column, is_text, skips), groups)

            return _with_rest(scan, file, lines)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name), closing(_runs(file)) as runs:
            lines = _head(next(runs, (b"", 0))[0])

            def columns(skips: bool) -> dict[str, str | None]:
                kinds = _kinds_of(_parsed(lines, file, skips))
                return {key: "json" if kind == "null" else kind for key, kind in kinds.items()}

            return _with_rest(columns, file, lines)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        return _JsonLinesReader(file, columns, text_column, kinds)


def _with_rest(read: Callable[[bool], _Result], file: StoredFile, lines: Sequence[bytes]) -> _Result:
    """`read(False)`; a `Damaged` that it raises can give `read(True)`, which passes over rows that are no good."""
    try:
        return read(False)
    except Damaged as error:
        require_json_lines(file, lines, _is_object)
        error.rest = lambda: read(True)
        raise


def _is_object(line: bytes) -> bool:
    try:
        _object(line.strip(_SPACE))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


class _JsonLinesReader(ShardReader):
    """A line that is damaged is a fault of its row alone."""

    def __init__(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None,
    ) -> None:
        super().__init__(JsonLines.name, Shard(file, codec_of(file.path)), columns, text_column)
        # Without kinds all is text, and anything else is refused. Columns that the first rows lack are read as text.
        self._kinds = dict.fromkeys(self.physical, "document")
        if kinds is not None:
            for name in set(self._kinds) - {text_column}:
                known = kinds.get(name)
                self._kinds[name] = "text" if known in (None, "null") else str(known)
            templates = [name for name in columns if template_of(name) is not None]
            printed = {name: _PRINTED.get(self._kinds[name]) for name in physical_columns(templates)}
            self._kinds |= {text_name(name): kind for name, kind in printed.items() if kind}

    def read(self, group: Group) -> pa.Table:
        with corrupt_data_errors(self.file, self.fmt):
            data = self.shard.content(group)
            try:
                return self._table(data, group)
            except Damaged as error:
                error.rest = lambda: self._rescued(data, group)
                raise

    def _table(self, data: pa.Buffer, group: Group) -> pa.Table:
        return self.sound(_parse(data, self._kinds, self.file, group), group)

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

        return rescued(group.rows, read, content, self.columns, group.first_row)


def _runs(file: StoredFile) -> Generator[tuple[memoryview | bytearray, int]]:
    """(bytes, lines) of each run of whole lines; the bytes are valid until the next run."""
    block = bytearray(RUN_BYTES)
    view, filled = memoryview(block), 0
    long = bytearray()  # the beginning of a line longer than a block
    row = 0
    with open_stream(file, codec_of(file.path)) as stream:
        while True:
            while filled < RUN_BYTES and (count := stream.readinto(view[filled:])):
                filled += count
            if not filled:
                break
            # A long line ends at the first newline; otherwise the run takes all lines that are whole.
            end = (block.find if long else block.rfind)(b"\n", 0, filled) + 1
            if filled < RUN_BYTES and not (end and long):
                end = filled  # the last line may lack its newline
            if long or not end:
                long += view[: end or filled]
                if len(long) - long.endswith(b"\n") > _MAX_LINE_BYTES:
                    if not row:
                        require_json_lines(file, [bytes(long[:_SHOWN_BYTES])], _is_object)
                    _refuse(
                        file,
                        row,
                        f"is longer than {_MAX_LINE_BYTES:,} bytes, the most that are read as one document",
                        "JSON lines hold one document per line, so check that it is such a file",
                    )
            if end:
                run = long or view[:end]
                rows = int(np.count_nonzero(np.frombuffer(run, np.uint8) == _NEWLINE)) + (run[-1] != _NEWLINE)
                yield run, rows
                row, long = row + rows, bytearray()
                block[: filled - end] = block[end:filled]
            filled = filled - end if end else 0
        if long:  # it fills its last block exactly and has no newline
            yield long, 1


def _head(run: bytes | bytearray | memoryview) -> list[bytes]:
    """The first lines of a file by its first run."""
    return bytes(run).split(b"\n", _HEAD_ROWS)[:_HEAD_ROWS]


def _columns(file: StoredFile, lines: Sequence[bytes], size_column: str, is_text: bool, skips: bool) -> dict[str, str]:
    """What the keys of the first rows hold, sorted, with what `size_column` needs of later rows ("null")."""
    is_template = template_of(size_column) is not None
    kinds = _kinds_of(_parsed(lines, file, skips, size_column if is_text and not is_template else None))
    late = [name for name in physical_columns([size_column]) if kinds and not has_column(name, kinds)]
    if late:
        later = _later_keys(file, late)
        kinds.update(dict.fromkeys(later, "null") if is_text else later)  # documents are read as text
        # What a template names may be missing in a file; whether it is in none is known when all are.
        for name in late:
            if not is_template and not has_column(name, kinds):
                raise missing_column(name, sorted(kinds), file.path)
    return dict(sorted(kinds.items()))


def _later_keys(file: StoredFile, names: Sequence[str]) -> dict[str, str]:
    """Which of `names`, or what they are paths into, a file has as a key anywhere, with what the first of them hold.

    Only lines with the key in quotes are parsed, as it is or with what is not ASCII escaped: a key that is escaped in
    another way is not found.
    """
    keys = {top for name in names for top, *_ in readings_in_full(name)}
    wanted = {
        json.dumps(key, ensure_ascii=escaped).encode("utf-8", "surrogatepass"): key
        for key in keys
        for escaped in (False, True)
    }
    found: dict[str, str] = {}
    with closing(_runs(file)) as runs:
        for run, _ in runs:
            data = bytes(run)
            if here := [quoted for quoted, key in wanted.items() if key not in found and quoted in data]:
                lines = [line for line in data.split(b"\n") if any(quoted in line for quoted in here)]
                kinds = _kinds_of(_parsed(lines, file, True))
                found |= {wanted[quoted]: kinds[wanted[quoted]] for quoted in here if wanted[quoted] in kinds}
                if found.keys() == keys:
                    break
    return dict(sorted(found.items()))


def _parsed(lines: Iterable[bytes], file: StoredFile, skips: bool, text_column: str | None = None) -> list[Fields]:
    """The first lines of a file, whose `text_column` must be text; with `skips`, without those that are no good."""
    rows = []
    for row, line in enumerate(lines):
        try:
            fields = _fields(line, file, row)
            if text_column is not None:
                _value(fields, text_column, "document", file, row)
            rows.append(fields)
        except Damaged:
            if not skips:
                raise
    return rows


def _kinds_of(rows: Iterable[Fields]) -> dict[str, str]:
    """What each key holds in `rows`: text, number, flag, json or null (nothing), see `common_types`."""
    kinds: dict[str, set[str]] = {}
    for fields in rows:
        for key, raw in fields.items():
            seen = kinds.setdefault(key, set())
            if (value := bytes(raw)) != b"null":
                seen.add(_KINDS.get(_named(value), "json"))
    return {key: common_types(seen) or "json" for key, seen in kinds.items()}


def _parse(data: pa.Buffer, kinds: Kinds, file: StoredFile, group: Group) -> pa.Table:
    """The rows of a run, a column for each of `kinds`."""
    lines, one_object_each = _line_shape(np.frombuffer(data, np.uint8))
    if lines != group.rows:
        raise DataError(
            f"'{file.path}' holds {lines} lines at byte {group.offset}, not {group.rows} as when it was listed; "
            "a dataset must not change during a run, so restore the file or start a new run"
        )
    digits = [name for name, kind in kinds.items() if kind == "digits"]
    own = {name: kind for name, kind in kinds.items() if kind != "digits"}
    if one_object_each and "json" not in kinds.values() and (schema := _arrow_schema(own)) is not None:
        try:
            table = pa.json.read_json(
                pa.BufferReader(data),
                read_options=pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowException:
            pass  # read again below, which names the row or, for what only Arrow refuses, reads it
        else:
            table = _with_path_columns(table, own)
            numbers = [table.column(name[1:-1]).combine_chunks() for name in digits]
            if table.num_rows == lines and not any(pc.any(is_rounded(each)).as_py() for each in numbers):
                return pa.table([*table.columns, *map(number_text, numbers)], [*table.column_names, *digits])
    return _parse_line_by_line(data, kinds, file, group)


def _arrow_schema(kinds: Kinds) -> pa.Schema | None:
    """Each column as a key and, where it may be a path, below other keys; None where one lies inside of another."""
    schemas = [pa.schema([(name, _TYPES[kind]) for name, kind in kinds.items()])]
    for name, kind in kinds.items():
        for top, *parts in readings_in_full(name)[1:]:
            below = _TYPES[kind]
            for part in reversed(parts):
                below = pa.struct([(part, below)])
            schemas.append(pa.schema([(top, below)]))
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowTypeError:
        return None


def _with_path_columns(table: pa.Table, kinds: Kinds) -> pa.Table:
    """`table` with each path's column from where it is: a key of that name, or inside of objects."""
    read = table
    for name in kinds:
        if "." in name:
            found = [pc.struct_field(read.column(top), parts) for top, *parts in readings_in_full(name)[1:]]
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, pc.coalesce(table.column(name), *found))
    return table


def _line_shape(data: npt.NDArray[np.uint8]) -> tuple[int, bool]:
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


def _parse_line_by_line(data: pa.Buffer, kinds: Kinds, file: StoredFile, group: Group) -> pa.Table:
    """Any columns, blank lines, odd spacing, and errors that name the row; about a tenth of the speed."""
    columns: list[list[Any]] = [[] for _ in kinds]
    plain = {name for name in kinds if "." not in name and not name.startswith("{")}
    for row, line in enumerate(data.to_pybytes().split(b"\n")[: group.rows], group.first_row):
        fields = _fields(line, file, row)
        for column, (name, kind) in zip(columns, kinds.items(), strict=True):
            missing = name not in fields and name in plain  # which is quicker said here
            column.append(None if missing else _value(fields, name, kind, file, row))
    types = [_TYPES[kind] for kind in kinds.values()]
    return pa.table([column_of(column).cast(kind) for column, kind in zip(columns, types, strict=True)], list(kinds))


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)


def _fields(line: bytes, file: StoredFile, row: int) -> Fields:
    """What the object on one line holds; nothing for a blank line."""
    if row == 0:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    line = line.strip(_SPACE)
    if not line:
        return {}
    try:
        return _object(line)
    except msgspec.ValidationError:
        _refuse(file, row, f"holds {_named(line)}, not a JSON object", "JSON lines hold one object per line")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        _refuse(file, row, f"is not valid JSON ({error})", "repair or drop that line")


def _object(line: bytes) -> Fields:
    try:
        return _OBJECT.decode(line)
    except RecursionError:  # how deep is too deep depends on the caller; so what is nested is not looked at
        line, values = _without_nested(line)
        return {key: values.get(bytes(value), value) for key, value in _OBJECT.decode(line).items()}
    except msgspec.DecodeError:
        marked = _PIECES.sub(_marked, line)
        if marked == line:
            raise
        return {key: _MARKED.sub(_unmarked, bytes(value)) for key, value in _OBJECT.decode(marked).items()}


def _without_nested(line: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """A line with marks in the place of the arrays and objects in its object, and these by mark."""
    parts, values, depth, done = list[bytes](), dict[bytes, bytes](), 0, 0
    for found in _BRACKETS.finditer(line):
        opens, closes = found[0] in (b"[", b"{"), found[0] in (b"]", b"}")
        depth += opens
        if depth == 2 and opens:
            parts.append(line[done : found.start()])
            done = found.start()
        elif depth == 2 and closes:
            values[mark := b'"\xff%d"' % len(values)] = line[done : found.end()]
            parts.append(mark)
            done = found.end()
        depth -= closes
    return b"".join([*parts, line[done:]]), values


_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)

# Python's json module writes what JSON has no word for: NaN, Infinity, and lone surrogates in strings. While msgspec
# splits such a line, they are marked by a byte that occurs in no UTF-8 and that it does not look at: NaN as the string
# "\xffNaN", \ud800 as \xffud800.
_PIECES = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN', re.DOTALL)
_ESCAPES = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\(u[dD][89a-fA-F]..)|(\\.)", re.DOTALL)
_MARKED = re.compile(rb'"\xff(-?Infinity|NaN)"|\xff(u[dD][89a-fA-F])')


def _marked(piece: re.Match[bytes]) -> bytes:
    if not piece[0].startswith(b'"'):
        return b'"\xff%s"' % piece[0]
    return _ESCAPES.sub(lambda found: b"\xff" + found[2] if found[2] else found[0], piece[0])


def _unmarked(piece: re.Match[bytes]) -> bytes:
    return piece[1] or b"\\" + piece[2]


def _value(fields: Fields, name: str, kind: str, file: StoredFile, row: int) -> Any:
    """The value of a key or, for "meta.text" where that key is missing or null, of a key inside of objects."""
    name = name[1:-1] if name.startswith("{") else name  # a column of `text_name`
    value = bytes(fields.get(name, b"null"))
    for *parts, last in readings_in_full(name)[1:] if value == b"null" and "." in name else ():
        inside = fields
        for place, part in enumerate(parts, 1):
            value = bytes(inside.get(part, b"null"))
            if value[:1] not in (b"{", b"n"):
                path = ".".join(parts[:place])
                _refuse(file, row, f"holds {_named(value)} in '{path}', where '{name}' needs an object", "repair it")
            inside = _object(value) if value != b"null" else {}
        value = bytes(inside.get(last, b"null"))
        if value != b"null":
            break
    if value == b"null":
        return None
    first = chr(value[0])
    try:
        text = value.decode()
        if first == '"' and kind in ("document", "text"):
            return _STRING.decode(value)
        if kind in ("text", "json"):
            return text
    except (ValueError, msgspec.DecodeError) as error:
        bad = f"byte {value[error.start]:#04x}" if isinstance(error, UnicodeDecodeError) else "a lone surrogate"
        _refuse(file, row, f"is not valid UTF-8 in '{name}' ({bad})", "repair or drop that line")
    if kind in ("number", "digits") and first in "-0123456789NI":
        if kind == "number":
            return float(value)
        return text if _WHOLE.fullmatch(value) else number_text(column_of([float(value)]))[0].as_py()
    if kind == "flag" and first in "tf":
        return value == b"true"
    _refuse(file, row, f"holds {_named(value)} in '{name}', and {_EXPECTED[kind]}", "give the column one type")


def _named(value: bytes) -> str:
    return _NAMES.get(chr(value[0]), "a number")


def _refuse(file: StoredFile, row: int, what: str, remedy: str) -> NoReturn:
    raise Damaged(f"'{file.path}' row {row} (line {row + 1}) {what}; {remedy}")
