"""Arrow IPC, file and stream format: a group is a record batch.

Both formats are a run of messages, each a small flatbuffer and a body; the file format only adds marks and a footer.
A scan therefore hops from message to message and reads no column data, and a batch is read as a stream of its own:
the schema, the dictionaries before it, the batch. Of the batch only the bytes of the wanted columns are fetched; the
rest of its buffer stays untouched memory. Layout: https://arrow.apache.org/docs/format/Columnar.html.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import types

from zephon.data.columns import check_columns, sound_table, top_level, with_paths
from zephon.data.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["ArrowIpc", "check_claims"]

_FILE_MARK = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # flatbuffer enum MessageHeader
# Read at the start of each message: its metadata, nearly always, and a sample of its data for the digest.
_HEAD_BYTES = 4096
_MAX_GROUP_ROWS = 2**40
# Columns point into the buffer of their whole batch and keep it alive, though the cache counts the columns alone.
# Where they are less than this share of it, they are copied out.
_COMPACT_BELOW = 0.75


class ArrowIpc:
    """The `Format` of Arrow IPC files. Group offset and length are the bytes of its whole message."""

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc")

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        digest, groups, batches = hashlib.sha256(), [], 0
        with corrupt_data_errors(file, self.name), file.open() as handle:
            start, end, batches_claimed = _bounds(handle, file)
            schema, span = None, None
            for message in _messages(handle, start, end, is_stream=batches_claimed is None):
                digest.update(message.head)
                if message.kind == _SCHEMA:
                    schema = pa.ipc.read_schema(pa.py_buffer(message.head[: message.body_start - message.start]))
                    check_columns(schema, [size_column], size_column if is_text else None, file.path)
                    span = _BufferSpans(schema, top_level([size_column], schema.names))
                elif message.kind == _BATCH:
                    if span is None:
                        raise ValueError("a record batch comes before the schema")
                    batches += 1
                    size = span.text_bytes(message, handle)
                    groups.append((message.rows, size, message.start, message.end - message.start))
            if schema is None:
                raise ValueError("it has no schema")
            if batches_claimed not in (None, batches):
                raise ValueError(f"its footer lists {batches_claimed} record batches and {batches} are there")
        return ShardScan.of(digest.hexdigest()[:32], with_paths(schema, size_column), groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name), file.open() as handle:
            start, end, batches_claimed = _bounds(handle, file)
            first = next(_messages(handle, start, end, is_stream=batches_claimed is None))
            return dict.fromkeys(
                pa.ipc.read_schema(pa.py_buffer(handle.read_at(first.end - first.start, first.start))).names
            )

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        return _ArrowReader(file, columns, text_column)


def check_claims(file: StoredFile, most: int) -> None:
    """Raises ValueError where a compressed buffer of a file claims more than `most` bytes, or the layout is damaged.

    For libraries that allocate what a file claims, and end the process where there is not so much.
    """
    with file.open() as handle:
        start, end, batches_claimed = _bounds(handle, file)
        kinds = []
        for message in _messages(handle, start, end, is_stream=batches_claimed is None):
            kinds.append(message.kind)
            for offset, length in message.buffers if message.compressed else ():
                claimed = int.from_bytes(handle.read_at(8, message.body_start + offset), "little", signed=True)
                if length and (length < 8 or not -1 <= claimed <= most):
                    raise ValueError(f"a buffer of '{file.path}' claims {claimed} bytes")
        if kinds.count(_SCHEMA) != 1 or kinds.count(_BATCH) != (batches_claimed or 0):
            raise ValueError(f"'{file.path}' does not hold what its footer lists")


class _ArrowReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        self._dictionaries: list[tuple[int, int]] = []
        with corrupt_data_errors(file, ArrowIpc.name), file.open() as handle:
            start, end, batches_claimed = _bounds(handle, file)
            messages = _messages(handle, start, end, is_stream=batches_claimed is None)
            first = next(messages)
            self._prelude = handle.read_at(first.end - first.start, first.start)
            schema = pa.ipc.read_schema(pa.py_buffer(self._prelude))
            check_columns(schema, self._columns, text_column, file.path, strict=False)
            if any(_has_dictionary(field.type) for field in schema):
                self._dictionaries = [(m.start, m.end) for m in messages if m.kind == _DICTIONARY]
            # Columns that this file lacks are null; where it has none of them, some column must say how many rows.
            wanted = top_level(self._columns, schema.names) or schema.names[:1]
            self._fields = sorted(schema.get_field_index(name) for name in wanted)
            self._spans = _BufferSpans(schema, wanted)

    def read(self, group: Group) -> pa.Table:
        file = self._file
        with corrupt_data_errors(file, ArrowIpc.name, f" (record batch at byte {group.offset})"):
            with file.open() as handle:
                stream = self._stream_of(handle, group)
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=self._fields)
            with pa.ipc.open_stream(stream, options=options) as reader:
                batch = reader.read_next_batch()
            if batch.num_rows != group.rows:
                raise ValueError(f"{batch.num_rows} rows, where {group.rows} were listed")
            table = pa.Table.from_batches([batch])
            table = sound_table(table, self._columns, self._text_column, file.path, group.first_row)
            return _compact(table) if table.nbytes < _COMPACT_BELOW * stream.size else table

    def close(self) -> None:
        pass

    def _stream_of(self, handle: Any, group: Group) -> pa.Buffer:
        """Schema, dictionaries and one batch as a stream in memory, the batch without its unwanted columns."""
        before = [(start, end) for start, end in self._dictionaries if start < group.offset]
        prelude = b"".join([self._prelude, *(handle.read_at(end - start, start) for start, end in before)])
        message = _message_at(handle, group.offset, group.offset + group.length)
        if message is None or message.kind != _BATCH or message.end != group.offset + group.length:
            raise ValueError("no record batch is there")
        buffer = pa.allocate_buffer(len(prelude) + group.length)
        view = memoryview(buffer).cast("B")
        view[: len(prelude)] = prelude
        batch = view[len(prelude) :]
        for start, end in [(0, message.body_start - message.start), *self._spans.wanted(message)]:
            handle.seek(message.start + start)
            if handle.readinto(batch[start:end]) != end - start:
                raise ValueError("it ends early")
        return buffer


@dataclass(slots=True)
class _Message:
    """One encapsulated message; positions are bytes in the file. `head` is its first `_HEAD_BYTES`, or its metadata."""

    start: int
    body_start: int
    end: int
    kind: int
    head: bytes
    rows: int = 0
    compressed: bool = False
    variadic: bool = False
    buffers: tuple[tuple[int, int], ...] = ()  # (offset in the body, length) of each Arrow buffer of a batch


def _bounds(handle: Any, file: StoredFile) -> tuple[int, int, int | None]:
    """Where the messages begin and end, and the number of batches in the footer; None in a stream, which has none."""
    mark = handle.read_at(8, 0)
    if mark[:4] == b"FEA1":
        raise DataError(f"'{file.path}' is a Feather V1 file, which is no Arrow IPC file; write it again as Feather V2")
    if mark[:6] != _FILE_MARK:
        return 0, file.size, None
    tail = handle.read_at(10, max(file.size - 10, 0))
    length = int.from_bytes(tail[:4], "little", signed=True)
    if tail[4:] != _FILE_MARK or not 0 < length <= file.size - 18:
        raise ValueError("it does not end with the footer of an Arrow file")
    footer = handle.read_at(length, file.size - 10 - length)
    _, blocks = _FlatTable.root(footer).vector(3, item_bytes=24)
    # Arrow's Rust library begins the messages at byte 64, with zeros before.
    padding = handle.read_at(56, 8)
    start = next((8 + at for at in range(0, 56, 8) if padding[at : at + 8].strip(b"\0")), 64)
    return start, file.size - 10 - length, blocks


def _messages(handle: Any, start: int, end: int, is_stream: bool) -> Iterator[_Message]:
    """The messages from `start` on. A stream must end with its end mark, for else a cut could go unseen."""
    while start < end:
        message = _message_at(handle, start, end)
        if message is None:
            return
        yield message
        start = message.end
    if is_stream:
        raise ValueError("it ends without the end mark of an Arrow stream")


def _message_at(handle: Any, start: int, limit: int) -> _Message | None:
    """The message at `start`, None for the end mark; ValueError when it does not lie before `limit`."""
    head = handle.read_at(min(_HEAD_BYTES, limit - start), start)
    prefix = 8 if head[:4] == _CONTINUATION else 4  # files from before Arrow 0.15 lack the continuation mark
    (length,) = struct.unpack_from("<i", head, prefix - 4)
    if length == 0:
        return None
    body_start = start + prefix + length
    if length < 0 or body_start > limit:
        raise ValueError(f"the message at byte {start} is cut off")
    if body_start - start > len(head):
        head = handle.read_at(body_start - start, start)
    metadata = head[prefix : body_start - start]
    table = _FlatTable.root(metadata)
    message = _Message(start, body_start, body_start + table.number(3, "<q"), table.number(1, "<B"), head)
    if not body_start <= message.end <= limit:
        raise ValueError(f"the message at byte {start} is cut off")
    if message.kind == _BATCH:
        batch = table.table(2)
        message.rows = batch.number(0, "<q")
        first, count = batch.vector(2, item_bytes=16)
        message.buffers = tuple(struct.iter_unpack("<qq", metadata[first : first + 16 * count]))
        message.compressed = batch.has(3)
        message.variadic = batch.has(4)
        body = message.end - body_start
        if not 0 <= message.rows < _MAX_GROUP_ROWS or any(
            offset < 0 or length < 0 or offset + length > body for offset, length in message.buffers
        ):
            raise ValueError(f"the record batch at byte {start} has impossible bounds")
    return message


class _BufferSpans:
    """Which buffers of a batch belong to the wanted columns.

    Arrow lays the buffers of a batch down column by column, and how many a column has follows from its type: counted
    here on empty columns. Where the count does not fit (old unions, string views), the whole batch counts as wanted.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        empty = schema.empty_table()
        counts = []
        for name in range(len(schema)):
            batch = pa.record_batch([empty.column(name).combine_chunks()], names=["c"])
            message = _message_at(pa.BufferReader(batch.serialize()), 0, 1 << 62)
            counts.append(len(message.buffers) if message else 0)
        self._total = sum(counts)
        first = [schema.get_field_index(name) for name in columns]
        self._ranges = [(sum(counts[:i]), sum(counts[: i + 1])) for i in first]

    def wanted(self, message: _Message) -> list[tuple[int, int]]:
        """(start, end) of the bytes to fetch, counted from the start of the message."""
        body = message.body_start - message.start
        if message.variadic or len(message.buffers) != self._total:
            return [(body, message.end - message.start)]
        spans = []
        for first, last in self._ranges:
            buffers = [(offset, offset + length) for offset, length in message.buffers[first:last] if length]
            if buffers:
                spans.append((body + min(buffers)[0], body + max(end for _, end in buffers)))
        return spans

    def text_bytes(self, message: _Message, handle: Any) -> int:
        """Uncompressed bytes of the wanted columns' text; of all their buffers where a text has no one buffer."""
        if message.variadic or len(message.buffers) != self._total:
            return sum(length for _, length in message.buffers)
        return sum(self._column_bytes(message, handle, first, last) for first, last in self._ranges)

    def _column_bytes(self, message: _Message, handle: Any, first: int, last: int) -> int:
        if first == last:
            return 0
        if last - first > 3:  # nested
            return sum(length for _, length in message.buffers[first:last])
        offset, length = message.buffers[last - 1]  # validity, offsets, text
        if message.compressed and length >= 8:  # a compressed buffer begins with its true length, -1 for stored
            (size,) = struct.unpack("<q", handle.read_at(8, message.body_start + offset))
            return size if 0 <= size < 2**40 else length - 8
        return length


