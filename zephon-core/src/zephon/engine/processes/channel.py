"""Objects between two processes: pickled through a socket, large arrays through shared memory.

Shared memory has no name. It is a memory file (on systems without them, an unlinked temporary file) whose descriptor
goes to the other process, so the system frees it when both have ended, in whatever way, and the size of /dev/shm does
not matter. If no such file can be allocated, arrays go through the socket.

Memory is reused once nothing in the receiver refers to it: on a virtual machine, fresh pages for 8 MiB cost 6 ms,
as much as tokenizing a sixth of the text behind them.

Both ends belong to one user and one program: objects are pickled, which is safe between them and nowhere else.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import tempfile
import weakref
from collections import deque
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from zephon.columns.appending import allocate
from zephon.errors import WorkerError

_INLINE_BYTES = 32 << 10  # a smaller message is faster through the socket
_INLINE_ARRAY_BYTES = 1 << 10
_ALIGNMENT = 64
_MIN_BLOCK = 1 << 20
_MAX_VIEWS = 4  # blocks whose arrays the receiver uses in place; arrays of further ones are copied


class Closed(Exception):
    """The other process is gone, or this end was closed."""


class Channel:
    """One end of a connection between two processes. For one thread at a time, except `close`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._blocks: dict[int, np.ndarray] = {}  # memory that this end writes to, by number
        self._free: list[int] = []  # numbers of those not in use by the receiver
        self._count = 0  # blocks allocated so far
        self._received: dict[int, np.ndarray] = {}  # memory that the other end writes to
        self._views: set[int] = set()  # numbers of received blocks that arrays refer to
        self._released: deque[int] = deque()  # received blocks no longer in use; any thread may append

    def fileno(self) -> int:
        """The descriptor to wait on for an object to receive."""
        return self._connection.fileno()

    def send(self, value: Any) -> None:
        """Send an object."""
        buffers: list[pickle.PickleBuffer] = []

        def stays_inline(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes <= _INLINE_ARRAY_BYTES:
                return True
            buffers.append(buffer)
            return False

        description = pickle.dumps(value, protocol=5, buffer_callback=stays_inline)
        parts = [memoryview(description), *(buffer.raw() for buffer in buffers)]
        sizes = [part.nbytes for part in parts]
        released = [self._released.popleft() for _ in range(len(self._released))]
        self._views.difference_update(released)
        fd, number, dropped = self._block(sum(map(_aligned, sizes))) if sum(sizes) > _INLINE_BYTES else (None, None, [])
        try:
            if number is None:
                self._send_head(None, False, [], released, dropped)
                self._connection.send_bytes(pickle.dumps(value, protocol=5) if buffers else description)
                return
            block, start = self._blocks[number], 0
            for part, size in zip(parts, sizes, strict=True):
                if size:
                    block[start : start + size] = np.frombuffer(part, dtype=np.uint8)  # without the interpreter lock
                start += _aligned(size)
            self._send_head(number, fd is not None, sizes, released, dropped)
            if fd is not None:
                reduction.send_handle(self._connection, fd, 0)
        except OSError as error:
            raise Closed from error
        finally:
            if fd is not None:
                os.close(fd)

    def receive(self) -> Any:
        """The next object; its arrays may be views of shared memory, which the sender leaves alone meanwhile."""
        try:
            number, is_new, sizes, released, dropped = pickle.loads(self._connection.recv_bytes())
            self._free += [each for each in released if each in self._blocks]
            for each in dropped:
                self._received.pop(each, None)
            if number is None:
                return pickle.loads(self._connection.recv_bytes())
            if is_new:
                self._received[number] = _mapped(reduction.recv_handle(self._connection))
        except (EOFError, OSError) as error:
            raise Closed from error
        except RuntimeError:
            raise WorkerError("too many open files for shared memory between processes; raise ulimit -n.") from None
        edges = np.cumsum([0, *map(_aligned, sizes)]).tolist()
        whole = self._received[number][: edges[-1]]
        if len(self._views) < _MAX_VIEWS:
            # A new array object, finalized when its last view is gone.
            whole = np.frombuffer(memoryview(whole), dtype=np.uint8)
            self._views.add(number)
            weakref.finalize(whole, self._released.append, number).atexit = False
        else:
            whole = whole.copy()
            self._released.append(number)
        description, *buffers = (memoryview(whole)[at : at + size] for at, size in zip(edges, sizes, strict=False))
        return pickle.loads(description, buffers=buffers)

    def close(self) -> None:
        """Close the connection: the other process finds out, and so does a thread that waits here."""
        try:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed before
            pass

    def _send_head(self, *head: Any) -> None:
        # Not by `Connection.send`: where that raises, a view of a `BytesIO` stays in the traceback, which crashes the
        # garbage collector of Python 3.12.
        self._connection.send_bytes(pickle.dumps(head))

    def _block(self, nbytes: int) -> tuple[int | None, int | None, list[int]]:
        """A block of memory: (descriptor if new, number, numbers of dropped blocks); number is None without memory."""
        for number in reversed(self._free):  # the last used one may still be in the CPU cache
            if len(self._blocks[number]) >= nbytes:
                self._free.remove(number)
                return None, number, []
        dropped, self._free = self._free, []  # all too small
        for number in dropped:
            del self._blocks[number]
        try:
            fd = _memory_file(max(_MIN_BLOCK, nbytes + nbytes // 4))
        except OSError:
            return None, None, dropped
        self._count += 1
        self._blocks[self._count] = _mapped(os.dup(fd))
        return fd, self._count, dropped


def _memory_file(nbytes: int) -> int:
    """The descriptor of an unnamed file with its space allocated: writing to a hole on a full disk would be fatal."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("zephon")
    else:
        with tempfile.TemporaryFile(prefix="zephon-") as file:
            fd = os.dup(file.fileno())
    try:
        allocate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mapped(fd: int) -> np.ndarray:
    """uint8[size], the content of a file; closes the descriptor."""
    try:
        return np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)
    finally:
        os.close(fd)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
