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

__all__ = ["Spans", "open_spans"]

_log = logging.getLogger(__name__)

# One request at a time brings 50 to 100 MB/s from an object store; this many fill a link of 25 Gbit/s.
_THREADS = 32
_PLANNERS = 16
_PART_BYTES = 8 << 20
# Shards of which is known what was read besides announced ranges, and how many of the first such reads of each.
_NOTED_SHARDS = 4096
_NOTED_READS = 64
_Key = tuple[str, str, int, int]


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
        self._announced = 0  # bytes announced and not yet used
        self._noted: OrderedDict[str, set[tuple[_Key, int]]] = OrderedDict()  # by path of the shard
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._process = os.getpid()
        self._largest = (0, "")  # bytes of the largest piece of any dataset, and its name

    def read(self, file: StoredFile, start: int, length: int, *, noted: bool = False) -> Any:
        """`length` bytes of `file` from `start`, as a buffer; errors as those of `StoredFile.open`.

        `drop` forgets what was read `noted` without being told of it.
        """
        key = _key(file, start, length)
        with self._lock:
            if noted:
                self._note(file, key)
            flight = self._flights.get(key)
            mine = flight is None or flight.cancel()  # announced but not begun: quicker done here and now
            if mine:
                if flight is None:
                    self._announced += length
                flight = self._flights[key] = Future()
                flight.set_running_or_notify_cancel()  # no other thread may take it over
        assert flight is not None
        if mine:
            self._fly(flight, file, start, length)
        try:
            data = flight.result()
        except BaseException:
            self._forget(key, flight)  # the next who asks tries again
            raise
        if self.node is not None:
            self._forget(key, flight)
        else:
            with self._lock:
                if self._flights.get(key) is flight:
                    self._flights.move_to_end(key)
                self._shrink()
        return data

    def announce(self, file: StoredFile, ranges: Sequence[tuple[int, int]]) -> bool:
        """Has (start, length) ranges fetched that will be read soon; False where memory has no room for more."""
        if file.size <= SMALL_BYTES and ranges:
            ranges = [(0, file.size)]
        fresh = []
        with self._lock:
            self._shrink()
            for start, length in ranges:
                key = _key(file, start, length)
                if key in self._flights:
                    continue
                if self._announced + length > self.memory_bytes and self._announced:
                    return False
                self._announced += length
                flight = self._flights[key] = Future()
                fresh.append((flight, start, length))
            pool = self._pool("read")
        for flight, start, length in fresh:
            pool.submit(self._fly_announced, flight, file, start, length)
        return True

    def plan(self, task: Callable[[], None]) -> None:
        """Runs what finds out which ranges to announce; its errors wait for whoever reads."""
        with self._lock:
            pool = self._pool("plan")
        pool.submit(_quietly, task)

    def drop(self, file: StoredFile, ranges: Sequence[tuple[int, int]]) -> None:
        """Forgets bytes of a shard that turned out to be no good, so that they are fetched anew."""
        with self._lock:
            keys = self._noted.pop(file.path, set()) | {(_key(file, *piece), file.size) for piece in ranges}
        for key, size in keys:
            with self._lock:
                flight = self._flights.get(key)
            if flight is not None:
                self._forget(key, flight)
            if self.node is not None:
                self.node.drop(NodeCache.key(*key, size))
        if self.node is not None:
            self.node.drop(_whole_key(file))

    def local(self, file: StoredFile) -> str | None:
        """The path of a complete local copy of `file`, None where the node cache is off or full."""
        if self.node is None or not file.version:
            return None
        return self.node.whole(_whole_key(file), file.size, lambda start, length: self._parts(file, start, length))

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
                f"cache_limit_bytes is {self.node.limit_bytes:,}, but dataset '{name}' is read in pieces of up to "
                f"{largest:,} bytes and the cache must hold two for each process of this node; allow at least {least:,}"
            )

    def close(self) -> None:
        """Ends the threads; what is read later starts them again."""
        with self._lock:
            pools, self._pools = self._pools, {}
            self._flights.clear()
            self._announced = 0
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _fly_announced(self, flight: Future[Any], file: StoredFile, start: int, length: int) -> None:
        if flight.set_running_or_notify_cancel():  # else somebody could not wait
            self._fly(flight, file, start, length)

    def _fly(self, flight: Future[Any], file: StoredFile, start: int, length: int) -> None:
        try:
            if self.node is not None and file.version:
                key = NodeCache.key(*_key(file, start, length), file.size)
                data = self.node.fetch(key, length, lambda: self._parts(file, start, length))
            else:
                data = self._parts(file, start, length)
        except BaseException as error:
            flight.set_exception(error)
        else:
            flight.set_result(data)

    def _parts(self, file: StoredFile, start: int, length: int) -> Any:
        """From the store, large ranges in several requests at once."""
        if length <= _PART_BYTES * 3 // 2:
            return file.fetch(start, length)
        data = bytearray(length)
        view = memoryview(data)

        def part(offset: int) -> None:
            size = min(_PART_BYTES, length - offset)
            view[offset : offset + size] = file.fetch(start + offset, size)

        with self._lock:
            pool = self._pool("part")
        for done in [pool.submit(part, offset) for offset in range(0, length, _PART_BYTES)]:
            done.result()
        return data

    def _pool(self, kind: str) -> ThreadPoolExecutor:
        if self._process != os.getpid():  # a fork has no threads
            self._process, self._pools = os.getpid(), {}
        if kind not in self._pools:
            threads = _PLANNERS if kind == "plan" else _THREADS
            self._pools[kind] = ThreadPoolExecutor(threads, thread_name_prefix=f"zephon-{kind}")
        return self._pools[kind]

    def _note(self, file: StoredFile, key: _Key) -> None:
        owner = file.owner or file.path
        reads = self._noted.setdefault(owner, set())
        self._noted.move_to_end(owner)
        if len(reads) < _NOTED_READS:
            reads.add((key, file.size))
        if len(self._noted) > _NOTED_SHARDS:
            self._noted.popitem(last=False)

    def _forget(self, key: _Key, flight: Future[Any]) -> None:
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
                self._announced -= key[3]

    def _shrink(self) -> None:
        """Drops what was announced or read longest ago and has come, down to the bytes that memory may take."""
        if self._announced <= self.memory_bytes:
            return
        for key, flight in list(self._flights.items()):
            if self._announced <= self.memory_bytes:
                return
            if flight.done():
                del self._flights[key]
                self._announced -= key[3]


def _key(file: StoredFile, start: int, length: int) -> _Key:
    return file.path, file.version, start, length


def _whole_key(file: StoredFile) -> str:
    return NodeCache.key(file.path, file.version, "whole", file.size)


def _quietly(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception as error:
        _log.debug("reading ahead failed, and is tried again when the data is needed: %s", error)
