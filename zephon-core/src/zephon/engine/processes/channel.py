"""Objects between two processes: what describes them through a socket, their arrays through memory that both share.

Shared memory here has no name. It is a file without a directory entry (in memory where the system has such files, in
the folder for temporary files else) whose descriptor both processes hold, so the system frees it when the last of them
is gone, however it went, and the size of /dev/shm is of no concern. Where it cannot grow, arrays go through the socket.

Both ends belong to one user and one program: objects are pickled, which is safe between them and nowhere else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import struct
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Channel", "Stretch", "shared_file"]

_ALIGNMENT = 64
_LEAST_STRETCH = 1 << 20
_INLINE_BYTES = 32 << 10  # less than that goes through the socket faster
_HEAD = struct.Struct("<QI?")  # bytes of the description, number of arrays, whether these are in the stretch


def shared_file() -> int:
    """The descriptor of an empty file that has no name."""
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        return os.memfd_create("zephon", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="zephon-") as file:
        return os.dup(file.fileno())


class Stretch:
    """Memory shared with another process, which grows as it is needed.

    Args:
        fd: of a `shared_file`; owned.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._bytes: np.ndarray = np.empty(0, dtype=np.uint8)

    def reserve(self, nbytes: int) -> np.ndarray | None:
        """The first `nbytes` bytes, to write to; None where there is no room for them."""
        if nbytes > len(self._bytes):
            size = max(_LEAST_STRETCH, 1 << (nbytes - 1).bit_length())
            try:
                _allocate(self.fd, size)
                self._map(size)
            except OSError:
                return None
        return self._bytes[:nbytes]

    def read(self, nbytes: int) -> np.ndarray:
        """The first `nbytes` bytes as the other process has written them; a view of an array of their own."""
        if nbytes > len(self._bytes):
            self._map(os.fstat(self.fd).st_size)
        return self._bytes[:nbytes]

    def _map(self, size: int) -> None:
        # An earlier map is let go when nobody looks into it any longer.
        self._bytes = np.frombuffer(mmap.mmap(self.fd, size), dtype=np.uint8)

    def close(self) -> None:
        """Let go of the memory; views of it stay good."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._bytes = self._bytes[:0]


def _allocate(fd: int, size: int) -> None:
    """Make a file this large, and sure of its room: writing to a hole where there is none would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    at = os.fstat(fd).st_size
    while at < size:
        at += os.pwrite(fd, bytes(min(size - at, 1 << 20)), at)


class Channel:
    """One end of a connection between two processes. For one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """For waiting until something can be received."""
        return self._socket.fileno()

    def send(self, what: Any, stretch: Stretch | None = None) -> None:
        """Send an object; the arrays in it through `stretch`, which the other side must have done with.

        Raises:
            OSError: the other process is gone.
        """
        arrays: list[pickle.PickleBuffer] = []
        description = pickle.dumps(what, protocol=5, buffer_callback=arrays.append)
        raw = [array.raw() for array in arrays]
        sizes = [array.nbytes for array in raw]
        if len(description) > _INLINE_BYTES:
            # Python values, for example, are all description.
            raw.append(memoryview(description))
            sizes.append(len(description))
            description = b""
        total = sum(map(_aligned, sizes))
        room = stretch.reserve(total) if stretch is not None and total > _INLINE_BYTES else None
        head = _HEAD.pack(len(description), len(sizes), room is not None) + struct.pack(f"<{len(sizes)}Q", *sizes)
        if room is not None:
            at = 0
            for part, size in zip(raw, sizes, strict=True):
                if size:
                    room[at : at + size] = np.frombuffer(part, dtype=np.uint8)  # without the interpreter lock
                at += _aligned(size)
        self._socket.sendall(head + description)
        if room is None:
            for part in raw:
                self._socket.sendall(part)

    def receive(self, stretch: Stretch | None = None, on_free: Callable[[], None] | None = None) -> Any:
        """The next object.

        Args:
            stretch: where its arrays may be.
            on_free: with this, arrays are views of the stretch, and it is called when none is left; else copies.

        Raises:
            EOFError, OSError: the other process is gone.
        """
        described, count, shared = _HEAD.unpack(self._exactly(_HEAD.size))
        sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
        description: Any = self._exactly(described)
        total = sum(map(_aligned, sizes))
        if shared:
            assert stretch is not None
            # An array object of its own, so that its end tells that of all views of it.
            whole = stretch.read(total).view() if on_free else stretch.read(total).copy()
            if on_free:
                whole = np.frombuffer(memoryview(whole), dtype=np.uint8)
                weakref.finalize(whole, on_free).atexit = False
            edges = np.cumsum([0, *map(_aligned, sizes)]).tolist()
            parts = [memoryview(whole)[at : at + size] for at, size in zip(edges[:-1], sizes, strict=True)]
        else:
            parts = [memoryview(self._exactly(size)) for size in sizes]
            if on_free:
                on_free()
        if not described:
            description = parts.pop()
        return pickle.loads(description, buffers=parts)

    def close(self) -> None:
        """Close this end. The other process and whoever waits here find out."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, nbytes: int) -> bytearray:
        made = bytearray(nbytes)
        view = memoryview(made)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return made


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
