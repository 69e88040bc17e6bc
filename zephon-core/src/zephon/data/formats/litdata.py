"""LitData's chunks, plain or compressed: a group is a run of items.

What the items are, and which chunks there are, is in index.json beside the chunks; the shard is the chunk. A chunk is,
besides a table of offsets, one of: items as fields; raw tokens (`TokensLoader`); items in zstd frames, one for many
items or one for each; rows as an Arrow file at the chunk's end. A chunk compressed as a whole is read as a stream.
Columns are the keys of the items, those of dictionaries in dictionaries joined with a dot; an item that is but one text
is column "text", one that is but one array is "tokens". What is pickled is refused.
Layouts: litdata/streaming/writer.py and framed_zstd.py.
"""

import hashlib
import json
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.columns import check_columns, sound_table, top_level, with_paths
from zephon.data.formats.arrow_ipc import ArrowIpc
from zephon.data.formats.base import (
    TOKENS,
    Group,
    ShardReader,
    ShardScan,
    corrupt_data_errors,
    read_exactly,
    run_bounds,
    sample_digest,
)
from zephon.data.formats.fields import Field, Spans, array_column, bytes_column, field_spans, list_type, number_column
from zephon.data.formats.sequential import SequentialBytes, open_stream
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["INDEX_NAME", "LitData", "chunk_names"]

INDEX_NAME = "index.json"

