"""Megatron's indexed datasets: token ids in `name.bin`, where sequences and documents begin in `name.idx`.

A row is a document, column "tokens" (large_list<uint32>); a group is a run of documents. The shard is the .bin file,
and the .idx file lies beside it. Group offset and length are bytes of the .bin file. Of the index only what a group
needs is read at a time. Layout: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.columns import check_columns, sound_table
from zephon.data.formats.base import (
    TOKENS,
    Group,
    ShardReader,
    ShardScan,
    corrupt_data_errors,
    read_exactly,
    run_bounds,
    sample_digest,
    token_lists,
)
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["Megatron", "index_name"]

_SCHEMA = pa.schema([(TOKENS, pa.large_list(pa.uint32()))])
_HEADER = struct.Struct("<9sQBQQ")
_MARK = b"MMIDIDX\x00\x00"
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
# Sequences whose part of the index is in memory at a time: 20 bytes each.
_BLOCK = 1 << 18
_SAMPLES = 4


def index_name(name: str) -> str:
    """The name of the index of a .bin file."""
    return f"{name[:-4]}.idx"


class Megatron:
    """The `Format` of Megatron's indexed datasets."""

    name = "megatron"
    suffixes = (".bin",)

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        check_columns(_SCHEMA, [size_column], size_column if is_text else None, file.path)
        digest, groups = hashlib.sha256(), []
        with corrupt_data_errors(file, self.name):
            index = _Index(file)
            with index.file.open() as handle, file.open() as data:
                digest.update(index.header)
                index.check_modes(handle)
                position = 0
                for first in range(0, index.documents, _BLOCK):
                    count = min(_BLOCK, index.documents - first)
                    sizes, raw = index.document_bytes(handle, first, count, position)
                    digest.update(raw)
                    bounds = run_bounds(sizes)
                    ends = position + np.cumsum(sizes)
                    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                        length = int(sizes[low:high].sum())
                        groups.append((high - low, length, int(ends[high - 1]) - length, length))
                    position = int(ends[-1])
                if position != file.size:
                    raise ValueError(f"its index describes {position} bytes, and it has {file.size}")
                digest.update(sample_digest(data, file.size, _SAMPLES))
        return ShardScan.of(digest.hexdigest()[:32], _SCHEMA, groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        return dict.fromkeys(_SCHEMA.names)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        check_columns(_SCHEMA, columns, text_column, file.path, strict=False)
        return _MegatronReader(file, columns, text_column)


class _MegatronReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        with corrupt_data_errors(file, Megatron.name):
            self._index = _Index(file)

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        return [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        file, index = self._file, self._index
        with corrupt_data_errors(file, Megatron.name, f" (documents from row {group.first_row})"):
            with index.file.open() as handle:
                sizes, _ = index.document_bytes(handle, group.first_row, group.rows, group.offset)
            if int(sizes.sum()) != group.length:
                raise ValueError(f"{int(sizes.sum())} bytes, where {group.length} were listed")
            with file.open() as handle:
                data = read_exactly(handle, group.offset, group.length, file.size)
            tokens = token_lists(np.frombuffer(data, index.dtype), sizes // index.dtype.itemsize)
            table = pa.table({TOKENS: tokens})
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        pass


class _Index:
    """The header of an .idx file, and the parts behind it by range."""

    def __init__(self, file: StoredFile) -> None:
        self.file = file.beside(index_name(file.path.rpartition("/")[2]))
        size = self.file.size
        with self.file.open() as handle:
            self.header = read_exactly(handle, 0, _HEADER.size, size)
        mark, version, code, sequences, documents = _HEADER.unpack(self.header)
        if mark != _MARK or version != 1:
            raise ValueError("its index does not begin as Megatron's version 1 does")
        if code not in _DTYPES:
            raise ValueError(f"its index names the unknown type {code}")
        self.dtype: np.dtype[Any] = np.dtype(_DTYPES[code])
        if self.dtype.kind == "f":
            raise DataError(f"'{file.path}' holds numbers of type {self.dtype.name}, and token ids were expected")
        self._lengths = _HEADER.size
        self._pointers = self._lengths + 4 * sequences
        self._bounds = self._pointers + 8 * sequences
        self._modes = self._bounds + 8 * documents
        self.sequences, self.documents = sequences, documents - 1
        if documents < 1 or size not in (self._modes, self._modes + sequences):
            raise ValueError(f"its index has {size} bytes, and {self._modes} follow from its header")

    def check_modes(self, handle: Any) -> None:
        """Refuses datasets of mixed kinds: what is not tokens must not be read as tokens."""
        for first in range(self._modes, self.file.size, _BLOCK):
            modes = read_exactly(handle, first, min(_BLOCK, self.file.size - first), self.file.size)
            if modes.strip(b"\0"):
                raise DataError(f"'{self.file.path}' is of a multimodal dataset, and only text can be read; split it")

    def document_bytes(self, handle: Any, first: int, count: int, position: int) -> tuple[npt.NDArray[np.int64], bytes]:
        """(bytes of `count` documents from `first` on, int64[count]; the index read for it).

        The first must begin at byte `position` of the .bin file, and all must follow each other without gaps.
        """
        if first < 0 or first + count > self.documents:
            raise ValueError(f"documents {first} to {first + count} are wanted, and it has {self.documents}")
        raw = [self._part(handle, self._bounds + 8 * first, 8 * (count + 1))]
        bounds = np.frombuffer(raw[0], "<i8")
        if first == 0 and bounds[0] != 0:
            raise ValueError("its first document does not begin with its first sequence")
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > self.sequences:
            raise ValueError("its index has documents that end before they begin")
        if first + count == self.documents and bounds[-1] != self.sequences:
            raise ValueError("its index has sequences that belong to no document")
        sizes = np.zeros(int(bounds[-1] - bounds[0]) + 1, np.int64)  # ends of sequences, from the first one's start
        for start in range(int(bounds[0]), int(bounds[-1]), _BLOCK):
            n = min(_BLOCK, int(bounds[-1]) - start)
            raw.append(self._part(handle, self._lengths + 4 * start, 4 * n))
            lengths = np.frombuffer(raw[-1], "<i4").astype(np.int64)
            raw.append(self._part(handle, self._pointers + 8 * start, 8 * n))
            pointers = np.frombuffer(raw[-1], "<i8")
            at = start - int(bounds[0])
            if (lengths < 0).any():
                raise ValueError("its index has a sequence of less than no tokens")
            sizes[at + 1 : at + 1 + n] = sizes[at] + np.cumsum(lengths * self.dtype.itemsize)
            if not np.array_equal(pointers, position + sizes[at : at + n]):
                raise ValueError("its index has sequences that do not follow each other")
        return np.diff(sizes[bounds - bounds[0]]), b"".join(raw)

    def _part(self, handle: Any, offset: int, length: int) -> bytes:
        return read_exactly(handle, offset, length, self.file.size)
