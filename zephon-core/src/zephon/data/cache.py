"""Decoded groups in memory, shared by every lane and dataset of a process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from zephon.errors import RecipeError

__all__ = ["DecodeCache"]


class DecodeCache:
    """Least recently used decoded groups, up to `max_bytes` of Arrow buffers; thread-safe.

    Two threads that want the same group decode it once: the first works, the others wait for its result, or get its
    error, which is not remembered. The group asked for last stays even when it alone is larger than `max_bytes`, so
    that huge row groups are decoded once per pass and not once per chunk; 0 keeps nothing at all.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise RecipeError(f"the decode cache is {max_bytes} bytes, but must be 0 or more")
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self._bytes = 0
        self._lock = threading.Lock()
        self._tables: OrderedDict[Hashable, tuple[pa.Table, int]] = OrderedDict()
        self._flights: dict[Hashable, Future[pa.Table]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodeCache, (self.max_bytes,)  # what it holds stays behind

    @property
    def bytes(self) -> int:
        """Bytes of the groups kept now."""
        return self._bytes

    def get(self, key: Hashable, decode: Callable[[], pa.Table]) -> pa.Table:
        """The group `key`, from memory or by calling `decode`."""
        while True:
            with self._lock:
                if key in self._tables:
                    self.hits += 1
                    self._tables.move_to_end(key)
                    return self._tables[key][0]
                flight = self._flights.get(key)
                if flight is None:
                    self.misses += 1
                    flight = self._flights[key] = Future()
                    break
            error = flight.exception()
            if error is None:
                return flight.result()
            if isinstance(error, Exception):
                raise error
            # The thread that was decoding has been interrupted, which is no fault of the group: try again.
        try:
            table = decode()
        except BaseException as error:
            with self._lock:
                del self._flights[key]
            flight.set_exception(error)
            raise
        with self._lock:
            del self._flights[key]
            self._keep(key, table)
        flight.set_result(table)
        return table

    def holds(self, key: Hashable) -> bool:
        """Whether the group `key` is there; counts as no use of it."""
        with self._lock:
            return key in self._tables

    def discard(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Drops the groups whose key is `unwanted`."""
        with self._lock:
            for key in [key for key in self._tables if unwanted(key)]:
                self._bytes -= self._tables.pop(key)[1]

    def _keep(self, key: Hashable, table: pa.Table) -> None:
        if self.max_bytes == 0:
            return
        size = table.nbytes
        self._tables[key] = (table, size)
        self._bytes += size
        while self._bytes > self.max_bytes and len(self._tables) > 1:
            _, (_, freed) = self._tables.popitem(last=False)
            self._bytes -= freed
