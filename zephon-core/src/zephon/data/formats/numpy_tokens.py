"""Files of token ids and nothing else: NumPy's .npy, and plain numbers without any header.

Column "tokens" (large_list<uint32>). An array of two dimensions has a row per row. One of one dimension does not say
where documents begin; it is cut into rows of `ROW_TOKENS` ids, the last one shorter, so that they can be shuffled.
A group is a run of rows; offset and length are bytes of the file.

What has no header is read only where the format is named, for nothing in such a file says what it is: "uint16" for
nanoGPT's .bin, "uint32" for what larger vocabularies need (OLMo's .npy are such files, too).
Layout of .npy: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.data.columns import check_columns, sound_table
from zephon.data.formats import base
from zephon.data.formats.base import (
    TOKENS,
    Group,
    ShardReader,
    ShardScan,
    corrupt_data_errors,
    read_exactly,
    sample_digest,
    token_lists,
)
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["ROW_TOKENS", "NumpyTokens", "PlainTokens"]

ROW_TOKENS = 8192

_SCHEMA = pa.schema([(TOKENS, pa.large_list(pa.uint32()))])
_MARK = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 16
# What numpy writes, and nothing else: the header is Python source, and is not run.
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[a-zA-Z]\d+)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), *\}\s*"
)
_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class _Layout:
    """`rows` rows of `width` numbers (the last may be shorter: `total` numbers in all) from byte `start` on."""

    start: int
    dtype: np.dtype[Any]
    width: int
    rows: int
    total: int

    def span(self, first: int, last: int) -> tuple[int, int]:
        """(offset, length) in bytes of rows `first` to `last` - 1."""
        low, high = first * self.width, min(last * self.width, self.total)
        return self.start + low * self.dtype.itemsize, (high - low) * self.dtype.itemsize


class _Tokens:
    """What both formats share."""

    name: str
    suffixes: tuple[str, ...]

    def layout(self, file: StoredFile) -> tuple[_Layout, bytes]:
        """How the numbers lie in the file, and its header."""
        raise NotImplementedError

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        check_columns(_SCHEMA, [size_column], size_column if is_text else None, file.path)
        with corrupt_data_errors(file, self.name):
            layout, header = self.layout(file)
            with file.open() as handle:
                digest = hashlib.sha256(header + sample_digest(handle, file.size, _SAMPLES)).hexdigest()[:32]
            per_group = max(1, base.RUN_BYTES // (layout.width * layout.dtype.itemsize)) if layout.width else 1
            firsts = np.arange(0, layout.rows, per_group, dtype=np.int64)
            lasts = np.minimum(firsts + per_group, layout.rows)
            low, high = firsts * layout.width, np.minimum(lasts * layout.width, layout.total)
            size = layout.dtype.itemsize
            groups = np.stack(
                [lasts - firsts, (high - low) * size, layout.start + low * size, (high - low) * size], axis=1
            )
            return ShardScan.of(digest, _SCHEMA, groups)

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
        with corrupt_data_errors(file, self.name):
            layout, _ = self.layout(file)
        return _TokensReader(file, columns, text_column, layout, self.name)


class NumpyTokens(_Tokens):
    """The `Format` of .npy files of whole numbers."""

    name = "numpy"
    suffixes = (".npy",)

    def layout(self, file: StoredFile) -> tuple[_Layout, bytes]:
        with file.open() as handle:
            head = read_exactly(handle, 0, min(12, file.size), file.size)
            if head[:6] != _MARK:
                raise DataError(
                    f"'{file.path}' does not begin as an .npy file; if it holds plain numbers without a header, say "
                    'which with fmt = "uint16" or "uint32"'
                )
            wide = head[6] >= 2
            length = int.from_bytes(head[8:12] if wide else head[8:10], "little")
            start = (12 if wide else 10) + length
            if head[6] not in (1, 2, 3) or length > _MAX_HEADER_BYTES:
                raise ValueError("its header is none of version 1 to 3")
            header = read_exactly(handle, 0, start, file.size)
        found = _HEADER.fullmatch(header[start - length :])
        if found is None:
            if b"'O'" in header or b"|O" in header:
                raise DataError(
                    f"'{file.path}' holds pickled Python objects, which can run code when read and are refused; save "
                    "an array of whole numbers"
                )
            raise ValueError("its header is not that of an array of numbers")
        dtype = np.dtype(found[1].decode())
        shape = [int(number) for number in found[3].split(b",") if number.strip()]
        if dtype.kind not in "iu" or len(shape) not in (1, 2) or any(number > 2**48 for number in shape):
            raise DataError(
                f"'{file.path}' holds {dtype.name} of shape {tuple(shape)}, and whole numbers of one or two dimensions "
                "were expected: token ids, or rows of them"
            )
        if len(shape) == 2 and found[2] == b"True":
            raise DataError(f"'{file.path}' is in Fortran order; save it in C order (numpy.ascontiguousarray)")
        total = int(np.prod(shape, dtype=object))
        if start + total * dtype.itemsize != file.size:
            raise ValueError(f"its header describes {start + total * dtype.itemsize} bytes, and it has {file.size}")
        if len(shape) == 2:
            return _Layout(start, dtype, shape[1], shape[0], total), header
        return _Layout(start, dtype, ROW_TOKENS, -(-total // ROW_TOKENS), total), header


class PlainTokens(_Tokens):
    """The `Format` of files that are numbers and nothing else, little-endian. Never found from a name."""

    suffixes = (".bin", ".npy")

    def __init__(self, name: str) -> None:
        self.name = name

    def layout(self, file: StoredFile) -> tuple[_Layout, bytes]:
        dtype = np.dtype(self.name).newbyteorder("<")
        total, rest = divmod(file.size, dtype.itemsize)
        if rest:
            raise ValueError(f"its {file.size} bytes are no whole number of {self.name}")
        with file.open() as handle:
            if read_exactly(handle, 0, min(6, file.size), file.size) == _MARK:
                raise DataError(f"'{file.path}' is an .npy file, which says itself what it holds; use fmt = \"numpy\"")
        return _Layout(0, dtype, ROW_TOKENS, -(-total // ROW_TOKENS), total), b""


class _TokensReader:
    def __init__(
        self, file: StoredFile, columns: Sequence[str], text_column: str | None, layout: _Layout, fmt: str
    ) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        self._layout, self._fmt = layout, fmt

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        return [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        file, layout = self._file, self._layout
        with corrupt_data_errors(file, self._fmt, f" (rows from {group.first_row})"):
            if layout.span(group.first_row, group.first_row + group.rows) != (group.offset, group.length):
                raise ValueError("its rows lie elsewhere than when it was listed")
            with file.open() as handle:
                data = read_exactly(handle, group.offset, group.length, file.size)
            values = np.frombuffer(data, layout.dtype)
            lengths = np.full(group.rows, layout.width, np.int64)
            lengths[-1] -= group.rows * layout.width - len(values)
            table = pa.table({TOKENS: token_lists(values, lengths)})
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        pass
