"""The table of contents of a dataset: shards, groups, rows, sizes and a fingerprint, as columns."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zephon.columns.arrow import byte_lengths, int64_array, string_array, valid_mask, values_of
from zephon.columns.damage import Damaged, LostShard
from zephon.data.columns import common_types
from zephon.data.formats.base import Format, ShardScan
from zephon.data.index import INDEX_SCHEMA, index_path, load_table, save_table
from zephon.data.storage import FileChanged, Listing, StoredFile
from zephon.data.store import Unavailable
from zephon.errors import DataError

__all__ = ["Catalog", "scan_shards"]

_log = logging.getLogger(__name__)

# Scans wait for the disk or hash outside the GIL; more threads than this gain nothing on a local disk.
_SCAN_THREADS = 8
_SCANNED_AGAIN = 2  # files of a store, before one that cannot be read counts as damaged
_STORE_SCAN_THREADS = 32  # of a store, waiting for its answers
_SCANS_IN_FLIGHT = 4096
# So many scans are put into columns at a time, and so often the index is saved while there are more to come: a start
# that is interrupted goes on where it was.
_SCANS_PER_TABLE = 512
_SAVE_SECONDS = 20.0
_INT_LISTS = ("group_rows", "group_bytes", "group_offset", "group_length")


@dataclass(frozen=True, eq=False)
class Catalog:
    """What a dataset holds. Shards are sorted by name, groups by position in their shard; arrays are read-only.

    The row id space is 0 .. `rows` - 1: shards in order, rows in file order. `group_offset` and `group_length` are
    private to the format; `group_bytes` are uncompressed bytes of the size column, approximate.
    """

    name: str
    fmt: str
    shard_names: pa.StringArray  # [n_shards] POSIX paths relative to the dataset's folder
    shard_sizes: npt.NDArray[np.int64]  # [n_shards] bytes on disk
    shard_digests: pa.StringArray  # [n_shards] hex
    group_shard: npt.NDArray[np.int32]  # [n_groups]
    group_rows: npt.NDArray[np.int64]  # [n_groups] each > 0
    group_bytes: npt.NDArray[np.int64]  # [n_groups]
    group_offset: npt.NDArray[np.int64]  # [n_groups]
    group_length: npt.NDArray[np.int64]  # [n_groups]
    sequential: bool  # some shard can only be read from its start (compressed JSON lines)
    pin: str = ""  # the commit that was listed, for stores that have such a thing

    @classmethod
    def from_shards(cls, name: str, fmt: Format, shards: pa.Table, pin: str = "") -> Catalog:
        """From a table of `scan_shards`."""
        counts = values_of(pc.list_value_length(shards["group_rows"]))
        columns = {key: _read_only(_flat(shards[key])) for key in _INT_LISTS}
        names = shards["name"].combine_chunks()
        return cls(
            name=name,
            fmt=fmt.name,
            shard_names=names,
            shard_sizes=values_of(shards["size"]),
            shard_digests=shards["digest"].combine_chunks(),
            group_shard=_read_only(np.repeat(np.arange(len(names), dtype=np.int32), counts)),
            sequential=any(map(fmt.is_sequential, names.to_pylist())),
            pin=pin,
            **columns,
        )

    @property
    def n_shards(self) -> int:
        return len(self.shard_names)

    @property
    def n_groups(self) -> int:
        return len(self.group_rows)

    @cached_property
    def row_starts(self) -> npt.NDArray[np.int64]:
        """int64[n_groups + 1]: the first row id of each group, then `rows`."""
        return _read_only(np.concatenate(([0], np.cumsum(self.group_rows, dtype=np.int64))))

    @cached_property
    def shard_group_starts(self) -> npt.NDArray[np.int64]:
        """int64[n_shards + 1]: the first group of each shard, then `n_groups`."""
        return _read_only(np.searchsorted(self.group_shard, np.arange(self.n_shards + 1)))

    @cached_property
    def shard_row_starts(self) -> npt.NDArray[np.int64]:
        """int64[n_shards + 1]: the first row id of each shard, then `rows`."""
        return _read_only(self.row_starts[self.shard_group_starts])

    @property
    def rows(self) -> int:
        return int(self.row_starts[-1])

    @cached_property
    def bytes(self) -> int:
        """Uncompressed bytes of the size column, approximate."""
        return int(self.group_bytes.sum())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 hex of what decides the data: names, sizes and digests of the shards, and the rows of each group.

        Where the dataset lies, when its files were written and how the system lists them do not enter.
        """
        return self.fingerprint_of(self.n_shards)

    def fingerprint_of(self, n_shards: int) -> str:
        """`fingerprint` as it would be with the first `n_shards` shards alone, to tell growth from change."""
        n_groups = int(np.searchsorted(self.group_shard, n_shards))
        digest = hashlib.sha256(b"zephon catalog 1\0")
        for column in (self.shard_names[:n_shards], self.shard_digests[:n_shards]):
            digest.update(byte_lengths(column).astype("<i8").tobytes())
            digest.update("".join(column.to_pylist()).encode())
        for numbers in (self.shard_sizes[:n_shards], self.group_shard[:n_groups], self.group_rows[:n_groups]):
            digest.update(numbers.astype("<i8").tobytes())
        return digest.hexdigest()

    def groups_at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64[n]: the group of each row id; DataError for ids outside 0 .. `rows` - 1."""
        low, high = (int(np.min(rows)), int(np.max(rows))) if len(rows) else (0, 0)
        if low < 0 or high >= self.rows:
            wrong = low if low < 0 else high
            raise DataError(f"row {wrong} was asked of dataset '{self.name}', which has rows 0 to {self.rows - 1}")
        return np.searchsorted(self.row_starts, rows, side="right") - 1

    def locate(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """(shard int32[n], row in that shard int64[n]) of row ids int64[n]."""
        shard = self.group_shard[self.groups_at(rows)]
        return shard, rows - self.shard_row_starts[shard]


def scan_shards(
    listing: Listing,
    fmt: Format,
    path: str,
    size_column: str,
    index_dir: Path | None,
    is_text: bool = True,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    lost: list[LostShard] | None = None,
) -> tuple[pa.Table, dict[str, str | None]]:
    """What is in each file of `listing`, scanned or remembered from an earlier run, and the columns there are.

    Files that are damaged are an error or, with `lost`, told there and taken for files without rows. These are scanned
    at every start, so that the index never says of a damaged file that it is empty.

    Each column, sorted, comes with what it is read as in all of them (see `common_types`).

    The table has one row per file in name order, in the columns of `INDEX_SCHEMA`. Files whose name, size and
    modification time are those of the sidecar index are not opened. `threads` scan at a time (by default as many as a
    local disk can use); `progress` is told of files that are done, and their bytes, as they are.

    Raises:
        DataError: from the first file, in name order, that cannot be read; no rows at all.
    """
    index = index_path(index_dir, path, fmt.name, size_column) if index_dir is not None else None
    known = load_table(index) if index is not None else None
    names = string_array(listing.names)
    fresh, found = _still_valid(known, names, listing)
    stale = np.flatnonzero(~fresh)
    began = time.perf_counter()
    if len(stale):
        total = int(listing.sizes[stale].sum())
        _log.info("scanning %d of %d files (%d MB) of '%s'", len(stale), len(names), total // 10**6, path)
    parts = [] if known is None else [known.take(int64_array(found[fresh]))]
    if progress is not None and not fresh.all() and fresh.any():
        progress(int(fresh.sum()), int(listing.sizes[fresh].sum()))
    due = began + _SAVE_SECONDS
    threads = threads or (_SCAN_THREADS if listing.sources is None else _STORE_SCAN_THREADS)
    unsound: set[str] = set()

    def save() -> None:
        assert index is not None
        found = pa.concat_tables(parts).combine_chunks()
        if unsound:
            found = found.filter(pc.invert(pc.is_in(found["name"], string_array(sorted(unsound)))))
        save_table(index, found)

    skipping = None if lost is None else _Skipping(lost, unsound)
    for part in _scan_all(listing, fmt, size_column, stale.tolist(), is_text, threads, progress, skipping):
        if isinstance(part, BaseException):
            if index is not None and parts:
                save()
            raise part
        parts.append(part)
        now = time.perf_counter()
        if index is not None and now > due:
            save()
            due = time.perf_counter() + max(_SAVE_SECONDS, 20 * (time.perf_counter() - now))
    order = np.argsort(np.concatenate((np.flatnonzero(fresh), stale)))
    shards = pa.concat_tables(parts).take(int64_array(order)).combine_chunks()
    if len(stale):
        _log.info("scanned '%s' in %.1f s", path, time.perf_counter() - began)
    if index is not None and (known is None or len(stale) > len(unsound) or len(known) != len(shards) - len(unsound)):
        parts = [shards]
        save()
    if not pc.sum(pc.list_value_length(shards["group_rows"])).as_py():
        raise DataError(f"'{path}' has no rows in {len(names)} file(s); a dataset needs at least one document")
    kinds: dict[str, set[str]] = {}
    for shard_columns in pc.unique(shards["columns"]).to_pylist():
        for column, kind in json.loads(shard_columns).items():
            kinds.setdefault(column, set()).add(kind)
    return shards, {column: common_types(kinds[column]) for column in sorted(kinds)}


def _still_valid(
    known: pa.Table | None, names: pa.Array, listing: Listing
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """(which files the index still describes bool[n], their rows in the index int64[n], anything where none)."""
    if known is None or not len(known):
        return np.zeros(len(names), bool), np.zeros(len(names), np.int64)
    position = _positions(names, known["name"].combine_chunks())
    sizes, mtimes = values_of(known["size"]), values_of(known["mtime_ns"])
    fresh = (position >= 0) & (sizes[position] == listing.sizes) & (mtimes[position] == listing.mtimes)
    return fresh, position


def _positions(names: pa.Array, among: pa.Array) -> npt.NDArray[np.int64]:
    """Where each name stands in `among`, -1 where it does not: int64[n]."""
    found = pc.index_in(names, among)
    positions = np.full(len(names), -1, np.int64)
    positions[valid_mask(found)] = values_of(found.drop_null())
    return positions


@dataclass(frozen=True)
class _Skipping:
    """Where scans that go on over damage note it.

    lost: shards of which nothing can be read, in any order.
    unsound: names of these and of shards with damaged rows, which no index may take for sound.
    """

    lost: list[LostShard]
    unsound: set[str]

    def scan(self, file: StoredFile, name: str, error: Damaged) -> ShardScan:
        """What is left of a shard.

        Raises:
            FileChanged: it is not the file that was listed any more.
        """
        now = file.refreshed()
        if (now.size, now.mtime_ns) != (file.size, file.mtime_ns):
            raise FileChanged(f"'{file.path}' has changed while it was read for the first time; start again") from error
        self.unsound.add(name)
        if error.rest is not None:
            rest: ShardScan = error.rest()
            return rest
        self.lost.append(LostShard(name, file.size, str(error)))
        return ShardScan("damaged", {}, [])


def _scan_all(
    listing: Listing,
    fmt: Format,
    size_column: str,
    indices: Sequence[int],
    is_text: bool,
    threads: int,
    progress: Callable[[int, int], None] | None,
    skipping: _Skipping | None,
) -> Iterator[pa.Table | BaseException]:
    """Scans in the given order, a table per few hundred files; the first error, in that order, comes as the last."""

    def scan(index: int) -> ShardScan:
        if listing.sources is not None:
            for _ in range(_SCANNED_AGAIN):
                try:
                    return fmt.scan(listing.file(index), size_column, is_text)
                except (FileChanged, Unavailable):
                    raise
                except DataError:
                    pass  # perhaps damaged on the way
        try:
            return fmt.scan(listing.file(index), size_column, is_text)
        except Damaged as error:
            if skipping is None:
                raise
            return skipping.scan(listing.file(index), listing.names[index], error)

    with ThreadPoolExecutor(max(1, min(threads, len(indices))), thread_name_prefix="zephon-scan") as pool:
        done: list[ShardScan] = []
        first = 0
        try:
            for start in range(0, len(indices), _SCANS_IN_FLIGHT):
                batch = indices[start : start + _SCANS_IN_FLIGHT]
                for place, found in enumerate(pool.map(scan, batch) if len(indices) > 1 else map(scan, batch), start):
                    done.append(found)
                    if progress is not None:
                        progress(1, int(listing.sizes[indices[place]]))
                    if len(done) == _SCANS_PER_TABLE:
                        yield _table_of(listing, indices[first : first + len(done)], done)
                        first, done = first + len(done), []
            if done or not indices:
                yield _table_of(listing, indices[first:], done)
        except GeneratorExit:
            raise
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if done:
                yield _table_of(listing, indices[first : first + len(done)], done)
            yield error
        finally:
            pool.shutdown(cancel_futures=True)


def _table_of(listing: Listing, indices: Sequence[int], scans: Sequence[ShardScan]) -> pa.Table:
    bounds = np.concatenate(([0], np.cumsum([len(scan.groups) for scan in scans], dtype=np.int64)))
    groups = np.concatenate([np.empty((0, 4), np.int64), *(scan.groups for scan in scans)])
    lists = {
        key: pa.LargeListArray.from_arrays(int64_array(bounds), int64_array(numbers))
        for key, numbers in zip(_INT_LISTS, groups.T, strict=True)
    }
    columns = {
        "name": string_array([listing.names[i] for i in indices]),
        "size": int64_array(listing.sizes[list(indices)]),
        "mtime_ns": int64_array(listing.mtimes[list(indices)]),
        "digest": string_array([scan.digest for scan in scans]),
        "columns": string_array([json.dumps(scan.columns) for scan in scans]),
        **lists,
    }
    return pa.table(columns, schema=INDEX_SCHEMA)


def _flat(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = values_of(column.combine_chunks().flatten())
    return numbers


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
