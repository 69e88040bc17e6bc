"""Files of datasets: the one place that turns a dataset's path into files and opens them.

A path is a local file, a folder, a glob, or the URI of a store. Wherever files lie, the rest of `zephon.data` sees a
sorted `Listing` and, per file, a `StoredFile` that opens as an Arrow file.
"""

from __future__ import annotations

import bisect
import difflib
import glob
import hashlib
import io
import os
import posixpath
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.data.clients import store_of
from zephon.data.patterns import MAGIC, Pattern, split_pattern, table_of
from zephon.data.store import Changed, Source, attempt, shown
from zephon.errors import DataError

SMALL_BYTES = 64 << 10
"""A file of a store up to this size is read in one piece: as much is read of the end of a Parquet file anyway."""
WINDOW_BYTES = 4 << 20
"""Most bytes that are read ahead of reads that follow each other."""
_LEAST_BYTES = 16 << 10
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)")
_CHANGED = "a dataset must not change during a run, so restore the file or start a new run"


class FileChanged(DataError):
    """The size, modification time or version of a file is not what it was when the dataset was listed."""

    @classmethod
    def of(cls, path: str, how: object) -> FileChanged:
        return cls(f"'{path}' has changed since the dataset was listed ({how}); {_CHANGED}")


class Ranges(Protocol):
    """What fetches ranges of files of stores: `zephon.data.fetch.Spans`."""

    node: Any

    def read(self, file: StoredFile, start: int, length: int) -> Any: ...

    def announce(self, file: StoredFile, ranges: Sequence[tuple[int, int]]) -> bool: ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file as it was when listed."""

    path: str  # local path, or URI, for messages
    size: int  # bytes
    mtime_ns: int  # since the epoch; for a file of a store a number made of its version
    source: Source | None = None  # where its bytes are, None for a local file
    spans: Ranges | None = None  # how they are read ahead and kept, None to stream them
    sequential: bool = False  # only ever read from its start on
    # The listing that it is from, for the files beside it; None where it was not listed.
    among: Listing | None = field(default=None, repr=False, compare=False)
    owner: str = ""  # path of the shard that this file lies beside and belongs to, "" for a shard itself

    @property
    def version(self) -> str:
        """The version of a file of a store, "" where the store has nothing of the kind."""
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
            now = os.stat(self.path)
        except OSError as error:
            raise DataError(f"cannot open '{self.path}': {_reason(error)}; make it readable and start again") from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            file.close()
            raise FileChanged.of(self.path, f"{self.size:,} bytes then, {now.st_size:,} now")
        return file

    def fetch(self, start: int, length: int) -> Any:
        """Bytes of a file of a store as a buffer, straight from there; errors as `open`."""
        assert self.source is not None
        store, key, version = self.source
        what = f"bytes {start:,} to {start + length:,} of '{shown(self.path)}'"
        try:
            return attempt(lambda: store.get(key, start, length, version, self.size), store, what)
        except Changed as changed:
            raise FileChanged.of(self.path, changed) from changed

    def beside(self, name: str) -> StoredFile:
        """The file called `name` (a plain name, no path) in the same folder, as it was listed or else as it is now.

        Raises:
            DataError: it does not exist.
        """
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise DataError(f"'{self.path}' refers to a file named {name[:100]!r}; expected a plain file name")
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
            return StoredFile(self.path, *_size_and_mtime(self.path))
        place = self.source
        try:
            size, version = attempt(lambda: place.store.head(place.key), place.store, f"'{self.path}'")
        except Changed as changed:
            raise FileChanged.of(self.path, changed) from changed
        source = place._replace(version=version)
        return replace(self, size=size, mtime_ns=_stamp(version), source=source, among=None)

    def check_unchanged(self) -> None:
        """Raises `FileChanged` where the file is not what was listed any more."""
        now = self.refreshed()
        if (now.size, now.mtime_ns) != (self.size, self.mtime_ns):
            raise FileChanged.of(self.path, f"{self.size:,} bytes then, {now.size:,} now")


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
        self._first, self._held = 0, memoryview(b"")  # the bytes held, and where they begin
        self._window = self._least = min(WINDOW_BYTES if file.sequential else _LEAST_BYTES, file.size)
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
        start = min(self._position, self._file.size)
        stop = self._file.size if size is None or size < 0 else min(start + size, self._file.size)
        if start == stop:
            return b""
        if not self._first <= start <= stop <= self._first + len(self._held):
            self._first, self._held = self._around(start, stop)
        self._position = stop
        return self._held[start - self._first : stop - self._first]

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _around(self, start: int, stop: int) -> tuple[int, memoryview]:
        """(position, bytes) that hold [start, stop)."""
        file, spans, held = self._file, self._file.spans, self._held
        if file.size <= SMALL_BYTES:
            return 0, self._read(0, file.size)
        for low, high in self._ranges:
            if low <= start and stop <= high:
                return low, self._read(low, high - low)
        last = self._first + len(held)
        if not (held and self._first <= start <= last):
            self._window = self._least
            return start, self._read(start, min(max(stop - start, self._window), file.size - start))
        self._window = min(2 * self._window, WINDOW_BYTES)
        length = min(max(stop - last, self._window), file.size - last)
        if spans is None or spans.node is None:  # a stream, and nothing of it is to stay in memory
            more = memoryview(file.fetch(last, length))
        else:
            more = self._read(last, length)
            if file.sequential and last + length < file.size:
                spans.announce(file, [(last + length, min(WINDOW_BYTES, file.size - last - length))])
        kept = held[start - self._first :]
        return start, memoryview(bytes(kept) + bytes(more)) if kept else more

    def _read(self, start: int, length: int) -> memoryview:
        spans = self._file.spans
        return memoryview(self._file.fetch(start, length) if spans is None else spans.read(self._file, start, length))


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The files of one dataset, sorted by name; columns, not objects, for there may be a million."""

    root: str
    names: list[str]  # [n] POSIX paths below `root`, unique, in code point order
    sizes: npt.NDArray[np.int64]  # [n] bytes
    mtimes: npt.NDArray[np.int64]  # [n] nanoseconds, or numbers made of versions
    sources: list[Source] | None = None  # what stores know the files by, None where they are local
    pin: str = ""  # the commit that was listed, where the store has such a thing
    others: Listing | None = None  # what this one was selected from, where that has more files

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
        sources = None if self.sources is None else [self.sources[i] for i in keep]
        names, others = [self.names[i] for i in keep], self.others or self
        return replace(
            self, names=names, sizes=self.sizes[keep], mtimes=self.mtimes[keep], sources=sources, others=others
        )

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
    """`path`, which may be a file:// URI, as a local path or pattern."""
    uri = _URI.match(path)
    if uri is None:
        return os.path.expanduser(path)
    if uri[2] not in ("", "localhost"):
        raise DataError(f"'{path}' names the host '{uri[2]}', and file:// is local only; write file:///folder/file")
    return unquote(path[uri.end() :])


