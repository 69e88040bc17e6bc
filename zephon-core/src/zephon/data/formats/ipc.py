"""Arrow IPC, file and stream format: a group is a record batch, its offset and length are those of its message.

Both formats are a run of messages, each a small flatbuffer and a body; the file format only adds marks and a footer.
A scan hops from message to message and reads no column data. A batch is decoded by Arrow from a stream in memory: the
schema, the dictionaries before it, the batch, of which only the bytes of the wanted columns are fetched; the rest stays
untouched memory. Arrow's own reader selects columns by range too, but only in files with a footer, and says of no
message where it lies, how long its columns are or what it holds, which catalogs need; hence the few lines at the end
of this module. Layout: https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyarrow import types

from zephon.data.columns import top_level
from zephon.data.formats.base import MAX_GROUP_ROWS, Group, Groups, Shard
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["IpcShard"]

_FILE_MARK = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_DICTIONARY, _BATCH = 2, 3  # flatbuffer enum MessageHeader
# Read at the start of each message: its metadata, nearly always, and a sample of its data for the digest.
_HEAD_BYTES = 4096
# Columns point into the buffer of their whole batch and keep it alive, though the cache counts the columns alone.
# Where they are less than this share of it, they are copied out.
_COMPACT_BELOW = 0.75

Span = tuple[int, int]


class IpcShard(Shard):
    """The record batches of a file, or of the Arrow file that is bytes `start` to `end` of it."""

    def __init__(self, file: StoredFile, start: int = 0, end: int | None = None) -> None:
        super().__init__(file)
        self._start, self._end = start, file.size if end is None else end
        with file.open() as handle:
            first = next(self._messages(handle))
            self._prelude = handle.read_at(first.end - first.start, first.start)
        self.schema = pa.ipc.read_schema(pa.py_buffer(self._prelude))

    def scan(self, size_column: str) -> tuple[str, Groups]:
        digest, groups = hashlib.sha256(), []
        sized = top_level([size_column], self.schema.names)
        with self.file.open() as handle:
            for message in self._messages(handle):
                digest.update(message.head)
                if message.kind == _BATCH:
                    size = self._text_bytes(message, sized, handle)
                    groups.append((message.rows, size, message.start - self._start, message.end - message.start))
        return digest.hexdigest()[:32], groups

    def ranges(self, group: Group, columns: Sequence[str]) -> None:
        return None

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        # Where the file has none of the columns, some column must say how many rows there are.
        wanted = top_level(columns, self.schema.names) or self.schema.names[:1]
        with self.file.open() as handle:
            stream = self._stream_of(handle, group, wanted)
        fields = sorted(self.schema.get_field_index(name) for name in wanted)
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        with pa.ipc.open_stream(stream, options=options) as reader:
            return pa.Table.from_batches([reader.read_next_batch()])

    def finish(self, table: pa.Table, group: Group) -> pa.Table:
        if table.nbytes >= _COMPACT_BELOW * (len(self._prelude) + group.length):
            return table
        # Joining with something, even with nothing, is what makes Arrow copy.
        columns = [column.combine_chunks() for column in table.columns]
        return pa.table([pa.concat_arrays([column, column[:0]]) for column in columns], names=table.column_names)

    def _messages(self, handle: Any) -> Iterator[_Message]:
        """All messages. What is cut short shows: a file ends with a footer, a stream must end with its end mark."""
        start, end, listed = self._bounds(handle)
        batches = 0
        while start < end and (message := _message_at(handle, start, end)) is not None:
            batches += message.kind == _BATCH
            yield message
            start = message.end
        if listed is None and start >= end:
            raise ValueError("it ends without the end mark of an Arrow stream")
        if listed not in (None, batches):
            raise ValueError(f"its footer lists {listed} record batches and {batches} are there")

    def _bounds(self, handle: Any) -> tuple[int, int, int | None]:
        """Where the messages begin and end, and the number of batches in the footer; None in a stream, without one."""
        start, end = self._start, self._end
        mark = handle.read_at(64, start)
        if mark[:4] == b"FEA1":
            raise DataError(
                f"'{self.file.path}' is a Feather V1 file, which is no Arrow IPC file; write it again as Feather V2"
            )
        if mark[:6] != _FILE_MARK:
            return start, end, None
        tail = handle.read_at(10, max(end - 10, 0))
        length = int.from_bytes(tail[:4], "little", signed=True)
        if tail[4:] != _FILE_MARK or not 0 < length <= end - start - 18:
            raise ValueError("it does not end with the footer of an Arrow file")
        footer = handle.read_at(length, end - 10 - length)
        _, batches = _vector(footer, _at("<I", footer, 0), 3, item_bytes=24)
        # Arrow's Rust library begins the messages at byte 64, with zeros before.
        first = next((at for at in range(8, 64, 8) if any(mark[at : at + 8])), 64)
        return start + first, end - 10 - length, batches

    @cached_property
    def _dictionaries(self) -> list[Span]:
        if not any(_has_dictionary(field.type) for field in self.schema):
            return []
        with self.file.open() as handle:
            return [(found.start, found.end) for found in self._messages(handle) if found.kind == _DICTIONARY]

    def _stream_of(self, handle: Any, group: Group, wanted: Sequence[str]) -> pa.Buffer:
        """Schema, dictionaries and one batch as a stream in memory, the batch without its unwanted columns."""
        place = self._start + group.offset
        before = [(start, end) for start, end in self._dictionaries if start < place]
        prelude = b"".join([self._prelude, *(handle.read_at(end - start, start) for start, end in before)])
        message = _message_at(handle, place, place + group.length)
        if message is None or message.kind != _BATCH or message.end != place + group.length:
            raise ValueError("no record batch is there")
        buffer = pa.allocate_buffer(len(prelude) + group.length)
        view = memoryview(buffer).cast("B")
        view[: len(prelude)] = prelude
        batch, body = view[len(prelude) :], message.body_start - place
        spans = [(0, body)]
        if (columns := self._buffers(message, wanted)) is None:
            spans.append((body, group.length))
        for buffers in columns or ():
            filled = [(offset, offset + length) for offset, length in buffers if length]
            if filled:
                spans.append((body + min(filled)[0], body + max(end for _, end in filled)))
        for start, end in spans:
            handle.seek(place + start)
            if handle.readinto(batch[start:end]) != end - start:
                raise ValueError("it ends early")
        return buffer

    @cached_property
    def _counts(self) -> list[int]:
        """How many buffers each column has, which follows from its type: counted on empty columns."""
        empty = self.schema.empty_table()
        batches = [pa.record_batch([empty.column(n).combine_chunks()], names=["c"]) for n in range(len(self.schema))]
        messages = [_message_at(pa.BufferReader(batch.serialize()), 0, 1 << 62) for batch in batches]
        return [len(message.buffers) if message else 0 for message in messages]

    def _buffers(self, message: _Message, columns: Sequence[str]) -> list[Sequence[Span]] | None:
        """(offset in the body, length) of the buffers of each of `columns`, since a batch holds column after column.

        None where the count does not fit: old unions, string views.
        """
        counts = self._counts
        if message.is_variadic or len(message.buffers) != sum(counts):
            return None
        numbers = [self.schema.get_field_index(name) for name in columns]
        return [message.buffers[sum(counts[:n]) : sum(counts[: n + 1])] for n in numbers]

    def _text_bytes(self, message: _Message, columns: Sequence[str], handle: Any) -> int:
        """Uncompressed bytes of the columns' text; of all their buffers where a text has no one buffer."""
        found = self._buffers(message, columns)
        if found is None:
            return sum(length for _, length in message.buffers)
        total = 0
        for buffers in found:
            size = sum(length for _, length in buffers)
            if 1 <= len(buffers) <= 3:  # validity, offsets, text: not nested
                offset, size = buffers[-1]
                if message.is_compressed and size >= 8:  # begins with its true length, -1 where it is stored as it is
                    claimed = int.from_bytes(handle.read_at(8, message.body_start + offset), "little", signed=True)
                    size = claimed if 0 <= claimed < 2**40 else size - 8
            total += size
        return total


