"""Samples made of fields, one after the other behind a table of offsets: MDS shards and LitData's chunks.

A file begins with uint32 n, the number of samples, and uint32[n + 1], where each begins. A sample is the uint32 sizes
of its fields of varying size, then the fields. All samples of a group are decoded at once, column by column, by Arrow
and NumPy. Which files a dataset has is said by index.json.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.columns.arrow import bool_array, int64_array
from zephon.data.columns import top_level
from zephon.data.fetch import Spans
from zephon.data.formats.base import Group, Groups, Shard, read_exactly, run_groups, sample_digest, token_lists
from zephon.data.formats.content import other_content
from zephon.data.formats.sequential import open_stream
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

INDEX_NAME = "index.json"
PICKLED = "holds pickled Python objects, which can run code when read and are refused; write it as text or numbers"

_MAX_SAMPLES = 1 << 27
# Samples per byte of a compressed file; the table of offsets alone, which ascend, takes a byte for three at most.
_MOST_PACKED = 16
_READ_BYTES = 1 << 20

FieldSpans = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(first byte, byte after the last) of one field in each of n samples, int64[n] each."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a sample, a column."""

    name: str
    kind: str  # "text", "bytes", "number" or "array" (of numbers, of one dimension)
    dtype: str = ""  # of numbers, for NumPy
    size: int | None = None  # bytes; None where they stand at the start of each sample
    refusal: str = ""  # why the column is not read, "" where it is
    # Where the values of arrays begin that do not begin with the field.
    values_of: Callable[[pa.Buffer, FieldSpans], tuple[FieldSpans, str]] | None = None

    @property
    def type(self) -> pa.DataType:
        if self.kind == "number":
            return pa.from_numpy_dtype(np.dtype(self.dtype))
        if self.kind == "array":
            return _list_type(self.dtype)
        return pa.large_string() if self.kind == "text" else pa.large_binary()

    def column(self, data: pa.Buffer, spans: FieldSpans) -> pa.Array:
        """`type`[n] of the values at `spans` in `data`."""
        if self.kind == "number":
            return _number_column(data, spans, np.dtype(self.dtype))
        if self.kind == "array":
            spans, dtype = self.values_of(data, spans) if self.values_of is not None else (spans, self.dtype)
            return _array_column(data, spans, np.dtype(dtype)).cast(self.type)
        column = _bytes_column(data, spans)
        return column.view(pa.large_string()) if self.kind == "text" else column


class SampleShard(Shard):
    """A file of samples. Group offset and length are bytes, uncompressed where `codec` packs the file as a whole.

    Args:
        described: all that says what the samples are, and where.
        offsets: int64[n_samples + 1], where the samples begin.
    """

    bounds: npt.NDArray[np.int64] | None = None  # of groups, in samples, where the file has groups of its own

    def __init__(
        self,
        file: StoredFile,
        fields: Sequence[Field],
        codec: str | None,
        described: bytes,
        offsets: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(file, codec)
        self.fields, self.described, self.offsets = fields, described, offsets
        self.schema = pa.schema([(field.name, field.type) for field in fields])

    def scan(self, size_column: str) -> tuple[str, Groups]:
        if self.codec is not None:
            content = b"%d" % _packed_checksum(self.file, self.codec, int(self.offsets[0]), int(self.offsets[-1]))
        else:
            with self.file.open() as handle:
                content = sample_digest(handle, self.file.size, 4)
        # Samples are small or their text is most of them; its share would need all of the file to be read.
        return hashlib.sha256(self.described + content).hexdigest()[:32], run_groups(self.offsets, self.bounds)

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
    """The head of a file up to its first sample, and its offsets int64[n + 1], which ascend."""
    head = _read_stream(stream, 8)
    count, begin = (int(number) for number in np.frombuffer(head, "<u4"))
    length = 4 * (count + 2)
    # All this is checked before the offsets are read: a small compressed file can become any number of bytes.
    most = _MOST_PACKED * file.size if is_packed else file.size // 4
    if count > min(most, _MAX_SAMPLES) or not length <= begin <= length + _READ_BYTES:
        raise ValueError(f"it claims {count} samples from byte {begin} on, and has {file.size} bytes")
    head += _read_stream(stream, begin - len(head))
    offsets = np.frombuffer(head, "<u4", count + 1, offset=4).astype(np.int64)
    if (np.diff(offsets) < 0).any():
        raise ValueError("its offsets do not ascend")
    if not is_packed and offsets[-1] != file.size:
        raise ValueError(f"its samples end at byte {offsets[-1]}, and it has {file.size}")
    return head, offsets


def _read_stream(stream: Any, length: int) -> bytes:
    """Exactly so many bytes, in pieces, for `length` comes from the file and may be anything."""
    parts = []
    while length:
        part = stream.read(min(length, _READ_BYTES))
        if not part:
            raise ValueError("it ends early")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _packed_checksum(file: StoredFile, codec: str, begin: int, end: int) -> int:
    """CRC-32 of the uncompressed bytes from `begin` to `end`, where the file must end; no more than that is read."""
    with open_stream(file, codec) as stream:
        _read_stream(stream, begin)
        position, checksum = begin, 0
        while position <= end and (block := stream.read(_READ_BYTES)):
            position, checksum = position + len(block), zlib.crc32(block, checksum)
    if position != end:
        raise ValueError(f"its samples end at byte {end}, and it has {'more' if position > end else position}")
    return checksum


def read_index(index: StoredFile, what: str, parse: Callable[[Any], Any]) -> Any:
    """What `parse` makes of the JSON of an index; `DataError` where it is damaged, or no such index."""
    try:
        with index.open() as handle:
            return parse(json.loads(read_exactly(handle, 0, index.size, index.size)))
    except DataError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)[:100]
        said = f"'{index.path}' is no index of {what}, or damaged ({reason}); restore or remove it"
        raise DataError(other_content(index) or said) from error


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
    names = listing.names
    place = {name: i for i, name in enumerate(names)}
    folders = {posixpath.dirname(names[i]): i for i in reversed(keep)}
    searched = {parent for folder in folders for parent in _with_parents(folder)} if above else set(folders)
    named, governed = set[str](), set[str]()
    for folder in sorted(searched):
        index = place.get(posixpath.join(folder, INDEX_NAME))
        if index is not None:
            file = listing.file(index, spans)
        elif above:
            continue
        else:
            file = listing.file(folders[folder], spans).beside(INDEX_NAME)
        listed = entries(file)
        if listed is None:
            continue
        governed.add(folder)
        for entry in listed:
            present = [name for each in entry if (name := posixpath.join(folder, each)) in place]
            named.update(present[:1])
            if not present and index is not None:
                raise DataError(
                    f"'{file.path}' names '{entry[0][:200]}', which is not there; restore that file, or write the "
                    "dataset anew"
                )
    kept = [i for i in keep if names[i] in named or governed.isdisjoint(_with_parents(posixpath.dirname(names[i])))]
    if not kept:
        raise DataError(
            f"'{path}' holds no file that its index.json names, but for example '{names[keep[0]]}'; restore the files "
            "that belong to it, or the index"
        )
    return listing.select(kept)


