"""Files of datasets: the one place that turns a dataset's path into files and opens them.

A path is a local file, a folder, a glob, or the URI of a store. Wherever files lie, the rest of `zephon.data` sees a
sorted `Listing` and, per file, a `StoredFile` that opens as an Arrow file.
"""

from __future__ import annotations

import bisect
import difflib
import hashlib
import io
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data import store
from zephon.data.clients import store_of
from zephon.data.store import Changed, Source, attempt, shown
from zephon.errors import DataError

__all__ = [
    "SMALL_BYTES",
    "WINDOW_BYTES",
    "FileChanged",
    "Listing",
    "StoredFile",
    "is_remote",
    "list_files",
    "local_path",
]

SMALL_BYTES = 64 << 10
"""A file of a store up to this size is read in one piece: as much is read of the end of a Parquet file anyway."""
WINDOW_BYTES = 4 << 20
"""Most bytes that are read ahead of reads that follow each other."""
_LEAST_BYTES = 16 << 10
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)")
_MAGIC = re.compile(r"[*?\[]")


class FileChanged(DataError):
    """The size or modification time of a file is not what it was when the dataset was listed."""


class Ranges(Protocol):
    """What fetches ranges of files of stores: `zephon.data.fetch.Spans`."""

    node: Any

    def read(self, file: StoredFile, start: int, length: int) -> Any: ...

    def announce(self, file: StoredFile, ranges: Sequence[tuple[int, int]]) -> bool: ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file as it was when listed.

    Attributes:
        path: local path, or URI, for messages.
        size: bytes.
        mtime_ns: nanoseconds since the epoch; for a file of a store a number made of its version.
        source: where its bytes are, None for a local file.
        spans: how they are read ahead and kept, None to stream them.
        sequential: only ever read from its start on.
        among: the listing that it is from, for the files beside it; None where it was not listed, or is looked at anew.
        owner: path of the shard that this file lies beside and belongs to, "" for a shard itself.
    """

    path: str
    size: int
    mtime_ns: int
    source: Source | None = None
    spans: Ranges | None = None
    sequential: bool = False
    among: Listing | None = field(default=None, repr=False, compare=False)
    owner: str = ""

    @property
    def version(self) -> str:
        """What tells this version of a file of a store from any other, "" where the store has nothing of the kind."""
        return self.source.version if self.source is not None else ""

    def open(self, ranges: Sequence[tuple[int, int]] = ()) -> Any:
        """The file as a `pa.NativeFile` for random access; the caller closes it.

        Plain reads, never a memory map: a file cut short under a map would kill the process with SIGBUS.

        Args:
            ranges: (start, length) of the reads to come, which a store is then asked for all at once.

        Raises:
            FileChanged: it is not the file that was listed.
            DataError: it cannot be opened.
        """
        if self.source is not None:
            return pa.PythonFile(_RangeFile(self, ranges), mode="r")
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

    def fetch(self, start: int, length: int) -> Any:
        """Bytes of a file of a store as a buffer, straight from there; errors as `open`."""
        assert self.source is not None
        try:
            return store.fetch(self.source, self.path, self.size, start, length)
        except Changed as changed:
            raise FileChanged(
                f"'{self.path}' has changed since the dataset was listed ({changed}); a dataset must not change during "
                "a run, so restore the file or start a new run"
            ) from changed

    def beside(self, name: str) -> StoredFile:
        """The file called `name` (a plain name, no path) in the same folder, as it was listed or else as it is now.

        Raises:
            DataError: there is none.
        """
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise DataError(f"'{self.path}' refers to a file named {name[:100]!r}, and a plain file name was expected")
        path = os.path.join(os.path.dirname(self.path), name)
        if self.source is None:
            return replace(self, path=path).refreshed()
        key = posixpath.join(posixpath.dirname(self.source.key), name)
        found = replace(self, path=path, source=self.source._replace(key=key), owner=self.owner or self.path)
        listed = self.among.at(path) if self.among is not None else None
        if listed is None:
            return found.refreshed()
        return replace(found, size=listed.size, mtime_ns=listed.mtime_ns, source=listed.source)

    def refreshed(self) -> StoredFile:
        """The same path with its size and modification time, or version, of now."""
        if self.source is None:
            now = _stat_regular(self.path)
            return StoredFile(self.path, now.st_size, now.st_mtime_ns)
        place = self.source
        try:
            size, version = attempt(lambda: place.store.head(place.key), place.store, f"'{self.path}'")
        except Changed as changed:
            raise DataError(f"'{self.path}' cannot be looked at: {changed}; check the store") from changed
        source = place._replace(version=version)
        return replace(self, size=size, mtime_ns=_stamp(version), source=source, among=None)


class _RangeFile(io.RawIOBase):
    """A file of a store as a Python file. What was announced comes from `Spans`, the rest as it is asked for.

    Reads that follow each other double a window of look-ahead, up to `WINDOW_BYTES`; others fetch what they ask for,
    and `_LEAST_BYTES` at least, since small reads come in company; of a small file, all of it. Windows follow from the
    reads alone, so the next rank of the node asks for the same ones and finds them there.
    """

    def __init__(self, file: StoredFile, ranges: Sequence[tuple[int, int]]) -> None:
        self._file = file
        self._ranges = [(start, start + length) for start, length in ranges if length]
        self._position = 0
        self._held = (0, memoryview(b""))
        self._window = self._least = min(WINDOW_BYTES if file.sequential else _LEAST_BYTES, file.size)
        self._on_node = file.spans is not None and file.spans.node is not None
        if file.spans is not None and len(self._ranges) > 1 and file.size > SMALL_BYTES:
            file.spans.announce(file, [(start, stop - start) for start, stop in self._ranges])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> Any:
        left = max(0, self._file.size - self._position)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        data = self._bytes(self._position, length)
        self._position += length
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _bytes(self, start: int, length: int) -> Any:
        stop = start + length
        first, held = self._held
        last = first + len(held)
        if not first <= start <= stop <= last:
            first, held = self._held = self._around(start, stop, first, last, held)
        return held[start - first : stop - first]

    def _around(self, start: int, stop: int, first: int, last: int, held: memoryview) -> tuple[int, memoryview]:
        """(position, bytes) that hold [start, stop); `held` are the bytes [first, last) of the file."""
        file = self._file
        if file.size <= SMALL_BYTES:
            return 0, self._read(0, file.size)
        for low, high in self._ranges:
            if low <= start and stop <= high:
                return low, self._read(low, high - low)
        if not (held and first <= start <= last):
            self._window = self._least
            return start, self._read(start, min(max(stop - start, self._window), file.size - start))
        self._window = min(2 * self._window, WINDOW_BYTES)
        length = min(max(stop - last, self._window), file.size - last)
        # Without a cache on the node it is a stream, and nothing of it is to stay in memory.
        more = self._read(last, length) if self._on_node else memoryview(file.fetch(last, length))
        if file.sequential and self._on_node and file.spans is not None and last + length < file.size:
            file.spans.announce(file, [(last + length, min(WINDOW_BYTES, file.size - last - length))])
        kept = held[start - first :]
        return start, memoryview(bytes(kept) + bytes(more)) if kept else more

    def _read(self, start: int, length: int) -> memoryview:
        spans = self._file.spans
        return memoryview(self._file.fetch(start, length) if spans is None else spans.read(self._file, start, length))


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The files of one dataset, sorted by name; columns, not objects, for there may be a million.

    names: n relative POSIX paths below `root`, unique, in code point order; sizes: int64[n] bytes;
    mtimes: int64[n] nanoseconds, or numbers made of versions; sources: what stores know the files by, None where they
    are local; pin: the commit that the listing is of, where the store has such a thing; others: what this one was
    selected from, where that has more files.
    """

    root: str
    names: list[str]
    sizes: npt.NDArray[np.int64]
    mtimes: npt.NDArray[np.int64]
    sources: list[Source] | None = None
    pin: str = ""
    others: Listing | None = None

    def file(self, index: int, spans: Ranges | None = None, *, sequential: bool = False) -> StoredFile:
        size, stamp = int(self.sizes[index]), int(self.mtimes[index])
        if self.sources is None:
            return StoredFile(os.path.join(self.root, self.names[index]), size, stamp)
        path = f"{self.root}/{self.names[index]}"
        return StoredFile(path, size, stamp, self.sources[index], spans, sequential, self.others)

    def at(self, path: str) -> StoredFile | None:
        """The file of a store with that path, None if it is not among these."""
        name = path.removeprefix(f"{self.root}/")
        index = bisect.bisect_left(self.names, name)
        return self.file(index) if index < len(self.names) and self.names[index] == name else None

    def select(self, keep: list[int]) -> Listing:
        """The files at the positions `keep`, ascending."""
        if len(keep) == len(self.names):
            return self
        names, sources = [self.names[i] for i in keep], None
        if self.sources is not None:
            sources = [self.sources[i] for i in keep]
        return Listing(self.root, names, self.sizes[keep], self.mtimes[keep], sources, self.pin, self.others or self)

    def accept(self, index: int, file: StoredFile) -> None:
        """Takes the time or version of `file`, whose content is that of the file listed."""
        self.mtimes[index] = file.mtime_ns
        if self.sources is not None and file.source is not None:
            self.sources[index] = file.source


