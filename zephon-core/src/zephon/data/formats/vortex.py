"""Vortex files, read with their own library: a group is one of the file's own splits.

Layout and library: https://github.com/vortex-data/vortex.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.data.columns import top_level
from zephon.data.formats.base import Format, Group, Groups, Shard, library, read_exactly, sample_digest
from zephon.data.storage import StoredFile
from zephon.errors import ZephonError

# Holds the footer of nearly any file, which is what the digest is of.
_TAIL_BYTES = 64 << 10


class Vortex(Format):
    """Vortex files. Group offset = first row, length = rows."""

    name = "vortex"
    suffixes = (".vortex", ".vtx")

    def open_shard(self, file: StoredFile) -> Shard:
        return _VortexShard(file)


class _VortexShard(Shard):
    """Keeps the parsed footer; the file is open only while it is read."""

    def __init__(self, file: StoredFile) -> None:
        super().__init__(file)
        with _opened(file) as opened:
            self.schema = opened.dtype.to_arrow_schema()
            self._splits = np.array(opened.splits(), np.int64).reshape(-1, 2)
            self._footer: Any = opened.footer

    def scan(self, size_column: str) -> tuple[str, Groups]:
        file, (starts, ends) = self.file, self._splits.T
        rows = ends - starts
        if (rows < 0).any() or (starts != np.append(0, ends)[: len(starts)]).any():
            raise ValueError("its splits do not follow each other")
        # The file does not say how many bytes a column has.
        sizes = (file.size * (rows / max(int(rows.sum()), 1))).astype(np.int64)
        with file.open() as handle:
            tail = read_exactly(handle, max(file.size - _TAIL_BYTES, 0), min(_TAIL_BYTES, file.size), file.size)
            digest = hashlib.sha256(tail + sample_digest(handle, file.size, 4)).hexdigest()[:32]
        return digest, np.stack([rows, sizes, starts, rows], axis=1)

    def ranges(self, group: Group, columns: Sequence[str]) -> None:
        return None

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        wanted = top_level(columns, self.schema.names) or self.schema.names[:1]
        with _opened(self.file, self._footer) as opened:
            rows = opened.to_repeated_scan(wanted).execute(row_range=(group.offset, group.offset + group.length))
            return rows.read_all().to_arrow_table().combine_chunks()


class _Bytes:
    """What the library reads from. It makes texts of the errors of its reader, so the last one is kept here."""

    def __init__(self, handle: Any, size: int) -> None:
        self._handle, self._size = handle, size
        self.error: ZephonError | None = None

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, length: int) -> Any:
        try:
            return self._handle.read_at(length, offset)
        except ZephonError as error:
            self.error = error
            raise


@contextmanager
def _opened(file: StoredFile, footer: Any = None) -> Iterator[Any]:
    """The library's file; an error of a store is raised as it is, and is no damage of the file."""
    with library("vortex", file.path) as vortex, file.open() as handle:
        source = _Bytes(handle, file.size)
        try:
            yield vortex.open_readable(source, footer=footer, without_segment_cache=True)
        except Exception:
            if source.error is not None:
                raise source.error from None
            raise
