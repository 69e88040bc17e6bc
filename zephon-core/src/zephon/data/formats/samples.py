"""Samples made of fields, one after the other behind a table of offsets: MDS shards and LitData's chunks.

A file begins with uint32 n, the number of samples, and uint32[n + 1], where each begins. A sample is the uint32 sizes
of its fields of varying size, then the fields. All samples of a group are decoded at once, column by column, by Arrow
and NumPy. What the files of a dataset are is said by index.json.
"""

from __future__ import annotations

import json
import posixpath
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.data.columns import top_level
from zephon.data.fetch import Spans
from zephon.data.formats.base import Group, Groups, Shard, read_exactly, run_groups, token_lists
from zephon.data.formats.sequential import open_stream
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

__all__ = [
    "INDEX_NAME",
    "PICKLED",
    "Field",
    "FieldSpans",
    "SampleShard",
    "array_column",
    "list_type",
    "packed_checksum",
    "read_head",
    "read_index",
    "read_stream",
    "select_indexed",
]

INDEX_NAME = "index.json"
PICKLED = "holds pickled Python objects, which can run code when read and are refused; write it as text or numbers"

_MAX_INDEX_BYTES = 1 << 30
_MAX_SAMPLES = 1 << 27
# Samples per byte of a compressed file; the table of offsets alone, which ascend, takes a byte for three at most.
_MOST_PACKED = 16
_READ_BYTES = 1 << 20

FieldSpans = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(first byte, byte after the last) of one field in each of n samples, int64[n] each."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a sample.

    Attributes:
        name: the column.
        kind: "text", "bytes", "number" or "array" (of numbers, of one dimension).
        dtype: of numbers, for NumPy.
        size: bytes, None where they stand at the start of each sample.
        refusal: why the column is not read, "" where it is.
        decode: for arrays that are not their values alone.
    """

    name: str
    kind: str
    dtype: str = ""
    size: int | None = None
    refusal: str = ""
    decode: Callable[[pa.Buffer, FieldSpans], pa.Array] | None = None

    @property
    def type(self) -> pa.DataType:
        if self.kind == "number":
            return pa.from_numpy_dtype(np.dtype(self.dtype))
        if self.kind == "array":
            return list_type(self.dtype)
        return pa.large_string() if self.kind == "text" else pa.large_binary()

    def column(self, data: pa.Buffer, spans: FieldSpans) -> pa.Array:
        """`type`[n] of the values at `spans` in `data`."""
        if self.decode is not None:
            return self.decode(data, spans)
        if self.kind == "number":
            return _number_column(data, spans, self.dtype)
        if self.kind == "array":
            return array_column(data, spans, self.dtype)
        column = _bytes_column(data, spans)
        return column.view(pa.large_string()) if self.kind == "text" else column


class SampleShard(Shard):
    """A file of samples. Group offset and length are bytes, uncompressed where `codec` packs the file as a whole.

    Subclasses set `offsets` int64[n_samples + 1], where the samples begin, and give `content_digest`.
    """

    offsets: npt.NDArray[np.int64]

    def __init__(self, file: StoredFile, fields: Sequence[Field], codec: str | None) -> None:
        super().__init__(file, codec)
        self.fields = fields
        self.schema = pa.schema([(field.name, field.type) for field in fields])

    def content_digest(self) -> str:
        """Hex digest of the file, all of which is seen to be there and, where it is compressed, to be sound."""
        raise NotImplementedError

    def scan(self, size_column: str) -> tuple[str, Groups]:
        # Samples are small or their text is most of them; a share would need all of the file to be read.
        return self.content_digest(), run_groups(self.offsets)

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        wanted = set(top_level(columns, self.schema.names))
        for field in self.fields:
            if field.name in wanted and field.refusal:
                raise DataError(f"column '{field.name}' of '{self.file.path}' {field.refusal}")
        offsets = self.offsets[group.first_row : group.first_row + group.rows + 1]
        if len(offsets) != group.rows + 1 or offsets[0] != group.offset or offsets[-1] - offsets[0] != group.length:
            raise ValueError("its samples lie elsewhere than when it was listed")
        data, ends = self.samples(group, offsets - offsets[0])
        spans = self.spans(data, ends)
        found = {f.name: f.column(data, at) for f, at in zip(self.fields, spans, strict=True) if f.name in wanted}
        return pa.table(found or {"": pa.nulls(group.rows)})

    def samples(self, group: Group, ends: npt.NDArray[np.int64]) -> tuple[pa.Buffer, npt.NDArray[np.int64]]:
        """The bytes of a group's samples, and where each ends in them, int64[rows + 1]."""
        return self.content(group), ends

    def spans(self, data: pa.Buffer, ends: npt.NDArray[np.int64]) -> list[FieldSpans]:
        """Where each field lies in `data`."""
        return _field_spans(data, ends, [field.size for field in self.fields])


