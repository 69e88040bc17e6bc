"""The history of a run's data: which data it read from which record on, in a file beside its states.

Counting records to a place is correct only if the data before it have not changed. A state proves that by its
fingerprint. This history does if there is no state (virtual pipeline stages, --zephon-seek), or if state and model are
at different records.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from zephon import CheckpointError
from zephon.loader import Change, check_fingerprint

FILE = "zephon-data.json"


class Entry(msgspec.Struct, frozen=True):
    """The data from one record on.

    Attributes:
        consumed: records used before.
        fingerprint: of the data.
        by_state: whether the run continued from a saved state there; otherwise records were counted.
        start: Megatron's consumed samples where the data began: above 0 if a run with other data was moved over.
    """

    consumed: Annotated[int, msgspec.Meta(ge=0)]
    fingerprint: dict[str, Any]
    by_state: bool
    start: int = 0


def read_history(folders: Sequence[Path]) -> list[Entry]:
    """The history in the first of `folders` that has one; empty without one.

    Raises:
        CheckpointError: it is damaged.
    """
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None:
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Entry])
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        raise CheckpointError(
            f"{path}, the history of the data of this run, is damaged. Restore the file, or delete it to resume by "
            "the number of consumed samples without this check."
        ) from None


def check_count(entries: Sequence[Entry], fingerprint: Mapping[str, Any], allowed: Collection[str]) -> list[Change]:
    """Check that the records before a place are of the present data, so that it can be found by counting.

    Args:
        entries: the history up to the place.
        fingerprint: of the present data.
        allowed: names of differences to accept.

    Returns:
        The differences that are accepted.

    Raises:
        CheckpointError: the data were different, or changed during the run.
    """
    for before, entry in pairwise(entries):
        a, b = before.fingerprint, entry.fingerprint
        if entry.by_state and a != b:
            names = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
            raise CheckpointError(
                f"the data of this run changed at record {entry.consumed} ({', '.join(names)}), where it went on from "
                "a saved state, so counting records from the start would give other data. Resume from a saved state."
            )
    if not entries:
        return []
    return check_fingerprint(
        entries[-1].fingerprint,
        fingerprint,
        allow=allowed,
        where="this run has read other data so far",
        remedy="--zephon-allow-changes",
        counted=True,
    )


def with_entry(entries: Sequence[Entry], entry: Entry) -> list[Entry]:
    """The history of a run that continues at `entry`; entries of later records, from abandoned runs, are dropped."""
    kept = [earlier for earlier in entries if earlier.consumed < entry.consumed]
    if kept and kept[-1].fingerprint == entry.fingerprint:
        return kept
    return [*kept, entry]


def write_history(folder: str | os.PathLike[str], entries: Sequence[Entry]) -> None:
    """Write the history into `folder`, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = Path(folder) / FILE
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(entries))
        os.replace(unfinished, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}. Free space there.") from None
