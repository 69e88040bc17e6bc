"""LitData's chunks, plain or compressed: a group is a run of items.

What the items are, and which chunks there are, is in index.json beside the chunks; the shard is the chunk. A chunk is,
besides a table of offsets, one of: items as fields; raw tokens (`TokensLoader`); items in zstd frames, one for many
items or one for each; rows as an Arrow file at the chunk's end. A chunk compressed as a whole is read as a stream.
Columns are the keys of the items, those of dictionaries in dictionaries joined with a dot; an item that is but one text
is column "text", one that is but one array is "tokens". What is pickled is refused.
Layouts: litdata/streaming/writer.py and framed_zstd.py; LitData's own reader unpickles and is not used.
"""

from __future__ import annotations

import json
import posixpath
import re
import struct
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.fetch import Spans
from zephon.data.formats.arrow_ipc import IpcShard
from zephon.data.formats.base import TOKENS, Format, Group, Shard, read_exactly
from zephon.data.formats.samples import (
    INDEX_NAME,
    PICKLED,
    Field,
    FieldSpans,
    SampleShard,
    read_head,
    read_index,
    select_indexed,
)
from zephon.data.formats.sequential import open_stream
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

_MAX_FRAME_BYTES = 1 << 31
_PACKED = re.compile(r"\.zstd(:\d+)?\.bin$")
_FRAMED = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("size", "<u4")])
_FRAMED_MARK = b"LDFZ01\0\0"
_ARROW_MARK = b"LDARW01\0"
_NUMBERS = {"bool": "|b1", "int": "<i8", "float": "<f8"}
_TORCH = {0: "<f4", 1: "<f4", 2: "<f8", 3: "<f8", 8: "<f2", 9: "<f2", 11: "<u1", 12: "<i1", 13: "<i2", 14: "<i2"}
_TORCH |= {15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 19: "|b1", 20: "<u2"}
_NUMPY = dict(enumerate(["<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]))
_ARRAYS = {"no_header_tensor": _TORCH, "no_header_numpy": _NUMPY}

_layouts: dict[tuple[str, int, int], _Layout] = {}


class LitData(Format):
    """LitData's chunks. Group offset and length are bytes of the uncompressed items."""

    name = "litdata"
    suffixes = (".bin",)
    companion = "index.json (LitData)"

    def claims(self, name: str, beside: AbstractSet[str]) -> bool:
        return super().claims(name, beside) and posixpath.join(posixpath.dirname(name), INDEX_NAME) in beside

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        def chunks(index: StoredFile) -> list[tuple[str, ...]]:
            return [(name,) for name in _layout(index).chunks]

        return select_indexed(listing, keep, path, spans, chunks, above=False)

    def is_sequential(self, name: str) -> bool:
        return _PACKED.search(name) is not None

    def open_shard(self, file: StoredFile) -> Shard:
        layout = _layout(file.beside(INDEX_NAME))
        codec = "zstd" if self.is_sequential(file.path) else None
        if codec is None:
            with file.open() as handle:
                if (start := _arrow_start(file, handle)) is not None:
                    return IpcShard(file, start, file.size - 12)
                head = read_exactly(handle, 0, min(_FRAMED.size, file.size), file.size)
                if head[:8] == _FRAMED_MARK:
                    return _FramedChunk(file, layout, handle, head)
        return _Chunk(file, layout, codec)


class _Chunk(SampleShard):
    """A chunk of items, or of token ids, one after the other; each item may be packed, or the whole chunk."""

    def __init__(self, file: StoredFile, layout: _Layout, codec: str | None) -> None:
        with open_stream(file, codec) as stream:
            head, offsets = read_head(stream, file, codec is not None)
        if len(head) != 4 * (len(offsets) + 1):
            raise ValueError(f"its items begin at byte {len(head)}, not behind its offsets")
        super().__init__(file, layout.fields, codec, layout.text + head[4:], offsets)
        self._is_tokens, self._is_packed_items = layout.is_tokens, layout.is_packed_items and codec is None

    def samples(self, group: Group, ends: npt.NDArray[np.int64]) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
        data = self.content(group)
        return _unframed(data, ends) if self._is_packed_items else (data, ends)

    def spans(self, data: pa.Buffer, ends: npt.NDArray[np.int64]) -> list[FieldSpans]:
        return [(ends[:-1], ends[1:])] if self._is_tokens else super().spans(data, ends)


class _FramedChunk(SampleShard):
    """A chunk of zstd frames of many items each: a group is a frame, its offset that in what the frames hold."""

    def __init__(self, file: StoredFile, layout: _Layout, handle: Any, head: bytes) -> None:
        _, version, _, count, _, n_frames = _FRAMED.unpack(head)
        if version != 1:
            raise ValueError(f"its frames are of the unknown version {version}")
        table = read_exactly(handle, _FRAMED.size, 4 * (count + 1) + _FRAME.itemsize * n_frames, file.size)
        offsets = np.frombuffer(table, "<u4", count + 1).astype(np.int64)
        self._frames = frames = np.frombuffer(table, _FRAME, n_frames, offset=4 * (count + 1))
        super().__init__(file, layout.fields, None, layout.text + head + table, offsets)
        items, lengths = frames["items"].astype(np.int64), frames["length"].astype(np.int64)
        self.bounds = np.concatenate([[0], np.cumsum(items)])
        begin = len(head) + len(table) + np.cumsum(lengths) - lengths
        fits = (
            n_frames > 0
            and (items > 0).all()
            and self.bounds[-1] == count
            and np.array_equal(frames["first"], self.bounds[:-1])
            and np.array_equal(frames["offset"], begin)
            and begin[-1] + lengths[-1] == file.size
            and offsets[0] == 0
            and (np.diff(offsets) >= 0).all()
            and np.array_equal(np.diff(offsets[self.bounds]), frames["size"])
        )
        if not fits:
            raise ValueError("its table of frames does not fit its items and its size")

    def ranges(self, group: Group, columns: Any) -> list[tuple[int, int]]:
        assert self.bounds is not None
        frame = self._frames[np.searchsorted(self.bounds, group.first_row)]
        return [(int(frame["offset"]), int(frame["length"]))]

    def samples(self, group: Group, ends: npt.NDArray[np.int64]) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
        ((offset, length),) = self.ranges(group, ())
        if group.length > _MAX_FRAME_BYTES:
            raise ValueError(f"a frame claims {group.length} bytes")
        with self.file.open() as handle:
            packed = read_exactly(handle, offset, length, self.file.size)
        if not group.length:
            return pa.py_buffer(b""), ends
        data = pa.decompress(packed, decompressed_size=group.length, codec="zstd")
        if len(data) != group.length:
            raise ValueError(f"a frame has {len(data)} bytes, where {group.length} were expected")
        return data, ends


@dataclass(frozen=True, slots=True)
class _Layout:
    """What index.json says of all chunks, and their names; `text` is the part of it that enters digests."""

    chunks: tuple[str, ...]
    fields: tuple[Field, ...]
    is_tokens: bool
    is_packed_items: bool
    text: bytes


def _layout(index: StoredFile) -> _Layout:
    # All chunks have one index, which for a large dataset is megabytes of JSON.
    key = (index.path, index.size, index.mtime_ns)
    if (layout := _layouts.get(key)) is None:
        if len(_layouts) >= 16:
            _layouts.clear()
        layout = _layouts[key] = read_index(index, "LitData", lambda content: _parsed(content, index.path))
    return layout


def _parsed(content: Any, path: str) -> _Layout:
    config, chunks = content["config"], tuple(chunk["filename"] for chunk in content["chunks"])
    if not all(isinstance(name, str) for name in chunks):
        raise ValueError("a chunk has no name")
    formats, spec = config["data_format"], config["data_spec"]
    names = _names(json.loads(spec)[1] if spec else {"children_spec": []}, "")
    if config.get("encryption"):
        raise DataError(f"the chunks of '{path}' are encrypted, and cannot be read; write them without")
    loader = config.get("item_loader", "PyTreeLoader")
    if loader not in ("PyTreeLoader", "TokensLoader"):
        raise DataError(f"the chunks of '{path}' are written for {loader}, and cannot be read; use PyTreeLoader")
    if len(formats) != len(names) or not all(isinstance(each, str) for each in formats) or not formats:
        raise ValueError("data_format and data_spec do not fit together")
    if names == [""]:
        kind = formats[0].partition(":")[0]
        names = ["text" if kind in ("str", "text") else TOKENS if kind in _ARRAYS else "value"]
    fields = tuple(_field(name, encoding) for name, encoding in zip(names, formats, strict=True))
    text = json.dumps([names, formats, loader]).encode()
    return _Layout(chunks, fields, loader == "TokensLoader", config.get("compression_level") == "sample", text)


def _names(spec: Any, prefix: str) -> list[str]:
    """A name for each leaf of an item, keys joined with dots."""
    children, kind = spec["children_spec"], spec.get("type")
    if kind is None:
        return [prefix]
    keys = json.loads(spec["context"]) if kind.endswith("dict") else range(len(children))
    return [
        name
        for key, child in zip(keys, children, strict=True)
        for name in _names(child, f"{prefix}.{key}" if prefix else str(key))
    ]


def _field(name: str, encoding: str) -> Field:
    kind, _, number = encoding.partition(":")
    if kind in ("str", "text"):
        return Field(name, "text")
    if kind in _NUMBERS:
        return Field(name, "number", _NUMBERS[kind])
    if kind in _ARRAYS:
        if not number.isdigit() or int(number) not in _ARRAYS[kind]:
            raise ValueError(f"column '{name}' has arrays of the unknown type {number[:40]}")
        return Field(name, "array", _ARRAYS[kind][int(number)])
    refusal = ""
    if kind in ("pickle", "graph"):
        refusal = PICKLED
    elif kind in ("json", "tensor", "numpy"):
        refusal = f"is stored as {kind}, which is not read; write it as text, a number or an array of one dimension"
    return Field(name, "bytes", refusal=refusal)


def _unframed(data: pa.Buffer, ends: npt.NDArray[np.int64]) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
    """Items that are a zstd frame each, uncompressed."""
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        with pa.CompressedInputStream(pa.BufferReader(data[start:end]), "zstd") as stream:
            parts.append(stream.read())
    new_ends = np.zeros(len(ends), np.int64)
    np.cumsum([len(part) for part in parts], out=new_ends[1:])
    return pa.py_buffer(b"".join(parts)), new_ends


def _arrow_start(file: StoredFile, handle: Any) -> int | None:
    """Where the Arrow file at the end of a chunk begins, None where there is none."""
    if file.size < 24:
        return None
    tail = read_exactly(handle, file.size - 12, 12, file.size)
    if tail[4:] != _ARROW_MARK:
        return None
    length = int.from_bytes(tail[:4], "little")
    start = file.size - 12 - length
    count = int.from_bytes(read_exactly(handle, 0, 4, file.size), "little")
    if start < 4 + 4 * (count + 1):
        raise ValueError(f"the Arrow file at its end claims {length} bytes")
    return start