_MAX_INDEX_BYTES = 1 << 30
_MAX_ITEMS = 1 << 27
# Items per byte of a compressed chunk; the table of offsets alone, which ascend, takes a byte for three at most.
_MOST_PACKED = 16
_MAX_FRAME_BYTES = 1 << 31
_READ_BYTES = 1 << 20
_PACKED = re.compile(r"\.zstd(:\d+)?\.bin$")
_FRAMED = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("size", "<u4")])
_FRAMED_MARK = b"LDFZ01\0\0"
_ARROW_MARK = b"LDARW01\0"
_TEXT = frozenset(["str", "text"])
_PICKLED = frozenset(["pickle", "graph"])
_NUMBERS = {"bool": "|b1", "int": "<i8", "float": "<f8"}
_TORCH = {0: "<f4", 1: "<f4", 2: "<f8", 3: "<f8", 8: "<f2", 9: "<f2", 11: "<u1", 12: "<i1", 13: "<i2", 14: "<i2"}
_TORCH |= {15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 19: "|b1", 20: "<u2"}
_NUMPY = dict(enumerate(["<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]))

_lock = threading.Lock()
_MAX_LAYOUTS = 16
_layouts: dict[tuple[str, int, int], "_Layout"] = {}


class LitData:
    """The `Format` of LitData's chunks."""

    name = "litdata"
    suffixes = (".bin",)

    def is_sequential(self, name: str) -> bool:
        return _PACKED.search(name) is not None

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        with corrupt_data_errors(file, self.name):
            layout = _layout(file)
            inner = _arrow_part(file)
            if inner is not None:
                return ArrowIpc().scan(inner, size_column, is_text)
            schema = _schema(layout)
            check_columns(schema, [size_column], size_column if is_text else None, file.path)
            chunk = _chunk(file, layout, whole=True)
            sizes = np.diff(chunk.offsets)
            bounds = run_bounds(sizes) if chunk.frames is None else _frame_bounds(chunk)
            starts, ends = chunk.offsets[bounds[:-1]], chunk.offsets[bounds[1:]]
            groups = np.stack([np.diff(bounds), ends - starts, starts, ends - starts], axis=1)
            return ShardScan.of(chunk.digest, with_paths(schema, size_column), groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name):
            inner = _arrow_part(file)
            return ArrowIpc().columns_of(inner) if inner else dict.fromkeys(_schema(_layout(file)).names)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        with corrupt_data_errors(file, self.name):
            inner = _arrow_part(file)
        return ArrowIpc().open(inner, columns, text_column) if inner else _LitDataReader(file, columns, text_column)


class _LitDataReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        with corrupt_data_errors(file, LitData.name):
            self._layout = _layout(file)
            schema = _schema(self._layout)
            check_columns(schema, self._columns, text_column, file.path, strict=False)
            self._wanted = set(top_level(self._columns, schema.names))
            _refuse_unreadable(self._layout.fields, self._wanted, file)
            self._chunk = _chunk(file, self._layout)
        self._packed = SequentialBytes(file, "zstd") if _PACKED.search(file.path) else None

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        if self._packed is not None:
            return []
        if (frame := self._frame(group)) is not None:
            return [(int(frame["offset"]), int(frame["length"]))]
        return [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        file, chunk, layout = self._file, self._chunk, self._layout
        with corrupt_data_errors(file, LitData.name, f" (items from row {group.first_row})"):
            offsets = chunk.offsets[group.first_row : group.first_row + group.rows + 1]
            if len(offsets) != group.rows + 1 or offsets[0] != group.offset or offsets[-1] - offsets[0] != group.length:
                raise ValueError("its items lie elsewhere than when it was listed")
            data, ends = self._content(group, offsets - offsets[0])
            if layout.is_tokens:
                spans = [(ends[:-1], ends[1:])]
            else:
                spans = field_spans(memoryview(data), ends, [None] * len(layout.fields))
            table = pa.table(
                {
                    field.name: _decoded(data, span, field)
                    for field, span in zip(layout.fields, spans, strict=True)
                    if field.name in self._wanted
                }
            )
            if not self._wanted:
                table = pa.table({"": pa.nulls(group.rows)})
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        if self._packed is not None:
            self._packed.close()

    def _frame(self, group: Group) -> Any:
        """The frame that holds a group; None where there are no frames."""
        frames = self._chunk.frames
        return None if frames is None else frames[np.searchsorted(frames["first"], group.first_row)]

    def _content(self, group: Group, ends: npt.NDArray[np.int64]) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
        """The items' bytes, uncompressed, and where each ends, int64[rows + 1]."""
        if self._packed is not None:
            data = self._packed.read(group.offset, group.length)
            if len(data) != group.length:
                raise ValueError(f"it ends at byte {group.offset + len(data)}")
            return data, ends
        chunk, size = self._chunk, self._file.size
        with self._file.open() as handle:
            if chunk.frames is None:
                data = pa.py_buffer(read_exactly(handle, group.offset, group.length, size))
                return _unframed(data, ends) if self._layout.is_packed_items else (data, ends)
            frame = self._frame(group)
            packed = read_exactly(handle, int(frame["offset"]), int(frame["length"]), size)
        return pa.py_buffer(_inflated(packed, group.length)), ends


@dataclass(frozen=True, slots=True)
class _Layout:
    """What index.json says of all chunks, and their names."""

    chunks: tuple[str, ...]
    fields: tuple[Field, ...]
    is_tokens: bool
    is_packed_items: bool
    text: bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    """int64[n_items + 1] offsets: in the chunk, or with `frames` in what they hold, one frame after the other."""

    offsets: npt.NDArray[np.int64]
    frames: npt.NDArray[Any] | None
    digest: str


def chunk_names(index: StoredFile) -> tuple[str, ...]:
    """The names of the chunks that an index.json lists, as they stand there.

    Raises:
        DataError: it is no index of LitData, or of chunks that cannot be read.
    """
    return _layout_of(index).chunks


def _layout(file: StoredFile) -> _Layout:
    return _layout_of(file.beside(INDEX_NAME))


def _layout_of(index: StoredFile) -> _Layout:
    # All chunks have one index, which for a large dataset is megabytes of JSON.
    key = (index.path, index.size, index.mtime_ns)
    with _lock:
        if key in _layouts:
            return _layouts[key]
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        layout = _layouts[key] = _parsed_index(index)
        return layout


def _parsed_index(index: StoredFile) -> _Layout:
    if index.size > _MAX_INDEX_BYTES:
        raise DataError(f"'{index.path}' has {index.size:,} bytes, which is no index of LitData; restore it")
    try:
        with index.open() as handle:
            told = json.loads(read_exactly(handle, 0, index.size, index.size))
        config, chunks = told["config"], tuple(chunk["filename"] for chunk in told["chunks"])
        if not all(isinstance(name, str) for name in chunks):
            raise ValueError("a chunk has no name")
        formats, spec = config["data_format"], config["data_spec"]
        names = _names(json.loads(spec)[1] if spec else {"children_spec": []}, "")
        if config.get("encryption"):
            raise DataError(f"the chunks of '{index.path}' are encrypted, and cannot be read; write them without")
        loader = config.get("item_loader", "PyTreeLoader")
        if loader not in ("PyTreeLoader", "TokensLoader"):
            raise DataError(
                f"the chunks of '{index.path}' are written for {loader}, and cannot be read; use PyTreeLoader"
            )
        if len(formats) != len(names) or not all(isinstance(each, str) for each in formats) or not formats:
            raise ValueError("data_format and data_spec do not fit together")
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DataError(
            f"'{index.path}' is no index of LitData, or damaged ({str(error)[:100]}); restore it"
        ) from error
    if names == [""]:
        kind = formats[0].partition(":")[0]
        names = ["text" if kind in _TEXT else TOKENS if kind.startswith("no_header") else "value"]
    fields = tuple(Field(name, encoding, None) for name, encoding in zip(names, formats, strict=True))
    text = json.dumps([names, formats, loader]).encode()
    return _Layout(chunks, fields, loader == "TokensLoader", config.get("compression_level") == "sample", text)


def _names(spec: Any, prefix: str) -> list[str]:
    """A name for each leaf of an item, keys joined with dots."""
    children, kind = spec["children_spec"], spec.get("type")
    if kind is None:
        return [prefix]
    keys = json.loads(spec["context"]) if kind.endswith("dict") else range(len(children))
    if len(keys) != len(children):
        raise ValueError("data_spec has keys without values")
    return [
        name
        for key, child in zip(keys, children, strict=True)
        for name in _names(child, f"{prefix}.{key}" if prefix else str(key))
    ]


def _schema(layout: _Layout) -> pa.Schema:
    return pa.schema([(field.name, _type(field)) for field in layout.fields])


def _type(field: Field) -> pa.DataType:
    kind = field.encoding.partition(":")[0]
    if kind in _TEXT:
        return pa.large_string()
    if kind in _NUMBERS:
        return pa.from_numpy_dtype(np.dtype(_NUMBERS[kind]))
    dtype = _array_dtype(field)
    return list_type(dtype) if dtype else pa.large_binary()


def _array_dtype(field: Field) -> str | None:
    kind, _, number = field.encoding.partition(":")
    known = {"no_header_tensor": _TORCH, "no_header_numpy": _NUMPY}.get(kind)
    if known is None:
        return None
    if not number.isdigit() or int(number) not in known:
        raise ValueError(f"column '{field.name}' has arrays of the unknown type {number[:40]}")
    return known[int(number)]


def _refuse_unreadable(fields: Sequence[Field], wanted: set[str], file: StoredFile) -> None:
    for field in fields:
        kind = field.encoding.partition(":")[0]
        if field.name in wanted and kind in _PICKLED:
            raise DataError(
                f"column '{field.name}' of '{file.path}' holds pickled Python objects, which can run code when read "
                "and are refused; write it as text, a number or an array of one dimension"
            )
        if field.name in wanted and kind in ("json", "tensor", "numpy"):
            raise DataError(
                f"column '{field.name}' of '{file.path}' is stored as {kind}, which is not read; write it as text, a "
                "number or an array of one dimension"
            )


def _decoded(data: pa.Buffer, spans: Spans, field: Field) -> pa.Array:
    kind = field.encoding.partition(":")[0]
    if kind in _NUMBERS:
        return number_column(data, spans, _NUMBERS[kind])
    dtype = _array_dtype(field)
    if dtype is not None:
        return array_column(data, spans, dtype)
    column = bytes_column(data, spans)
    return column.view(pa.large_string()) if kind in _TEXT else column


def _chunk(file: StoredFile, layout: _Layout, whole: bool = False) -> _Chunk:
    """The head of a chunk; with `whole`, the rest is seen to be there, and to be sound as far as a codec can tell."""
    if _PACKED.search(file.path):
        return _packed_chunk(file, layout, whole)
    size = file.size
    digest = hashlib.sha256(layout.text)
    with file.open() as handle:
        head = read_exactly(handle, 0, min(_FRAMED.size, size), size)
        if head[:8] == _FRAMED_MARK:
            chunk = _framed_chunk(handle, head, size, digest)
        else:
            table = read_exactly(handle, 4, 4 * (_count(head) + 1), size)
            digest.update(table)
            offsets = _checked(np.frombuffer(table, "<u4").astype(np.int64), 4 + len(table), size)
            chunk = _Chunk(offsets, None, "")
        if whole:
            digest.update(sample_digest(handle, size, 4))
    return _Chunk(chunk.offsets, chunk.frames, digest.hexdigest()[:32])


def _count(head: bytes) -> int:
    count = int.from_bytes(head[:4], "little")
    if len(head) < 4 or count > _MAX_ITEMS:
        raise ValueError(f"it claims {count} items")
    return count


def _checked(offsets: npt.NDArray[np.int64], begin: int, end: int) -> npt.NDArray[np.int64]:
    if (np.diff(offsets) < 0).any() or offsets[0] != begin or offsets[-1] != end:
        raise ValueError(f"its items are not bytes {begin} to {end}, one after the other")
    return offsets


def _packed_chunk(file: StoredFile, layout: _Layout, whole: bool) -> _Chunk:
    with open_stream(file, "zstd") as stream:
        head = _read(stream, 8)
        count = _count(head)
        length = 4 * (count + 2)  # of the head
        # Asked before the offsets are read: a small compressed file can become any number of bytes.
        if count > _MOST_PACKED * file.size or int.from_bytes(head[4:], "little") != length:
            raise ValueError(f"it claims {count} items, and has {file.size} bytes")
        table = head[4:] + _read(stream, length - len(head))
        offsets = np.frombuffer(table, "<u4").astype(np.int64)
        end, checksum = length, 0
        while whole and end <= int(offsets[-1]):
            block = stream.read(_READ_BYTES)
            if not block:
                break
            end, checksum = end + len(block), zlib.crc32(block, checksum)
    _checked(offsets, length, end if whole else int(offsets[-1]))
    return _Chunk(offsets, None, hashlib.sha256(layout.text + table + b"%d" % checksum).hexdigest()[:32])


def _read(stream: Any, length: int) -> bytes:
    """Exactly so many bytes, in pieces, for `length` comes from the file and may be anything."""
    parts = []
    while length:
        part = stream.read(min(length, _READ_BYTES))
        if not part:
            raise ValueError("it ends early")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _framed_chunk(handle: Any, head: bytes, size: int, digest: Any) -> _Chunk:
    _, version, _, count, _, n_frames = _FRAMED.unpack(head)
    if version != 1:
        raise ValueError(f"its frames are of the unknown version {version}")
    table = read_exactly(handle, _FRAMED.size, 4 * (count + 1) + _FRAME.itemsize * n_frames, size)
    digest.update(head + table)
    offsets = np.frombuffer(table, "<u4", count + 1).astype(np.int64)
    frames = np.frombuffer(table, _FRAME, n_frames, offset=4 * (count + 1))
    firsts, items = frames["first"].astype(np.int64), frames["items"].astype(np.int64)
    lengths = frames["length"].astype(np.int64)
    begin = _FRAMED.size + len(table) + np.cumsum(lengths) - lengths
    in_turn = np.array_equal(firsts, np.cumsum(items) - items) and np.array_equal(frames["offset"], begin)
    if not n_frames or (items < 1).any() or not in_turn or int(items.sum()) != count:
        raise ValueError("its frames do not follow each other")
    if int(begin[-1] + lengths[-1]) != size or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError("its frames are not as long as it is")
    if not np.array_equal(np.diff(offsets[np.append(firsts, count)]), frames["size"]):
        raise ValueError("its frames are not as long as their items")
    return _Chunk(offsets, frames, "")


def _frame_bounds(chunk: _Chunk) -> npt.NDArray[np.int64]:
    assert chunk.frames is not None
    return np.append(chunk.frames["first"].astype(np.int64), len(chunk.offsets) - 1)


def _inflated(packed: bytes, size: int) -> bytes:
    """The content of a zstd frame that must have so many bytes."""
    if size > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame claims {size} bytes")
    if not size:
        return b""
    data: bytes = pa.decompress(packed, decompressed_size=size, codec="zstd", asbytes=True)
    if len(data) != size:
        raise ValueError(f"a frame has {len(data)} bytes, where {size} were expected")
    return data


def _unframed(data: pa.Buffer, ends: npt.NDArray[np.int64]) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
    """Items that are a zstd frame each, uncompressed."""
    raw = memoryview(data)
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        with pa.CompressedInputStream(pa.BufferReader(raw[start:end]), "zstd") as stream:
            parts.append(stream.read())
    new_ends = np.zeros(len(ends), np.int64)
    np.cumsum([len(part) for part in parts], out=new_ends[1:])
    return pa.py_buffer(b"".join(parts)), new_ends


@dataclass(frozen=True, slots=True)
class _ArrowPart:
    """The Arrow file at the end of a chunk, as if it were a `StoredFile` of `size` bytes."""

    path: str
    size: int
    start: int
    outer: StoredFile

    @contextmanager
    def open(self) -> Iterator[Any]:
        with self.outer.open() as handle:
            yield _Part(handle, self.start)


class _Part:
    """Reads of a file that count from `start`."""

    def __init__(self, handle: Any, start: int) -> None:
        self._handle, self._start = handle, start

    def read_at(self, length: int, offset: int) -> bytes:
        data: bytes = self._handle.read_at(length, self._start + offset)
        return data

    def seek(self, offset: int) -> None:
        self._handle.seek(self._start + offset)

    def readinto(self, buffer: Any) -> int:
        count: int = self._handle.readinto(buffer)
        return count


def _arrow_part(file: StoredFile) -> Any:
    """The Arrow file at the end of a chunk, None where there is none."""
    if _PACKED.search(file.path) or file.size < 24:
        return None
    with file.open() as handle:
        tail = read_exactly(handle, file.size - 12, 12, file.size)
        if tail[4:] != _ARROW_MARK:
            return None
        length = int.from_bytes(tail[:4], "little")
        start = file.size - 12 - length
        head = read_exactly(handle, 0, 4, file.size)
        if start < 4 + 4 * (_count(head) + 1):
            raise ValueError(f"the Arrow file at its end claims {length} bytes")
    return _ArrowPart(file.path, length, start, file)
