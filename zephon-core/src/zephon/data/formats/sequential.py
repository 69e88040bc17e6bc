"""Compressed files: read from their start, forward, and by offset as far as that costs one decompression."""

from __future__ import annotations

import gzip
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

CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
"""Endings of compressed files, and what Arrow calls the codec."""

SNAPPY = "snappy"
"""Only where a format says so: such a file is held in memory while it is open."""
_SNAPPY_BYTES = 128 << 20  # twice what Mosaic's writer puts into a shard by itself

# Files with an open decompressor, over all datasets of the process; and the bytes that each, and all, may keep.
_MAX_FILES = 128
_KEEP_BYTES = 64 << 20
_KEEP_BYTES_IN_ALL = 256 << 20
_SKIP_BYTES = 1 << 20


@contextmanager
def open_stream(file: StoredFile, codec: str | None) -> Iterator[Any]:
    """The file's uncompressed bytes from the start, as a `pa.NativeFile`."""
    with file.open() as handle:
        if codec is None:
            yield handle
        elif file.size == 0:  # the decompressors take no bytes for no data
            raise DataError(f"'{file.path}' is empty, and even an empty {codec} file has a header; restore it")
        elif codec == SNAPPY:
            yield pa.BufferReader(_unpacked(file, handle.read_buffer(file.size)))
        elif codec == "gzip":  # as fast as Arrow's, and passes over zeros behind the end, which tapes and pipes leave
            with pa.PythonFile(gzip.GzipFile(fileobj=handle), mode="r") as stream:
                yield stream
        else:
            with pa.CompressedInputStream(handle, codec) as stream:
                yield stream


def _unpacked(file: StoredFile, packed: pa.Buffer) -> pa.Buffer:
    """The content of one block of snappy, which begins with its length, seven bits to a byte."""
    length = 0
    for place, byte in enumerate(packed[:5].to_pybytes()):
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    if length > _SNAPPY_BYTES:
        raise DataError(
            f"'{file.path}' is compressed with snappy as a whole and claims {length:,} bytes; expected at most "
            f"{_SNAPPY_BYTES:,}, which are held in memory at once. Write smaller shards, or compress them with zstd"
        )
    return pa.Codec("snappy").decompress(packed, decompressed_size=length)


def codec_of(name: str) -> str | None:
    """The codec that the ending of a file name stands for."""
    return next((codec for suffix, codec in CODECS.items() if name.lower().endswith(suffix)), None)


class SequentialBytes:
    """`read(offset, length)` over the uncompressed bytes of one compressed file. Thread-safe; one read at a time.

    A lane's look-ahead threads read the runs of a shard in nearly ascending order. The decompressor stays open where it
    stopped, and bytes that a read passes over are kept for a while, so that this costs one decompression. A read of
    earlier bytes starts again at the beginning of the file.
    """

    def __init__(self, file: StoredFile, codec: str) -> None:
        self._file, self._codec = file, codec
        self._lock = threading.Lock()
        self._failure: tuple[int, str] | None = None  # where decompression failed, and why
        self._reset()

    def _reset(self) -> None:
        self._context: Any = None
        self._stream: Any = None
        self._position = 0
        self._passed: list[tuple[int, pa.Buffer]] = []  # (offset, bytes) ascending and disjoint
        # Neighbouring chunks of a lane share a run, which the decode cache may be too small to hold.
        self._last = (-1, pa.py_buffer(b""))

    def read(self, offset: int, length: int) -> pa.Buffer:
        """`length` uncompressed bytes from `offset`, fewer where the file ends."""
        with self._lock:
            if self._failure is not None and offset >= self._failure[0]:
                raise ValueError(self._failure[1])
            if (data := self._take_kept(offset, length)) is None:
                try:
                    data = self._read_forward(offset, length)
                except BaseException as error:
                    self._stop()
                    if isinstance(error, Exception) and not isinstance(error, ZephonError) and is_damage(error):
                        # Else every later read would decompress the file up to here again.
                        self._failure = offset, str(error)
                    raise
            self._last = offset, data
        _close_excess(self)
        return data

    def _read_forward(self, offset: int, length: int) -> pa.Buffer:
        if self._context is None or offset < self._position:
            self._stop()
            self._context = open_stream(self._file, self._codec)
            self._stream = self._context.__enter__()
        keep_bytes = min(_KEEP_BYTES, _KEEP_BYTES_IN_ALL // (len(_open_files) + 1))
        while self._position < offset:
            passed = self._stream.read_buffer(min(_SKIP_BYTES, offset - self._position))
            if not len(passed):
                break
            self._passed.append((self._position, passed))
            self._position += len(passed)
            while self._passed and self._passed[0][0] < self._position - keep_bytes:
                self._passed.pop(0)
        data = self._stream.read_buffer(length)
        self._position += len(data)
        return data

    def _take_kept(self, offset: int, length: int) -> pa.Buffer | None:
        """The bytes if all of them are at hand; what was passed over is then kept no longer."""
        if (offset, length) == (self._last[0], len(self._last[1])):
            return self._last[1]
        parts, rest = [], []
        for start, data in self._passed:
            low, high = (min(max(at - start, 0), len(data)) for at in (offset, offset + length))
            parts.append(data[low:high])
            rest += [(start, data[:low]), (start + high, data[high:])]
        if sum(map(len, parts)) != length:
            return None
        self._passed = [(start, data) for start, data in rest if len(data)]
        return pa.py_buffer(b"".join(parts))

    def _stop(self) -> None:
        context = self._context
        self._reset()
        if context is not None:
            context.__exit__(None, None, None)

    def let_go(self) -> bool:
        """Closes the decompressor, unless the file is being read; a later read opens one again."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._stop()
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        with self._lock:
            self._failure = None
            self._stop()
        with _open_lock:
            _open_files.pop(self, None)


_open_lock = threading.Lock()
_open_files: OrderedDict[SequentialBytes, None] = OrderedDict()  # with a decompressor; least recently used first


def most_files() -> int:
    """How many files may have a decompressor open: less where the system allows a process few open files."""
    return min(_MAX_FILES, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))


def _close_excess(used: SequentialBytes) -> None:
    """Notes that `used` has a decompressor open, and closes that of the file not read for longest if there are many."""
    with _open_lock:
        _open_files[used] = None
        _open_files.move_to_end(used)
        if len(_open_files) > most_files():
            oldest, _ = _open_files.popitem(last=False)
            if not oldest.let_go():  # being read just now
                _open_files[oldest] = None
