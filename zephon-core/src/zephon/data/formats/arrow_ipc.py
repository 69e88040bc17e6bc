"""Arrow IPC files and streams, also of `save_to_disk` of Hugging Face datasets: a group is a record batch.

Both formats are a run of messages, each a small flatbuffer and a body. The file format adds a footer, which has the
schema and says where the messages lie; what else is between them does not matter. A scan hops from message to message
and reads no column data. A batch is decoded by Arrow from a stream in memory: the schema, the dictionaries, the batch,
of which only the bytes of the wanted columns are fetched; the rest stays untouched memory. Arrow's own reader selects
columns by range too, but only in files with a footer, and says of no message where it lies, how long its columns are or
what it holds, which catalogs need; hence the few lines at the end of this module. Layout: https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from zephon.data.columns import top_level
from zephon.data.fetch import Spans
from zephon.data.formats.base import MAX_GROUP_ROWS, Format, Group, Groups, Shard, corrupt_data_errors
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

_FILE_MARK = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # flatbuffer enum MessageHeader
# Read at the start of each message: its metadata, nearly always, and a sample of its data for the digest.
_HEAD_BYTES = 4096
# Columns point into the buffer of their whole batch and keep it alive, though the cache counts the columns alone.
# Where they are less than this share of it, they are copied out.
_COMPACT_BELOW = 0.75

Span = tuple[int, int]


class ArrowIpc(Format):
    """Arrow IPC files. Group offset and length are the bytes of its whole message."""

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc")

    def open_shard(self, file: StoredFile) -> Shard:
        return IpcShard(file)

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        """Of a saved dataset only the files that its state.json names, not what `map` caches beside them."""
        place = {name: i for i, name in enumerate(listing.names)}
        folders = sorted({posixpath.dirname(listing.names[i]) for i in keep})
        if "dataset_dict.json" in place and len(folders) > 1:
            raise DataError(
                f"'{path}' holds several splits ({', '.join(folders[:10])}); append the one to read to the path"
            )
        named: dict[str, set[str]] = {}
        for folder in folders:
            state = place.get(posixpath.join(folder, "state.json"))
            if state is None:
                continue
            file = listing.file(state, spans)
            with corrupt_data_errors(file, "the state of a saved dataset"), file.open() as handle:
                entries = json.loads(handle.read(file.size))["_data_files"]
                named[folder] = {posixpath.join(folder, entry["filename"]) for entry in entries}
            if missing := sorted(named[folder] - set(listing.names)):
                raise DataError(f"'{file.path}' names '{missing[0]}', which is not there; restore the dataset's files")
        kept = []
        for i in keep:
            name = listing.names[i]
            if name in named.get(posixpath.dirname(name), {name}):
                kept.append(i)
        return listing.select(kept)


class IpcShard(Shard):
    """The record batches of a file, or of the Arrow file that is bytes `start` to `end` of it."""

    def __init__(self, file: StoredFile, start: int = 0, end: int | None = None) -> None:
        super().__init__(file)
        self._start, self._end = start, file.size if end is None else end
        with file.open() as handle:
            self._footer, start = self._read_footer(handle)
            first = None
            with suppress(ValueError, struct.error):
                message = _message_at(handle, start, self._end)
                first = message if message is not None and message.kind == _SCHEMA else None
            if self._footer is not None:
                # The footer decides. Polars, for one, has no such message before the batches.
                self._described = first.head if first is not None else self._footer.content
                self._prelude = _schema_message(self._footer.content)
            elif first is not None:
                self._described, self._prelude = first.head, handle.read_at(first.end - start, start)
            else:
                raise ValueError("it does not begin with the schema of an Arrow stream")
        self.schema = pa.ipc.read_schema(pa.py_buffer(self._prelude))

    def scan(self, size_column: str) -> tuple[str, Groups]:
        digest, groups = hashlib.sha256(self._described), []
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
        """All messages with data: of a file those that its footer lists; a stream must end with its end mark."""
        if self._footer is not None:
            for start, end in sorted([*self._footer.dictionaries, *self._footer.batches]):
                message = _message_at(handle, start, self._end)
                if message is None or message.end != end:
                    raise ValueError(f"its footer and the message at byte {start} do not fit together")
                yield message
            return
        place = self._start + len(self._prelude)
        while place < self._end and (message := _message_at(handle, place, self._end)) is not None:
            yield message
            place = message.end
        if place >= self._end:
            raise ValueError("it ends without the end mark of an Arrow stream")

    def _read_footer(self, handle: Any) -> tuple[_Footer | None, int]:
        """The footer, None in a stream, and where the first message would begin."""
        start, end = self._start, self._end
        mark = handle.read_at(64, start)
        if mark[:4] == b"FEA1":
            raise DataError(
                f"'{self.file.path}' is a Feather V1 file, which is no Arrow IPC file; write it again as Feather V2"
            )
        if mark[:6] != _FILE_MARK:
            return None, start
        tail = handle.read_at(10, max(end - 10, 0))
        length = int.from_bytes(tail[:4], "little", signed=True)
        if tail[4:] != _FILE_MARK or not 0 < length <= end - start - 18:
            raise ValueError("it does not end with the footer of an Arrow file")
        self._end = end - 10 - length
        content = handle.read_at(length, self._end)
        dictionaries, batches = (self._blocks(content, field) for field in (2, 3))
        # Arrow's Rust library begins the messages at byte 64, with zeros before.
        first = next((at for at in range(8, 64, 8) if any(mark[at : at + 8])), 64)
        return _Footer(content, dictionaries, batches), start + first

    def _blocks(self, footer: bytes, field: int) -> list[Span]:
        """(start, end) in the file of the messages that the footer lists in a field."""
        first, count = _vector(footer, _at("<I", footer, 0), field, item_bytes=24)
        blocks = struct.iter_unpack("<qi4xq", footer[first : first + 24 * count])
        return [(self._start + at, self._start + at + metadata + body) for at, metadata, body in blocks]

    @cached_property
    def _dictionaries(self) -> list[Span]:
        if not any(_has_dictionary(field.type) for field in self.schema):
            return []
        if self._footer is not None:
            return self._footer.dictionaries
        with self.file.open() as handle:
            return [(found.start, found.end) for found in self._messages(handle) if found.kind == _DICTIONARY]

    def _stream_of(self, handle: Any, group: Group, wanted: Sequence[str]) -> pa.Buffer:
        """Schema, dictionaries and one batch as a stream in memory, the batch without its unwanted columns."""
        place = self._start + group.offset
        before = [(start, end) for start, end in self._dictionaries if self._footer is not None or start < place]
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
        try:
            batches = [pa.record_batch([pa.nulls(0, field.type)], names=["c"]) for field in self.schema]
        except (pa.ArrowException, KeyError):  # of a type that Arrow, or its Python, makes no empty column of
            return []
        messages = [_message_at(pa.BufferReader(batch.serialize()), 0, 1 << 62) for batch in batches]
        return [len(message.buffers) if message else 0 for message in messages]

    def _buffers(self, message: _Message, columns: Sequence[str]) -> list[Sequence[Span]] | None:
        """(offset in the body, length) of the buffers of each of `columns`; None where their count does not fit."""
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


class _Footer(NamedTuple):
    """The footer of a file, and (start, end) in the file of the messages that it lists."""

    content: bytes
    dictionaries: list[Span]
    batches: list[Span]


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


def _schema_message(footer: bytes) -> bytes:
    """The schema of a footer as a message: a table that refers to it is put before the footer."""
    root = _at("<I", footer, 0)
    if not (slot := _slot(footer, root, 1)):
        raise ValueError("its footer has no schema")
    # The root; the vtable: its size, that of the table, places of version, kind and header; the table: back to the
    # vtable, on to the schema, version, kind.
    schema = 12 + slot + _at("<I", footer, slot)
    head = struct.pack("<I5H2xiIhB5x", 16, 10, 16, 8, 10, 4, 12, schema, _number(footer, root, 0, "<h"), _SCHEMA)
    data = head + footer + bytes(-len(footer) % 8)
    return _CONTINUATION + len(data).to_bytes(4, "little") + data


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