def _with_parents(folder: str) -> list[str]:
    """A relative folder and all above it, "" the last."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:cut]) for cut in range(len(parts), -1, -1)]


def _field_spans(data: pa.Buffer, ends: npt.NDArray[np.int64], sizes: Sequence[int | None]) -> list[FieldSpans]:
    """Where each field lies in n samples without gaps, `ends` int64[n + 1]; `sizes` are None where samples say them."""
    starts = ends[:-1]
    varying = sizes.count(None)
    if (np.diff(ends) < 4 * varying).any():
        raise ValueError("a sample is shorter than its header")
    raw = np.frombuffer(data, np.uint8)
    # uint32[n, varying], from wherever the samples begin
    heads = iter(raw[starts[:, None] + np.arange(4 * varying)].view("<u4").astype(np.int64).T)
    place, spans = starts + 4 * varying, []
    for size in sizes:
        after = place + (next(heads) if size is None else size)
        spans.append((place, after))
        place = after
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


def _number_column(data: pa.Buffer, spans: FieldSpans, kind: np.dtype[Any]) -> pa.Array:
    """One number per sample."""
    starts, ends = spans
    if (ends - starts != kind.itemsize).any():
        raise ValueError(f"a number is not {kind.itemsize} bytes long")
    return _numbers(np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(kind.itemsize)].view(kind).reshape(-1))


def _numbers(values: npt.NDArray[Any]) -> pa.Array:
    if values.dtype.kind == "b":
        return bool_array(values.view(np.uint8) != 0)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _list_type(dtype: str) -> pa.DataType:
    """What arrays of a type come as: unsigned numbers may be token ids."""
    kind = np.dtype(dtype)
    if kind.kind == "u" and kind.itemsize <= 4:
        return pa.large_list(pa.uint32())
    return pa.large_list({"f": pa.float64(), "b": pa.bool_()}.get(kind.kind, pa.int64()))


def _array_column(data: pa.Buffer, spans: FieldSpans, kind: np.dtype[Any]) -> pa.LargeListArray:
    """One array of numbers, of any length, per sample: `_list_type`[n]."""
    lengths, rest = np.divmod(spans[1] - spans[0], kind.itemsize)
    if rest.any():
        raise ValueError(f"an array is no whole number of {kind.name}")
    count = int(lengths.sum())
    values = np.frombuffer(_bytes_column(data, spans).buffers()[2], kind, count) if count else np.empty(0, kind)
    if kind.kind == "u" and kind.itemsize <= 4:
        return token_lists(values, lengths)
    if kind == np.uint64 and len(values) and int(values.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{int(values.max())} does not fit into 64 bits with a sign")
    if kind.kind != "b":
        values = np.ascontiguousarray(values, np.float64 if kind.kind == "f" else np.int64)
    return pa.LargeListArray.from_arrays(int64_array(np.concatenate([[0], np.cumsum(lengths)])), _numbers(values))
