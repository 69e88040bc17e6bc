"""Damage: rows, groups and shards that exist but cannot be decoded, as opposed to any other failure.

Damaged data is damaged on every machine and after every restart, so leaving it out keeps the stream a function of the
data alone. A store that does not answer, a failing disk or a changed file is not damage: skipping those would make the
stream depend on the moment.

The table of a group with damaged rows has an additional column `FAULT`, null for sound rows. It passes through `take`
and `concat` like any column; `split_damaged` removes it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.errors import DataError

FAULT = "\0fault"
"""The column that says which rows of a table are damaged, and how."""
CONTENT_LIMIT = 4096
"""Characters of a damaged row that are kept for the report, at most."""
_FAULT_TYPE = pa.struct(
    {"reason": pa.string(), "first_row": pa.int64(), "rows": pa.int64(), "content": pa.large_string()}
)


_NOT_DAMAGE = (
    MemoryError, NotImplementedError, AttributeError, TypeError, NameError, ImportError, AssertionError,
)  # fmt: skip


class Damaged(DataError):
    """Bytes that cannot be decoded, on any machine and at any retry.

    Attributes:
        rest: returns the readable part: of a group, its table with `FAULT`; of a scan, its result without the damaged
            rows. None where nothing is readable.
    """

    def __init__(self, message: str, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(message)
        self.rest = rest

    def __reduce__(self) -> Any:
        return type(self), (str(self),)


class Lost(NamedTuple):
    """Why a row is damaged.

    Attributes:
        reason: one line.
        first_row, rows: the range of rows of the shard that is lost together; one row where damage is of a single row.
        content: printable content of the row, or "".
    """

    reason: str
    first_row: int
    rows: int
    content: str


class LostShard(NamedTuple):
    """An unreadable shard: name, size in bytes and reason. Its number of rows is unknown."""

    name: str
    size: int
    reason: str


def is_damage(error: Exception) -> bool:
    """Whether a decoding error is due to the bytes, not to the machine, the program or what libraries can read."""
    if isinstance(error, _NOT_DAMAGE):
        return False
    # Arrow also raises OSError for bytes that it cannot decode, but without an errno.
    return not isinstance(error, OSError) or error.errno in (None, errno.EINVAL)


def lost_table(columns: Sequence[str], lost: Lost, rows: int) -> pa.Table:
    """`rows` damaged rows."""
    why = pa.repeat(pa.scalar(lost._asdict(), _FAULT_TYPE), rows)
    return pa.table({**{name: pa.nulls(rows) for name in columns}, FAULT: why})


def rescued(
    rows: int,
    read: Callable[[int, int], pa.Table],
    content: Callable[[int], str],
    columns: Sequence[str],
    first_row: int,
) -> pa.Table:
    """The readable rows of a group, and the damaged ones marked in `FAULT`.

    Args:
        rows: number of rows of the group.
        read: returns rows `low` to `high` of the group, or raises `Damaged`.
        content: printable content of a damaged row.
        columns: names of the columns that `read` returns.
        first_row: the group's first row in its shard.

    Ranges that cannot be read are halved down to single rows, so each damaged row of n costs about log n reads. The
    result is a function of the group alone.
    """
    pieces: list[pa.Table] = []
    waiting = [(0, rows)]
    while waiting:
        low, high = waiting.pop()
        try:
            pieces.append(read(low, high))
        except Damaged as error:
            if high - low > 1:
                middle = (low + high) // 2
                waiting += [(middle, high), (low, middle)]
            else:
                pieces.append(lost_table(columns, Lost(str(error), first_row + low, 1, content(low)), 1))
    return pa.concat_tables(pieces, promote_options="permissive").combine_chunks()


def split_damaged(table: pa.Table) -> tuple[pa.Table, np.ndarray, list[tuple[int, Lost]]]:
    """(the sound rows without `FAULT`, their places int64[m] in `table`, (place, why) of the others)."""
    if FAULT not in table.column_names:
        return table, np.arange(table.num_rows, dtype=np.int64), []
    faults = table.column(FAULT)
    bad = np.asarray(faults.is_valid(), dtype=bool)
    kept = np.flatnonzero(~bad)
    places = np.flatnonzero(bad)
    why = faults.take(int64_array(places)).to_pylist()
    sound = table.drop_columns(FAULT).take(int64_array(kept))
    return sound, kept, [(int(place), Lost(**each)) for place, each in zip(places, why, strict=True)]


def shown_value(value: Any) -> str:
    """Any value as printable text of at most `CONTENT_LIMIT` characters."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    # A surrogate without its pair must still be written as UTF-8.
    return text[:CONTENT_LIMIT].encode("utf-8", "backslashreplace").decode()
