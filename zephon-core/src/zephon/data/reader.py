"""Reading rows: from row ids to Arrow columns, group by group through the decode cache."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

# Parsed footers and open decompressors kept per dataset; one per lane that reads at once is enough.
_MAX_OPEN_SHARDS = 128
# Above this share of the rows of the groups it touches, a `take` copies those groups into one and picks from that;
# below, it picks from each group first. Measured on 100 MB in 12 groups: at 100 % 7.2 against 3.9 GB/s, at 25 % 3.7
# against 4.2 GB/s, at 3 % 0.6 against 5.9 GB/s.
_DENSE_SHARE = 0.4

_ANNOUNCED_KEPT = 1024
# How often a group of a file of a store is read, with its bytes fetched anew, before the file counts as damaged.
_STORE_TRIES = 3


class GroupSource:
    """Where the groups of one dataset come from. Thread-safe."""

    remote = False

    def read(self, shard: int, group: Group) -> pa.Table:
        """The rows of a group."""
        raise NotImplementedError

    def announce(self, shard: int, group: Group) -> bool:
        """Has the bytes of a group fetched ahead; False where there is no room for more."""
        return True

    def close(self) -> None:
        """Frees files; a later `read` opens them again."""


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
        self._announced: OrderedDict[int, None] = OrderedDict()  # used by the one thread that announces

    @property
    def name(self) -> str:
        return self.catalog.name

    @property
    def remote(self) -> bool:
        """Whether reading goes to a store, which is worth telling beforehand what will be read."""
        return self._source.remote

    def read_group(self, group: int) -> pa.Table:
        """All `catalog.group_rows[group]` rows of a group, decoded now, the cache neither asked nor filled.

        Where damage is skipped, damaged rows are marked, see `zephon.columns.damage`; so they are by `take`.
        """
        return self._source.read(*self._place(group))

    def announce(self, rows: npt.NDArray[np.int64]) -> None:
        """Has the bytes fetched that the rows with ids `rows` int64[n] will be made of; a hint, cheap, never waits."""
        for group in np.unique(self.catalog.groups_at(rows)).tolist():
            if group in self._announced or self._cache.holds((self, group)):
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
            return self.group(0, 0).slice(0, 0)
        catalog = self.catalog
        of_row = catalog.groups_at(rows)
        return _taken(rows, of_row, catalog.row_starts, catalog.group_rows, self.group, catalog.sequential)

    def close(self) -> None:
        """Frees files and cached groups; the dataset can still be read, which opens what it needs again."""
        self._source.close()
        self._cache.discard(lambda key: isinstance(key, tuple) and key[0] == self)

    def group(self, group: int, rows: int) -> pa.Table:
        """A group from the cache, of which so many rows are used now."""
        return self._cache.get((self, group), lambda: self.read_group(group), rows)


class JoinedDatasets:
    """Open datasets with the same columns, read as one: the row ids of each follow those of the one before it.

    What a read costs besides its rows is then paid once, and not once per dataset.
    """

    def __init__(self, datasets: Sequence[OpenDataset]) -> None:
        self._datasets = list(datasets)
        catalogs = [dataset.catalog for dataset in datasets]
        self.first_rows = np.cumsum([0, *(catalog.rows for catalog in catalogs)])
        """int64[n_datasets + 1]: the first row id of each dataset here, then the number of rows."""
        starts = [catalog.row_starts[:-1] + first for catalog, first in zip(catalogs, self.first_rows, strict=False)]
        self._row_starts = np.concatenate([*starts, self.first_rows[-1:]])
        self._group_rows = np.concatenate([catalog.group_rows for catalog in catalogs])
        self._first_groups = np.cumsum([0, *(catalog.n_groups for catalog in catalogs)]).tolist()
        self._sequential = any(catalog.sequential for catalog in catalogs)

    def take(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """As `OpenDataset.take`."""
        of_row = np.searchsorted(self._row_starts, rows, side="right") - 1
        return _taken(rows, of_row, self._row_starts, self._group_rows, self._group, self._sequential)

    def _group(self, group: int, rows: int) -> pa.Table:
        d = bisect_right(self._first_groups, group) - 1
        return self._datasets[d].group(group - self._first_groups[d], rows)


def _taken(
    rows: npt.NDArray[np.int64],
    of_row: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    group_rows: npt.NDArray[np.int64],
    read: Callable[[int, int], pa.Table],
    sequential: bool,
) -> pa.Table:
    """Rows of several groups, in the order of `rows`.

    Args:
        rows: int64[n], at least one.
        of_row: int64[n], the group of each.
        starts, group_rows: int64[n_groups + 1] and int64[n_groups], the first row and the number of rows of each group.
        read: a group, of which so many rows are used now.
        sequential: whether groups are to be read in order.
    """
    groups, counts = np.unique(of_row, return_counts=True)
    if len(groups) == 1:
        return read(int(groups[0]), len(rows)).take(int64_array(rows - starts[groups[0]]))
    # Threads that need the same groups would else follow each other from group to group, one decoding, all waiting.
    turn = 0 if sequential else int(rows[0]) % len(groups)
    tables = [pa.table({})] * len(groups)
    if len(rows) >= _DENSE_SHARE * group_rows[groups].sum():
        # Groups side by side, then one pick: row r lies at its group's new start plus its place in the group.
        for i in [*range(turn, len(groups)), *range(turn)]:
            tables[i] = read(int(groups[i]), int(counts[i]))
        new_starts = np.cumsum(group_rows[groups]) - group_rows[groups]
        shift = new_starts - starts[groups]
        return _picked(tables, rows + shift[np.searchsorted(groups, of_row)])
    order = np.argsort(of_row, kind="stable")
    ends = np.cumsum(counts)
    inside = int64_array((rows - starts[of_row])[order])
    for i in [*range(turn, len(groups)), *range(turn)]:
        table = read(int(groups[i]), int(counts[i]))
        tables[i] = table.take(inside.slice(ends[i] - counts[i], counts[i]))
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return _picked(tables, back)


def _picked(tables: list[pa.Table], indices: npt.NDArray[np.int64]) -> pa.Table:
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


class ShardFiles(GroupSource):
    """Groups of files: opens shards as they are needed and keeps the readers of the last few."""

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
        self.remote = self._spans is not None
        self._is_text, self._kinds = is_text, kinds
        # JSON lines are read as their kinds; other formats give their own types, which may differ between shards.
        self._types: dict[str, pa.DataType] = {}
        if kinds is not None and fmt.name != "jsonl":
            named = {name: kinds.get(name) for name in columns if name != size_column or not is_text}
            self._types = {name: pa.type_for_alias(kind) for name, kind in named.items() if kind}
        self._lock = threading.Lock()
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()

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
            self._listing.file(shard).check_unchanged()  # damage that is due to a change is a change
            while error.rest is not None:
                try:
                    return self._typed(error.rest(), shard, group)
                except Damaged as wrong:
                    error = wrong
            return lost_table(self._columns, Lost(str(error), group.first_row, group.rows, ""), group.rows)

    def _read(self, shard: int, group: Group) -> pa.Table:
        tries = 0
        while True:
            tries += 1
            try:
                return self._typed(self._reader(shard).read(group), shard, group)
            except FileChanged as changed:
                self._accept_if_same_content(shard, changed)
                if tries > 1:
                    raise
            except Unavailable:
                raise
            except DataError:
                # Bytes may have been damaged on their way, or on this node's disk: those of the store decide.
                if self._spans is None or tries == _STORE_TRIES:
                    raise
                self._spans.drop(self._file(shard))
                self._close_reader(shard)

    def _typed(self, table: pa.Table, shard: int, group: Group) -> pa.Table:
        if not self._types:
            return table
        return as_types(table, self._types, self._listing.file(shard).path, group.first_row)

    def announce(self, shard: int, group: Group) -> bool:
        if self._spans is None:
            return True
        spans, file = self._spans, self._file(shard)
        with self._lock:
            reader = self._readers.get(shard)
        if reader is not None:
            return spans.announce(file, reader.ranges(group) or [])
        # Finding out what to fetch takes a request by itself.
        first = [(0, min(WINDOW_BYTES, file.size))]
        spans.plan(lambda: spans.announce(file, first if file.sequential else self._reader(shard).ranges(group) or []))
        return True

    def close(self) -> None:
        for shard in list(self._readers):
            self._close_reader(shard)

    def _reader(self, shard: int) -> ShardReader:
        with self._lock:
            reader = self._readers.get(shard)
            if reader is not None:
                self._readers.move_to_end(shard)
                return reader
        file = self._file(shard)
        text_column = self._size_column if self._is_text else None
        opened = self._format.open(file, self._columns, text_column, self._kinds)
        digest = opened.digest  # of formats that come to know it by opening the shard
        if digest is not None and digest != self._catalog.shard_digests[shard].as_py():
            raise DataError(
                f"'{file.path}' is not what it was when the dataset was listed, though its size and version are the "
                "same: it has changed, or was damaged on its way; restore it or start a new run"
            )
        dropped = -1
        with self._lock:
            reader = self._readers.setdefault(shard, opened)  # another thread may have been faster
            if len(self._readers) > _MAX_OPEN_SHARDS:
                dropped = next(iter(self._readers))
        if dropped >= 0:
            self._close_reader(dropped)
        return reader

    def _file(self, shard: int) -> StoredFile:
        sequential = self._format.is_sequential(self._listing.names[shard])
        return self._listing.file(shard, self._spans, sequential=sequential)

    def _close_reader(self, shard: int) -> None:
        with self._lock:
            reader = self._readers.pop(shard, None)
        if reader is not None:
            reader.close()

    def _accept_if_same_content(self, shard: int, changed: FileChanged) -> None:
        """A file that was only touched or copied over itself is still the file; one that differs ends the run."""
        file = self._listing.file(shard).refreshed()
        try:
            scan = self._format.scan(file, self._size_column, self._is_text)
        except Damaged as error:
            raise changed from error
        catalog = self._catalog
        first, last = catalog.shard_group_starts[shard : shard + 2]
        listed = (catalog.shard_sizes[shard], catalog.shard_digests[shard].as_py())
        if (file.size, scan.digest) != listed or not np.array_equal(scan.groups[:, 0], catalog.group_rows[first:last]):
            raise changed
        self._listing.accept(shard, file)
        self._close_reader(shard)