def read_head(stream: Any, file: StoredFile, is_packed: bool) -> tuple[bytes, npt.NDArray[np.int64]]:
    """The head of a file, and its offsets int64[n + 1], which ascend and begin behind it."""
    head = read_stream(stream, 8)
    count, begin = (int(number) for number in np.frombuffer(head, "<u4"))
    length = 4 * (count + 2)
    # All this is checked before the offsets are read: a small compressed file can become any number of bytes.
    most = _MOST_PACKED * file.size if is_packed else file.size // 4
    if count > min(most, _MAX_SAMPLES) or begin < length:
        raise ValueError(f"it claims {count} samples from byte {begin} on, and has {file.size} bytes")
    head += read_stream(stream, length - len(head))
    offsets = np.frombuffer(head, "<u4", offset=4)
    if (offsets[1:] < offsets[:-1]).any():
        raise ValueError("its offsets do not ascend")
    return head, offsets.astype(np.int64)


def read_stream(stream: Any, length: int) -> bytes:
    """Exactly so many bytes, in pieces, for `length` comes from the file and may be anything."""
    parts = []
    while length:
        part = stream.read(min(length, _READ_BYTES))
        if not part:
            raise ValueError("it ends early")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def packed_checksum(file: StoredFile, codec: str, begin: int, end: int) -> int:
    """CRC-32 of the uncompressed bytes from `begin` to `end`, where the file must end; no more than that is read."""
    with open_stream(file, codec) as stream:
        read_stream(stream, begin)
        position, checksum = begin, 0
        while position <= end and (block := stream.read(_READ_BYTES)):
            position, checksum = position + len(block), zlib.crc32(block, checksum)
    if position != end:
        raise ValueError(f"its samples end at byte {end}, and it has {'more' if position > end else position}")
    return checksum


def read_index(index: StoredFile, what: str, parse: Callable[[Any], Any]) -> Any:
    """What `parse` makes of the JSON of an index.

    Raises:
        DataError: it is damaged, or no such index.
    """
    if index.size > _MAX_INDEX_BYTES:
        raise DataError(f"'{index.path}' has {index.size:,} bytes, which is no index of {what}; restore or remove it")
    try:
        with index.open() as handle:
            return parse(json.loads(read_exactly(handle, 0, index.size, index.size)))
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        reason = str(error)[:100]
        raise DataError(f"'{index.path}' is no index of {what}, or damaged ({reason}); restore or remove it") from error


def select_indexed(
    listing: Listing,
    keep: list[int],
    path: str,
    spans: Spans | None,
    entries: Callable[[StoredFile], Iterable[tuple[str, ...]] | None],
    *,
    above: bool,
) -> Listing:
    """Those of the files `keep` that an index.json names, and those that have none.

    An index lies beside the files or, with `above`, also in a folder above them. All that it names must be there. A
    glob or a single file that leaves out the index beside it picks among the files.

    Args:
        entries: the files that an index names, each by the names it may have; None: it is an index of other things.
    """
    place = {name: i for i, name in enumerate(listing.names)}
    folders = {posixpath.dirname(listing.names[i]): i for i in reversed(keep)}
    searched = {parent for folder in folders for parent in _with_parents(folder)} if above else set(folders)
    named: set[str] = set()
    governed: set[str] = set()
    for folder in sorted(searched):
        index = place.get(posixpath.join(folder, INDEX_NAME))
        if index is None and above:
            continue
        at = index if index is not None else folders[folder]
        file = listing.file(at, spans) if index is not None else listing.file(at, spans).beside(INDEX_NAME)
        listed = entries(file)
        if listed is None:
            continue
        governed.add(folder)
        for entry in listed:
            names = [posixpath.join(folder, name) for name in entry]
            present = next((name for name in names if name in place), None)
            if present is not None:
                named.add(present)
            elif index is not None:
                raise DataError(
                    f"'{file.path}' names '{entry[0][:200]}', which is not there; restore that file, or write the "
                    "dataset anew"
                )
    kept = [
        i
        for i in keep
        if listing.names[i] in named or governed.isdisjoint(_with_parents(posixpath.dirname(listing.names[i])))
    ]
    if not kept:
        raise DataError(
            f"'{path}' holds no file that its index.json names, but for example '{listing.names[keep[0]]}'; restore "
            "the files that belong to it, or the index"
        )
    return listing.select(kept)


