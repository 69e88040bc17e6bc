"""Files of token ids: Megatron's indexed datasets, NumPy's .npy, and plain numbers without any header.

Column "tokens" (large_list<uint32>); a group is a run of rows, its offset and length are bytes of the file.

Megatron: ids in `name.bin`, where sequences and documents begin in `name.idx` beside it; a row is a document. Of the
index only what a group needs is read at a time. An array of two dimensions has a row per row. One of one dimension does
not say where documents begin; it is cut into rows of `ROW_TOKENS` ids, the last one shorter, so that they can be
shuffled. What has no header is read only where the format is named, for nothing in such a file says what it is:
"uint16" for nanoGPT's .bin, "uint32" for what larger vocabularies need (OLMo's .npy are such files, too).

Layout: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.formats import base
from zephon.data.formats.base import (
    TOKENS,
    Format,
    Group,
    Groups,
    Shard,
    read_exactly,
    run_groups,
    sample_digest,
    token_lists,
)
from zephon.data.formats.content import LFS_POINTER, other_content
from zephon.data.storage import StoredFile
from zephon.errors import DataError

ROW_TOKENS = 8192

_NUMPY_MARK = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 16
_ARRAY_SAMPLES, _MEGATRON_SAMPLES = 64, 4
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_MARK = b"MMIDIDX\x00\x00"
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
# Sequences whose part of the index is in memory at a time: 20 bytes each.
_BLOCK = 1 << 18


class _TokenShard(Shard):
    """Numbers of `dtype`; subclasses say how many belong to each row of a group."""

    schema = pa.schema([(TOKENS, pa.large_list(pa.uint32()))])
    dtype: np.dtype[Any]

    def lengths(self, group: Group) -> npt.NDArray[np.int64]:
        """int64[rows]: tokens of each row; their sum is found to be that of the group."""
        raise NotImplementedError

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        lengths = self.lengths(group)
        if int(lengths.sum()) * self.dtype.itemsize != group.length:
            raise ValueError("its rows lie elsewhere than when it was listed")
        return pa.table({TOKENS: token_lists(np.frombuffer(self.content(group), self.dtype), lengths)})


class NumpyTokens(Format):
    """.npy files of whole numbers."""

    name = "numpy"
    suffixes = (".npy",)

    def open_shard(self, file: StoredFile) -> Shard:
        with file.open() as handle:
            head = io.BytesIO(read_exactly(handle, 0, min(_MAX_HEADER_BYTES, file.size), file.size))
        if not head.getvalue().startswith(_NUMPY_MARK):
            raise DataError(
                other_content(file)
                or f"'{file.path}' does not begin as an .npy file; if it holds plain numbers without a header, say "
                'which with fmt = "uint16" or "uint32"'
            )
        is_first = np.lib.format.read_magic(head) == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(head)
        if dtype.kind not in "iu" or len(shape) not in (1, 2) or not all(0 <= number <= 2**48 for number in shape):
            kind = "pickled Python objects" if dtype.hasobject else f"{dtype.name} of shape {shape}"
            raise DataError(f"'{file.path}' holds {kind}; expected token ids, whole numbers of one or two dimensions")
        if len(shape) == 2 and is_fortran:
            raise DataError(f"'{file.path}' is in Fortran order; save it in C order (numpy.ascontiguousarray)")
        return _ArrayShard(file, dtype, head.getvalue()[: head.tell()], shape)


class PlainTokens(Format):
    """Files that are numbers and nothing else, little-endian."""

    suffixes = (".bin", ".npy")
    found_by_name = False

    def __init__(self, name: str) -> None:
        self.name = name

    def open_shard(self, file: StoredFile) -> Shard:
        with file.open() as handle:
            head = read_exactly(handle, 0, min(len(LFS_POINTER), file.size), file.size)
            if head == LFS_POINTER:
                raise ValueError("a pointer")
            if head.startswith(_NUMPY_MARK):
                raise DataError(f"'{file.path}' is an .npy file, which says itself what it holds; use fmt = \"numpy\"")
        dtype = np.dtype(self.name).newbyteorder("<")
        if file.size % dtype.itemsize:
            raise ValueError(f"its {file.size} bytes are no whole number of {self.name}")
        return _ArrayShard(file, dtype, b"", (file.size // dtype.itemsize,))


class _ArrayShard(_TokenShard):
    """An array of `shape` behind a header."""

    def __init__(self, file: StoredFile, dtype: np.dtype[Any], header: bytes, shape: tuple[int, ...]) -> None:
        super().__init__(file)
        self.dtype, self._header, self._total = dtype, header, math.prod(shape)
        self._rows, self._width = shape if len(shape) == 2 else (-(-self._total // ROW_TOKENS), ROW_TOKENS)
        if (size := len(header) + self._total * dtype.itemsize) != file.size:
            raise ValueError(f"{self._total} numbers of type {dtype.name} take {size} bytes, and it has {file.size}")

    def scan(self, size_column: str) -> tuple[str, Groups]:
        with self.file.open() as handle:
            content = sample_digest(handle, self.file.size, _ARRAY_SAMPLES)
        row_bytes = self._width * self.dtype.itemsize
        per_group = max(1, base.RUN_BYTES // row_bytes) if row_bytes else 1
        bounds = np.append(np.arange(0, self._rows, per_group, dtype=np.int64), self._rows)
        offsets = len(self._header) + np.minimum(bounds * self._width, self._total) * self.dtype.itemsize
        sizes = np.diff(offsets)
        groups = np.stack([np.diff(bounds), sizes, offsets[:-1], sizes], axis=1)
        return hashlib.sha256(self._header + content).hexdigest()[:32], groups

    def lengths(self, group: Group) -> npt.NDArray[np.int64]:
        starts = np.arange(group.first_row, group.first_row + group.rows + 1, dtype=np.int64) * self._width
        starts = np.minimum(starts, self._total)
        if len(self._header) + int(starts[0]) * self.dtype.itemsize != group.offset:
            raise ValueError("its rows lie elsewhere than when it was listed")
        return np.diff(starts)


class Megatron(Format):
    """Megatron's indexed datasets; the shard is the .bin file."""

    name = "megatron"
    suffixes = (".bin",)
    companion = "its .idx file (Megatron)"

    def claims(self, name: str, beside: AbstractSet[str]) -> bool:
        return super().claims(name, beside) and f"{name[:-4]}.idx" in beside

    def open_shard(self, file: StoredFile) -> Shard:
        return _MegatronShard(file)


