"""Reading a compressed stream by offset: forward cheaply, backward only from the start.

Lanes and look-ahead threads ask for the runs of one shard in nearly ascending order. `SequentialBytes` makes that
cost one decompression: it keeps its decompressors open where they stopped, and keeps what a reader passed over.
"""

import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from zephon.columns.damage import is_damage
from zephon.data.storage import StoredFile
from zephon.errors import DataError, ZephonError

__all__ = ["CODECS", "SNAPPY", "SequentialBytes", "codec_of", "open_stream", "read_range"]

CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
"""Endings of compressed files, and what Arrow calls the codec."""

SNAPPY = "snappy"
"""Only where a format says so: such a file is held in memory while it is open."""
_SNAPPY_BYTES = 128 << 20  # twice what Mosaic's writer puts into a shard by itself

# A second cursor serves a lane that trails far behind the first one; each holds one file and its window open.
_MAX_CURSORS = 2
# Files of which this process keeps decompressors open, over all datasets, at most; and what it keeps for them.
_MAX_FILES = 128
_KEEP_BYTES_IN_ALL = 512 << 20
_SKIP_BYTES = 1 << 20
# How far behind its position a cursor keeps bytes that it passed over and that nobody has asked for yet.
_KEEP_BYTES = 64 << 20


@contextmanager
def open_stream(file: StoredFile, codec: str | None) -> Iterator[Any]:
    """The file's uncompressed bytes from the start, as a `pa.NativeFile`."""
    with file.open() as handle:
        if codec is None:
            yield handle
            return
        if file.size == 0:  # the decompressors take no bytes for no data
            raise DataError(f"'{file.path}' is empty, and even an empty {codec} file has a header; restore it")
        if codec == SNAPPY:
            yield pa.BufferReader(_unpacked(file, handle))
            return
        with pa.CompressedInputStream(handle, codec) as stream:
            yield stream


def _unpacked(file: StoredFile, handle: Any) -> pa.Buffer:
    """All of a file that is one block of snappy, which can only be decompressed as a whole.

    Its first bytes say how long the rest becomes, seven bits in each: a claim, so it is checked before it is believed.
    """
    packed = handle.read_buffer(file.size)
    length = 0
    for place, byte in enumerate(packed[:5].to_pybytes()):
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    # An element of two bytes stands for 64 at most.
    if length > 32 * file.size:
        raise ValueError(f"it claims {length} bytes, more than its {file.size} can become")
    if length > _SNAPPY_BYTES:
        raise DataError(
            f"'{file.path}' is compressed with snappy as a whole and holds {length:,} bytes, where at most "
            f"{_SNAPPY_BYTES:,} are taken into memory at once; write smaller shards, or compress them with zstd"
        )
    return pa.Codec("snappy").decompress(packed, decompressed_size=length)


def codec_of(name: str) -> str | None:
    """The codec that the ending of a file name stands for."""
    return next((codec for suffix, codec in CODECS.items() if name.lower().endswith(suffix)), None)


def read_range(file: StoredFile, offset: int, length: int, packed: "SequentialBytes | None") -> pa.Buffer:
    """`length` bytes from `offset`, fewer where the file ends; of what `packed` decompresses, where it is given."""
    if packed is not None:
        return packed.read(offset, length)
    with file.open() as handle:
        handle.seek(offset)
        return handle.read_buffer(length)


