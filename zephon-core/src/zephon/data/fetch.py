"""Ranges of bytes of remote files: each fetched once, ahead of need where it is announced, in bounded memory.

announce(file, ranges) ──> threads ──> memory ──┐
read(file, start, length) ──────────────────────┴─> bytes     (node cache ──> store, whoever asks first)
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from zephon.config.options import CacheOptions
from zephon.data.node_cache import NodeCache
from zephon.data.storage import SMALL_BYTES, StoredFile
from zephon.errors import RecipeError

_log = logging.getLogger(__name__)

# One request at a time brings 50 to 100 MB/s from an object store; this many fill a link of 25 Gbit/s.
_THREADS = 32
_PART_BYTES = 8 << 20
_Key = tuple[str, str, int, int]  # path, version, start, length


def open_spans(cache: CacheOptions) -> Spans:
    """What fetches the data of stores, and keeps it on this node, as `cache` says."""
    node = NodeCache(cache.data_dir, cache.data_limit_bytes) if cache.data_dir is not None else None
    return Spans(node, cache.memory_bytes // 2)


class Spans:
    """Thread-safe; one for all datasets of a pipeline.

    Args:
        node: the node's cache, or None to keep bytes in memory only.
        memory_bytes: most bytes that are in memory because they were announced; what is being read comes on top.
    """

    def __init__(self, node: NodeCache | None, memory_bytes: int = 256 << 20) -> None:
        self.node, self.memory_bytes = node, memory_bytes
        self._lock = threading.Lock()
        self._flights: OrderedDict[_Key, Future[Any]] = OrderedDict()
        self._flight_bytes = 0
        self._beside: dict[str, set[str]] = {}  # paths of files that shards have beside them, by path of the shard
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._process = os.getpid()
        self._largest = (0, "")  # bytes of the largest piece of any dataset, and its name

    def __reduce__(self) -> tuple[Any, ...]:
        return Spans, (self.node, self.memory_bytes)

    def read(self, file: StoredFile, start: int, length: int) -> Any:
        """`length` bytes of `file` from `start`, as a buffer; errors as those of `StoredFile.open`."""
        key = (file.path, file.version, start, length)
        with self._lock:
            if file.owner:
                self._beside.setdefault(file.owner, set()).add(file.path)
            flight = self._flights.get(key)
            is_mine = flight is None or flight.cancel()  # announced but not begun: quicker done here and now
            if flight is None or is_mine:
                self._forget(key)
                flight = self._add(key)
                flight.set_running_or_notify_cancel()
        if is_mine:
            self._fly(flight, file, start, length)
        try:
            data = flight.result()
        except BaseException:
            with self._lock:  # the next who asks tries again
                if self._flights.get(key) is flight:
                    self._forget(key)
            raise
        with self._lock:
            if self._flights.get(key) is flight:
                if self.node is None:
                    self._flights.move_to_end(key)
                else:
                    self._forget(key)
            self._shrink()
        return data

    def announce(self, file: StoredFile, ranges: Sequence[tuple[int, int]]) -> bool:
        """Has (start, length) ranges fetched that will be read soon; False where memory has no room for more."""
        if file.size <= SMALL_BYTES and ranges:
            ranges = [(0, file.size)]
        for start, length in ranges:
            key = (file.path, file.version, start, length)
            with self._lock:
                self._shrink()
                if key in self._flights:
                    continue
                if self._flight_bytes and self._flight_bytes + length > self.memory_bytes:
                    return False
                flight = self._add(key)
            self._pool("read").submit(self._fly, flight, file, start, length)
        return True

    def plan(self, task: Callable[[], object]) -> None:
        """Runs what finds out which ranges to announce; its errors wait for whoever reads."""

        def quietly() -> None:
            try:
                task()
            except Exception as error:
                _log.debug("reading ahead failed, and is tried again when the data is needed: %s", error)

        self._pool("plan").submit(quietly)

    def drop(self, file: StoredFile) -> None:
        """Forgets all bytes of a shard, some of which turned out to be no good, so that they are fetched anew."""
        paths = {file.path, *self._beside.get(file.path, ())}
        with self._lock:
            for key in [key for key in self._flights if key[0] in paths]:
                self._forget(key)
        if self.node is not None:
            for path in paths:
                self.node.drop(path)

    def require(self, name: str, largest: int) -> None:
        """Notes that dataset `name` is read in pieces of up to `largest` bytes, for `check_limit`."""
        with self._lock:
            self._largest = max(self._largest, (largest, name))

    def check_limit(self) -> None:
        """Refuses a limit of the cache in which a dataset that has been opened cannot be read.

        Raises:
            RecipeError: with the least limit that will do for all of them.
        """
        if self.node is None or self.node.limit_bytes is None:
            return
        largest, name = self._largest
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        least = 2 * max(1, int(ranks) if ranks.isdigit() else 1) * (largest + 4096)
        if name and self.node.limit_bytes < least:
            raise RecipeError(
                f"cache_limit_bytes is {self.node.limit_bytes:,}; expected at least {least:,}, for dataset '{name}' is "
                f"read in pieces of up to {largest:,} bytes and the cache must hold two for each process of this node"
            )

    def close(self) -> None:
        """Ends the threads; what is read later starts them again."""
        with self._lock:
            pools, self._pools = self._pools, {}
            self._flights.clear()
            self._flight_bytes = 0
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _fly(self, flight: Future[Any], file: StoredFile, start: int, length: int) -> None:
        if not flight.running() and not flight.set_running_or_notify_cancel():  # somebody could not wait
            return
        try:
            if self.node is not None and file.version:
                key = (file.version, file.size, start, length)
                data = self.node.fetch(file.path, key, length, lambda: self._from_store(file, start, length))
            else:
                data = self._from_store(file, start, length)
        except BaseException as error:
            flight.set_exception(error)
        else:
            flight.set_result(data)

    def _from_store(self, file: StoredFile, start: int, length: int) -> Any:
        """Large ranges in several requests at once."""
        if length <= _PART_BYTES * 3 // 2:
            return file.fetch(start, length)
        data = bytearray(length)
        view = memoryview(data)

        def part(offset: int) -> None:
            size = min(_PART_BYTES, length - offset)
            view[offset : offset + size] = file.fetch(start + offset, size)

        list(self._pool("part").map(part, range(0, length, _PART_BYTES)))
        return data

    def _pool(self, kind: str) -> ThreadPoolExecutor:
        """The threads of a kind; each kind may wait for the next one: plan, read, part."""
        with self._lock:
            if self._process != os.getpid():  # a fork has no threads
                self._process, self._pools = os.getpid(), {}
            if kind not in self._pools:
                self._pools[kind] = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"zephon-{kind}")
            return self._pools[kind]

    # The rest is called with the lock held.

    def _add(self, key: _Key) -> Future[Any]:
        self._flight_bytes += key[3]
        flight = self._flights[key] = Future()
        return flight

    def _forget(self, key: _Key) -> None:
        if self._flights.pop(key, None) is not None:
            self._flight_bytes -= key[3]

    def _shrink(self) -> None:
        """Drops what was announced or read longest ago and has come, down to the bytes that memory may take."""
        for key in list(self._flights) if self._flight_bytes > self.memory_bytes else ():
            if self._flight_bytes > self.memory_bytes and self._flights[key].done():
                self._forget(key)
