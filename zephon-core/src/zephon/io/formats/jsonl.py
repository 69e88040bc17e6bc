"""JSON lines, plain or compressed with gzip or zstd: a row is a line, a group is a run of whole lines.

A run is as many whole lines as fit into `RUN_BYTES`; a longer line is a run of its own. Blank lines are rows whose
values are null, so row r is always line r + 1 of the file. A scan is one pass for newlines; only the first rows are
parsed by it. Offsets and lengths of groups count uncompressed bytes.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.json

from zephon.errors import DataError
from zephon.io.columns import missing_column, sound_table
from zephon.io.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors
from zephon.io.formats.sequential import SequentialBytes, open_stream
from zephon.io.storage import StoredFile

__all__ = ["RUN_BYTES", "JsonLines"]

RUN_BYTES = 1 << 20
# Arrow's JSON parser counts a block in 32 bits. A line beyond this is no document but a file without newlines.
_MAX_LINE_BYTES = 1 << 30
# Rows whose keys stand for those of the file when a column is looked for.
_HEAD_ROWS = 64
_CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
# Integers of any length must not be refused (int() stops at 4,300 digits), and their value is not needed.
_DECODER = json.JSONDecoder(parse_int=float)


class JsonLines:
    """The `Format` of JSON lines files. Every wanted column is read as text."""

    name = "jsonl"
    suffixes = tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in ("", *_CODECS))

    def is_sequential(self, name: str) -> bool:
        return _codec(name) is not None

    def scan(self, file: StoredFile, size_column: str) -> ShardScan:
        digest = hashlib.sha256()
        groups: list[tuple[int, int, int, int]] = []
        offset = 0
        with corrupt_data_errors(file, self.name):
            for checksum, length, rows in _runs(file):
                digest.update(b"%d %d %d;" % (checksum, length, rows))
                groups.append((rows, length, offset, length))
                offset += length
        keys = _keys_of_head(file, groups, size_column) if groups else ()
        return ShardScan.of(digest.hexdigest()[:32], keys, groups)

    def open(self, file: StoredFile, columns: Sequence[str], text_column: str) -> ShardReader:
        return _JsonLinesReader(file, columns, text_column)


class _JsonLinesReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        codec = _codec(file.path)
        self._packed = SequentialBytes(file, codec) if codec else None

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        return [] if self._packed is not None else [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        with corrupt_data_errors(self._file, JsonLines.name):
            data = _read_run(self._file, group.offset, group.length, self._packed)
            table = _parse(data, self._columns, self._file, group)
            return sound_table(table, self._columns, self._text_column, self._file.path, group.first_row)

    def close(self) -> None:
        if self._packed is not None:
            self._packed.close()


def _codec(name: str) -> str | None:
    return next((codec for suffix, codec in _CODECS.items() if name.lower().endswith(suffix)), None)


def _read_run(file: StoredFile, offset: int, length: int, packed: SequentialBytes | None) -> pa.Buffer:
    if packed is not None:
        return packed.read(offset, length)
    with file.open() as handle:
        handle.seek(offset)
        return handle.read_buffer(length)


def _runs(file: StoredFile) -> Iterator[tuple[int, int, int]]:
    """(CRC-32, bytes, rows) of each run of the file.

    CRC-32 because it is the fastest checksum of the standard library (7 GB/s here, SHA-256 2 GB/s); one per run and
    a SHA-256 over them make the digest of the shard. Counting newlines in NumPy runs at 15 GB/s without the GIL.
    """
    block = bytearray(RUN_BYTES)
    view, filled = memoryview(block), 0
    array = np.frombuffer(block, np.uint8)
    long_crc, long_bytes = 0, 0  # what has gone by of a line longer than a block

    with open_stream(file, _codec(file.path)) as source:
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
                    raise DataError(
                        f"'{file.path}' holds a line of more than {_MAX_LINE_BYTES >> 20} MiB; "
                        "JSON lines hold one document per line, so check that it is such a file"
                    )
                continue
            rows = int(np.count_nonzero(array[:end] == _NEWLINE)) + (block[end - 1] != _NEWLINE)
            yield zlib.crc32(view[:end], long_crc), long_bytes + end, rows
            long_crc, long_bytes = 0, 0
            block[: filled - end] = block[end:filled]
            filled -= end
        if long_bytes:  # the file ends with a long line that fills its last block exactly and has no newline
            yield long_crc, long_bytes, 1


def _keys_of_head(file: StoredFile, groups: list[tuple[int, int, int, int]], size_column: str) -> tuple[str, ...]:
    """The keys of the first rows, sorted; raises `DataError` when none of them is `size_column`."""
    _, _, offset, length = groups[0]
    codec = _codec(file.path)
    packed = SequentialBytes(file, codec) if codec else None
    with corrupt_data_errors(file, JsonLines.name):
        data = _read_run(file, offset, length, packed)
    if packed is not None:
        packed.close()
    keys: set[str] = set()
    for row, line in enumerate(data.to_pybytes().split(b"\n", _HEAD_ROWS)[:_HEAD_ROWS]):
        parsed = _object(line, file, row)
        _text(parsed.get(size_column), size_column, file, row)
        keys.update(parsed)
    if keys and size_column not in keys:
        raise missing_column(size_column, sorted(keys), file.path)
    return tuple(sorted(keys))


def _parse(data: pa.Buffer, columns: list[str], file: StoredFile, group: Group) -> pa.Table:
    """The rows of a run. Fast by Arrow's parser where that is certain to give one row per line, else line by line."""
    lines, one_object_each = _line_shape(np.frombuffer(data, np.uint8))
    if len(data) != group.length or lines != group.rows:
        raise DataError(
            f"'{file.path}' holds {lines} lines at byte {group.offset}, not {group.rows} as when it was listed; "
            "a dataset must not change during a run, so restore the file or start a new run"
        )
    if one_object_each:
        schema = pa.schema([(name, pa.large_string()) for name in columns])
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
                return table
    return _parse_line_by_line(data, columns, file, group)


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


def _parse_line_by_line(data: pa.Buffer, columns: list[str], file: StoredFile, group: Group) -> pa.Table:
    """The exact and slow way (about a tenth of the speed): blank lines, odd spacing, and errors that name the row."""
    values: dict[str, list[str | None]] = {name: [] for name in columns}
    lines = data.to_pybytes().split(b"\n")
    for row, line in enumerate(lines[: group.rows], group.first_row):
        parsed = _object(line, file, row)
        for name in columns:
            values[name].append(_text(parsed.get(name), name, file, row))
    return pa.table({name: pa.array(column, pa.large_string()) for name, column in values.items()})


def _object(line: bytes, file: StoredFile, row: int) -> dict[str, Any]:
    """The JSON object on one line; none for a blank line."""
    if row == 0:
        line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        # Bytes that are not UTF-8 matter only in the wanted columns: they come back to light in `_text`.
        text = line.decode("utf-8", "surrogateescape").strip(" \t\r\n")
        parsed = _DECODER.decode(text) if text else {}
    except (ValueError, RecursionError) as error:
        found = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        _refuse(file, row, f"is not valid JSON ({found})", "repair or drop that line")
    if not isinstance(parsed, dict):
        _refuse(file, row, f"holds {_kind(parsed)}, not a JSON object", "JSON lines hold one object per line")
    return parsed


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
    raise DataError(f"'{file.path}' row {row} (line {row + 1}) {what}; {remedy}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
