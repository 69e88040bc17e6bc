"""Patterns of file names, the same in local folders and in stores.

``*``, ``?`` and ``[..]`` match within a name, ``**`` any number of folders, and a folder that matches means all files
below it. Names that start with ``.`` or ``_`` are skipped unless the pattern spells the character out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

MAGIC = re.compile(r"[*?\[]")
HIDDEN = "._"
_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi", "metadata": "Iceberg"}
_ICEBERG = r"metadata(?=/(?:v[0-9]+|[0-9]{5,}-[0-9a-f-]{36})(?:\.gz)?\.metadata\.json(?:\.gz)?$)"
_LOG = re.compile(rf"(?:^|/)(_delta_log|\.hoodie|{_ICEBERG})(?:/|$)")


def table_of(names: Iterable[str]) -> str:
    """Why a folder with these below it, files or folders, cannot be read: the log of a table lies there; else ""."""
    for log in filter(None, map(_LOG.search, names)):
        return (
            f"it is a table of {_LOGS[log[1]]}, whose log ({log.string[: log.end(1)]}) says which files count, beside "
            "older versions of rows; export it to plain files, or name those that count with a glob such as *.parquet"
        )
    return ""


def split_pattern(path: str) -> tuple[str, str]:
    """(the folder before the first wildcard, without a slash at its end; the pattern below it, "" for a folder)."""
    parts = path.split("/")
    first = next((n for n, part in enumerate(parts) if MAGIC.search(part)), len(parts))
    return "/".join(parts[:first]).rstrip("/"), "/".join(parts[first:])


class Pattern:
    """A pattern as an automaton over the parts of a path: states are sets of how many of its parts have matched."""

    def __init__(self, pattern: str, hidden: str = HIDDEN) -> None:
        self._parts = [part for part in pattern.split("/") if part]
        self._hidden = hidden
        self.start = self._closed({0})

    def step(self, states: frozenset[int], name: str) -> frozenset[int]:
        """The states after one more folder or file name; empty where nothing below it can match."""
        visible = name[:1] not in ("", *self._hidden)  # empty names only mark a folder
        after = set()
        for state in states:
            part = self._parts[state] if state < len(self._parts) else "**"
            if part == "**":
                if visible:
                    after.add(state)
            elif fnmatchcase(name, part) and (visible or name[:1] == part[0]):
                after.add(state + 1)
        return self._closed(after)

    def matches(self, states: frozenset[int]) -> bool:
        """Whether a path with these states at its end is meant."""
        return len(self._parts) in states

    def _closed(self, states: set[int]) -> frozenset[int]:
        """With those after each ``**``, which may also stand for no folder at all."""
        for state in range(len(self._parts)):
            if state in states and self._parts[state] == "**":
                states.add(state + 1)
        return frozenset(states)


def select_names(paths: Iterable[str], folder: str, pattern: str, hidden: str = HIDDEN) -> list[str]:
    """Those of `paths` that lie below `folder` and match there, relative to it."""
    start, wanted = f"{folder}/" if folder else "", Pattern(pattern, hidden)
    names = []
    for path in paths:
        if path.startswith(start):
            states = wanted.start
            for part in path[len(start) :].split("/"):
                states = wanted.step(states, part)
            if wanted.matches(states):
                names.append(path[len(start) :])
    return names
