"""Where files come from: the one place that turns a dataset's path into files and opens them.

Today a path is a local file, a folder, a glob or a ``file://`` URI. Another store is another implementation of what
this module gives the rest of `zephon.io`: a sorted `Listing` and, per file, a `StoredFile` that opens as an Arrow file.
"""

import difflib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.errors import DataError

__all__ = ["FileChanged", "Listing", "StoredFile", "list_files", "local_path"]

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)")
_MAGIC = re.compile(r"[*?\[]")


class FileChanged(DataError):
    """The size or modification time of a file is not what it was when the dataset was listed."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file as it was when listed. `size` in bytes, `mtime_ns` in nanoseconds since the epoch."""

    path: str
    size: int
    mtime_ns: int

    def open(self) -> Any:
        """The file as a `pa.NativeFile` for random access; the caller closes it.

        Plain reads, never a memory map: a file cut short under a map would kill the process with SIGBUS.

        Raises:
            FileChanged: it is not the file that was listed.
            DataError: it cannot be opened.
        """
        try:
            file = pa.OSFile(self.path, "rb")
            now = os.fstat(file.fileno())
        except OSError as error:
            raise DataError(
                f"cannot open '{self.path}': {_reason(error)}; the dataset was listed with this file, "
                "so make it readable and start again"
            ) from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            file.close()
            raise FileChanged(
                f"'{self.path}' has changed since the dataset was listed ({self.size:,} bytes then, {now.st_size:,} "
                "now); a dataset must not change during a run, so restore the file or start a new run"
            )
        return file

    def local(self) -> str:
        """The path of a complete copy of the file on this machine, for libraries that take nothing but paths.

        For a local file that is the file itself. The path may be read, never written, and not kept for longer than the
        reader that asked for it.

        Raises:
            FileChanged, DataError: as `open`.
        """
        self.open().close()
        return self.path

    def beside(self, name: str) -> "StoredFile":
        """The file called `name` (a plain name, no path) in the same folder, as it is now.

        Raises:
            DataError: there is none.
        """
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise DataError(f"'{self.path}' refers to a file named {name[:100]!r}, and a plain file name was expected")
        return replace(self, path=os.path.join(os.path.dirname(self.path), name)).refreshed()

    def refreshed(self) -> "StoredFile":
        """The same path with its size and modification time of now."""
        now = _stat_regular(self.path)
        return StoredFile(self.path, now.st_size, now.st_mtime_ns)


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The files of one dataset, sorted by name; columns, not objects, for there may be a million.

    names: n relative POSIX paths below `root`, unique, in code point order; sizes: int64[n] bytes;
    mtimes: int64[n] nanoseconds.
    """

    root: str
    names: list[str]
    sizes: npt.NDArray[np.int64]
    mtimes: npt.NDArray[np.int64]

    def file(self, index: int) -> StoredFile:
        return StoredFile(os.path.join(self.root, self.names[index]), int(self.sizes[index]), int(self.mtimes[index]))

    def select(self, keep: list[int]) -> "Listing":
        """The files at the positions `keep`, ascending."""
        return Listing(self.root, [self.names[i] for i in keep], self.sizes[keep], self.mtimes[keep])


def local_path(path: str) -> str:
    """`path` as a local path or pattern.

    Raises:
        DataError: a URI of a store that this version cannot read.
    """
    uri = _URI.match(path)
    if uri is None:
        return os.path.expanduser(path)
    if uri[1].lower() != "file":
        raise DataError(
            f"stores of kind {uri[1].lower()}:// are not supported by this version; '{path}' must be a local file, "
            "folder, glob or file:// URI, so copy or mount the dataset locally"
        )
    if uri[2] not in ("", "localhost"):
        raise DataError(f"'{path}' names the host '{uri[2]}', and file:// is local only; write file:///folder/file")
    return unquote(path[uri.end() :])


def list_files(path: str) -> Listing:
    """All regular files behind `path`, sorted by name; at least one.

    A file gives itself; a folder all files below it; a glob (``*``, ``?``, ``[..]``, ``**`` for any depth) what
    matches, matching folders in full. Names that start with ``.`` or ``_`` are skipped unless `path` spells the
    character out. Links are followed and every real folder is read once, so loops of links end.

    Raises:
        DataError: nothing there, a store of another kind, or a folder or link that cannot be followed.
    """
    local = local_path(path)
    try:
        if os.path.isdir(local):
            root, found = local, dict(_files_below(local, ""))
        elif os.path.lexists(local):
            root, found = os.path.dirname(local), {os.path.basename(local): _size_and_mtime(_stat_regular(local))}
        elif _MAGIC.search(local):
            root, found = _expand_glob(local)
        else:
            raise DataError(f"'{local}' does not exist; {_hint(local)}")
    except OSError as error:
        raise DataError(f"cannot list '{error.filename or local}': {_reason(error)}; check its permissions") from error
    if not found:
        raise DataError(f"'{local}' holds no files (names that start with '.' or '_' are skipped); check the path")
    for name in found:
        # File names are bytes to the system; Arrow and the fingerprint need text.
        if not name.isascii() and not _encodes(name):
            raise DataError(f"the file name {name!r} below '{root}' is not valid UTF-8; rename it")
    names = sorted(found)
    sizes = np.fromiter((found[name][0] for name in names), np.int64, len(names))
    mtimes = np.fromiter((found[name][1] for name in names), np.int64, len(names))
    return Listing(root, names, sizes, mtimes)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]


def _hidden(name: str, pattern: str = "") -> bool:
    return name[0] in "._" and pattern[:1] != name[0]


def _stat_regular(path: str) -> os.stat_result:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read '{path}': {_reason(error)}; restore the file, or remove a broken link") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"'{path}' is not a regular file; a dataset consists of files")
    return found


def _size_and_mtime(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns  # a fifth of the memory of the whole


def _folders_below(root: str, top: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """`top` (relative to `root`) and every folder below it, once each, with its visible entries that are no folders.

    Links to folders are followed after all real folders, in name order: which of two paths to one folder gives its
    files their names must not depend on the order in which the system lists them.
    """
    seen: set[tuple[int, int]] = set()
    folders, links = [top], list[str]()
    while folders or links:
        if not folders:
            links.sort(reverse=True)
            folders.append(links.pop())
        folder = folders.pop()
        path = os.path.join(root, folder) or "."
        identity = os.stat(path)
        if (identity.st_dev, identity.st_ino) in seen:
            continue
        seen.add((identity.st_dev, identity.st_ino))
        files: list[os.DirEntry[str]] = []
        with os.scandir(path) as entries:
            for entry in entries:
                if _hidden(entry.name):
                    continue
                if entry.is_dir():
                    (links if entry.is_symlink() else folders).append(os.path.join(folder, entry.name))
                else:
                    files.append(entry)
        yield folder, files


def _files_below(root: str, top: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name relative to `root`, (size, mtime_ns)) of every regular file below `top`; pipes and sockets are no data."""
    for folder, entries in _folders_below(root, top):
        for entry in entries:
            try:
                found = entry.stat()
            except OSError as error:
                raise DataError(
                    f"cannot read '{entry.path}': {_reason(error)}; restore the file, or remove a broken link"
                ) from error
            if stat.S_ISREG(found.st_mode):
                yield os.path.join(folder, entry.name), _size_and_mtime(found)