def list_files(path: str) -> Listing:
    """All regular files behind `path`, sorted by name; at least one.

    A file gives itself; a folder all files below it; a glob what matches, see `zephon.data.patterns`; NAME, NAME.bin or
    NAME.idx a pair of Megatron's. Links are followed, and every real folder is read under one name only, so loops of
    links end.

    Raises:
        DataError: nothing there, a store that cannot be reached, or a folder or link that cannot be followed.
    """
    if is_remote(path):
        return _list_remote(_pair(path) if MAGIC.search(path) else path)
    local = local_path(path)
    stem = local.removesuffix(".bin").removesuffix(".idx")
    if not os.path.isdir(local) and all(os.path.isfile(f"{stem}{end}") for end in (".bin", ".idx")):
        local = _pair(f"{glob.escape(stem)}.bin")
    elif MAGIC.search(local) and not os.path.lexists(local):
        local = _pair(local)
    try:
        if os.path.isdir(local):
            root, found = local, _walk(local, "")
        elif os.path.lexists(local):
            root, found = os.path.dirname(local), {os.path.basename(local): _size_and_mtime(local)}
        elif MAGIC.search(local):
            folder, pattern = split_pattern(local)
            while os.path.isdir(os.path.join(folder, (parts := pattern.partition("/"))[0])) and parts[2]:
                folder, pattern = os.path.join(folder, parts[0]), parts[2]  # a folder with brackets in its name
            root = folder or ("/" if local.startswith("/") else "")
            found = _walk(root, pattern) if os.path.isdir(root or ".") else {}
        else:
            raise DataError(f"'{local}' does not exist; {_hint(local)}")
    except OSError as error:
        raise DataError(f"cannot list '{error.filename or local}': {_reason(error)}; check its permissions") from error
    if not found:
        raise _no_files(local)
    names = sorted(found)
    try:
        "\0".join(names).encode()
    except UnicodeEncodeError:  # file names are bytes to the system; Arrow and the fingerprint need text
        bad = next(name for name in names if not name.isascii() and name.encode(errors="replace").decode() != name)
        raise DataError(f"the file name {bad!r} below '{root}' is not valid UTF-8; rename it") from None
    sizes = np.fromiter((found[name][0] for name in names), np.int64, len(names))
    mtimes = np.fromiter((found[name][1] for name in names), np.int64, len(names))
    return Listing(root, names, sizes, mtimes)