class _Recent:
    """The files that have decompressors open, least recently used first; those in excess lose theirs.

    So a run with many compressed datasets has a bounded number of files open. It costs the ones that lose theirs a
    decompression from the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[SequentialBytes, None] = OrderedDict()

    def use(self, file: "SequentialBytes") -> None:
        """`file`, which the calling thread is reading, has decompressors open."""
        with self._lock:
            self._files[file] = None
            self._files.move_to_end(file)
            excess = [next(iter(self._files))] if len(self._files) > most_files() else []
            for other in excess:
                del self._files[other]
        for other in excess:
            if not other.let_go():  # being read just now
                with self._lock:
                    self._files[other] = None

    def drop(self, file: "SequentialBytes") -> None:
        """`file` has none any more."""
        with self._lock:
            self._files.pop(file, None)

    @property
    def keep_bytes(self) -> int:
        """How many bytes each decompressor may keep."""
        return min(_KEEP_BYTES, _KEEP_BYTES_IN_ALL // (_MAX_CURSORS * max(1, len(self._files))))


def most_files() -> int:
    """How many files may have decompressors open: less where the system allows a process few open files."""
    return min(_MAX_FILES, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // (4 * _MAX_CURSORS)))


_recent = _Recent()


class SequentialBytes:
    """`read(offset, length)` over the uncompressed bytes of one compressed file. Thread-safe; one read at a time."""

    def __init__(self, file: StoredFile, codec: str) -> None:
        self._file, self._codec = file, codec
        self._lock = threading.Lock()
        self._cursors: list[_Cursor] = []  # least recently used first
        self._broken: tuple[int, str] | None = None  # from where on nothing can be decompressed, and why

    def read(self, offset: int, length: int) -> pa.Buffer:
        """`length` uncompressed bytes from `offset`, fewer where the file ends."""
        with self._lock:
            if self._broken is not None and offset >= self._broken[0]:
                raise ValueError(self._broken[1])
            for cursor in self._cursors:
                kept = cursor.take_kept(offset, length)
                if kept is not None:
                    return kept
            behind = [cursor for cursor in self._cursors if cursor.position <= offset]
            if behind:
                cursor = max(behind, key=lambda known: known.position)
                self._cursors.remove(cursor)
            else:
                if len(self._cursors) == _MAX_CURSORS:
                    self._cursors.pop(0).close()
                cursor = _Cursor(self._file, self._codec)
            try:
                data = cursor.read(offset, length)
            except BaseException as error:
                cursor.close()
                if isinstance(error, Exception) and not isinstance(error, ZephonError) and is_damage(error):
                    # Else every later read would decompress the file up to here again.
                    self._broken = offset, str(error)
                raise
            self._cursors.append(cursor)
            _recent.use(self)
            return data

    def let_go(self) -> bool:
        """Closes the decompressors, unless the file is being read; a later read opens one again."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._cursors:
                self._cursors.pop().close()
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        with self._lock:
            self._broken = None
            while self._cursors:
                self._cursors.pop().close()
        _recent.drop(self)


class _Cursor:
    """One open decompressor.

    `_kept` holds (offset, bytes) that were passed over, ascending and disjoint; `_last` what was read last, because
    two neighbouring chunks of a lane share a run and the cache above may be too small to hold it.
    """

    def __init__(self, file: StoredFile, codec: str) -> None:
        self._context = open_stream(file, codec)
        self._stream = self._context.__enter__()
        self.position = 0
        self._kept: list[tuple[int, pa.Buffer]] = []
        self._last: tuple[int, pa.Buffer] = (-1, pa.py_buffer(b""))

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        self._kept.clear()

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Bytes from `offset`, which is not before the position."""
        while self.position < offset:
            passed = self._stream.read_buffer(min(_SKIP_BYTES, offset - self.position))
            if not len(passed):
                break
            self._kept.append((self.position, passed))
            self.position += len(passed)
            self._forget()
        data = self._stream.read_buffer(length)
        self.position += len(data)
        self._forget()
        self._last = (offset, data)
        return data

    def take_kept(self, offset: int, length: int) -> pa.Buffer | None:
        """The bytes if all of them are at hand; what was passed over is not kept any longer."""
        if self._last[0] == offset and len(self._last[1]) == length:
            return self._last[1]
        parts, rest, end = [], [], offset + length
        for start, data in self._kept:
            stop = start + len(data)
            first, last = max(offset, start), min(end, stop)
            if first >= last:
                rest.append((start, data))
                continue
            parts.append(data[first - start : last - start])
            if start < first:
                rest.append((start, data[: first - start]))
            if last < stop:
                rest.append((last, data[last - start :]))
        if sum(map(len, parts)) != length:
            return None
        self._kept = rest
        return parts[0] if len(parts) == 1 else pa.py_buffer(b"".join(parts))

    def _forget(self) -> None:
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) < self.position - _recent.keep_bytes:
            self._kept.pop(0)