def _expand_glob(pattern: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The folder before the first wildcard, and the files that match, named relative to it.

    Not `glob.glob`: its ``**`` follows loops of links until the path is too long for the system.
    """
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if _MAGIC.search(part))
    root = "/".join(parts[:first]) or ("/" if pattern.startswith("/") else "")
    wanted = [part for part in parts[first:] if part]
    while wanted and wanted[-1] == "**":  # a matching folder is listed in full anyway
        wanted.pop()
    matches = {""}
    for part in wanted:
        matches = {match for folder in matches for match in _matching(root, folder, part)}
    found: dict[str, tuple[int, int]] = {}
    for match in matches:
        path = os.path.join(root, match)
        if os.path.isdir(path):
            found.update(_files_below(root, match))
        else:
            found[match] = _size_and_mtime(_stat_regular(path))
    return root, found


def _matching(root: str, folder: str, part: str) -> Iterator[str]:
    """What one part of a pattern matches in `folder` (all relative to `root`)."""
    path = os.path.join(root, folder) or "."
    if not os.path.isdir(path):
        return
    if part == "**":
        for below, _ in _folders_below(root, folder):
            yield below
    elif _MAGIC.search(part):
        with os.scandir(path) as entries:
            for entry in entries:
                if fnmatchcase(entry.name, part) and not _hidden(entry.name, part):
                    yield os.path.join(folder, entry.name)
    elif os.path.lexists(os.path.join(path, part)):
        yield os.path.join(folder, part)


def _encodes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hint(path: str) -> str:
    parent, child = os.path.abspath(path), ""
    while not os.path.isdir(parent):
        parent, child = os.path.split(parent)
    close = difflib.get_close_matches(child, os.listdir(parent), n=1)
    return f"did you mean '{os.path.join(parent, close[0])}'?" if close else f"the nearest folder is '{parent}'"
