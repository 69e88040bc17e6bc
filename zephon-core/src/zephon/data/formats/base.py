"""What a file format owes the rest of `zephon.data`, and the tools that formats share.

`Format` says which files are its own and opens them. A format whose files have a schema gives a `Shard` per file and
inherits the rest; one without (JSON lines, tar archives) overrides `scan`, `columns_of` and `open`. A format knows
nothing of other formats, datasets, row ids, lanes or caches.

Damage is found as far as a format can tell: gzip, zstd with checksums, bzip2 and Parquet with page checksums find all
of it; elsewhere what says where things lie is checked against the file, and flipped bits inside a text can go unseen.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.columns.damage import Damaged, is_damage
from zephon.data.columns import check_columns, physical_columns, sound_table, sound_type, with_paths
from zephon.data.fetch import Spans
from zephon.data.formats.content import other_content
from zephon.data.formats.sequential import SequentialBytes
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError, ZephonError

# Formats that know single rows make groups of neighbouring rows of about so many bytes, and so many rows at most.
RUN_BYTES = 1 << 20
_RUN_ROWS = 1 << 16
MAX_GROUP_ROWS = 2**40
_SAMPLE_BYTES = 4096
# The column of formats that hold token ids and nothing else.
TOKENS = "tokens"

Groups = Sequence[tuple[int, int, int, int]] | npt.NDArray[np.int64]
"""(rows, bytes, offset, length) per group, int64[n_groups, 4]."""


@dataclass(frozen=True, slots=True)
class Group:
    """Where one group lies in its shard. `offset` and `length` mean what the format's own scan made them mean."""

    offset: int
    length: int
    rows: int
    first_row: int  # in the shard, for error messages


class ShardScan:
    """What a scan finds in one shard.

    Attributes:
        digest: hex, changes when the content does as far as the format can tell without decoding.
        columns: the top-level columns (JSON lines: the keys of the first rows) with Arrow's name of the type that each
            is read as, "" where that has no name. JSON lines: what the first rows hold.
        groups: int64[n_groups, 4], see `Groups`; groups without rows are left out. Bytes are the uncompressed ones of
            the size column, approximate.
    """

    def __init__(self, digest: str, columns: Mapping[str, str], groups: Groups) -> None:
        table = np.array(groups, np.int64).reshape(-1, 4)
        self.digest, self.columns, self.groups = digest, columns, table[table[:, 0] > 0]


class Shard:
    """One open file. Subclasses set `schema`, and give `scan` and `read`.

    What they raise over damaged bytes, of whatever kind, becomes a `DataError` that names the file.

    Attributes:
        file: the file.
        codec: that of a file that is compressed as a whole, whose groups count uncompressed bytes; else None.
        schema: of all columns.
        is_utf8: whether `scan` found no text in another encoding.
        digest: that of `scan`, where opening a file gives it as well: a file that has changed is then refused.
    """

    schema: pa.Schema
    digest: str | None = None
    is_utf8: bool = True

    def __init__(self, file: StoredFile, codec: str | None = None) -> None:
        self.file, self.codec = file, codec
        self._packed = SequentialBytes(file, codec) if codec else None

    def scan(self, size_column: str) -> tuple[str, Groups]:
        """A digest of the content, and the groups; bytes are those of `size_column`, uncompressed, approximate."""
        raise NotImplementedError

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        """`group.rows` rows with at least those of `columns` (names and paths, see `top_level`) that there are."""
        raise NotImplementedError

    def finish(self, table: pa.Table, group: Group) -> pa.Table:
        """The columns once more, after they were found to be sound."""
        return table

    def ranges(self, group: Group, columns: Sequence[str]) -> list[tuple[int, int]] | None:
        """(start, length) of the bytes that `read` will fetch; None where that is not known."""
        return [(group.offset, group.length)] if self._packed is None else None

    def content(self, group: Group) -> pa.Buffer:
        """The bytes of a group whose offset and length count bytes."""
        if self._packed is not None:
            data = self._packed.read(group.offset, group.length)
        else:
            with self.file.open() as handle:
                handle.seek(group.offset)
                data = handle.read_buffer(group.length)
        if len(data) != group.length:
            raise ValueError(f"it ends at byte {group.offset + len(data)}")
        return data

    def close(self) -> None:
        """Lets go of files that are held open, if any; a later `read` may open them again."""
        if self._packed is not None:
            self._packed.close()


