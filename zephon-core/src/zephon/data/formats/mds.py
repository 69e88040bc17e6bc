"""Mosaic's MDS shards, plain or compressed with gzip, zstd, bzip2, brotli or snappy: a group is a run of samples.

A shard describes itself: a table of offsets, a JSON object with the columns, the samples. So index.json is not needed;
where there is one, it says which shards count. Text comes as text, numbers as numbers, arrays of one dimension as lists
(unsigned ones as large_list<uint32>, which may be token ids), all else as bytes; pickled columns are refused.
Layout: streaming/base/format/mds of mosaicml-streaming, whose own reader unpickles and is not used.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.fetch import Spans
from zephon.data.formats.base import Format, Shard
from zephon.data.formats.samples import (
    PICKLED,
    Field,
    FieldSpans,
    SampleShard,
    read_head,
    read_index,
    select_indexed,
)
from zephon.data.formats.sequential import CODECS, SNAPPY, open_stream
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

_CODECS = {**CODECS, ".br": "brotli", ".snappy": SNAPPY}
_TEXT = frozenset(["str", "json", "str_int", "str_float", "str_decimal"])
_BYTES = frozenset(["bytes", "pil", "jpeg", "png", "jpeg_array", "jpegarray", "list[jpeg]", "list[pil]", "list[png]"])
# The numbers, and how the type of an array is noted where the column leaves it open.
_NOTED = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_NOTED |= {64: "uint64", 65: "int64", 66: "float64"}


class MosaicShards(Format):
    """MDS shards. Group offset and length are uncompressed bytes."""

    name = "mds"
    suffixes = (".mds", *(f".mds{packed}" for packed in _CODECS))

    def is_sequential(self, name: str) -> bool:
        return _codec(name) is not None

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        return select_indexed(listing, keep, path, spans, _shard_names, above=True)

    def open_shard(self, file: StoredFile) -> Shard:
        codec = _codec(file.path)
        with open_stream(file, codec) as stream:
            head, offsets = read_head(stream, file, codec is not None)
        return SampleShard(file, _fields(head[4 * (len(offsets) + 1) :], file.path), codec, head, offsets)


def _codec(name: str) -> str | None:
    return next((codec for suffix, codec in _CODECS.items() if name.lower().endswith(suffix)), None)


def _shard_names(index: StoredFile) -> list[tuple[str, ...]] | None:
    """The names of each shard that an index lists: plain, compressed or both. None: it lists no shards."""

    def names(content: Any) -> list[tuple[str, ...]] | None:
        if isinstance(content, dict) and "shards" not in content:
            return None
        listed = []
        for shard in content["shards"]:
            files = [shard.get(key) for key in ("raw_data", "zip_data")]
            entry = tuple(each["basename"] for each in files if each is not None)
            if not entry or not all(isinstance(name, str) for name in entry):
                raise ValueError("a shard has no name")
            listed.append(entry)
        return listed

    listed: list[tuple[str, ...]] | None = read_index(index, "MDS shards", names)
    return listed


def _fields(config: bytes, path: str) -> list[Field]:
    """The columns that a shard describes."""
    content = json.loads(config)
    described = list(zip(*(content[f"column_{key}"] for key in ("names", "encodings", "sizes")), strict=True))
    for name, encoding, size in described:
        sized = size is None or (type(size) is int and 0 <= size < 2**32)
        if not isinstance(name, str) or not isinstance(encoding, str) or not sized:
            raise ValueError("its description of the columns is damaged")
    if not described or len({name for name, _, _ in described}) != len(described):
        raise ValueError("its description of the columns is damaged")
    return [_field(name, encoding, size, path) for name, encoding, size in described]


def _field(name: str, encoding: str, size: int | None, path: str) -> Field:
    kind, _, rest = encoding.partition(":")
    if kind == "int" or kind in _NOTED.values():
        return Field(name, "number", np.dtype("int64" if kind == "int" else kind).newbyteorder("<").str, size)
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        if dtype and dtype not in _NOTED.values():
            raise ValueError(f"column '{name}' has arrays of the unknown type {dtype[:40]}")
        values_of = partial(_values_of, name=name, dtype=dtype, shape=shape, path=path)
        return Field(name, "array", dtype or "int64", size, values_of=values_of)
    refusal = ""
    if kind in ("pkl", "pickle"):
        refusal = PICKLED
    elif kind not in _TEXT | _BYTES:
        refusal = f"is encoded as {encoding[:40]!r}, which is not known; write it as str, json, bytes or numbers"
    return Field(name, "text" if kind in _TEXT else "bytes", "", size, refusal)


def _values_of(
    data: pa.Buffer, spans: FieldSpans, *, name: str, dtype: str, shape: str, path: str
) -> tuple[FieldSpans, str]:
    """Where the values of arrays lie, behind their type and shape where the column leaves these open; their type."""
    starts, ends = spans
    raw = np.frombuffer(data, np.uint8)

    def byte(at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if (at >= ends).any():
            raise ValueError(f"an array of column '{name}' is cut off")
        return raw[at].astype(np.int64)

    if not dtype:
        codes = np.unique(byte(starts))
        if len(codes) > 1 or not set(codes.tolist()) <= _NOTED.keys():
            raise ValueError(f"column '{name}' has arrays of several or unknown types")
        dtype, starts = _NOTED[int(codes[0])] if len(codes) else "int64", starts + 1
    # Shapes begin with 4 times the number of dimensions, plus the logarithm of the bytes of each.
    dimensions = np.full(len(starts), len(shape.split(","))) if shape else byte(starts) >> 2
    if (dimensions != 1).any():
        raise DataError(
            f"column '{name}' of '{path}' holds arrays of several dimensions, and lists of numbers were expected"
        )
    if not shape:
        widths = 1 << (byte(starts) & 3)
        starts = starts + 1 + widths
    if (starts > ends).any():
        raise ValueError(f"an array of column '{name}' is cut off")
    if not shape:
        # A damaged width would otherwise read a number more or less of the row without a word.
        lengths = np.zeros(len(starts), np.int64)
        for width in np.unique(widths).tolist():
            at = np.flatnonzero(widths == width)
            lengths[at] = raw[(starts[at] - width)[:, None] + np.arange(width)].view(f"<u{width}")[:, 0]
        if not np.array_equal(lengths * np.dtype(dtype).itemsize, ends - starts):
            raise ValueError(f"an array of column '{name}' is not as long as its shape says")
    return (starts, ends), dtype
