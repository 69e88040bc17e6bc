"""Rows that could not be used: the budget of a run for them, and the report.

Any failure over a single row (unreadable bytes, a user's function, a chat template, a value of the wrong shape) becomes
a `RowFault`. The policy says whether the first one ends the run or whether such rows are left out. A row is
left out because of its content only, so a run gives the same records after any restart.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from zephon.columns.appending import append_whole
from zephon.config.options import FaultPolicy
from zephon.errors import DataError

_log = logging.getLogger("zephon")
_MAX_REASON = 300
_FAULTS_LOGGED = 10
# Entries per process, which are kept in memory to report each once: at most about 300 MB of file, 100 MB of memory.
_MAX_REPORTED = 1 << 20


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that could not be used.

    Attributes:
        operator: as `explain()` names it; "read" where the row could not be read.
        dataset, shard: names.
        row: number of the row within its shard.
        reason: one line.
        first_row, rows: the range of rows of the shard that failed together: a row group that cannot be decoded, or the
            row.
        content: content of the row, shortened, if it is kept for the report, else "".
    """

    operator: str
    dataset: str
    shard: str
    row: int
    reason: str
    first_row: int = 0
    rows: int = 1
    content: str = ""

    def __str__(self) -> str:
        return f'{self.operator} failed on dataset "{self.dataset}", shard {self.shard}, row {self.row}: {self.reason}'


class FaultBudget:
    """Counts the faults of one lane against the policy, chunk by chunk.

    Each chunk is judged by itself, without the faults of earlier ones, so the verdict does not depend on where the lane
    was entered.

    Args:
        policy: the budget of faults per chunk.
        logged: the stretches of rows that this process has logged, in any lane and pass.
        on_fault: called with the chunk and the fault, for every fault.
    """

    def __init__(
        self, policy: FaultPolicy, logged: set[Any], on_fault: Callable[[int, RowFault], None] | None = None
    ) -> None:
        self._policy, self._logged, self._on_fault = policy, logged, on_fault
        self._chunk = -1
        self._in_chunk = 0

    def add(self, chunk: int, rows: int, faults: Iterable[RowFault]) -> None:
        """Count faults of a chunk that has `rows` rows.

        Raises:
            DataError: the chunk has more faults than the budget allows.
        """
        if chunk != self._chunk:
            self._chunk, self._in_chunk = chunk, 0
        allowed = self._policy.allowed(rows)
        for fault in faults:
            self._in_chunk += 1
            if self._on_fault is not None:
                self._on_fault(chunk, fault)
            if self._in_chunk > allowed:
                raise DataError(
                    f"{fault}. Rows that cannot be used in this chunk of {rows}: {self._in_chunk}; "
                    f"{self._policy.described(rows)}. Repair the data or the function, or raise the budget."
                )
            stretch = (fault.dataset, fault.shard, fault.first_row, fault.reason)
            if len(self._logged) < _FAULTS_LOGGED and stretch not in self._logged:
                self._logged.add(stretch)
                several = f" (with all {fault.rows:,} rows from row {fault.first_row} on)" if fault.rows > 1 else ""
                more = " (further rows are only counted)" if len(self._logged) == _FAULTS_LOGGED else ""
                _log.warning("row left out: %s%s%s", fault, several, more)


class FaultReport:
    """Appends the faults of one process to a file of JSON lines, each once.

    A line is an object with "dataset", "shard", "row" and "rows" (the first of the rows of the shard that failed
    together, and their number; null for an unreadable shard), "operator", "reason", "lane" and "chunk" (of the fault;
    "record" in place of "chunk" where an image is grey), and "content" in quarantine. A process reports the same rows
    once, however often they come up. Lines are written whole and at once, so faults that a killed process met are on
    record.

    Args:
        folder: shared by the ranks of a run; created if missing.
        rank: prefix of the file name, before time and process id.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: str) -> None:
        self._path = Path(folder) / f"{rank}-{time.time_ns()}-{os.getpid()}.jsonl"
        self._file: FileIO | None = None
        self._written: set[int] = set()
        self._failed = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(self._path.parent, os.W_OK | os.X_OK):
                raise PermissionError(13, "permission denied")
        except OSError as error:
            raise DataError(
                f"error_report is {str(folder)!r}; expected a folder that can be written to ({error.strerror}). Name "
                "another folder, or free space."
            ) from None

    def add(self, lane: int, chunk: int, fault: RowFault) -> None:
        """Report a fault, unless it has been reported."""
        self._add(fault, lane=lane, chunk=chunk)

    def add_grey(self, lane: int, record: int, fault: RowFault) -> None:
        """Report a row with a grey image, and the first record that showed it."""
        self._add(fault, lane=lane, record=record)

    def add_shard(self, dataset: str, shard: str, reason: str) -> None:
        """Report an unreadable shard."""
        self._write({"dataset": dataset, "shard": shard, "row": 0, "rows": None, "operator": "read"}, reason, "")

    def close(self) -> None:
        """Close the file; a later fault opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, fault: RowFault, **where: int) -> None:
        stretch = {"dataset": fault.dataset, "shard": fault.shard, "row": fault.first_row, "rows": fault.rows}
        self._write({**stretch, "operator": fault.operator}, fault.reason, fault.content, **where)

    def _write(self, subject: dict[str, Any], reason: str, content: str, **where: int) -> None:
        key = hash(tuple(subject.values()))
        if self._failed or key in self._written or len(self._written) > _MAX_REPORTED:
            return
        self._written.add(key)
        entry = {**subject, "reason": reason, **where, **({"content": content} if content else {})}
        if len(self._written) > _MAX_REPORTED:
            entry = {"reason": f"more than {_MAX_REPORTED} faults; further ones are not reported"}
        line = json.dumps(entry, ensure_ascii=True) + "\n"
        try:
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
            append_whole(self._file, line.encode())
        except OSError as error:
            # Rows are left out because of their content, whether or not the fault can be reported.
            self._failed = True
            _log.warning("cannot write to %s (%s); further faults are not reported.", self._path, error.strerror)


def read_report(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The entries of the reports in a folder, each range of rows once per operator, sorted by file name.

    Lines that are no valid entry, such as one that a killed process cut off, are skipped.
    """
    seen = set()
    for path in sorted(Path(folder).glob("*.jsonl")):
        with open(path, "rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    key = tuple(entry[name] for name in ("dataset", "shard", "row", "rows", "operator"))
                except (ValueError, KeyError, TypeError):
                    continue
                if key not in seen:
                    seen.add(key)
                    yield entry


def reason_of(error: BaseException) -> str:
    """Type and message of an exception, as one short line."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    text = f"{kind}: {text}" if text else kind
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."
