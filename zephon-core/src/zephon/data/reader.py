"""Reading rows: from row ids to Arrow columns, group by group through the decode cache."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.columns.damage import Damaged, Lost, LostShard, lost_table
from zephon.data.cache import DecodeCache
from zephon.data.catalog import Catalog
from zephon.data.columns import as_types
from zephon.data.fetch import Spans
from zephon.data.formats.base import Format, Group, ShardReader
from zephon.data.storage import WINDOW_BYTES, FileChanged, Listing, StoredFile
from zephon.data.store import Unavailable
from zephon.errors import DataError

__all__ = ["GroupSource", "OpenDataset", "ShardFiles"]

# Parsed footers and open decompressors kept per dataset; one per lane that reads at once is enough.
_MAX_OPEN_SHARDS = 128
# Above this share of the rows of the groups it touches, a `take` copies those groups into one and picks from that;
# below, it picks from each group first. Measured on 100 MB in 12 groups: at 100 % 7.2 against 3.9 GB/s, at 25 % 3.7
# against 4.2 GB/s, at 3 % 0.6 against 5.9 GB/s.
_DENSE_SHARE = 0.4

_ANNOUNCED_KEPT = 1024
# How often bytes from a store are fetched anew when they cannot be decoded, before the file counts as damaged.
_FETCHED_AGAIN = 2

_tokens = itertools.count()


class GroupSource(Protocol):
    """Where the groups of one dataset come from. Thread-safe."""

    @property
    def remote(self) -> bool: ...

    def read(self, shard: int, group: Group) -> pa.Table: ...

    def announce(self, shard: int, group: Group) -> bool: ...

    def row_bytes(self, shard: int) -> float: ...

    def close(self) -> None: ...


class OpenDataset:
    """A dataset ready to read. Thread-safe; tables have one chunk per column, and text is `large_string`.

    `catalog` describes what is there; row ids and groups are its. Errors are `DataError` and name file and row.
    """

    def __init__(
        self, catalog: Catalog, source: GroupSource, cache: DecodeCache, lost: Sequence[LostShard] = ()
    ) -> None:
        self.catalog = catalog
        self.lost = tuple(lost)
        """Shards that are left out as damaged; the catalog has no rows of them."""
        self._source = source
        self._cache = cache
        self._token = next(_tokens)
        self._turn = itertools.count()
        self._announced: OrderedDict[int, None] = OrderedDict()  # used by the one thread that announces

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_token", "_turn")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _token=next(_tokens), _turn=itertools.count())

    @property
    def name(self) -> str:
        return self.catalog.name

    @property
    def remote(self) -> bool:
        """Whether reading goes to a store, which is worth telling beforehand what will be read."""
        return self._source.remote

    @property
    def row_bytes(self) -> float:
        """Bytes per row of all columns that are read, by the first shard; 0 where its format cannot tell.

        Sizes work, decides no data.
        """
        return self._source.row_bytes(int(self.catalog.group_shard[0]))

    def read_group(self, group: int) -> pa.Table:
        """All `catalog.group_rows[group]` rows of a group, decoded now, the cache neither asked nor filled.

        Where damage is skipped, damaged rows are marked, see `zephon.columns.damage`; so they are by `take`.
        """
        return self._source.read(*self._place(group))

    def announce(self, rows: npt.NDArray[np.int64]) -> None:
        """Has the bytes fetched that the rows with ids `rows` int64[n] will be made of; a hint, cheap, never waits."""
        for group in np.unique(self.catalog.groups_at(rows)).tolist():
            if group in self._announced or self._cache.holds((self._token, group)):
                continue
            if not self._source.announce(*self._place(group)):
                return
            self._announced[group] = None
            if len(self._announced) > _ANNOUNCED_KEPT:
                self._announced.popitem(last=False)

    def _place(self, group: int) -> tuple[int, Group]:
        catalog = self.catalog
        shard = int(catalog.group_shard[group])
        first_row = int(catalog.row_starts[group] - catalog.shard_row_starts[shard])
        offset, length = int(catalog.group_offset[group]), int(catalog.group_length[group])
        return shard, Group(offset, length, int(catalog.group_rows[group]), first_row)

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """The rows with ids `rows` int64[n], in that order; repeats are allowed."""
        rows = np.asarray(rows, np.int64)
        if not len(rows):
            return self._group(0).slice(0, 0)
        starts = self.catalog.row_starts
        of_row = self.catalog.groups_at(rows)
        groups, counts = np.unique(of_row, return_counts=True)
        if len(groups) == 1:
            return self._group(int(groups[0])).take(int64_array(rows - starts[groups[0]]))
        if len(rows) >= _DENSE_SHARE * self.catalog.group_rows[groups].sum():
            # Groups side by side, then one pick: row r lies at its group's new start plus its place in the group.
            tables = [pa.table({})] * len(groups)
            for i in self._rotated(len(groups)):
                tables[i] = self._group(int(groups[i]))
            new_starts = np.cumsum(self.catalog.group_rows[groups]) - self.catalog.group_rows[groups]
            shift = new_starts - starts[groups]
            return _picked(tables, rows + shift[np.searchsorted(groups, of_row)])
        order = np.argsort(of_row, kind="stable")
        by_group = np.split(rows[order], np.cumsum(counts)[:-1])
        pieces = [pa.table({})] * len(groups)
        for i in self._rotated(len(groups)):
            pieces[i] = self._group(int(groups[i])).take(int64_array(by_group[i] - starts[groups[i]]))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return _picked(pieces, back)

    def _rotated(self, count: int) -> list[int]:
        """0 to count - 1, from a different one each time, but in order where a format can only be read in order.

        Threads that need the same groups would else follow each other from group to group, one decoding, all waiting.
        """
        start = 0 if self.catalog.sequential else next(self._turn) * 7919 % count
        return [*range(start, count), *range(start)]

    def close(self) -> None:
        """Frees files and cached groups; the dataset can still be read, which opens what it needs again."""
        self._source.close()
        self._cache.discard(lambda key: isinstance(key, tuple) and key[0] == self._token)

    def _group(self, group: int) -> pa.Table:
        return self._cache.get((self._token, group), lambda: self.read_group(group))


def _picked(tables: list[pa.Table], indices: npt.NDArray[np.int64]) -> pa.Table:
    # Shards may differ in columns other than the text: int32 beside int64, all null beside a type.
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"files of a dataset hold the same column with types that have nothing in common ({reason}); write "
            "them with one type, or do not ask for that column"
        ) from error
    in_order = bool((np.diff(indices) == 1).all())  # then rows are joined and not picked one by one
    table = table.slice(indices[0], len(indices)) if in_order else table.take(int64_array(indices))
    return table.combine_chunks()  # free where there is one chunk already


class ShardFiles:
    """The `GroupSource` of files: opens shards as they are needed and keeps the readers of the last few."""

    def __init__(
        self,
        listing: Listing,
        fmt: Format,
        catalog: Catalog,
        columns: Sequence[str],
        size_column: str,
        spans: Spans | None = None,
        *,
        is_text: bool = True,
        kinds: Mapping[str, str | None] | None = None,
        skips: bool = False,
    ) -> None:
        self._skips = skips
        self._listing, self._format, self._catalog = listing, fmt, catalog
        self._columns, self._size_column = columns, size_column
        self._spans = spans if listing.sources is not None else None
        self._is_text, self._kinds = is_text, kinds
        # JSON lines are read as their kinds; other formats give their own types, which may differ between shards.
        self._types: dict[str, pa.DataType] = {}
        if kinds is not None and fmt.name != "jsonl":
            named = {name: kinds.get(name) for name in columns if name != size_column or not is_text}
            self._types = {name: pa.type_for_alias(kind) for name, kind in named.items() if kind}
        self._lock = threading.Lock()
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()

    @property
    def remote(self) -> bool:
        return self._spans is not None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_readers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _readers=OrderedDict())

    def read(self, shard: int, group: Group) -> pa.Table:
        """The rows of a group; where damage is skipped, damaged rows are marked in the column `FAULT`."""
        try:
            return self._read(shard, group)
        except Damaged as error:
            if not self._skips:
                raise
            self._check_unchanged(shard)
            return self._rest(shard, group, error)

    def _rest(self, shard: int, group: Group, error: Damaged) -> pa.Table:
        """What can be saved of a group."""
        if error.rest is None:
            return lost_table(self._columns, Lost(str(error), group.first_row, group.rows, ""), group.rows)
        table: pa.Table = error.rest()
        try:
            return self._typed(table, shard, group)
        except Damaged as wrong:
            return self._rest(shard, group, wrong)

    def _typed(self, table: pa.Table, shard: int, group: Group) -> pa.Table:
        if not self._types:
            return table
        return as_types(table, self._types, self._listing.file(shard).path, group.first_row)

    def _check_unchanged(self, shard: int) -> None:
        """Damage that is due to a change is a change."""
        listed = self._listing.file(shard)
        now = listed.refreshed()
        if (now.size, now.mtime_ns) != (listed.size, listed.mtime_ns):
            raise FileChanged(
                f"'{listed.path}' has changed since the dataset was listed ({listed.size:,} bytes then, {now.size:,} "
                "now), and cannot be read any longer; restore the file or start a new run"
            )

    def _read(self, shard: int, group: Group) -> pa.Table:
        tries = 0
        while True:
            try:
                return self._typed(self._reader(shard).read(group), shard, group)
            except FileChanged as changed:
                self._accept_if_same_content(shard, changed)
                if tries:
                    raise
            except Unavailable:
                raise
            except DataError:
                # Bytes may have been damaged on their way, or on this node's disk: those of the store decide.
                if self._spans is None or tries == _FETCHED_AGAIN:
                    raise
                self._forget(shard)
            tries += 1

    def row_bytes(self, shard: int) -> float:
        """Bytes per row of the columns that are read, uncompressed; 0 where the format cannot tell."""
        return float(getattr(self._reader(shard), "row_bytes", 0.0))

    def announce(self, shard: int, group: Group) -> bool:
        """Has the bytes of a group fetched ahead; False where there is no room for more."""
        if self._spans is None:
            return True
        spans, file = self._spans, self._file(shard)

        with self._lock:
            reader = self._readers.get(shard)
        if reader is None:  # finding out what to fetch takes a request by itself
            first = [(0, min(WINDOW_BYTES, file.size))]
            spans.plan(
                lambda: spans.announce(file, first if file.sequential else self._reader(shard).ranges(group) or [])
            )
            return True
        return spans.announce(file, reader.ranges(group) or [])

    def close(self) -> None:
        with self._lock:
            readers = list(self._readers.values())
            self._readers.clear()
        for reader in readers:
            reader.close()

    def _reader(self, shard: int) -> ShardReader:
        with self._lock:
            reader = self._readers.get(shard)
            if reader is not None:
                self._readers.move_to_end(shard)
                return reader
        file = self._file(shard)
        text_column = self._size_column if self._is_text else None
        made = self._format.open(file, self._columns, text_column, self._kinds)
        digest = getattr(made, "digest", None)  # of formats that come to know it by opening the shard
        if digest is not None and digest != self._catalog.shard_digests[shard].as_py():
            raise DataError(
                f"'{file.path}' is not what it was when the dataset was listed, though its size and version are the "
                "same: it has changed, or was damaged on its way; restore it or start a new run"
            )
        dropped = None
        with self._lock:
            reader = self._readers.setdefault(shard, made)  # another thread may have been faster
            if len(self._readers) > _MAX_OPEN_SHARDS:
                _, dropped = self._readers.popitem(last=False)
        if dropped is not None:
            dropped.close()
        return reader

    def _file(self, shard: int) -> StoredFile:
        sequential = self._format.is_sequential(self._listing.names[shard])
        return self._listing.file(shard, self._spans, sequential=sequential)

    def _forget(self, shard: int) -> None:
        """Drops what is held of a shard, here and in the node's cache."""
        assert self._spans is not None
        with self._lock:
            reader = self._readers.pop(shard, None)
        self._spans.drop(self._file(shard))
        if reader is not None:
            reader.close()

    def _accept_if_same_content(self, shard: int, changed: FileChanged) -> None:
        """A file that was only touched or copied over itself is still the file; one that differs ends the run."""
        file = self._listing.file(shard).refreshed()
        try:
            scan = self._format.scan(file, self._size_column, self._is_text)
        except Damaged as error:
            raise changed from error
        first, last = self._catalog.shard_group_starts[shard : shard + 2]
        same_groups = np.array_equal(scan.groups[:, 0], self._catalog.group_rows[first:last])
        if file.size != self._catalog.shard_sizes[shard] or not same_groups:
            raise changed
        if scan.digest != self._catalog.shard_digests[shard].as_py():
            raise changed
        with self._lock:
            self._listing.accept(shard, file)
            stale = self._readers.pop(shard, None)
        if stale is not None:
            stale.close()
