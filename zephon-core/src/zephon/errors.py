"""Every error that Zephon raises on purpose.

A message states the value, what was expected and the remedy. `except ZephonError` catches all of them; the subclasses
tell which part of the job is at fault.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Change",
    "CheckpointError",
    "DataError",
    "PipelineError",
    "RecipeError",
    "TokenizerError",
    "TopologyError",
    "WorkerError",
    "ZephonError",
]


class ZephonError(Exception):
    """Base of all errors raised by Zephon on purpose."""


class RecipeError(ZephonError, ValueError):
    """A data recipe, or an option of a dataset or work source, is not usable as written."""


class PipelineError(ZephonError, ValueError):
    """Operators or options of a pipeline do not fit together."""


class TopologyError(ZephonError, ValueError):
    """Lanes, data-parallel groups, microbatch or global batch do not divide as they must."""


class DataError(ZephonError):
    """A dataset is missing, empty, corrupt, or has changed since it was indexed."""


class TokenizerError(ZephonError, ValueError):
    """A tokenizer cannot be loaded, or lacks a special token that is required."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between the data of two runs.

    Attributes:
        name: field of the fingerprint, such as "seed" or "dataset web".
        before, now: JSON types; "absent" where a run has no such field.
        note: text for messages in place of the two values, or "".
        way: how to go on where it cannot be accepted; "" where it can.
        is_exact: accepting it says that the data are the same nevertheless.
    """

    name: str
    before: Any
    now: Any
    note: str = ""
    way: str = ""
    is_exact: bool = False

    def __str__(self) -> str:
        if self.note:
            return f"{self.name}: {self.note}"
        if not (isinstance(self.before, Mapping) and isinstance(self.now, Mapping)):
            return f"{self.name}: was {self.before!r}, is {self.now!r}"
        before, now = self.before, self.now
        return f"{self.name}: " + ", ".join(
            f"{key} was {before.get(key, 'absent')!r}, is {now.get(key, 'absent')!r}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        )


class CheckpointError(ZephonError, ValueError):
    """A checkpoint is damaged, incomplete, of another version, or belongs to other data.

    Attributes:
        changes: differences between the data of the two runs; empty for any other error.
        remedy: the option that accepts these changes, or "".
        cost: what accepting them costs, as a sentence.
    """

    def __init__(
        self, message: str, changes: Sequence[Change] = (), remedy: str = "allow_changes", cost: str = ""
    ) -> None:
        super().__init__(message)
        self.changes = tuple(changes)
        self.remedy, self.cost = remedy, cost

    def __str__(self) -> str:
        message = super().__str__()
        if not self.changes:
            return message
        names = [change.name for change in self.changes]
        lines = "".join(f"  {change}\n" for change in self.changes)
        message = f"{message}; the data would differ:\n{lines}"
        ways = dict.fromkeys(change.way for change in self.changes if change.way)
        if ways or not self.remedy:
            names_of = {way: ", ".join(change.name for change in self.changes if change.way == way) for way in ways}
            return "\n".join([message.rstrip(), *(f"{names_of[way]} cannot be accepted. {way}" for way in ways)])
        if self.remedy.startswith("-"):
            accept = f"{self.remedy} {shlex.quote(','.join(names))}"
        else:
            accept = f"{self.remedy}={names}."
        return f"{message}{self.cost}To accept these differences, pass {accept}"


class WorkerError(ZephonError, RuntimeError):
    """A child process of the pipeline died, or cannot be started."""