class Format:
    """One file format. Stateless; its methods raise `DataError` for files that are not sound.

    Attributes:
        name: what `fmt` calls it.
        suffixes: file name endings, lower case, with the dot.
        found_by_name: whether a file's name says that it is of this format; else it must be named with `fmt`.
        companion: what must lie beside a file for it to be found from its name, for messages.
        is_fallback: its files count only where there are none of another format.
        text_by_name: names say what is text, in an encoding that nobody knows: `kinds` may ask for its bytes.
    """

    name: str
    suffixes: tuple[str, ...]
    found_by_name: bool = True
    companion: str = ""
    is_fallback: bool = False
    text_by_name: bool = False

    def claims(self, name: str, beside: AbstractSet[str]) -> bool:
        """Whether a file is of this format by its name, and by the names of the files of its dataset."""
        return self.found_by_name and name.lower().endswith(self.suffixes)

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        """Of the files at the positions `keep`, those that count.

        Raises:
            DataError: one that a description of the dataset names is missing.
        """
        return listing.select(keep)

    def is_sequential(self, name: str) -> bool:
        """Whether a file of this name can only be read from its start."""
        return False

    def open_shard(self, file: StoredFile) -> Shard:
        """The file, its head read."""
        raise NotImplementedError

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        """Finds the groups, reading as little of the file as the format allows.

        `size_column` holds the documents; `is_text` says that they must be text.
        """
        with corrupt_data_errors(file, self.name):
            shard = self.open_shard(file)
            text_column = size_column if is_text else None
            if shard.schema.names:
                check_columns(shard.schema, [size_column], text_column, file.path)
            columns = {field.name: _type_name(field.type) for field in with_paths(shard.schema, size_column)}
            digest, groups = shard.scan(size_column)
            if is_text and not shard.is_utf8:
                raise ValueError("no UTF-8")
            found = ShardScan(digest, columns, groups)
            if not columns and len(found.groups):  # without rows it is an empty frame, whose columns nobody has named
                check_columns(shard.schema, [size_column], text_column, file.path)
            return found

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        """The top-level columns of a file, and for formats that have no types of their own what to read each as."""
        with corrupt_data_errors(file, self.name):
            return dict.fromkeys(self.open_shard(file).schema.names)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        """A reader of `columns`; `text_column`, one of them or None, must hold text.

        `kinds` are those that `columns_of` found in the first file of the dataset.
        """
        with corrupt_data_errors(file, self.name):
            shard = self.open_shard(file)
            check_columns(shard.schema, columns, text_column, file.path, strict=False)
        return ShardReader(self.name, shard, columns, text_column, kinds if self.text_by_name else None)