class _FlatTable:
    """Just enough of a flatbuffer reader: a table in `data` at `position`. Damaged bytes raise struct.error."""

    __slots__ = ("_data", "_fields", "_position")

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        vtable = position - self._at("<i", position)
        size = self._at("<H", vtable)
        self._fields = [self._at("<H", vtable + at) for at in range(4, size - 1, 2)]

    @classmethod
    def root(cls, data: bytes) -> "_FlatTable":
        return cls(data, struct.unpack_from("<I", data)[0])

    def _at(self, kind: str, position: int) -> int:
        if position < 0:
            raise ValueError("a reference points before the message")
        return int(struct.unpack_from(kind, self._data, position)[0])

    def has(self, field: int) -> bool:
        return field < len(self._fields) and self._fields[field] != 0

    def number(self, field: int, kind: str) -> int:
        return self._at(kind, self._position + self._fields[field]) if self.has(field) else 0

    def table(self, field: int) -> "_FlatTable":
        if not self.has(field):
            raise ValueError("a message lacks its header")
        position = self._position + self._fields[field]
        return _FlatTable(self._data, position + self._at("<I", position))

    def vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """(position of the first item, number of items) of a vector of structs."""
        if not self.has(field):
            return 0, 0
        position = self._position + self._fields[field]
        start = position + self._at("<I", position)
        count = self._at("<I", start)
        if start + 4 + count * item_bytes > len(self._data):
            raise ValueError("a list is longer than its message")
        return start + 4, count


def _compact(table: pa.Table) -> pa.Table:
    """A copy in buffers of its own; joining with something, even with nothing, is what makes Arrow copy."""
    columns = [column.combine_chunks() for column in table.columns]
    return pa.table([pa.concat_arrays([column, column[:0]]) for column in columns], names=table.column_names)


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return types.is_dictionary(kind) or any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