def _with_parents(folder: str) -> list[str]:
    """A relative folder and all above it, "" the last."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:cut]) for cut in range(len(parts), -1, -1)]


def _field_spans(data: pa.Buffer, ends: npt.NDArray[np.int64], sizes: Sequence[int | None]) -> list[FieldSpans]:
    """Where each field lies in `data`, which is n samples without gaps; `ends` int64[n + 1], the first of them 0.

    `sizes` are the fields' bytes, None for a field whose size stands at the start of each sample.

    Raises:
        ValueError: fields that are not just as long as their sample.
    """
    starts = ends[:-1]
    varying = sum(size is None for size in sizes)
    if (np.diff(ends) < 4 * varying).any():
        raise ValueError("a sample is shorter than its header")
    raw = np.frombuffer(data, np.uint8)
    # uint32[n, varying], from wherever the samples begin
    heads = raw[starts[:, None] + np.arange(4 * varying)].view("<u4").astype(np.int64)
    place, next_varying, spans = starts + 4 * varying, 0, []
    for size in sizes:
        if size is None:
            length = heads[:, next_varying]
            next_varying += 1
        else:
            length = np.full(len(starts), size, np.int64)
        spans.append((place, place + length))
        place = place + length
    if not np.array_equal(place, ends[1:]):
        raise ValueError("a sample's fields are not as long as the sample")
    return spans


def _bytes_column(data: pa.Buffer, spans: FieldSpans) -> pa.Array:
    """large_binary[n] of the bytes at `spans`, which ascend and do not overlap."""
    starts, ends = spans
    if not len(starts):
        return pa.array([], pa.large_binary())
    # Arrow's own copying: of an array whose values are the fields and what lies between them, every second one.
    offsets = np.stack([starts, ends], axis=1).reshape(-1)
    pieces = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data])
    return pieces.take(int64_array(np.arange(0, len(offsets), 2)))


def _number_column(data: pa.Buffer, spans: FieldSpans, dtype: str) -> pa.Array:
    """One number per sample."""
    starts, ends = spans
    kind = np.dtype(dtype)
    if (ends - starts != kind.itemsize).any():
        raise ValueError(f"a number is not {kind.itemsize} bytes long")
    values = np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(kind.itemsize)].view(kind).reshape(-1)
    if kind.kind == "b":
        return pa.array(values.astype(bool).tolist(), pa.bool_())
    return pa.Array.from_buffers(pa.from_numpy_dtype(kind), len(values), [None, pa.py_buffer(values)])


def list_type(dtype: str) -> pa.DataType:
    """What arrays of a type come as: unsigned numbers may be token ids."""
    kind = np.dtype(dtype)
    if kind.kind == "u" and kind.itemsize <= 4:
        return pa.large_list(pa.uint32())
    return pa.large_list(pa.int64() if kind.kind in "iu" else pa.float64() if kind.kind == "f" else pa.bool_())


def array_column(data: pa.Buffer, spans: FieldSpans, dtype: str) -> pa.Array:
    """One array of numbers, of any length, per sample: `list_type(dtype)`[n]."""
    kind = np.dtype(dtype)
    lengths, rest = np.divmod(spans[1] - spans[0], kind.itemsize)
    if rest.any():
        raise ValueError(f"an array is no whole number of {kind.name}")
    count = int(lengths.sum())
    values = np.frombuffer(_bytes_column(data, spans).buffers()[2], kind, count) if count else np.empty(0, kind)
    wanted = list_type(dtype)
    if wanted.value_type == pa.uint32():
        return token_lists(values, lengths)
    if wanted.value_type == pa.bool_():
        items = pa.array(values.astype(bool).tolist(), pa.bool_())
    else:
        if kind == np.uint64 and len(values) and int(values.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{int(values.max())} does not fit into 64 bits with a sign")
        values = np.ascontiguousarray(values, np.int64 if wanted.value_type == pa.int64() else np.float64)
        items = pa.Array.from_buffers(wanted.value_type, len(values), [None, pa.py_buffer(values)])
    return pa.LargeListArray.from_arrays(int64_array(np.concatenate([[0], np.cumsum(lengths)])), items)
