"""Mosaic's MDS shards, plain or compressed with gzip, zstd, bzip2, brotli or snappy: a group is a run of samples.

A shard describes itself: a table of offsets, a JSON object with the columns, the samples. So index.json is not needed;
where there is one, it says which shards count. Text comes as text, numbers as numbers, arrays of one dimension as lists
(unsigned ones as large_list<uint32>, which may be token ids), all else as bytes; pickled columns are refused.
Layout: streaming/base/format/mds of mosaicml-streaming, whose own reader unpickles and is not used.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.fetch import Spans
from zephon.data.formats.base import Format, Shard, sample_digest
from zephon.data.formats.samples import (
    INDEX_NAME,
    PICKLED,
    Field,
    FieldSpans,
    SampleShard,
    array_column,
    list_type,
    packed_checksum,
    read_head,
    read_index,
    read_stream,
    select_indexed,
)
from zephon.data.formats.sequential import CODECS, SNAPPY, open_stream
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

__all__ = ["MosaicShards"]

_CODECS = {**CODECS, ".br": "brotli", ".snappy": SNAPPY}
_MAX_CONFIG_BYTES = 1 << 20
_TEXT = frozenset(["str", "json", "str_int", "str_float", "str_decimal"])
_BYTES = frozenset(["bytes", "pil", "jpeg", "png", "jpeg_array", "jpegarray", "list[jpeg]", "list[pil]", "list[png]"])
_PICKLED = frozenset(["pkl", "pickle"])
_NUMBERS = {
    "int": "<i8",
    **{f"{kind}int{bits}": f"<{kind or 'i'}{bits // 8}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
# How the type of an array is noted where the column leaves it open.
_NOTED = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_NOTED |= {64: "uint64", 65: "int64", 66: "float64"}


class MosaicShards(Format):
    """MDS shards. Group offset and length are uncompressed bytes."""

    name = "mds"
    suffixes = (".mds", *(f".mds{packed}" for packed in _CODECS))
    describing = frozenset([INDEX_NAME])

    def is_sequential(self, name: str) -> bool:
        return _codec(name) is not None

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        return select_indexed(listing, keep, path, spans, _shard_names, above=True)

    def open_shard(self, file: StoredFile) -> Shard:
        return _MosaicShard(file)


class _MosaicShard(SampleShard):
    def __init__(self, file: StoredFile) -> None:
        codec = _codec(file.path)
        with open_stream(file, codec) as stream:
            head, self.offsets = read_head(stream, file, codec is not None)
            length = int(self.offsets[0]) - len(head)
            if length > _MAX_CONFIG_BYTES:
                raise ValueError(f"its samples begin at byte {int(self.offsets[0])}, behind a head of {len(head)}")
            config = read_stream(stream, length)
        self._head = head + config
        super().__init__(file, _fields(config, file.path), codec)

    def content_digest(self) -> str:
        digest, end = hashlib.sha256(self._head), int(self.offsets[-1])
        if self.codec is not None:
            digest.update(b"%d" % packed_checksum(self.file, self.codec, len(self._head), end))
        else:
            if end != self.file.size:
                raise ValueError(f"its samples end at byte {end}, and it has {self.file.size}")
            with self.file.open() as handle:
                digest.update(sample_digest(handle, end, 4))
        return digest.hexdigest()[:32]


def _codec(name: str) -> str | None:
    return next((codec for suffix, codec in _CODECS.items() if name.lower().endswith(suffix)), None)


def _shard_names(index: StoredFile) -> list[tuple[str, ...]] | None:
    """The names of each shard that an index lists: plain, compressed or both. None: it lists no shards."""

    def names(told: Any) -> list[tuple[str, ...]] | None:
        if isinstance(told, dict) and "shards" not in told:
            return None
        listed = []
        for shard in told["shards"]:
            files = [shard.get(key) for key in ("raw_data", "zip_data")]
            entry = tuple(each["basename"] for each in files if each is not None)
            if not entry or not all(isinstance(name, str) for name in entry):
                raise ValueError("a shard has no name")
            listed.append(entry)
        return listed

    listed: list[tuple[str, ...]] | None = read_index(index, "MDS shards", names)
    return listed


def _fields(config: bytes, path: str) -> list[Field]:
    damaged = "its description of the columns is damaged"
    try:
        told = json.loads(config)
        described = list(zip(*(told[f"column_{key}"] for key in ("names", "encodings", "sizes")), strict=True))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{damaged}: {str(error)[:100]}") from error
    for name, encoding, size in described:
        sized = size is None or (type(size) is int and 0 <= size < 2**32)
        if not isinstance(name, str) or not isinstance(encoding, str) or not sized:
            raise ValueError(damaged)
    if not described or len({name for name, _, _ in described}) != len(described):
        raise ValueError(damaged)
    return [_field(name, encoding, size, path) for name, encoding, size in described]


def _field(name: str, encoding: str, size: int | None, path: str) -> Field:
    kind, _, rest = encoding.partition(":")
    if kind in _NUMBERS:
        return Field(name, "number", _NUMBERS[kind], size)
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        if dtype and dtype not in _NOTED.values():
            raise ValueError(f"column '{name}' has arrays of the unknown type {dtype[:40]}")
        decode = partial(_arrays, name=name, dtype=dtype, shape=shape, path=path)
        return Field(name, "array", dtype or "int64", size, decode=decode)
    refusal = ""
    if kind in _PICKLED:
        refusal = PICKLED
    elif kind not in _TEXT | _BYTES:
        refusal = f"is encoded as {encoding[:40]!r}, which is not known; write it as str, json, bytes or numbers"
    return Field(name, "text" if kind in _TEXT else "bytes", "", size, refusal)


def _arrays(data: pa.Buffer, spans: FieldSpans, *, name: str, dtype: str, shape: str, path: str) -> pa.Array:
    """Arrays of one dimension; type and shape stand before the values where the column leaves them open."""
    starts, ends = spans
    raw = np.frombuffer(data, np.uint8)
    noted = list_type(dtype or "int64")
    if not len(starts):
        return pa.array([], noted)

    def byte(at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if (at >= ends).any():
            raise ValueError(f"an array of column '{name}' is cut off")
        return raw[at].astype(np.int64)

    if not dtype:
        codes = np.unique(byte(starts))
        if len(codes) != 1 or int(codes[0]) not in _NOTED:
            raise ValueError(f"column '{name}' has arrays of several or unknown types")
        dtype, starts = _NOTED[int(codes[0])], starts + 1
    dimensions = np.full(len(starts), len(shape.split(","))) if shape else byte(starts) >> 2
    if (dimensions != 1).any():
        raise DataError(
            f"column '{name}' of '{path}' holds arrays of several dimensions, and lists of numbers were expected"
        )
    if not shape:
        width = 1 << (byte(starts) & 3)
        starts = starts + 1 + width
        if (starts > ends).any():
            raise ValueError(f"an array of column '{name}' is cut off")
        length = np.zeros(len(starts), np.int64)
        for place in range(int(width.max())):  # little-endian, of 1 to 8 bytes
            part = raw[np.minimum(starts - width + place, len(raw) - 1)].astype(np.int64)
            length += np.where(place < width, part << (8 * min(place, 7)), 0)
        if not np.array_equal(length * np.dtype(dtype).itemsize, ends - starts):
            raise ValueError(f"an array of column '{name}' is not as long as it says")
    column = array_column(data, (starts, ends), dtype)
    return column if column.type == noted else column.cast(noted)
