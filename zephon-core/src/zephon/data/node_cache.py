"""What came from stores, kept on this node's disk and shared by its processes.

An entry is one range of bytes of one version of one object, or one whole object. Entries are made whole or not at all:

* Whoever wants one that is missing locks ``KEY.part`` and downloads into it; others wait for the lock, and find the
  entry there. A lock is let go by the system when its holder dies, so a kill leaves nothing but a file to write over.
* A finished part is renamed to its entry. Every entry carries its length and a checksum, which are compared when it is
  read; one that does not fit is made anew.
* The bytes taken are counted in one file that all processes lock, before they are written; past the limit the entries
  not used for longest go, whole copies too: who has one open reads on, and who opens one that is gone downloads it
  again. Only files with the names that this module gives are ever counted or removed.

Nothing here can end a run: where the disk is full, gone or read-only, ranges are streamed and one warning says so.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["NodeCache"]

_log = logging.getLogger(__name__)

_OURS = re.compile(r"[0-9a-f]{40}\.(range|whole|sum|part)")
_TRAILER = struct.Struct("<8sIQ")  # mark, CRC-32 of the bytes, their number
_MARK = b"zephon 1"
_FIRST_POLL, _LONGEST_POLL = 0.002, 0.05
_WAIT_SECONDS = 330.0  # for another process's download, which has a deadline of its own
_LEFT_FREE = 1 << 30  # of the disk, where no limit is set
_SWEPT_TO = 0.9  # of the limit, so that sweeps are rare
_QUIET_SECONDS = 60.0  # after a failed write, until the next is tried
_PIECE = 8 << 20
_BLOCK = 1 << 20


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
        self._sound: dict[str, int] = {}  # whole copies whose checksum this process has compared, with their inodes

    @staticmethod
    def key(*identity: object) -> str:
        """The name of an entry, from everything that its bytes depend on."""
        text = "\0".join(map(str, identity))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]

    def fetch(self, key: str, length: int, download: Callable[[], Any]) -> Any:
        """The `length` bytes of an entry as a buffer, from the disk or from `download`, which one process calls."""
        entry = self._path(key, "range")
        kept = _read_entry(entry, length)
        if kept is not None:
            return kept
        with self._part(key, entry.exists) as part:
            kept = _read_entry(entry, length) if part is None or entry.exists() else None
            if kept is not None:
                return kept
            data = download()
            if part is not None:
                with self._forgiven():
                    self._reserve(length + _TRAILER.size, part)
                    _write(part, data, 0)
                    _write(part, _TRAILER.pack(_MARK, zlib.crc32(data), length), length)
                    os.rename(self._path(key, "part"), entry)
            return data

    def drop(self, key: str) -> None:
        """Forgets an entry whose bytes turned out to be no good."""
        for kind in ("range", "whole", "sum"):
            self._path(key, kind).unlink(missing_ok=True)
        self._sound.pop(key, None)

    def whole(self, key: str, size: int, download: Callable[[int, int], Any]) -> str | None:
        """The path of a complete copy of an object of `size` bytes, None where there is no room for one.

        `download(start, length)` gives bytes of it. The copy goes when room is needed and all others were used later,
        so open it at once and ask again where that fails; once open it can be read to the end.
        """
        entry, checksum = self._path(key, "whole"), self._path(key, "sum")
        if self._has_whole(key, entry, checksum, size):
            return str(entry)
        with self._part(key, entry.exists) as part:
            if self._has_whole(key, entry, checksum, size):
                return str(entry)
            if part is None:
                return None
            try:
                self._reserve(size, part, beside=_TRAILER.size)
            except OSError as error:
                self._complain(error)
                return None
            crc = 0
            for start in range(0, size, _PIECE):
                data = download(start, min(_PIECE, size - start))
                crc = zlib.crc32(data, crc)
                try:
                    _write(part, data, start)
                except OSError as error:
                    self._complain(error)
                    return None
            with self._forgiven():
                checksum.write_bytes(_TRAILER.pack(_MARK, crc, size))
                os.rename(self._path(key, "part"), entry)
                self._sound[key] = os.fstat(part).st_ino
            return str(entry) if self._has_whole(key, entry, checksum, size) else None

    def _path(self, key: str, kind: str) -> Path:
        return self.folder / key[:2] / f"{key}.{kind}"

    @contextmanager
    def _part(self, key: str, finished: Callable[[], bool]) -> Iterator[int | None]:
        """The locked, empty part of an entry as a descriptor; None where the entry came meanwhile or cannot be kept.

        What is still there under its name at the end is removed.
        """
        part = self._path(key, "part")
        descriptor = None
        if time.monotonic() >= self._quiet_until:
            with self._forgiven():
                descriptor = self._locked(part, finished)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                with suppress(OSError):
                    if _same_file(descriptor, part):
                        part.unlink()
                os.close(descriptor)

    def _locked(self, part: Path, finished: Callable[[], bool]) -> int | None:
        wait, give_up = _FIRST_POLL, time.monotonic() + _WAIT_SECONDS
        while not finished():
            try:
                descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:
                part.parent.mkdir(parents=True, exist_ok=True)
                continue
            if _try_lock(descriptor):
                if _same_file(descriptor, part):
                    os.ftruncate(descriptor, 0)
                    return descriptor
                os.close(descriptor)  # renamed or removed between opening and locking: look again
                continue
            os.close(descriptor)
            if time.monotonic() > give_up:
                return None
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_POLL)
        return None

    def _reserve(self, size: int, part: int, beside: int = 0) -> None:
        """Takes `size` bytes of the disk for a part, removing the entries not used for longest as far as needed.

        They are counted as taken, and so are those of its file `beside`.
        """
        size += beside
        if self.limit_bytes is not None and size > self.limit_bytes:
            raise _TooLarge(errno.EFBIG, f"{size:,} bytes at once, where its limit is {self.limit_bytes:,}")
        with self._usage() as usage:
            used = _read_number(usage)
            if used is None or not self._fits(used, size):
                used = self._sweep(size)
            if not self._fits(used, size):
                raise OSError(errno.ENOSPC, "no room within the limit of the cache")
            if hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(part, 0, max(size - beside, 1))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                            raise
                    else:
                        used = self._sweep(size, must_free=size)
                        os.posix_fallocate(part, 0, max(size - beside, 1))
            _write_number(usage, used + size)

    def _fits(self, used: int, size: int) -> bool:
        if self.limit_bytes is not None:
            return used + size <= self.limit_bytes
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize - size >= min(_LEFT_FREE, disk.f_blocks * disk.f_frsize // 20)

    def _sweep(self, size: int, must_free: int = 0) -> int:
        """Removes the entries not used for longest until `size` more bytes fit well; gives the bytes still taken."""
        found: list[tuple[float, int, Path]] = []
        for path in self._entries():
            with suppress(OSError):
                stat = path.lstat()
                if path.name.endswith(".part") and self._remove_unlocked(path):
                    continue  # what a killed process left behind
                found.append((stat.st_mtime, stat.st_size, path))
        used = sum(entry[1] for entry in found)
        goal = used - must_free
        if self.limit_bytes is not None:
            goal = min(goal, int(_SWEPT_TO * self.limit_bytes) - size, self.limit_bytes - size)
        elif not must_free:
            disk = os.statvfs(self.folder)
            lacking = size + min(_LEFT_FREE, disk.f_blocks * disk.f_frsize // 20) - disk.f_bavail * disk.f_frsize
            goal = used - max(0, 2 * lacking)
        for _, nbytes, path in sorted(found):
            if used <= max(goal, 0):
                break
            if path.name.endswith((".part", ".sum")):
                continue
            with suppress(OSError):
                path.unlink()
                used -= nbytes
                if path.name.endswith(".whole"):
                    path.with_suffix(".sum").unlink(missing_ok=True)
        return used

    def _entries(self) -> Iterator[Path]:
        with suppress(OSError):
            for folder in os.scandir(self.folder):
                if not (len(folder.name) == 2 and folder.is_dir(follow_symlinks=False)):
                    continue
                for file in os.scandir(folder.path):
                    if _OURS.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        yield Path(file.path)

    def _remove_unlocked(self, path: Path) -> bool:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not _try_lock(descriptor):
                return False
            path.unlink()
            return True
        finally:
            os.close(descriptor)

    @contextmanager
    def _usage(self) -> Iterator[int]:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for the moment of counting, or of a sweep
            yield descriptor
        finally:
            os.close(descriptor)

    def _has_whole(self, key: str, entry: Path, checksum: Path, size: int) -> bool:
        """Whether a sound copy is there, which is then marked as used now."""
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        sound = False
        try:
            inode = os.fstat(descriptor).st_ino
            sound = self._sound.get(key) == inode or _is_sound(descriptor, checksum, size)
            if sound:
                self._sound[key] = inode
                os.utime(descriptor)
        except OSError:
            sound = False
        finally:
            os.close(descriptor)
        if not sound:
            with suppress(OSError):
                entry.unlink(missing_ok=True)
        return sound

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        """Streams for a minute before the next try, and says so once per process."""
        with self._lock:
            if not isinstance(error, _TooLarge):  # smaller entries fit
                self._quiet_until = time.monotonic() + _QUIET_SECONDS
            first, self._warned = not self._warned, True
        if first:
            _log.warning(
                "nothing more can be kept in the cache '%s' (%s); data is streamed from its store again and again "
                "while that lasts: make room, or set cache_dir to a folder with more",
                self.folder,
                error.strerror or error,
            )


class _TooLarge(OSError):
    """An entry that the limit has no room for even alone."""


def _read_entry(path: Path, length: int) -> Any:
    """The bytes of an entry, None where there is none or none that is sound; marks it as used now."""
    try:
        with open(path, "rb", buffering=0) as file:
            data = bytearray(length + _TRAILER.size + 1)
            count, view = 0, memoryview(data)
            while more := file.readinto(view[count:]):
                count += more
        mark, crc, told = _TRAILER.unpack_from(data, length) if count == length + _TRAILER.size else (b"", 0, 0)
        payload = view[:length]
        if (mark, told) != (_MARK, length) or zlib.crc32(payload) != crc:
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):
            os.utime(path)
        return payload
    except OSError:
        return None


def _is_sound(descriptor: int, checksum: Path, size: int) -> bool:
    mark, crc, told = _TRAILER.unpack(checksum.read_bytes()[: _TRAILER.size].ljust(_TRAILER.size, b"\0"))
    if (mark, told) != (_MARK, size) or os.fstat(descriptor).st_size != size:
        return False
    found, position = 0, 0
    while block := os.pread(descriptor, _BLOCK, position):
        found, position = zlib.crc32(block, found), position + len(block)
    return found == crc


def _write(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _read_number(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0)
    return int(text) if re.fullmatch(rb"\d{20}\n", text) else None


def _write_number(descriptor: int, number: int) -> None:
    os.pwrite(descriptor, b"%020d\n" % number, 0)
