"""The flush index: where every window of every lane begins, so that a run can be entered anywhere without a checkpoint.

A run keeps it by appending 64 bytes per lane and window: lane, the six numbers of `LaneStart` (int64), and a CRC-32 of
those 56 bytes; with ensure_mixture `LaneStart` has one number more per dataset. Where windows begin is a pure function
of the data, so entries of any rank, of any topology and of runs that were killed all hold, as long as the fingerprint
in the header of their file is the run's own, and so is the history of the lane beside the CRC: where in it runs were
taken over.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zephon.columns.appending import append_whole, new_file
from zephon.columns.lane_start import LaneStart
from zephon.errors import CheckpointError
from zephon.run.compile import Compiled

_log = logging.getLogger("zephon")

_HEADER_BYTES = 256


def _seal(numbers: bytes, history: int) -> int:
    return zlib.crc32(numbers) | history << 32


def _head(fingerprint: str) -> bytes:
    head = json.dumps({"zephon_flush_index": 1, "fingerprint": fingerprint}).encode()
    return head.ljust(_HEADER_BYTES - 1) + b"\n"


def compact_index(folder: str | os.PathLike[str] | None, compiled: Compiled) -> None:
    """Put the files of a run into one; for the start of a job, before any of its processes writes."""
    head, size = _head(compiled.digest), 8 * (2 + len(compiled.plan.first_start.as_list()))
    files = {file: file.read_bytes() for file in sorted(Path(folder).glob("*.flush"))} if folder else {}
    bodies = {file: content[len(head) :] for file, content in files.items() if content.startswith(head)}
    if folder and len(bodies) > 1:
        entries = dict.fromkeys(body[at : at + size] for body in bodies.values() for at in range(0, len(body), size))
        whole = b"".join(entry for entry in entries if len(entry) == size)
        new_file(folder, f"{time.time_ns()}-{os.getpid()}.flush", "the flush index", head + whole).close()
        for file in bodies:
            file.unlink(missing_ok=True)


class FlushIndexWriter:
    """Appends the windows that the lanes of one process reach.

    Args:
        folder: shared by the ranks of a run; made if it does not exist.
        fingerprint: digest of everything that decides the data.
        history: a number below 2**32 for each lane, for the places where it was taken over; 0 for none.
    """

    def __init__(self, folder: str | os.PathLike[str], fingerprint: str, history: Mapping[int, int]) -> None:
        name = f"{time.time_ns()}-{os.getpid()}.flush"
        self._file = new_file(folder, name, "the flush index", _head(fingerprint))
        self._history, self._failed = history, False

    def write(self, lane: int, start: LaneStart) -> None:
        """Append one window. A run can do without the index: a failure is logged once and ends the writing."""
        if self._failed:
            return
        numbers = np.array([lane, *start.as_list()], dtype="<i8").tobytes()
        try:
            append_whole(self._file, numbers + _seal(numbers, self._history[lane]).to_bytes(8, "little"))
        except OSError as error:
            self._failed = True
            _log.warning("the flush index %s is not kept any longer: %s", self._file.name, error.strerror)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FlushIndex:
    """Reads the index files of a folder that belong to one run; damaged entries are passed over.

    Args:
        folder, fingerprint, history: as for `FlushIndexWriter`.
        first: where the lanes of the run begin.

    Raises:
        CheckpointError: the folder holds index files, but of other data only.
    """

    def __init__(
        self, folder: str | os.PathLike[str], fingerprint: str, history: Mapping[int, int], first: LaneStart
    ) -> None:
        self._first = first
        numbers = 1 + len(first.as_list())
        entry = np.dtype([("numbers", "<i8", (numbers,)), ("crc", "<u8")])
        own, foreign = [np.empty((0, numbers), dtype=np.int64)], 0
        for file in sorted(Path(folder).glob("*.flush")):
            content = file.read_bytes()
            try:
                head = json.loads(content[:_HEADER_BYTES])
                matches = head == {"zephon_flush_index": 1, "fingerprint": fingerprint}
            except ValueError:
                continue
            if not matches:
                foreign += 1
                continue
            body = content[_HEADER_BYTES:]
            entries = np.frombuffer(body, dtype=entry, count=len(body) // entry.itemsize)
            sound = [
                _seal(each["numbers"].tobytes(), history.get(int(each["numbers"][0]), 0)) == each["crc"]
                for each in entries
            ]
            own.append(entries["numbers"][np.array(sound, dtype=bool)])
        if foreign and len(own) == 1:
            raise CheckpointError(
                f"the flush index in {folder} was written by a run with other data (recipe, tokenizer, sequence length "
                "or lanes, or an accepted change); give the index of this run, or none to count from the start."
            )
        entries = np.concatenate(own)
        # By lane, then records before, then window: windows without a record share their number of records.
        self._entries = entries[np.lexsort((entries[:, 1], entries[:, 2], entries[:, 0]))]

    def start(self, lane: int, records: int) -> LaneStart:
        """The last window of `lane` known to begin before its record `records`, or the start of the run."""
        of_lane = self._entries[self._entries[:, 0] == lane]
        before = of_lane[of_lane[:, 2] < records]
        return LaneStart.of(before[-1, 1:]) if len(before) else self._first
