"""Which data a run has read, from which record on: an account beside its states.

A place that is found by counting records is right only where all data before it are the present ones. States say so by
their fingerprint; where there is none (virtual pipeline stages, --zephon-seek), or it is not where the model stands,
this account does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from zephon import CheckpointError
from zephon.loader import Change, check_fingerprint

__all__ = ["Entry", "check_count", "read_history", "with_entry", "write_history"]

FILE = "zephon-data.json"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Entry:
    """The data from one record on.

    Attributes:
        consumed: records used before.
        fingerprint: of the data.
        by_state: whether the run went on from a saved state there, and was not counted to the place.
    """

    consumed: int
    fingerprint: Mapping[str, Any]
    by_state: bool


def read_history(folders: Sequence[Path]) -> list[Entry]:
    """The account in the first of `folders` that has one; none where it is not there.

    Raises:
        CheckpointError: it is damaged.
    """
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        entries = [Entry(**entry) for entry in json.loads(content)]
    except (OSError, TypeError, ValueError, RecursionError):
        entries = [Entry(-1, {}, False)]
    sound = all(
        isinstance(e.consumed, int)
        and e.consumed >= 0
        and isinstance(e.fingerprint, dict)
        and isinstance(e.by_state, bool)
        for e in entries
    )
    if not sound:
        raise CheckpointError(
            f"{path}, the account of the data that this run has read, is damaged; restore it, or delete it to find the "
            "place by the number of consumed samples unchecked."
        )
    return entries


def check_count(entries: Sequence[Entry], fingerprint: Mapping[str, Any], allowed: Collection[str]) -> list[Change]:
    """Refuse to count to a place where the records before it were other data.

    Args:
        entries: up to the place.
        fingerprint: of the present data.
        allowed: names of differences to accept.

    Returns:
        The differences that are accepted.

    Raises:
        CheckpointError: the data were others, or changed on the way.
    """
    for before, entry in pairwise(entries):
        if entry.by_state and entry.fingerprint != before.fingerprint:
            names = sorted(
                name
                for name in {*before.fingerprint, *entry.fingerprint}
                if before.fingerprint.get(name) != entry.fingerprint.get(name)
            )
            raise CheckpointError(
                f"the data of this run changed at record {entry.consumed} ({', '.join(names)}), where it went on from "
                "a saved state, so counting records from the start would give other data; resume from a saved state."
            )
    if not entries:
        return []
    return check_fingerprint(
        entries[-1].fingerprint,
        fingerprint,
        allow=allowed,
        where="this run has read other data so far",
        remedy="--zephon-allow-changes",
    )


def with_entry(entries: Sequence[Entry], entry: Entry) -> list[Entry]:
    """The account with what goes on from `entry`: what it says of later records is of runs that were given up."""
    kept = [earlier for earlier in entries if earlier.consumed < entry.consumed]
    if kept and kept[-1].fingerprint == entry.fingerprint:
        return kept
    return [*kept, entry]


def write_history(folder: str | os.PathLike[str], entries: Sequence[Entry]) -> None:
    """Write the account into `folder`, whole or not at all."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / FILE
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps([asdict(entry) for entry in entries]))
    os.replace(unfinished, path)