def is_remote(path: str) -> bool:
    """Whether `path` is the URI of a store rather than a place on this machine."""
    uri = _URI.match(path)
    return uri is not None and uri[1].lower() != "file"


def local_path(path: str) -> str:
    """`path` as a local path or pattern.

    Raises:
        DataError: a URI of a store that this version cannot read.
    """
    uri = _URI.match(path)
    if uri is None:
        return os.path.expanduser(path)
    if uri[1].lower() != "file":
        raise DataError(f"'{shown(path)}' lies in a store, where a local path was expected; copy it first")
    if uri[2] not in ("", "localhost"):
        raise DataError(f"'{path}' names the host '{uri[2]}', and file:// is local only; write file:///folder/file")
    return unquote(path[uri.end() :])


def list_files(path: str) -> Listing:
    """All regular files behind `path`, sorted by name; at least one.

    A file gives itself; a folder all files below it; a glob (``*``, ``?``, ``[..]``, ``**`` for any depth) what
    matches, matching folders in full. Names that start with ``.`` or ``_`` are skipped unless `path` spells the
    character out. Links are followed and every real folder is read once, so loops of links end.

    Raises:
        DataError: nothing there, a store that cannot be reached, or a folder or link that cannot be followed.
    """
    if is_remote(path):
        return _list_remote(path)
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


def _list_remote(uri: str) -> Listing:
    place, path = store_of(uri)
    found = attempt(lambda: place.list(path), place, f"the listing of '{shown(uri)}'", is_first=True)
    if not found.files:
        raise DataError(f"'{shown(uri)}' holds no files (names that start with '.' or '_' are skipped); check the path")
    names, sizes, versions, keys = map(list, zip(*sorted(found.files), strict=True))
    sources = [Source(place, key, version) for key, version in zip(keys, versions, strict=True)]
    stamps = np.fromiter(map(_stamp, versions), np.int64, len(names))
    return Listing(found.root.rstrip("/"), names, np.array(sizes, np.int64), stamps, sources, found.pin)


def _stamp(version: str) -> int:
    """A version as a number in the place of a modification time."""
    return int.from_bytes(hashlib.sha256(version.encode()).digest()[:8], "big") >> 1


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
