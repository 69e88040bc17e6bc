"""The table of contents of a dataset: shards, groups, rows, sizes and a fingerprint, as columns."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
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
from zephon.columns.progress import progress_of
from zephon.data.columns import common_types
from zephon.data.formats.base import Format, ShardScan
from zephon.data.index import INDEX_SCHEMA, index_path, load_table, save_table
from zephon.data.storage import FileChanged, Listing
from zephon.data.store import Unavailable
from zephon.errors import DataError

_log = logging.getLogger(__name__)

# Scans wait for the disk or hash outside the GIL; more threads than this gain nothing on a local disk.
_SCAN_THREADS = 8
_STORE_TRIES = 3  # scans of a file of a store, before one that cannot be read counts as damaged
_STORE_SCAN_THREADS = 32  # waiting for the answers of a store
_SCANS_IN_FLIGHT = 4096  # and in memory as objects
# How often the index is saved while there is more to come: a start that is interrupted goes on where it was.
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
        columns = {key: _read_only(values_of(shards[key].combine_chunks().flatten())) for key in _INT_LISTS}
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
    progress: Callable[[int, int, int, int], None] | None = None,
    lost: list[LostShard] | None = None,
) -> tuple[pa.Table, dict[str, str | None]]:
    """What is in each file of `listing`, scanned or remembered from an earlier run, and the columns there are.

    Files that are damaged are an error or, with `lost`, told there and taken for files without rows. These are scanned
    at every start, so that the index never says of a damaged file that it is empty.

    Each column, sorted, comes with what it is read as in all of them (see `common_types`).

    The table has one row per file in name order, in the columns of `INDEX_SCHEMA`. Files whose name, size and
    modification time are those of the sidecar index are not opened. `threads` scan at a time (by default as many as a
    local disk can use); `progress` is called with files done, files, bytes of files done, bytes.

    Raises:
        DataError: from the first file, in name order, that cannot be read; no rows at all.
    """
    index = index_path(index_dir, path, fmt.name, size_column) if index_dir is not None else None
    known = load_table(index) if index is not None else None
    fresh, found = _still_valid(known, listing)
    stale = np.flatnonzero(~fresh).tolist()
    unsound: set[str] = set()  # names of files with damage
    parts = [] if known is None else [known.take(int64_array(found[fresh]))]
    done: list[ShardScan] = []
    began = time.perf_counter()

    def scan(i: int) -> ShardScan:
        file, tries = listing.file(i), 1 if listing.sources is None else _STORE_TRIES
        while True:
            tries -= 1
            try:
                return fmt.scan(file, size_column, is_text)
            except (FileChanged, Unavailable):
                raise
            except DataError as error:
                if tries:  # perhaps damaged on the way
                    continue
                if lost is None or not isinstance(error, Damaged):
                    raise
                file.check_unchanged()
                unsound.add(listing.names[i])
                if error.rest is not None:
                    rest: ShardScan = error.rest()
                    return rest
                lost.append(LostShard(listing.names[i], file.size, str(error)))
                return ShardScan("damaged", {}, [])

    def collect() -> pa.Table:
        """All that is known so far."""
        if done or not parts:
            first = sum(map(len, parts)) - int(fresh.sum())
            parts.append(_table_of(listing, stale[first : first + len(done)], done))
            done.clear()
        return pa.concat_tables(parts)

    def save() -> None:
        if index is not None:
            table = collect().combine_chunks()
            save_table(index, table.filter(pc.invert(pc.is_in(table["name"], string_array(sorted(unsound))))))

    if stale:
        _log.info("scanning %d of %d files of '%s'", len(stale), len(fresh), path)
    threads = threads or (_SCAN_THREADS if listing.sources is None else _STORE_SCAN_THREADS)
    files, size, total = int(fresh.sum()), int(listing.sizes[fresh].sum()), int(listing.sizes.sum())
    due = began + _SAVE_SECONDS
    if progress is not None and files:
        progress(files, len(fresh), size, total)
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="zephon-scan") as pool,
        progress_of(lambda: f"scanning '{path}': {files} of {len(fresh)} files done"),
    ):
        try:
            for first in range(0, len(stale), _SCANS_IN_FLIGHT):
                batch = stale[first : first + _SCANS_IN_FLIGHT]
                for i, scanned in zip(batch, pool.map(scan, batch), strict=True):
                    done.append(scanned)
                    files, size = files + 1, size + int(listing.sizes[i])
                    if progress is not None:
                        progress(files, len(fresh), size, total)
                    now = time.perf_counter()
                    if now > due:
                        save()
                        due = time.perf_counter() + max(_SAVE_SECONDS, 20 * (time.perf_counter() - now))
                collect()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            save()
            raise
    order = np.argsort(np.concatenate((np.flatnonzero(fresh), np.array(stale, np.int64))))
    shards = collect().take(int64_array(order)).combine_chunks()
    if stale:
        _log.info("scanned '%s' in %.1f s", path, time.perf_counter() - began)
    if known is None or len(stale) > len(unsound) or len(known) != len(shards) - len(unsound):
        parts[:] = [shards]
        save()
    if not pc.sum(pc.list_value_length(shards["group_rows"])).as_py():
        raise DataError(f"'{path}' has no rows in {len(fresh)} file(s); a dataset needs at least one document")
    kinds: dict[str, set[str]] = {}
    for shard_columns in pc.unique(shards["columns"]).to_pylist():
        for column, kind in json.loads(shard_columns).items():
            kinds.setdefault(column, set()).add(kind)
    return shards, {column: common_types(kinds[column]) for column in sorted(kinds)}


def _still_valid(known: pa.Table | None, listing: Listing) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """(which files the index still describes bool[n], their rows in the index int64[n], anything where none)."""
    position = np.full(len(listing.names), -1, np.int64)
    if known is None or not len(known):
        return position >= 0, position
    found = pc.index_in(string_array(listing.names), known["name"].combine_chunks())
    position[valid_mask(found)] = values_of(found.drop_null())
    sizes, mtimes = values_of(known["size"]), values_of(known["mtime_ns"])
    return (position >= 0) & (sizes[position] == listing.sizes) & (mtimes[position] == listing.mtimes), position


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


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