def _pair(pattern: str) -> str:
    """The pattern, with the .idx files of the .bin files that it names, or the other way round."""
    return f"{pattern[:-4]}.[bi][id][nx]" if pattern.endswith((".bin", ".idx")) else pattern


def _list_remote(uri: str) -> Listing:
    place, path = store_of(uri)
    found = attempt(lambda: place.list(path), place, f"the listing of '{shown(uri)}'", is_first=True)
    if not found.files:
        raise _no_files(shown(uri))
    names, sizes, versions, keys = map(list, zip(*sorted(found.files), strict=True))
    sources = [Source(place, key, version) for key, version in zip(keys, versions, strict=True)]
    stamps = np.fromiter(map(_stamp, versions), np.int64, len(names))
    return Listing(found.root.rstrip("/"), names, np.array(sizes, np.int64), stamps, sources, found.pin)


def _no_files(path: str) -> DataError:
    return DataError(f"'{path}' holds no files (names that start with '.' or '_' are skipped); check the path")


def _stamp(version: str) -> int:
    """A version as a number in the place of a modification time."""
    return int.from_bytes(hashlib.sha256(version.encode()).digest()[:8], "big") >> 1


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]


def _size_and_mtime(path: str | os.DirEntry[str]) -> tuple[int, int]:
    """(bytes, nanoseconds) of a regular file; a fifth of the memory of all that the system tells."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(
            f"cannot read '{os.fspath(path)}': {_reason(error)}; restore the file, or remove a broken link"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"'{os.fspath(path)}' is not a regular file; a dataset consists of files")
    return found.st_size, found.st_mtime_ns


def _walk(root: str, pattern: str) -> dict[str, tuple[int, int]]:
    """(bytes, mtime_ns) by name below `root` of the files that match; pipes and sockets are no data.

    Links to folders follow after all real folders, by name: the names of files must not depend on the system's order.
    """
    wanted = Pattern(pattern)
    found: dict[str, tuple[int, int]] = {}
    folders, links = [("", wanted.start)], list[tuple[str, frozenset[int]]]()
    seen: set[tuple[int, int, frozenset[int]]] = set()
    taken: set[tuple[int, int, str]] = set()
    while folders or links:
        if not folders:
            links.sort(key=lambda link: link[0], reverse=True)
            folders.append(links.pop())
        folder, states = folders.pop()
        path = os.path.join(root, folder) or "."
        identity = os.stat(path)
        if (identity.st_dev, identity.st_ino, states) in seen:
            continue
        seen.add((identity.st_dev, identity.st_ino, states))
        with os.scandir(path) as entries:
            for entry in entries:
                after = wanted.step(states, entry.name)
                name = os.path.join(folder, entry.name)
                file = (identity.st_dev, identity.st_ino, entry.name)
                if not pattern and (table := table_of([name])):
                    raise DataError(f"'{path}' cannot be read: {table}")
                if not after:
                    continue
                if entry.is_dir():
                    (links if entry.is_symlink() else folders).append((name, after))
                elif wanted.matches(after) and file not in taken and (entry.is_file() or entry.is_symlink()):
                    taken.add(file)
                    found[name] = _size_and_mtime(entry)
    return found


def _hint(path: str) -> str:
    parent, child = os.path.abspath(path), ""
    while not os.path.isdir(parent):
        parent, child = os.path.split(parent)
    close = difflib.get_close_matches(child, os.listdir(parent), n=1)
    return f"did you mean '{os.path.join(parent, close[0])}'?" if close else f"the nearest folder is '{parent}'"
