"""Ranges of bytes that came from stores, kept on this node's disk and shared by its processes.

* Whoever wants an entry that is missing locks ``KEY.lock`` and downloads; others wait for the lock, and find the entry
  there. A lock is let go by the system when its holder dies.
* An entry is written to ``KEY.part`` and renamed when it is complete. It ends with its length and a checksum; one that
  does not fit them is made anew.
* The bytes taken are counted in the file ``usage``, before they are written; past the limit the entries not used for
  longest go. Only files with the names that this module gives are ever counted or removed.

Nothing here can end a run: where the disk is full, gone or read-only, ranges are streamed and one warning says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_log = logging.getLogger(__name__)

_OURS = re.compile(r"[0-9a-f]{40}\.(range|part|lock|whole|sum)")  # the last two of earlier versions
_TRAILER = struct.Struct("<8sIQ")  # mark, CRC-32 of the bytes, their number
_MARK = b"zephon 1"
_POLL_SECONDS = 0.005
_WAIT_SECONDS = 330.0  # for another process's download, which has a deadline of its own
_LEFT_FREE = 1 << 30  # of the disk, where no limit is set
_SWEPT_SHARE = 0.1  # of the limit that a sweep frees beyond need, so that sweeps are rare
_QUIET_SECONDS = 60.0  # after a failed write, until the next is tried
_DEAD_SECONDS = 600.0  # without a write, after which a part was left behind by a process that was killed


class NodeCache:
    """Thread-safe, and safe among processes of one machine.

    Args:
        folder: where entries lie; made if it is missing.
        limit_bytes: most bytes that entries may take; None leaves 1 GiB of the disk free and takes the rest.
    """

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return NodeCache, (self.folder, self.limit_bytes)

    def fetch(self, owner: str, key: object, length: int, download: Callable[[], Any]) -> Any:
        """The `length` bytes of an entry as a buffer, from the disk or from `download`, which one process calls.

        Args:
            owner: the file that the entry belongs to, see `drop`.
            key: everything else that the bytes depend on; its `repr` counts.
        """
        entry = self._path(owner, key)
        data = _read_entry(entry, length)
        if data is None:
            with self._turn(entry):
                data = _read_entry(entry, length)
                if data is None:
                    data = download()
                    self._keep(entry, data)
        return data

    def drop(self, owner: str) -> None:
        """Forgets all entries of a file whose bytes turned out to be no good."""
        first = self._path(owner, None)
        with suppress(OSError):
            for entry in first.parent.glob(f"{first.name[:20]}*.range"):
                entry.unlink(missing_ok=True)

    def _path(self, owner: str, key: object) -> Path:
        name = _digest(owner) + _digest(repr(key))
        return self.folder / name[:2] / f"{name}.range"

    @contextmanager
    def _turn(self, entry: Path) -> Iterator[None]:
        """Alone with an entry; together with others where that cannot be had."""
        lock = FileLock(entry.with_suffix(".lock"), timeout=_WAIT_SECONDS)
        if time.monotonic() >= self._quiet_until:
            try:
                entry.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire(poll_interval=_POLL_SECONDS)
            except Timeout:
                pass
            except OSError as error:
                self._complain(error)
        try:
            yield
        finally:
            if lock.is_locked:
                # Who waits for it finds the entry, and who comes later does not need it.
                with suppress(OSError):
                    entry.with_suffix(".lock").unlink(missing_ok=True)
                lock.release()

    def _keep(self, entry: Path, data: Any) -> None:
        length = len(data)
        if time.monotonic() < self._quiet_until or (self.limit_bytes and length + _TRAILER.size > self.limit_bytes):
            return
        part = entry.with_suffix(".part")
        try:
            try:
                with open(part, "wb") as file:
                    self._reserve(file.fileno(), length + _TRAILER.size)
                    file.write(data)
                    file.write(_TRAILER.pack(_MARK, zlib.crc32(data), length))
                os.replace(part, entry)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            self._complain(error)

    def _reserve(self, part: int, size: int) -> None:
        """Counts the `size` bytes of a part as taken, removing the entries not used for longest as far as needed."""
        with FileLock(self.folder / "usage.lock").acquire(poll_interval=_POLL_SECONDS):
            os.ftruncate(part, size)  # from here on a sweep counts it
            usage = self.folder / "usage"
            text = usage.read_text() if usage.exists() else ""
            used = int(text) + size if text.isdecimal() else None
            if used is None or self._excess(used, size) > 0:
                used = self._sweep(size)
            usage.write_text(str(used))
            if self._excess(used, size) > 0:
                raise OSError(28, "no room within the limit of the cache")

    def _excess(self, used: int, size: int) -> int:
        """How many bytes must go before `size` of the `used` ones can be written."""
        disk = shutil.disk_usage(self.folder)
        if self.limit_bytes:
            return max(used - self.limit_bytes, size - disk.free)
        return size + min(_LEFT_FREE, disk.total // 20) - disk.free

    def _sweep(self, size: int) -> int:
        """Removes the entries not used for longest until `size` more bytes fit well; gives the bytes still taken."""
        found = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                if _OURS.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    stat = path.stat()
                    found.append((stat.st_mtime, stat.st_size, path))
        used = sum(nbytes for _, nbytes, _ in found)
        excess = self._excess(used, size)
        goal = used - excess - (int(_SWEPT_SHARE * self.limit_bytes) if self.limit_bytes else excess)
        for written, nbytes, path in sorted(found):
            is_dead = path.suffix == ".part" and time.time() - written > _DEAD_SECONDS
            if is_dead or (excess > 0 and used > goal and path.suffix not in (".part", ".lock")):
                with suppress(OSError):
                    path.unlink()
                    used -= nbytes
        return used

    def _complain(self, error: OSError) -> None:
        """Streams for a minute before the next try, and says so once per process."""
        with self._lock:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            first, self._warned = not self._warned, True
        if first:
            _log.warning(
                "nothing more can be kept in the cache '%s' (%s); data is streamed from its store again and again "
                "while that lasts: make room, or set cache_dir to a folder with more",
                self.folder,
                error.strerror or error,
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _read_entry(path: Path, length: int) -> Any:
    """The bytes of an entry, None where there is none or none that is sound; marks it as used now."""
    try:
        with open(path, "rb", buffering=0) as file:
            data = bytearray(length + _TRAILER.size + 1)
            count, view = 0, memoryview(data)
            while more := file.readinto(view[count:]):
                count += more
        if count == length + _TRAILER.size:
            payload = view[:length]
            if _TRAILER.unpack_from(data, length) == (_MARK, zlib.crc32(payload), length):
                os.utime(path)
                return payload
        path.unlink(missing_ok=True)
    except OSError:
        pass
    return None