class _MegatronShard(_TokenShard):
    """Keeps the header of the .idx file, and reads the parts behind it by range."""

    def __init__(self, file: StoredFile) -> None:
        super().__init__(file)
        self._index = file.beside(f"{file.path.rpartition('/')[2][:-4]}.idx")
        size = self._index.size
        with self._index.open() as handle:
            self._header = read_exactly(handle, 0, _INDEX_HEADER.size, size)
        mark, version, code, sequences, documents = _INDEX_HEADER.unpack(self._header)
        if mark != _INDEX_MARK or version != 1:
            raise ValueError("its index does not begin as Megatron's version 1 does")
        if code not in _DTYPES:
            raise ValueError(f"its index names the unknown type {code}")
        self.dtype = np.dtype(_DTYPES[code])
        if self.dtype.kind == "f":
            raise DataError(f"'{file.path}' holds numbers of type {self.dtype.name}, and token ids were expected")
        self._lengths = _INDEX_HEADER.size
        self._pointers = self._lengths + 4 * sequences
        self._bounds = self._pointers + 8 * sequences
        self._modes = self._bounds + 8 * documents
        self._sequences, self._documents = sequences, documents - 1
        if documents < 1 or size not in (self._modes, self._modes + sequences):
            raise ValueError(f"its index has {size} bytes, and {self._modes} follow from its header")

    def scan(self, size_column: str) -> tuple[str, Groups]:
        digest = hashlib.sha256(self._header)
        groups, position = [np.empty((0, 4), np.int64)], 0
        with self._index.open() as handle:
            # What is not tokens must not be read as tokens.
            for first in range(self._modes, self._index.size, _BLOCK):
                if any(read_exactly(handle, first, min(_BLOCK, self._index.size - first), self._index.size)):
                    raise DataError(
                        f"'{self._index.path}' is of a multimodal dataset, and only text can be read; split it"
                    )
            for first in range(0, self._documents, _BLOCK):
                count = min(_BLOCK, self._documents - first)
                sizes, raw = self._document_bytes(handle, first, count, position)
                digest.update(raw)
                offsets = position + np.concatenate([[0], np.cumsum(sizes)])
                groups.append(run_groups(offsets))
                position = int(offsets[-1])
        if position != self.file.size:
            raise ValueError(f"its index describes {position} bytes, and it has {self.file.size}")
        with self.file.open() as handle:
            digest.update(sample_digest(handle, self.file.size, _MEGATRON_SAMPLES))
        return digest.hexdigest()[:32], np.concatenate(groups)

    def lengths(self, group: Group) -> npt.NDArray[np.int64]:
        with self._index.open() as handle:
            sizes, _ = self._document_bytes(handle, group.first_row, group.rows, group.offset)
        return sizes // self.dtype.itemsize

    def _document_bytes(
        self, handle: Any, first: int, count: int, position: int
    ) -> tuple[npt.NDArray[np.int64], bytes]:
        """(bytes of `count` documents from `first` on, which begin at byte `position`; the index read)."""
        raw: list[bytes] = []

        def numbers(kind: str, offset: int, count: int) -> npt.NDArray[np.int64]:
            raw.append(read_exactly(handle, offset, count * np.dtype(kind).itemsize, self._index.size))
            return np.frombuffer(raw[-1], kind).astype(np.int64)

        bounds = numbers("<i8", self._bounds + 8 * first, count + 1)
        is_last = first + count >= self._documents
        is_whole = (first > 0 or bounds[0] == 0) and (not is_last or bounds[-1] == self._sequences)
        if not is_whole or (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > self._sequences:
            raise ValueError("the documents of its index are not its sequences, one after the other")
        sizes = np.zeros(int(bounds[-1] - bounds[0]) + 1, np.int64)  # ends of sequences, from the first one's start
        for start in range(int(bounds[0]), int(bounds[-1]), _BLOCK):
            n, at = min(_BLOCK, int(bounds[-1]) - start), start - int(bounds[0])
            lengths = numbers("<i4", self._lengths + 4 * start, n)
            pointers = numbers("<i8", self._pointers + 8 * start, n)
            sizes[at + 1 : at + 1 + n] = sizes[at] + np.cumsum(lengths * self.dtype.itemsize)
            if (lengths < 0).any() or not np.array_equal(pointers, position + sizes[at : at + n]):
                raise ValueError("the sequences of its index do not follow each other")
        return np.diff(sizes[bounds - bounds[0]]), b"".join(raw)
