"""Plain text and Markdown: a file is one document, so a shard has one row, and one group.

Columns: "text", and "file_name", which is the last part of the file's path.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence

import pyarrow as pa

from zephon.columns.arrow import string_array
from zephon.data.columns import check_columns, sound_table
from zephon.data.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["PlainText"]

_SCHEMA = pa.schema([("text", pa.large_string()), ("file_name", pa.large_string())])
# A larger file is a corpus, not a document.
_MAX_BYTES = 1 << 30
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class PlainText:
    """The `Format` of text files. Group length = bytes of the file."""

    name = "text"
    suffixes = (".txt", ".text", ".md", ".markdown")

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        check_columns(_SCHEMA, [size_column], size_column if is_text else None, file.path)
        content = _content(file)
        digest = hashlib.sha256(content).hexdigest()[:32]
        return ShardScan.of(digest, _SCHEMA, [(1, len(content), 0, file.size)])

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
        return _TextReader(file, columns, text_column)


class _TextReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        return [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        content = _content(self._file)
        with corrupt_data_errors(self._file, PlainText.name):
            table = pa.table(
                {
                    "text": pa.array([content], pa.large_binary()).view(pa.large_string()),
                    "file_name": string_array([os.path.basename(self._file.path)], pa.large_string()),
                }
            )
            return sound_table(table, self._columns, self._text_column, self._file.path, group.first_row)

    def close(self) -> None:
        pass


def _content(file: StoredFile) -> bytes:
    """The bytes of the file without a byte order mark."""
    if file.size > _MAX_BYTES:
        raise DataError(
            f"'{file.path}' has {file.size:,} bytes, and a text file is one document of at most {_MAX_BYTES >> 20} "
            "MiB; write its documents as JSON lines"
        )
    with corrupt_data_errors(file, PlainText.name), file.open() as handle:
        content: bytes = handle.read(file.size)
        if len(content) != file.size:
            raise ValueError(f"it ends at byte {len(content)}, not {file.size}")
    if content.startswith(_UTF16_MARKS):
        raise DataError(f"'{file.path}' is written as UTF-16, and text files must be UTF-8; convert it")
    return content.removeprefix(_UTF8_MARK)
