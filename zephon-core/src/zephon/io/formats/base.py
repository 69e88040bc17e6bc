"""What a file format owes the rest of `zephon.io`: the protocol, and the plain data that crosses it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.errors import DataError, ZephonError
from zephon.io.storage import StoredFile

__all__ = ["Format", "Group", "ShardReader", "ShardScan", "corrupt_data_errors"]


@dataclass(frozen=True, slots=True)
class Group:
    """Where one group lies in its shard. `offset` and `length` mean what the format's own scan made them mean."""

    offset: int
    length: int
    rows: int
    first_row: int  # in the shard, for error messages


@dataclass(frozen=True, slots=True, eq=False)
class ShardScan:
    """What a scan finds in one shard; the arrays are int64[n_groups], groups without rows are left out.

    digest: hex, changes when the content does as far as the format can tell without decoding.
    columns: top-level column names (JSON lines: the keys of the first rows).
    group_bytes: uncompressed bytes of the size column, approximate.
    """

    digest: str
    columns: tuple[str, ...]
    group_rows: npt.NDArray[np.int64]
    group_bytes: npt.NDArray[np.int64]
    group_offset: npt.NDArray[np.int64]
    group_length: npt.NDArray[np.int64]

    @classmethod
    def of(cls, digest: str, columns: Sequence[str], groups: Sequence[tuple[int, int, int, int]]) -> "ShardScan":
        """From (rows, bytes, offset, length) per group."""
        table = np.array([group for group in groups if group[0]], np.int64).reshape(-1, 4).T
        return cls(digest, tuple(columns), table[0], table[1], table[2], table[3])


class ShardReader(Protocol):
    """Decodes the groups of one shard. Many threads call `read` at once, each for a group of its own."""

    def read(self, group: Group) -> pa.Table:
        """The wanted columns, in order, exactly `group.rows` rows, one chunk per column, checked to be sound.

        Text is `large_string`. Raises `DataError` naming file and row; `FileChanged` when the file was replaced.
        """
        ...

    def close(self) -> None:
        """Lets go of files that are held open, if any; a later `read` may open them again."""
        ...


class Format(Protocol):
    """One file format. Stateless; `scan` and `open` raise `DataError` for files that are not sound."""

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """File name endings, lower case, with the dot."""
        ...

    def is_sequential(self, name: str) -> bool:
        """Whether a file of this name can only be read from its start."""
        ...

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        """Finds the groups, reading as little of the file as the format allows.

        `size_column` holds the documents; `is_text` says that they must be text.
        """
        ...

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        """The top-level columns of a file, and for formats that have no types of their own what to read each as."""
        ...

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
        ...


@contextmanager
def corrupt_data_errors(file: StoredFile, fmt: str, where: str = "") -> Iterator[None]:
    """Turns whatever a decoding library raises over a damaged file into one `DataError` that names the file.

    Damaged bytes make libraries raise almost anything (Arrow errors, OSError, KeyError, OverflowError), hence the
    broad net; it is cast only around calls that decode foreign bytes.
    """
    try:
        yield
    except ZephonError:
        raise
    except Exception as error:
        lines = str(error).splitlines()
        reason = " ".join((lines[0] if lines else type(error).__name__).split()).rstrip(". ")
        raise DataError(
            f"'{file.path}'{where} cannot be read as {fmt} ({reason}): the file is truncated, damaged or of another "
            "format, so restore it or leave it out"
        ) from error
