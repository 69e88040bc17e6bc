"""Files that rows name, such as images: below a folder or a prefix of a store, or in a tar archive, each read whole."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from zephon.data.clients import store_of
from zephon.data.formats.webdataset import members_of
from zephon.data.storage import is_remote, list_files, local_path
from zephon.data.store import Store, StoreFault, attempt, shown
from zephon.errors import DataError, PipelineError

MAX_FILE_BYTES = 64 << 20
NAMED = 100  # characters of a path in messages
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that say what is in the folder; others say how the machine is."""


class NoFile(Exception):
    """Why a name is that of no file that can be read."""


class Media(Protocol):
    """The files below a root. Any thread may read them, and a copy in another process."""

    is_slow: bool
    """Whether several reads at a time are faster."""

    def read(self, name: str) -> bytes:
        """The content of a file; `NoFile`, or DataError where a store does not answer."""


def open_media(root: str) -> Media:
    """What is at `root`; PipelineError where that is neither a folder, nor a tar archive, nor the URI of a store."""
    try:
        path = root if is_remote(root) else local_path(root)
        if path.lower().endswith(".tar"):
            return _Archive(path)
        if is_remote(root):
            return _Prefix(path)
        if Path(path).is_dir():
            return _Folder(path)
    except DataError as error:
        raise PipelineError(f"media_root is {shown(root)}, which cannot be used: {error}") from error
    raise PipelineError(
        f"media_root is {root}; expected an existing folder, a tar archive that is not compressed, or a store's URI."
    )


class _Folder:
    is_slow = False

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()

    def read(self, name: str) -> bytes:
        named = repr(name[:NAMED])
        try:
            path = Path(os.path.realpath(self._root / name))
            if not path.is_relative_to(self._root):
                raise NoFile(f"the path {named} leads out of media_root")
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise NoFile(f"the path {named} is no file")
            _check_size(name, status.st_size)
            return path.read_bytes()
        except OSError as error:
            if error.errno in _ABSENT:
                raise NoFile(f"the file {named} cannot be read ({error.strerror})") from None
            # Which rows are left out must not depend on the moment.
            raise DataError(f"cannot read {named} below media_root {self._root}: {error.strerror}.") from None
        except ValueError:
            raise NoFile(f"the path {named} is none") from None


class _Archive:
    """Members are read in place, by the offsets that a scan has found; of several of one name the last one counts."""

    def __init__(self, path: str) -> None:
        self._file = list_files(path).file(0)
        self._members = {posixpath.normpath(name): place for name, place in members_of(self._file)}
        self.is_slow = self._file.source is not None

    def read(self, name: str) -> bytes:
        place = self._members.get(posixpath.normpath(name))
        if place is None:
            raise NoFile(f"the archive at media_root has no file {name[:NAMED]!r}")
        start, length = place
        _check_size(name, length)
        if self._file.source is not None:
            return bytes(self._file.fetch(start, length)) if length else b""
        with self._file.open() as file:
            file.seek(start)
            return bytes(file.read(length))


class _Prefix:
    is_slow = True

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._store, self._path = store_of(self._root)
        try:
            self._key("name")
        except StoreFault as fault:
            raise DataError(fault.reason) from fault

    def read(self, name: str) -> bytes:
        below = posixpath.normpath(name)
        if below in (".", "..") or below.startswith(("/", "../")):
            raise NoFile(f"the path {name[:NAMED]!r} leads out of media_root")
        if not below.isprintable():  # which some stores refuse
            raise NoFile(f"the path {name[:NAMED]!r} is none")
        store, what = self._store, f"'{shown(self._root)}/{below}'"
        key = self._key(below)
        found = attempt(lambda: _head(store, key), store, what, is_first=True)
        if found is None:
            raise NoFile(f"the file {name[:NAMED]!r} cannot be read (No such file or directory)")
        size, version = found
        _check_size(name, size)
        return bytes(attempt(lambda: store.get(key, 0, size, version, size), store, what)) if size else b""

    def _key(self, name: str) -> str:
        return self._store.key_below(self._path, quote(name) if self._store.scheme in ("http", "https") else name)


def _head(store: Store, key: str) -> tuple[int, str] | None:
    """(bytes, version) of an object now; None where there is none."""
    try:
        return store.head(key)
    except StoreFault as fault:
        if fault.kind == "missing":
            return None
        raise


def _check_size(name: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise NoFile(f"the file {name[:NAMED]!r} is larger than {MAX_FILE_BYTES:,} bytes")
