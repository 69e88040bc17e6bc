"""Between NumPy and Arrow without copies, and without pandas.

`pyarrow.array(...)` and `Array.to_numpy()` import pandas where it is installed, which delays the first batch of a
process by up to a second. The functions here use Arrow's buffers instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def choose_allocator() -> None:
    """Take jemalloc where pyarrow would take mimalloc and nobody has chosen.

    mimalloc gives pages back to the system that the next row group needs again: a fifth of all CPU time.
    """
    is_default = "ARROW_DEFAULT_MEMORY_POOL" not in os.environ and pa.default_memory_pool().backend_name == "mimalloc"
    if is_default and "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())


def int64_array(values: np.ndarray) -> pa.Int64Array:
    """An Arrow array over the memory of int64[n] (any integers are converted)."""
    return _number_array(values, np.int64, pa.int64())


def int32_array(values: np.ndarray) -> pa.Int32Array:
    """An Arrow array over the memory of int32[n] (any integers are converted)."""
    return _number_array(values, np.int32, pa.int32())


def _number_array(values: Any, dtype: Any, kind: pa.DataType, nulls: pa.Buffer | None = None) -> pa.Array:
    values = np.ascontiguousarray(values, dtype=dtype)
    return pa.Array.from_buffers(kind, len(values), [nulls, pa.py_buffer(values)])


def bool_array(mask: np.ndarray) -> pa.BooleanArray:
    """An Arrow array of bool[n]."""
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, _bitmap(mask)])


def string_array(texts: Sequence[str], kind: pa.DataType | None = None, nulls: pa.Buffer | None = None) -> pa.Array:
    """A string array of `texts`, none of them None; `kind` is pa.string() or pa.large_string()."""
    kind = kind or pa.string()
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64 if pa.types.is_large_string(kind) else np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return pa.Array.from_buffers(kind, len(encoded), [nulls, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))])


def values_of(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The values of a fixed-width numeric array without nulls, as a read-only view where it has one chunk."""
    if isinstance(array, pa.ChunkedArray):
        parts = [values_of(chunk) for chunk in array.chunks]
        if len(parts) != 1:
            return np.concatenate([np.empty(0, dtype=str(array.type)), *parts])
        return parts[0]
    assert not array.null_count
    dtype = np.dtype(str(array.type))
    data = array.buffers()[1]
    if not len(array):
        return np.empty(0, dtype=dtype)
    return np.frombuffer(data, dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)


def _bits(buffer: pa.Buffer, offset: int, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), bitorder="little")[offset : offset + count].view(bool)


def valid_mask(array: pa.Array) -> np.ndarray:
    """bool[n]: which values are not null."""
    bitmap = array.buffers()[0]
    if bitmap is None or not array.null_count:
        return np.ones(len(array), dtype=bool)
    return _bits(bitmap, array.offset, len(array))


def mask_of(array: pa.BooleanArray) -> np.ndarray:
    """bool[n] of an Arrow boolean array; undefined at nulls."""
    if not len(array):
        return np.empty(0, dtype=bool)
    return _bits(array.buffers()[1], array.offset, len(array))


def true_mask(array: pa.BooleanArray) -> np.ndarray:
    """bool[n]: which values are true, and not null."""
    return mask_of(array) & valid_mask(array) if array.null_count else mask_of(array)


def byte_lengths(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """int64[n]: bytes of the content of each value, 0 for nulls.

    Exact for text and binary; for lists and structs the sum over their items or fields.
    """
    if isinstance(array, pa.ChunkedArray):
        parts = [byte_lengths(chunk) for chunk in array.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *parts])
    kind = array.type
    if not len(array) or pa.types.is_null(kind):
        return np.zeros(len(array), dtype=np.int64)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        lengths = np.diff(_offsets(array, np.int32)).astype(np.int64)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        lengths = np.diff(_offsets(array, np.int64))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        bounds = _offsets(array, np.int64 if pa.types.is_large_list(kind) else np.int32)
        items = array.keys if pa.types.is_map(kind) else array.values
        sizes = byte_lengths(items)
        if pa.types.is_map(kind):
            sizes = sizes + byte_lengths(array.items)
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        lengths = np.diff(ends[bounds])
    elif pa.types.is_struct(kind):
        lengths = np.zeros(len(array), dtype=np.int64)
        for field in range(kind.num_fields):
            lengths += byte_lengths(array.field(field))
    else:
        lengths = np.full(len(array), max(1, array.nbytes // len(array)), dtype=np.int64)
    if array.null_count:
        lengths[~valid_mask(array)] = 0
    return lengths


def _offsets(array: pa.Array, dtype: Any) -> np.ndarray:
    """The n + 1 offsets of an array of texts, lists or maps."""
    width = np.dtype(dtype).itemsize
    return np.frombuffer(array.buffers()[1], dtype=dtype, count=len(array) + 1, offset=array.offset * width)


def list_offsets(array: pa.Array) -> np.ndarray:
    """int64[n + 1]: where each list of a list or large_list array begins among `array.values`."""
    if not len(array):
        return np.zeros(1, dtype=np.int64)
    large = pa.types.is_large_list(array.type)
    return _offsets(array, np.int64 if large else np.int32).astype(np.int64, copy=False)


def ragged_take(offsets: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the items of the chosen lists.

    Args:
        offsets: int64[n_lists + 1], list i being items `offsets[i]:offsets[i + 1]`.
        indices: int64[m], the lists wanted, in any order.

    Returns:
        items int64[total], indices into the flat items, and new_offsets int64[m + 1].
    """
    counts = offsets[indices + 1] - offsets[indices]
    new_offsets = np.zeros(len(indices) + 1, dtype=np.int64)
    np.cumsum(counts, out=new_offsets[1:])
    shift = np.repeat(offsets[indices] - new_offsets[:-1], counts)
    return shift + np.arange(new_offsets[-1], dtype=np.int64), new_offsets


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.nulls(0, column.type)
    return pa.concat_arrays(column.chunks)


def column_of(values: Sequence[Any]) -> pa.Array:
    """An Arrow array of Python values, of the type that `pyarrow.array` infers; text becomes `large_string`.

    Values of one type among str, int, float and bool are converted without `pyarrow.array`, which imports pandas.

    Raises:
        pa.ArrowException, TypeError, ValueError, OverflowError: the values are not of one type.
    """
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        return pa.nulls(len(values))
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in (str, int, float, bool):
        array = pa.array(values)
        return array.cast(pa.large_string()) if pa.types.is_string(array.type) else array
    nulls = None
    if None in values:
        nulls = _bitmap([value is not None for value in values])
        values = [kind() if value is None else value for value in values]
    if kind is str:
        return string_array(values, pa.large_string(), nulls)
    if kind is bool:
        return pa.Array.from_buffers(pa.bool_(), len(values), [nulls, _bitmap(values)])
    if kind is int:
        return _number_array(values, np.int64, pa.int64(), nulls)
    return _number_array(values, np.float64, pa.float64(), nulls)


def _bitmap(flags: Any) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.array(flags, dtype=bool), bitorder="little"))
