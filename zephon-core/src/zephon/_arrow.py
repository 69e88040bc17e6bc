"""Between NumPy and Arrow without copies, and without pandas.

`pyarrow.array(...)` and `Array.to_numpy()` import pandas where it is installed, which costs a process up to a second at
its first batch, for nothing. These go through the buffers instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

__all__ = ["byte_lengths", "int32_array", "int64_array", "mask_of", "string_array", "valid_mask", "values_of"]


def int64_array(values: np.ndarray) -> pa.Int64Array:
    """An Arrow array over the memory of int64[n] (any integers are converted)."""
    values = np.ascontiguousarray(values, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def int32_array(values: np.ndarray) -> pa.Int32Array:
    """An Arrow array over the memory of int32[n] (any integers are converted)."""
    values = np.ascontiguousarray(values, dtype=np.int32)
    return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])


def string_array(texts: Sequence[str], kind: pa.DataType | None = None) -> pa.Array:
    """A string array of `texts`, none of them None; `kind` is pa.string() or pa.large_string()."""
    kind = kind or pa.string()
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64 if pa.types.is_large_string(kind) else np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return pa.Array.from_buffers(kind, len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))])


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
    """bool[n] of an Arrow boolean array; what a null holds is undefined."""
    if not len(array):
        return np.empty(0, dtype=bool)
    return _bits(array.buffers()[1], array.offset, len(array))


def byte_lengths(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """int64[n]: bytes of each value of a string or binary array, 0 for nulls."""
    if isinstance(array, pa.ChunkedArray):
        parts = [byte_lengths(chunk) for chunk in array.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *parts])
    if not len(array):
        return np.empty(0, dtype=np.int64)
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    dtype = np.dtype(np.int64 if large else np.int32)
    offsets = np.frombuffer(array.buffers()[1], dtype=dtype, count=len(array) + 1, offset=array.offset * dtype.itemsize)
    lengths = np.diff(offsets).astype(np.int64, copy=False)
    if array.null_count:
        lengths[~valid_mask(array)] = 0
    return lengths
