"""Damage: rows, groups and shards that are there but cannot be read, told apart from everything else that can fail.

What is damaged is so on every machine and after every restart, so leaving it out leaves a stream that is still a
function of the data alone. A store that does not answer, a disk that fails, a file that was changed are no damage:
skipping those would make the stream depend on the moment.

A group of which rows are damaged comes as a table with one column more, `FAULT`, null for sound rows. It passes through
`take` and `concat` like any column; `split_damaged` takes it off again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.errors import DataError

__all__ = [
    "FAULT",
    "Damaged",
    "Lost",
    "LostShard",
    "is_damage",
    "lost_table",
    "rescued",
    "shown_value",
    "split_damaged",
]

FAULT = "\0fault"
"""The column that says which rows of a table are damaged, and how."""
CONTENT_LIMIT = 4096
"""Most characters of a damaged row that are kept for people to look at."""
_FAULT_TYPE = pa.struct(
    {"reason": pa.string(), "first_row": pa.int64(), "rows": pa.int64(), "content": pa.large_string()}
)


class Damaged(DataError):
    """Bytes that cannot be read as what they are said to be, and never will.

    Attributes:
        rest: gives what can be saved: of a group, its table with `FAULT`; of a scan, its result without the rows that
            are no good. None where nothing can.
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
        first_row, rows: the stretch of its shard that was lost at once, 1 row where it is the row alone.
        content: what the row holds, as far as it can be shown, or "".
    """

    reason: str
    first_row: int
    rows: int
    content: str


class LostShard(NamedTuple):
    """A shard of which nothing can be read: name, bytes and why. How many rows it had is not known."""

    name: str
    size: int
    reason: str


def is_damage(error: Exception) -> bool:
    """Whether an error from decoding says something of the bytes, not of the machine that reads them."""
    if isinstance(error, MemoryError):
        return False
    # Arrow raises OSError for bytes that it cannot decode too, but those come without a number of the system.
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
    """The rows of a group that can be read, and the others marked in `FAULT`.

    Args:
        rows: of the group.
        read: rows `low` to `high` of the group, or `Damaged`.
        content: what a row that cannot be read holds, for people.
        columns: what `read` gives.
        first_row: the group's first row in its shard.

    Halves what cannot be read until it is one row, so a few bad rows in n cost about log n reads each. The result is a
    function of the group alone.
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
    """Any value as text of bounded length, for people to look at."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    # What was cut off in the middle of a surrogate pair, or holds half of one, must still be written as UTF-8.
    return text[:CONTENT_LIMIT].encode("utf-8", "backslashreplace").decode()
