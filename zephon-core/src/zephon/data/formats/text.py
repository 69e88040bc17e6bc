"""Plain text and Markdown: a file is one document, so a shard has one row, and one group.

Columns: "text", and "file_name", which is the last part of the file's path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import pyarrow as pa

from zephon.columns.arrow import string_array
from zephon.data.formats.base import Format, Group, Groups, Shard, read_exactly
from zephon.data.formats.content import LFS_POINTER
from zephon.data.storage import StoredFile
from zephon.errors import DataError

# A larger file is a corpus, not a document.
_MAX_BYTES = 1 << 30


class PlainText(Format):
    """Text files. Group length = bytes of the file."""

    name = "text"
    suffixes = (".txt", ".text", ".md", ".markdown")
    is_fallback = True  # a README beside the data is no document
    text_by_name = True

    def open_shard(self, file: StoredFile) -> Shard:
        return _TextShard(file)


class _TextShard(Shard):
    schema = pa.schema([("text", pa.large_string()), ("file_name", pa.large_string())])

    def scan(self, size_column: str) -> tuple[str, Groups]:
        content = self._content()
        self.is_utf8 = not content.startswith((b"\xff\xfe", b"\xfe\xff"))
        return hashlib.sha256(content).hexdigest()[:32], [(1, len(content), 0, self.file.size)]

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        text = pa.array([self._content()], pa.large_binary()).view(pa.large_string())
        name = string_array([os.path.basename(self.file.path)], pa.large_string())
        return pa.table({"text": text, "file_name": name})

    def _content(self) -> bytes:
        """The bytes of the file without a byte order mark."""
        file = self.file
        if file.size > _MAX_BYTES:
            raise DataError(
                f"'{file.path}' has {file.size:,} bytes, and a text file is one document of at most "
                f"{_MAX_BYTES >> 20} MiB; write its documents as JSON lines"
            )
        with file.open() as handle:
            content = read_exactly(handle, 0, file.size, file.size)
        if content.startswith(LFS_POINTER):
            raise ValueError("no text")
        return content.removeprefix(b"\xef\xbb\xbf")
