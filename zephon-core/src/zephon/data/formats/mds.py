"""Mosaic's MDS shards, plain or compressed with gzip, zstd, bzip2, brotli or snappy: a group is a run of samples.

A shard describes itself: uint32 number of samples, uint32 offsets, a JSON object with the columns, the samples. So
index.json is not needed; where there is one, it says which shards count. Text comes as text, numbers as numbers, arrays
of one dimension as lists (unsigned ones as large_list<uint32>, which may be token ids), all else as bytes; pickled
columns are refused.
Offsets and lengths of groups count uncompressed bytes. Layout: streaming/base/format/mds of mosaicml-streaming.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.columns import check_columns, sound_table, top_level, with_paths
from zephon.data.formats.base import (
    Group,
    ShardReader,
    ShardScan,
    corrupt_data_errors,
    read_exactly,
    run_bounds,
    sample_digest,
)
from zephon.data.formats.fields import Field, Spans, array_column, bytes_column, field_spans, list_type, number_column
from zephon.data.formats.sequential import CODECS, SNAPPY, SequentialBytes, open_stream, read_range
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["MosaicShards", "shard_names"]

_CODECS = {**CODECS, ".br": "brotli", ".snappy": SNAPPY}
_READ_BYTES = 1 << 20
_MAX_SAMPLES = 1 << 27
_MAX_CONFIG_BYTES = 1 << 20
# Samples per byte of a compressed shard; the table of offsets alone, which ascend, takes a byte for three at most.
_MOST_PACKED = 16
_MAX_INDEX_BYTES = 1 << 30
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


class MosaicShards:
    """The `Format` of MDS shards."""

    name = "mds"
    suffixes = (".mds", *(f".mds{packed}" for packed in _CODECS))

    def is_sequential(self, name: str) -> bool:
        return _codec(name) is not None

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        with corrupt_data_errors(file, self.name):
            shard = _shard(file, whole=True)
            schema = _schema(shard.fields, file)
            check_columns(schema, [size_column], size_column if is_text else None, file.path)
            sizes = np.diff(shard.offsets)
            bounds = run_bounds(sizes)
            starts, ends = shard.offsets[bounds[:-1]], shard.offsets[bounds[1:]]
            # Samples are small or their text is most of them; a share would need all of the file to be read.
            groups = np.stack([np.diff(bounds), ends - starts, starts, ends - starts], axis=1)
            return ShardScan.of(shard.digest, with_paths(schema, size_column), groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name):
            return dict.fromkeys(field.name for field in _shard(file).fields)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        return _MosaicReader(file, columns, text_column)


def shard_names(index: StoredFile) -> list[tuple[str, ...]] | None:
    """The file names, as they stand there, of each shard that an index.json lists: plain, compressed or both.

    None for an object that is the index of something else.

    Raises:
        DataError: it is damaged.
    """
    if index.size > _MAX_INDEX_BYTES:
        raise DataError(
            f"'{index.path}' has {index.size:,} bytes, which is no index of MDS shards; restore or remove it"
        )
    try:
        with index.open() as handle:
            told = json.loads(read_exactly(handle, 0, index.size, index.size))
        if isinstance(told, dict) and "shards" not in told:
            return None
        found = []
        for shard in told["shards"]:
            files = [shard.get(key) for key in ("raw_data", "zip_data")]
            names = tuple(each["basename"] for each in files if each is not None)
            if not names or not all(isinstance(name, str) for name in names):
                raise ValueError("a shard has no name")
            found.append(names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"'{index.path}' is no index of MDS shards, or damaged ({str(error)[:100]}); restore or remove it"
        ) from error
    return found


class _MosaicReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        with corrupt_data_errors(file, MosaicShards.name):
            self._shard = _shard(file)
            schema = _schema(self._shard.fields, file)
            check_columns(schema, self._columns, text_column, file.path, strict=False)
            self._wanted = set(top_level(self._columns, schema.names))
            _refuse_unreadable(self._shard.fields, self._wanted, file)
        codec = _codec(file.path)
        self._packed = SequentialBytes(file, codec) if codec else None

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        return [] if self._packed is not None else [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        file, shard = self._file, self._shard
        with corrupt_data_errors(file, MosaicShards.name, f" (samples from row {group.first_row})"):
            offsets = shard.offsets[group.first_row : group.first_row + group.rows + 1]
            if len(offsets) != group.rows + 1 or offsets[0] != group.offset or offsets[-1] - offsets[0] != group.length:
                raise ValueError("its samples lie elsewhere than when it was listed")
            data = read_range(file, group.offset, group.length, self._packed)
            if len(data) != group.length:
                raise ValueError(f"it ends at byte {group.offset + len(data)}")
            spans = field_spans(memoryview(data), offsets - offsets[0], [field.size for field in shard.fields])
            table = pa.table(
                {
                    field.name: _decoded(data, span, field, file.path)
                    for field, span in zip(shard.fields, spans, strict=True)
                    if field.name in self._wanted
                }
            )
            if not self._wanted:
                table = pa.table({"": pa.nulls(group.rows)})
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        if self._packed is not None:
            self._packed.close()


@dataclass(frozen=True, slots=True)
class _Shard:
    """The head of a shard: its fields, and int64[n_samples + 1] offsets. `digest` where the whole was looked at."""

    fields: list[Field]
    offsets: npt.NDArray[np.int64]
    digest: str


def _codec(name: str) -> str | None:
    return next((codec for suffix, codec in _CODECS.items() if name.lower().endswith(suffix)), None)


def _shard(file: StoredFile, whole: bool = False) -> _Shard:
    """The head of a shard; with `whole`, the rest is seen to be there, and to be sound as far as a codec can tell."""
    codec = _codec(file.path)
    with open_stream(file, codec) as stream:
        size = None if codec else file.size
        head = _read(stream, 8, size)
        count, begin = (int(number) for number in np.frombuffer(head, "<u4"))
        length = 4 * (count + 2)  # of the head
        # All this is asked before the offsets are read: a small compressed file can become any number of bytes.
        most = _MAX_SAMPLES if size is not None else min(_MAX_SAMPLES, _MOST_PACKED * file.size)
        if count > most:
            raise ValueError(f"it claims {count} samples, and has {file.size} bytes")
        if not length <= begin <= length + _MAX_CONFIG_BYTES:
            raise ValueError(f"its samples begin at byte {begin}, behind a head of {length}")
        head += _read(stream, length - len(head), size)
        numbers = np.frombuffer(head, "<u4", offset=4)
        if (numbers[1:] < numbers[:-1]).any():
            raise ValueError("its offsets do not ascend")
        offsets = numbers.astype(np.int64)
        config = _read(stream, begin - len(head), size)
        fields = _fields(config)
        digest = hashlib.sha256(head + config)
        if whole:
            end, checksum = begin, 0
            while codec:
                block = stream.read(_READ_BYTES)
                if not block:
                    break
                end, checksum = end + len(block), zlib.crc32(block, checksum)
                if end > int(offsets[-1]):
                    raise ValueError(f"its samples end at byte {int(offsets[-1])}, and more follows")
            if (end if codec else file.size) != int(offsets[-1]):
                raise ValueError(
                    f"its samples end at byte {int(offsets[-1])}, and it has {end if codec else file.size}"
                )
            digest.update(b"%d" % checksum if codec else sample_digest(stream, file.size, 4))
    return _Shard(fields, offsets, digest.hexdigest()[:32])


def _read(stream: Any, length: int, size: int | None) -> bytes:
    """Exactly so many bytes, in pieces, for `length` comes from the file and may be anything."""
    if size is not None and length > size:
        raise ValueError(f"{length} bytes are wanted, and it has {size}")
    parts = []
    while length:
        part = stream.read(min(length, _READ_BYTES))
        if not part:
            raise ValueError("it ends early")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _fields(config: bytes) -> list[Field]:
    try:
        told = json.loads(config)
        names, encodings, sizes = (told[f"column_{key}"] for key in ("names", "encodings", "sizes"))
        fields = [Field(*item) for item in zip(names, encodings, sizes, strict=True)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its description of the columns is damaged: {str(error)[:100]}") from error
    for field in fields:
        sized = field.size is None or (type(field.size) is int and 0 <= field.size < 2**32)
        if not isinstance(field.name, str) or not isinstance(field.encoding, str) or not sized:
            raise ValueError("its description of the columns is damaged")
    if not fields or len({field.name for field in fields}) != len(fields):
        raise ValueError("its description of the columns is damaged")
    return fields


def _schema(fields: Sequence[Field], file: StoredFile) -> pa.Schema:
    return pa.schema([(field.name, _type(field)) for field in fields])


def _type(field: Field) -> pa.DataType:
    kind, _, rest = field.encoding.partition(":")
    if kind in _TEXT:
        return pa.large_string()
    if kind in _NUMBERS:
        return pa.from_numpy_dtype(np.dtype(_NUMBERS[kind]))
    if kind == "ndarray":
        dtype = rest.partition(":")[0]
        if dtype and dtype not in _NOTED.values():
            raise ValueError(f"column '{field.name}' has arrays of the unknown type {dtype[:40]}")
        return list_type(dtype or "int64")
    return pa.large_binary()


def _refuse_unreadable(fields: Sequence[Field], wanted: set[str], file: StoredFile) -> None:
    for field in fields:
        known = field.encoding.partition(":")[0] in {*_TEXT, *_BYTES, *_PICKLED, *_NUMBERS, "ndarray"}
        if field.name in wanted and not known:
            raise DataError(
                f"column '{field.name}' of '{file.path}' is encoded as {field.encoding[:40]!r}, which is not known; "
                "write it as str, json, bytes, a number or ndarray"
            )
        if field.name in wanted and field.encoding in _PICKLED:
            raise DataError(
                f"column '{field.name}' of '{file.path}' holds pickled Python objects, which can run code when read "
                "and are refused; write it as str, json or ndarray"
            )


def _decoded(data: pa.Buffer, spans: Spans, field: Field, path: str) -> pa.Array:
    kind, _, rest = field.encoding.partition(":")
    if kind in _NUMBERS:
        return number_column(data, spans, _NUMBERS[kind])
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        return _arrays(data, spans, field.name, dtype, shape, path)
    column = bytes_column(data, spans)
    return column.view(pa.large_string()) if kind in _TEXT else column


def _arrays(data: pa.Buffer, spans: Spans, name: str, dtype: str, shape: str, path: str) -> pa.Array:
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
        told = np.zeros(len(starts), np.int64)
        for place in range(int(width.max())):  # little-endian, of 1 to 8 bytes
            part = raw[np.minimum(starts - width + place, len(raw) - 1)].astype(np.int64)
            told += np.where(place < width, part << (8 * min(place, 7)), 0)
        if not np.array_equal(told * np.dtype(dtype).itemsize, ends - starts):
            raise ValueError(f"an array of column '{name}' is not as long as it says")
    column = array_column(data, (starts, ends), dtype)
    return column if column.type == noted else column.cast(noted)
