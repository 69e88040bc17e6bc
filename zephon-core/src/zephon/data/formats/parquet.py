"""Parquet: a group is a row group; a scan reads the footer and nothing else."""

import hashlib
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from zephon.columns.damage import Damaged
from zephon.data.columns import check_columns, physical_columns, sound_table, with_paths
from zephon.data.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors
from zephon.data.storage import StoredFile

__all__ = ["Parquet"]

# The end of a file that is fetched at once; holds nearly every footer, and costs no more than a few bytes would.
_TAIL_BYTES = 64 * 1024
_MAX_GROUP_ROWS = 2**40
_SIZED_GROUPS = 16


class Parquet:
    """The `Format` of Parquet files. Group offset = row group number, length = its size column's compressed bytes."""

    name = "parquet"
    suffixes = (".parquet", ".pq")

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        metadata, digest = _footer(file)
        with corrupt_data_errors(file, self.name):
            schema = metadata.schema.to_arrow_schema()
            check_columns(schema, [size_column], size_column if is_text else None, file.path)
            paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            # A nested column has several leaves, a template several columns.
            sized = physical_columns([size_column])
            leaves = [i for i, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in sized)]
            groups = []
            for number in range(metadata.num_row_groups):
                row_group = metadata.row_group(number)
                chunks = [row_group.column(leaf) for leaf in leaves]
                bounded = all(0 <= column.data_page_offset < file.size for column in chunks)
                if not 0 <= row_group.num_rows < _MAX_GROUP_ROWS or not bounded:
                    raise ValueError(f"row group {number} has impossible bounds")
                size = sum(max(column.total_uncompressed_size, 0) for column in chunks)
                packed = sum(max(column.total_compressed_size, 0) for column in chunks)
                groups.append((row_group.num_rows, size, number, packed))
            return ShardScan.of(digest, with_paths(schema, size_column), groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        metadata, _ = _footer(file)
        with corrupt_data_errors(file, self.name):
            return dict.fromkeys(metadata.schema.to_arrow_schema().names)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        return _ParquetReader(file, columns, text_column)


class _ParquetReader:
    """Keeps the parsed footer; opens the file anew for each group (14 us), so no descriptor stays open."""

    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        self._metadata, self.digest = _footer(file)
        with corrupt_data_errors(file, Parquet.name):
            schema = self._metadata.schema.to_arrow_schema()
            check_columns(schema, self._columns, text_column, file.path, strict=False)
        self._physical = physical_columns(self._columns)

    @property
    def row_bytes(self) -> float:
        """Uncompressed bytes per row of the columns that are read, over the first row groups of the file."""
        size = rows = 0
        for number in range(min(self._metadata.num_row_groups, _SIZED_GROUPS)):
            row_group = self._metadata.row_group(number)
            rows += max(row_group.num_rows, 0)
            chunks = (row_group.column(column) for column in range(row_group.num_columns))
            size += sum(max(chunk.total_uncompressed_size, 0) for chunk in chunks if self._is_read(chunk))
        return size / max(1, rows)

    def _is_read(self, chunk: pq.ColumnChunkMetaData) -> bool:
        return any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in self._physical)

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the column chunks that `read` will fetch, neighbours in one."""
        if self._file.source is None:
            return []
        spans = []
        row_group = self._metadata.row_group(group.offset)
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            if self._is_read(chunk):
                start = chunk.data_page_offset
                if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
                    start = chunk.dictionary_page_offset
                stop = start + max(chunk.total_compressed_size, 0)
                if 0 <= start < stop <= self._file.size:
                    spans.append((start, stop))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return [(start, stop - start) for start, stop in merged]

    def read(self, group: Group) -> pa.Table:
        file = self._file
        with (
            corrupt_data_errors(file, Parquet.name, f" (row group {group.offset})"),
            file.open(self.ranges(group)) as handle,
        ):
            # One thread per call: the engine's own worker threads are the parallelism. No pre-buffering either: on
            # local files it is no faster, and it hands the reads to Arrow's own pool of I/O threads.
            reader = pq.ParquetFile(handle, metadata=self._metadata, pre_buffer=False, page_checksum_verification=True)
            table = reader.read_row_group(group.offset, columns=self._physical, use_threads=False)
            if table.num_rows != group.rows:
                raise Damaged(
                    f"'{file.path}' row group {group.offset} holds {table.num_rows} rows, not the {group.rows} of its "
                    "footer; the file is damaged or has changed, so restore it"
                )
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        pass


def _footer(file: StoredFile) -> tuple[pq.FileMetaData, str]:
    """The parsed footer and a digest of its bytes, from one read of the file's end (two for a large footer)."""
    with corrupt_data_errors(file, Parquet.name), file.open() as handle:
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
