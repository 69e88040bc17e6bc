"""Parquet: a group is a row group; a scan reads the footer and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq

from zephon.data.columns import physical_columns
from zephon.data.formats.base import MAX_GROUP_ROWS, Format, Group, Groups, Shard
from zephon.data.storage import StoredFile

# The end of a file that is fetched at once; holds nearly every footer, and costs no more than a few bytes would.
_TAIL_BYTES = 64 * 1024
_PART_ROWS = 64


class Parquet(Format):
    """Parquet files. Group offset = row group number, length = its size column's compressed bytes."""

    name = "parquet"
    suffixes = (".parquet", ".pq")

    def open_shard(self, file: StoredFile) -> Shard:
        return _ParquetShard(file)


class _ParquetShard(Shard):
    """Keeps the parsed footer; opens the file anew for each group (14 us), so no descriptor stays open.

    Of a small file the footer's read gives everything, which is kept for the first group, often the only one.
    """

    def __init__(self, file: StoredFile) -> None:
        super().__init__(file)
        self._metadata, self.digest, whole = _footer(file)
        self._whole = [whole] if whole is not None else []  # a list, as threads may take from one
        self.schema = self._metadata.schema.to_arrow_schema()

    @cached_property
    def _leaves(self) -> list[str]:
        return [f"{self._metadata.schema.column(i).path}." for i in range(self._metadata.num_columns)]

    def scan(self, size_column: str) -> tuple[str, Groups]:
        groups = []
        for number in range(self._metadata.num_row_groups):
            rows = self._metadata.row_group(number).num_rows
            # A nested column has several leaves, a template several columns.
            chunks = list(self._chunks(number, physical_columns([size_column])))
            bounded = all(0 <= chunk.data_page_offset < self.file.size for chunk in chunks)
            if not 0 <= rows < MAX_GROUP_ROWS or not bounded:
                raise ValueError(f"row group {number} has impossible bounds")
            size = sum(max(chunk.total_uncompressed_size, 0) for chunk in chunks)
            packed = sum(max(chunk.total_compressed_size, 0) for chunk in chunks)
            groups.append((rows, size, number, packed))
        return self.digest or "", groups

    def _chunks(self, number: int, columns: Sequence[str]) -> Iterable[pq.ColumnChunkMetaData]:
        """The column chunks of a row group that hold `columns`."""
        row_group = self._metadata.row_group(number)
        for leaf, path in enumerate(self._leaves):
            if any(path.startswith(f"{name}.") for name in columns):
                yield row_group.column(leaf)

    def ranges(self, group: Group, columns: Sequence[str]) -> list[tuple[int, int]]:
        """The column chunks that are read, neighbours in one."""
        if self.file.source is None:
            return []
        spans = []
        for chunk in self._chunks(group.offset, columns):
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
                start = chunk.dictionary_page_offset
            stop = start + max(chunk.total_compressed_size, 0)
            if 0 <= start < stop <= self.file.size:
                spans.append((start, stop))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return [(start, stop - start) for start, stop in merged]

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        try:
            return _read(self._whole.pop(), group, columns)
        except IndexError:
            pass
        with self.file.open(self.ranges(group, columns)) as handle:
            return _read(_opened(handle, self._metadata), group, columns)


def _opened(handle: pa.NativeFile, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    # No pre-buffering: on local files it is no faster, and it hands the reads to Arrow's own pool of I/O threads.
    return pq.ParquetFile(handle, metadata=metadata, pre_buffer=False, page_checksum_verification=True)


def _read(reader: pq.ParquetFile, group: Group, columns: Sequence[str]) -> pa.Table:
    # One thread per call: the engine's own worker threads are the parallelism.
    try:
        return reader.read_row_group(group.offset, columns=list(columns), use_threads=False)
    except pa.ArrowNotImplementedError:  # of a nested column with more than 2 GiB of text, which goes in parts
        parts = reader.iter_batches(_PART_ROWS, [group.offset], list(columns), use_threads=False)
        return pa.Table.from_batches(parts)


def _footer(file: StoredFile) -> tuple[pq.FileMetaData, str, pq.ParquetFile | None]:
    """The parsed footer, a digest of its bytes, and of a small file that was read whole a reader of its content.

    From one read of the file's end (two for a large footer).
    """
    with file.open() as handle:
        tail = handle.read_at(min(file.size, _TAIL_BYTES), max(file.size - _TAIL_BYTES, 0))
        if len(tail) < 12 or tail[-4:] != b"PAR1":
            kind = "it is encrypted" if tail[-4:] == b"PARE" else "it does not end with the mark of a Parquet file"
            raise ValueError(kind)
        length = int.from_bytes(tail[-8:-4], "little")
        if length + 12 > file.size:
            raise ValueError(f"its footer claims {length} bytes")
        if length + 8 > len(tail):
            tail = handle.read_at(length + 8, file.size - length - 8)
        footer = tail[-(length + 8) :]
        digest = hashlib.sha256(footer).hexdigest()[:32]
        if len(tail) == file.size:
            whole = _opened(pa.BufferReader(tail))
            return whole.metadata, digest, whole
        return pq.read_metadata(pa.BufferReader(footer)), digest, None