class ShardReader:
    """Decodes the groups of one shard. Many threads call `read` at once, each for a group of its own."""

    def __init__(
        self,
        fmt: str,
        shard: Shard,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> None:
        self._as_bytes = frozenset(name for name, kind in (kinds or {}).items() if kind == "large_binary")
        self.fmt, self.shard, self.file = fmt, shard, shard.file
        self.columns, self.text_column = list(columns), text_column
        self.physical, self.digest = physical_columns(columns), shard.digest

    def read(self, group: Group) -> pa.Table:
        """The wanted columns, in order, exactly `group.rows` rows, one chunk per column, checked to be sound.

        Text is `large_string`. Raises `DataError` naming file and row; `FileChanged` when the file was replaced.
        """
        with corrupt_data_errors(self.file, self.fmt, f" (rows from {group.first_row})"):
            table = self.shard.read(group, self.physical)
            if table.num_rows != group.rows:
                raise ValueError(f"{table.num_rows} rows, and {group.rows} were listed")
            return self.shard.finish(self.sound(table, group), group)

    def sound(self, table: pa.Table, group: Group) -> pa.Table:
        """The wanted columns of a decoded group, see `sound_table`."""
        return sound_table(table, self.columns, self.text_column, self.file.path, group.first_row, self._as_bytes)

    def ranges(self, group: Group) -> list[tuple[int, int]] | None:
        """(start, length) of the bytes that `read` will fetch, to be read ahead from a store; None: not known."""
        return self.shard.ranges(group, self.physical)

    def close(self) -> None:
        """Lets go of files that are held open, if any; a later `read` may open them again."""
        self.shard.close()


def _type_name(kind: pa.DataType) -> str:
    """The name of the type that `sound_table` makes of a column, "" for types that are not found by their name."""
    kind = sound_type(kind)
    name = str(kind)
    named = name in ("bool", "null", "large_string", "large_binary")
    return name if named or pa.types.is_integer(kind) or pa.types.is_floating(kind) else ""


@contextmanager
def corrupt_data_errors(file: StoredFile, fmt: str, where: str = "") -> Iterator[None]:
    """Turns whatever a decoding library raises over a file into one `DataError` that names the file.

    Damaged bytes make libraries raise almost anything (Arrow errors, OSError, KeyError, OverflowError), hence the
    broad net; it is cast only around calls that decode foreign bytes. It is a `Damaged` where the bytes are at fault.
    """
    try:
        yield
    except Damaged as error:  # one with a rest is of single rows, so it is the format's to say what they are
        if other := "" if where or error.rest is not None else other_content(file):
            raise DataError(other) from error
        raise
    except ZephonError:
        raise
    except Exception as error:
        lines = str(error).splitlines()
        reason = " ".join((lines[0] if lines else type(error).__name__).split()).rstrip(". ")
        what = f"'{file.path}'{where} cannot be read as {fmt} ({reason})"
        if other := "" if where else other_content(file):
            raise DataError(other) from error
        if is_damage(error):
            remedy = "the file is truncated, damaged or of another format, so restore it or leave it out"
            raise Damaged(f"{what}: {remedy}") from error
        if isinstance(error, NotImplementedError):
            remedy = f"pyarrow {pa.__version__} has no support for that, so write the file in another way or update it"
        elif isinstance(error, OSError | MemoryError):
            remedy = "the machine failed, not the file, so repair that and start again"
        else:
            remedy = (
                f"{type(error).__name__} is an error of the program, not of the file, so check the libraries' versions"
            )
        raise DataError(f"{what}: {remedy}") from error


def run_bounds(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64[n_runs + 1]: rows of `sizes` bytes, int64[n_rows], cut into runs of at most `RUN_BYTES`.

    A row that is larger is a run of its own.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    bounds, first, before = [0], 0, 0
    while first < len(sizes):
        last = int(np.searchsorted(ends, before + RUN_BYTES, side="right"))
        first = min(max(last, first + 1), first + _RUN_ROWS)
        before = int(ends[first - 1])
        bounds.append(first)
    return np.array(bounds, np.int64)


def run_groups(offsets: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """`Groups` of rows that lie one after the other, `offsets` int64[n_rows + 1]; cut by `run_bounds` by default."""
    if bounds is None:
        bounds = run_bounds(np.diff(offsets))
    starts, ends = offsets[bounds[:-1]], offsets[bounds[1:]]
    return np.stack([np.diff(bounds), ends - starts, starts, ends - starts], axis=1)


def read_exactly(handle: Any, offset: int, length: int, size: int) -> bytes:
    """`length` bytes at `offset` of a file of `size` bytes; ValueError where it has not so many."""
    # Checked before anything is allocated: lengths come from files, which may be damaged.
    if offset < 0 or length < 0 or offset + length > size:
        raise ValueError(f"bytes {offset} to {offset + length} are wanted, and it has {size}")
    data: bytes = handle.read_at(length, offset)
    if len(data) != length:
        raise ValueError(f"it ends at byte {offset + len(data)}, not {size}")
    return data


def sample_digest(handle: Any, size: int, blocks: int) -> bytes:
    """Some of a file's content, for a digest that need not read it all: `blocks` evenly spread pieces, one at its end.

    So a file whose content is exchanged for other content of the same layout is nearly always told apart.
    """
    last = max(size - _SAMPLE_BYTES, 0)
    places = sorted({last * n // blocks for n in range(1, blocks + 1)})
    return b"".join(read_exactly(handle, at, min(_SAMPLE_BYTES, size - at), size) for at in places)


def token_lists(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> pa.LargeListArray:
    """large_list<uint32>[n_rows] of token ids, `values` integers[sum of lengths] cut by `lengths` int64[n_rows].

    Raises:
        ValueError: an id that no tokenizer has: below 0 or from 2**32 on.
    """
    if values.dtype.kind == "i" or values.dtype.itemsize > 4:
        wrong = np.flatnonzero((values < 0) | (values > 0xFFFFFFFF)) if len(values) else values
        if len(wrong):
            ends = np.cumsum(lengths)
            row = int(np.searchsorted(ends, wrong[0], side="right"))
            raise ValueError(f"row {row} of the group holds {values[wrong[0]]}, and token ids are 0 to 2**32 - 1")
    values = np.ascontiguousarray(values, np.uint32)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = pa.Array.from_buffers(pa.uint32(), len(values), [None, pa.py_buffer(values)])
    return pa.LargeListArray.from_arrays(int64_array(offsets), ids)


@contextmanager
def library(name: str, path: str) -> Iterator[Any]:
    """The library that reads a format, for use inside `corrupt_data_errors`.

    A panic of one that is written in Rust, which is no `Exception`, comes out as a ValueError.

    Raises:
        DataError: it is not installed.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"'{path}' is read with the library {name} of the same project, which is missing or does not work here "
            f"({str(error)[:100]}); install it with: pip install 'zephon-core[{name}]'"
        ) from error
    try:
        yield module
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"its library gave up: {str(error)[:200]}") from error
        raise
