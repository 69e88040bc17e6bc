"""Decoded groups in memory, shared by every lane and dataset of a process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from zephon.errors import RecipeError


class DecodeCache:
    """Least recently used decoded groups, up to `max_bytes` of Arrow buffers; thread-safe.

    Two threads that want the same group decode it once: the first works, the others wait for its result, or get its
    error, which is not remembered. The group asked for last stays even when it alone is larger than `max_bytes`, so
    that huge row groups are decoded once per pass and not once per chunk; 0 keeps nothing at all.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise RecipeError(f"max_bytes of the decode cache is {max_bytes}; expected 0 or more")
        self.max_bytes = max_bytes
        self.bytes = 0
        """Bytes of the groups kept now."""
        self._lock = threading.Lock()
        self._tables: OrderedDict[Hashable, tuple[pa.Table, int]] = OrderedDict()
        self._flights: dict[Hashable, Future[pa.Table]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodeCache, (self.max_bytes,)  # its content stays in this process

    def get(self, key: Hashable, decode: Callable[[], pa.Table]) -> pa.Table:
        """The group `key`, from memory or by calling `decode`."""
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key][0]
            flight = self._flights.get(key)
            is_mine = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if not is_mine:
            return flight.result()
        try:
            table = decode()
        except BaseException as error:
            with self._lock:
                del self._flights[key]
            flight.set_exception(error)
            raise
        with self._lock:
            del self._flights[key]
            if self.max_bytes:
                self._tables[key] = table, table.nbytes
                self.bytes += table.nbytes
            while self.bytes > self.max_bytes and len(self._tables) > 1:
                self.bytes -= self._tables.popitem(last=False)[1][1]
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
                self.bytes -= self._tables.pop(key)[1]
