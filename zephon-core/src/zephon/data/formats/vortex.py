"""Vortex files, read with their own library: a group is one of the file's own splits.

Layout and library: https://github.com/vortex-data/vortex.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.data.columns import check_columns, sound_table, top_level, with_paths
from zephon.data.formats.base import (
    Group,
    ShardReader,
    ShardScan,
    corrupt_data_errors,
    library,
    read_exactly,
    sample_digest,
)
from zephon.data.storage import StoredFile
from zephon.errors import ZephonError

__all__ = ["Vortex"]

# Holds the footer of nearly any file, which is what the digest is of.
_TAIL_BYTES = 64 << 10


class Vortex:
    """The `Format` of Vortex files. Group offset = first row, length = rows."""

    name = "vortex"
    suffixes = (".vortex", ".vtx")

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        with corrupt_data_errors(file, self.name), _opened(file) as (opened, handle):
            schema = opened.dtype.to_arrow_schema()
            check_columns(schema, [size_column], size_column if is_text else None, file.path)
            splits = np.array(opened.splits(), np.int64).reshape(-1, 2)
            rows = np.diff(splits, axis=1)[:, 0]
            total = max(int(rows.sum()), 1)
            if (rows < 0).any() or (len(splits) and (splits[0, 0] or (splits[1:, 0] != splits[:-1, 1]).any())):
                raise ValueError("its splits do not follow each other")
            # The file does not say how many bytes a column has.
            groups = np.stack([rows, (file.size * (rows / total)).astype(np.int64), splits[:, 0], rows], axis=1)
            tail = read_exactly(handle, max(file.size - _TAIL_BYTES, 0), min(_TAIL_BYTES, file.size), file.size)
            digest = hashlib.sha256(tail + sample_digest(handle, file.size, 4)).hexdigest()[:32]
        return ShardScan.of(digest, with_paths(schema, size_column), groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name), _opened(file) as (opened, _):
            return dict.fromkeys(opened.dtype.to_arrow_schema().names)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        return _VortexReader(file, columns, text_column)


class _VortexReader:
    """Keeps the parsed footer; the file is open only while it is read."""

    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        with corrupt_data_errors(file, Vortex.name), _opened(file) as (opened, _):
            schema = opened.dtype.to_arrow_schema()
            check_columns(schema, self._columns, text_column, file.path, strict=False)
            self._wanted = top_level(self._columns, schema.names) or schema.names[:1]
            self._footer: Any = opened.footer

    def read(self, group: Group) -> pa.Table:
        file = self._file
        with (
            corrupt_data_errors(file, Vortex.name, f" (rows from {group.first_row})"),
            _opened(file, self._footer) as (opened, _),
        ):
            scan = opened.to_repeated_scan(self._wanted)
            found = scan.execute(row_range=(group.offset, group.offset + group.length)).read_all().to_arrow_table()
            table = found.combine_chunks()
            if table.num_rows != group.rows:
                raise ValueError(f"{table.num_rows} rows, where {group.rows} were listed")
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        pass


class _Bytes:
    """What the library reads from. It makes texts of the errors of its reader; here is what they were."""

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
def _opened(file: StoredFile, footer: Any = None) -> Iterator[tuple[Any, Any]]:
    """The library's file, and ours; what a store does not give is its error, not damage of the file."""
    with library("vortex", "vortex", file.path) as vortex, file.open() as handle:
        source = _Bytes(handle, file.size)
        try:
            yield vortex.open_readable(source, footer=footer, without_segment_cache=True), handle
        except Exception:
            if source.error is not None:
                raise source.error from None
            raise
