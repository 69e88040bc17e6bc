"""Samples made of fields: what Mosaic's MDS and LitData's chunks have in common.

A sample is the uint32 sizes of its fields of varying size, then the fields one after the other. All samples of a group
are decoded at once, column by column, by Arrow and NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.data.formats.base import token_lists

__all__ = ["Field", "Spans", "array_column", "bytes_column", "field_spans", "list_type", "number_column"]

Spans = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(first byte, byte after the last) of one field in each of n samples, int64[n] each."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a sample: its name, how it is encoded, and its bytes where they are always so many."""

    name: str
    encoding: str
    size: int | None


def field_spans(data: memoryview, ends: npt.NDArray[np.int64], sizes: Sequence[int | None]) -> list[Spans]:
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


def bytes_column(data: pa.Buffer, spans: Spans) -> pa.Array:
    """large_binary[n] of the bytes at `spans`, which ascend and do not overlap."""
    starts, ends = spans
    if not len(starts):
        return pa.array([], pa.large_binary())
    # Arrow's own copying: of an array whose values are the fields and what lies between them, every second one.
    offsets = np.stack([starts, ends], axis=1).reshape(-1)
    pieces = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data])
    return pieces.take(int64_array(np.arange(0, len(offsets), 2)))


def number_column(data: pa.Buffer, spans: Spans, dtype: str) -> pa.Array:
    """One number per sample."""
    starts, ends = spans
    kind = np.dtype(dtype)
    if (ends - starts != kind.itemsize).any():
        raise ValueError(f"a number is not {kind.itemsize} bytes long")
    values = np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(kind.itemsize)].view(kind).reshape(-1)
    if kind.kind == "b" or dtype == "|b1":
        return pa.array(values.astype(bool).tolist(), pa.bool_())
    return pa.Array.from_buffers(pa.from_numpy_dtype(kind), len(values), [None, pa.py_buffer(values)])


def list_type(dtype: str) -> pa.DataType:
    """What arrays of a type come as: unsigned numbers may be token ids."""
    kind = np.dtype(dtype).kind
    if kind == "u" and np.dtype(dtype).itemsize <= 4:
        return pa.large_list(pa.uint32())
    return pa.large_list(pa.int64() if kind in "iu" else pa.float64() if kind == "f" else pa.bool_())


def array_column(data: pa.Buffer, spans: Spans, dtype: str) -> pa.Array:
    """One array of numbers, of any length, per sample: `list_type(dtype)`[n]."""
    kind = np.dtype(dtype)
    lengths, rest = np.divmod(spans[1] - spans[0], kind.itemsize)
    if rest.any():
        raise ValueError(f"an array is no whole number of {kind.name}")
    content = bytes_column(data, spans)
    count = int(lengths.sum())
    values = np.frombuffer(content.buffers()[2] or b"", kind, count) if count else np.empty(0, kind)
    wanted = list_type(dtype)
    if wanted.value_type == pa.uint32():
        return token_lists(values, lengths)
    if wanted.value_type == pa.bool_():
        items = pa.array(values.astype(bool).tolist(), pa.bool_())
    else:
        target = np.int64 if wanted.value_type == pa.int64() else np.float64
        if kind == np.uint64 and len(values) and int(values.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{int(values.max())} does not fit into 64 bits with a sign")
        values = np.ascontiguousarray(values, target)
        items = pa.Array.from_buffers(wanted.value_type, len(values), [None, pa.py_buffer(values)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.LargeListArray.from_arrays(int64_array(offsets), items)