@dataclass(slots=True)
class _Message:
    """One encapsulated message; positions are bytes in the file. `head` is its first `_HEAD_BYTES`, or its metadata."""

    start: int
    body_start: int
    end: int
    kind: int
    head: bytes
    rows: int = 0
    is_compressed: bool = False
    is_variadic: bool = False
    buffers: tuple[Span, ...] = ()  # (offset in the body, length) of each Arrow buffer of a batch


def _message_at(handle: Any, start: int, limit: int) -> _Message | None:
    """The message at `start`, None for the end mark; ValueError when it does not lie before `limit`."""
    head = handle.read_at(min(_HEAD_BYTES, limit - start), start)
    prefix = 8 if head[:4] == _CONTINUATION else 4  # files from before Arrow 0.15 lack the continuation mark
    length = _at("<i", head, prefix - 4)
    if length == 0:
        return None
    body_start = start + prefix + length
    if length < 0 or body_start > limit:
        raise ValueError(f"the message at byte {start} is cut off")
    if body_start - start > len(head):
        head = handle.read_at(body_start - start, start)
    data = head[prefix : body_start - start]
    table = _at("<I", data, 0)
    end = body_start + _number(data, table, 3, "<q")
    if not body_start <= end <= limit:
        raise ValueError(f"the message at byte {start} is cut off")
    message = _Message(start, body_start, end, _number(data, table, 1, "<B"), head)
    if message.kind == _BATCH:
        slot = _slot(data, table, 2)
        if not slot:
            raise ValueError("a message lacks its header")
        batch = slot + _at("<I", data, slot)
        message.rows = _number(data, batch, 0, "<q")
        first, count = _vector(data, batch, 2, item_bytes=16)
        message.buffers = tuple(struct.iter_unpack("<qq", data[first : first + 16 * count]))
        message.is_compressed, message.is_variadic = _slot(data, batch, 3) > 0, _slot(data, batch, 4) > 0
        body = end - body_start
        if not 0 <= message.rows < MAX_GROUP_ROWS or any(
            offset < 0 or length < 0 or offset + length > body for offset, length in message.buffers
        ):
            raise ValueError(f"the record batch at byte {start} has impossible bounds")
    return message


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return types.is_dictionary(kind) or any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


# Flatbuffers, as much as messages need: a table at a position of `data`, its fields by number.


def _at(kind: str, data: bytes, position: int) -> int:
    if position < 0:
        raise ValueError("a reference points before the message")
    return int(struct.unpack_from(kind, data, position)[0])  # struct.error where it points behind


def _slot(data: bytes, table: int, field: int) -> int:
    """Where a field lies, 0 where it is left out."""
    vtable = table - _at("<i", data, table)
    place = 4 + 2 * field
    offset = _at("<H", data, vtable + place) if place + 2 <= _at("<H", data, vtable) else 0
    return table + offset if offset else 0


def _number(data: bytes, table: int, field: int, kind: str) -> int:
    slot = _slot(data, table, field)
    return _at(kind, data, slot) if slot else 0


def _vector(data: bytes, table: int, field: int, item_bytes: int) -> Span:
    """(position of the first item, number of items) of a vector of structs."""
    slot = _slot(data, table, field)
    if not slot:
        return 0, 0
    start = slot + _at("<I", data, slot)
    count = _at("<I", data, start)
    if start + 4 + count * item_bytes > len(data):
        raise ValueError("a list is longer than its message")
    return start + 4, count
