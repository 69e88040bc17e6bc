"""Parquet: a group is a row group; a scan reads the footer and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

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
    """Keeps the parsed footer; opens the file anew for each group (14 us), so no descriptor stays open."""

    def __init__(self, file: StoredFile) -> None:
        super().__init__(file)
        self._metadata, self.digest = _footer(file)
        self.schema = self._metadata.schema.to_arrow_schema()
        self._leaves = [f"{self._metadata.schema.column(i).path}." for i in range(self._metadata.num_columns)]

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
        with self.file.open(self.ranges(group, columns)) as handle:
            # One thread per call: the engine's own worker threads are the parallelism. No pre-buffering either: on
            # local files it is no faster, and it hands the reads to Arrow's own pool of I/O threads.
            reader = pq.ParquetFile(handle, metadata=self._metadata, pre_buffer=False, page_checksum_verification=True)
            names = list(columns)
            try:
                return reader.read_row_group(group.offset, columns=names, use_threads=False)
            except pa.ArrowNotImplementedError:  # of a nested column with more than 2 GiB of text, which goes in parts
                parts = reader.iter_batches(_PART_ROWS, [group.offset], names, use_threads=False)
                return pa.Table.from_batches(parts)


def _footer(file: StoredFile) -> tuple[pq.FileMetaData, str]:
    """The parsed footer and a digest of its bytes, from one read of the file's end (two for a large footer)."""
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
        return pq.read_metadata(pa.BufferReader(footer)), hashlib.sha256(footer).hexdigest()[:32]
