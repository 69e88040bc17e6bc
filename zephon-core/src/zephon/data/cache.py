"""Decoded groups, shared by every lane and dataset of a process: in memory, and beyond that on this machine's disk.

A lane has a group of each of its datasets in use, so many datasets or lanes need more groups at a time than memory has
room for. Decoding a group again for every few rows of it costs ten times what its tokens cost; writing it to disk, raw,
costs little, since the system keeps in memory what is read again soon.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from zephon.columns.appending import allocate
from zephon.errors import RecipeError

_log = logging.getLogger(__name__)
_SEGMENT_BYTES = 64 << 20
_LEFT_FREE = 1 << 30  # of the disk


@dataclass(slots=True)
class _Entry:
    table: pa.Table
    nbytes: int
    left: int  # rows of it that no lane has asked for in this pass
    is_spent: bool = False  # it will be wanted again in the next pass


class DecodeCache:
    """Decoded groups up to `max_bytes` of Arrow buffers in memory and `disk_bytes` on disk; thread-safe.

    Two threads that want the same group decode it once: the first works, the others wait for its result, or get its
    error, which is not remembered. Groups of which every row has been asked for take a quarter of the memory at most,
    which serves small datasets, and go first; then the least recently used ones go, to disk if rows of them are left.
    The group asked for last stays even when it alone is larger than `max_bytes`; 0 keeps nothing, on disk neither.
    """

    def __init__(self, max_bytes: int, disk_bytes: int = 0) -> None:
        if max_bytes < 0:
            raise RecipeError(f"max_bytes of the decode cache is {max_bytes}; expected 0 or more")
        self.max_bytes, self.disk_bytes = max_bytes, disk_bytes
        self.bytes = 0
        """Bytes of the groups in memory now."""
        self._spent_bytes = 0
        self._lock = threading.Lock()
        self._tables: OrderedDict[Hashable, _Entry] = OrderedDict()  # the next one to go first
        self._disk = _Disk(disk_bytes)
        self._on_disk: dict[Hashable, _Entry] = {}
        self._flights: dict[Hashable, Future[pa.Table]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodeCache, (self.max_bytes, self.disk_bytes)  # its content stays in this process

    def get(self, key: Hashable, decode: Callable[[], pa.Table], rows: int = 0) -> pa.Table:
        """The group `key`, kept or by calling `decode`.

        Args:
            rows: how many of its rows are going to be used now; each is used once in a pass over the data.
        """
        with self._lock:
            if (entry := self._tables.get(key) or self._on_disk.get(key)) is not None:
                self._use(key, entry, rows)
                return entry.table
            flight = self._flights.get(key)
            is_mine = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if not is_mine:
            table = flight.result()
            with self._lock:
                if (entry := self._tables.get(key)) is not None:
                    self._use(key, entry, rows)
            return table
        try:
            table = decode()
        except BaseException as error:
            with self._lock:
                del self._flights[key]
            flight.set_exception(error)
            raise
        with self._lock:
            del self._flights[key]
            if self.max_bytes:
                entry = self._tables[key] = _Entry(table, table.nbytes, table.num_rows)
                self.bytes += entry.nbytes
                self._use(key, entry, rows)
            outgoing = self._over_limit(key)
        flight.set_result(table)
        for other, entry in outgoing:
            if (stored := self._disk.store(entry.table)) is not None:
                with self._lock:
                    if other not in self._tables:  # nor decoded again meanwhile
                        self._on_disk[other] = _Entry(stored, entry.nbytes, entry.left)
        return table

    def holds(self, key: Hashable) -> bool:
        """Whether the group `key` is there; counts as no use of it."""
        with self._lock:
            return key in self._tables or key in self._on_disk

    def discard(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Drops the groups whose key is `unwanted`."""
        with self._lock:
            for key in [key for key in self._tables if unwanted(key)]:
                entry = self._tables.pop(key)
                self.bytes -= entry.nbytes
                self._spent_bytes -= entry.is_spent * entry.nbytes
            for key in [key for key in self._on_disk if unwanted(key)]:
                del self._on_disk[key]

    # The rest is called with the lock held.

    def _use(self, key: Hashable, entry: _Entry, rows: int) -> None:
        self._spent_bytes -= entry.is_spent * entry.nbytes
        entry.left -= rows
        entry.is_spent = entry.left <= 0
        if entry.is_spent:
            entry.left = entry.table.num_rows  # of the next pass
        if key in self._tables:
            self._tables.move_to_end(key, last=not entry.is_spent)
            self._spent_bytes += entry.is_spent * entry.nbytes
        elif entry.is_spent:
            del self._on_disk[key]

    def _over_limit(self, last: Hashable) -> list[tuple[Hashable, _Entry]]:
        """Takes groups out of memory down to its limits, but not the `last` one; those that should go to disk."""
        outgoing: list[tuple[Hashable, _Entry]] = []
        kept = self._tables.pop(last, None)
        while self._tables:  # from the front on: there may be 100,000 of a row each
            key, entry = next(iter(self._tables.items()))
            if self.bytes <= self.max_bytes and (self._spent_bytes <= self.max_bytes // 4 or not entry.is_spent):
                break
            del self._tables[key]
            self.bytes -= entry.nbytes
            self._spent_bytes -= entry.is_spent * entry.nbytes
            if entry.left < entry.table.num_rows:  # else nothing of it, or all, has been used
                outgoing.append((key, entry))
        if kept is not None:
            self._tables[last] = kept
            self._tables.move_to_end(last, last=not kept.is_spent)
        return outgoing


class _Disk:
    """Tables in unnamed files, up to `max_bytes`; a file goes with the last table in it. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._segment: tuple[mmap.mmap, int] | None = None  # (a file, mapped; how much of it is taken)
        self._process = os.getpid()

    def store(self, table: pa.Table) -> pa.Table | None:
        """The table as it lies in a file; None where there is no room."""
        nbytes = sum(map(pa.ipc.get_record_batch_size, table.to_batches())) + table.schema.serialize().size + 4096
        with self._lock:
            if self._process != os.getpid():  # a fork must not write to the file of its parent
                self._process, self._segment = os.getpid(), None
            if self._segment is None or self._segment[1] + nbytes > len(self._segment[0]):
                if (mapped := self._new_segment(max(nbytes, _SEGMENT_BYTES))) is None:
                    return None
                self._segment = mapped, 0
            segment, start = self._segment
            self._segment = segment, start + -(-nbytes // 64) * 64
        part = pa.py_buffer(memoryview(segment)[start : start + nbytes])
        with pa.ipc.new_stream(pa.FixedSizeBufferWriter(part), table.schema) as writer:
            writer.write_table(table)
        low = start // mmap.PAGESIZE * mmap.PAGESIZE
        segment.madvise(mmap.MADV_DONTNEED, low, start + nbytes - low)  # the system has it, this process needs it later
        return pa.ipc.open_stream(part).read_all()

    def _new_segment(self, nbytes: int) -> mmap.mmap | None:
        if self._bytes + nbytes > self._max_bytes:
            return None
        try:
            with tempfile.TemporaryFile(prefix="zephon-") as file:
                disk = os.fstatvfs(file.fileno())
                if disk.f_bavail * disk.f_frsize < nbytes + _LEFT_FREE:
                    return None
                allocate(file.fileno(), nbytes)
                mapped = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            _log.warning("decoded data cannot be kept on disk (%s); it is decoded again", error.strerror or error)
            self._max_bytes = 0
            return None
        self._bytes += nbytes
        weakref.finalize(mapped, self._freed, nbytes).atexit = False
        return mapped

    def _freed(self, nbytes: int) -> None:
        self._bytes -= nbytes
