"""Lance datasets, read with their own library: a shard is a fragment, named by its first data file.

The library runs in processes of its own, see `lance_process`.

A Lance dataset is a folder of data files and of versions, each of which says which files count and which of their rows
are deleted. The newest version counts when the dataset is listed, and is read to the end of the run even where further
ones are written meanwhile. Files of older versions have no rows. A group is a run of a fragment's rows.
Layout and library: https://github.com/lancedb/lance.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from zephon.data.columns import check_columns, sound_table, top_level, with_paths
from zephon.data.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors, run_bounds
from zephon.data.formats.lance_process import ask
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

__all__ = ["Lance", "as_listed"]


class Lance:
    """The `Format` of Lance datasets. Group offset = first row of the fragment, length = version of the dataset."""

    name = "lance"
    suffixes = (".lance",)

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        with corrupt_data_errors(file, self.name):
            told, empty = ask({**_place(file), "stamp": file.mtime_ns})
            assert empty is not None
            check_columns(empty.schema, [size_column], size_column if is_text else None, file.path)
            digest = hashlib.sha256()
            if "rows" not in told:
                return ShardScan.of(digest.hexdigest()[:32], with_paths(empty.schema, size_column), [])
            rows = told["rows"]
            # Data files are never written again, and their names are; so this is all that makes the fragment's rows.
            digest.update(json.dumps(told["made_of"], sort_keys=True).encode())
            per_row = max(1, told["size"] // max(rows, 1))
            bounds = run_bounds(np.full(rows, per_row, np.int64))
            counts = np.diff(bounds)
            version = np.full(len(counts), told["version"], np.int64)
            groups = np.stack([counts, counts * per_row, bounds[:-1], version], axis=1)
            return ShardScan.of(digest.hexdigest()[:32], with_paths(empty.schema, size_column), groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name):
            return dict.fromkeys(_schema(file).names)

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        return _LanceReader(file, columns, text_column)


class _LanceReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column

    def read(self, group: Group) -> pa.Table:
        file = self._file
        with corrupt_data_errors(file, Lance.name, f" (rows from {group.first_row})"):
            schema = _schema(file, group.length)
            check_columns(schema, self._columns, self._text_column, file.path, strict=False)
            wanted = top_level(self._columns, schema.names) or schema.names[:1]
            if os.path.getsize(file.path) != file.size:
                raise ValueError(f"it has {os.path.getsize(file.path)} bytes, and was listed with {file.size}")
            rows = {"columns": wanted, "offset": group.offset, "limit": group.rows}
            _, table = ask({**_place(file), "version": group.length, **rows})
            if table is None or table.num_rows != group.rows:
                raise ValueError(f"{table.num_rows if table else 0} rows, where {group.rows} were listed")
            table = table.combine_chunks()
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        pass


def as_listed(listing: Listing, path: str) -> Listing:
    """The data files of Lance datasets, each with the time of its dataset's newest version as its own.

    So what an index remembers of a fragment holds until the dataset gets another version.

    Raises:
        DataError: a dataset in a store; data files without a dataset round them, or a dataset without one of its own.
    """
    if listing.sources is not None:
        raise DataError(
            f"Lance datasets are read from local folders by their library, and '{path}' lies in a store; copy it to "
            "this machine or mount it, or write it as Parquet"
        )
    mtimes = listing.mtimes.copy()
    newest: dict[str, int] = {}
    for i, name in enumerate(listing.names):
        folder = _folder(os.path.join(listing.root, name))
        if folder not in newest:
            try:
                with os.scandir(os.path.join(folder, "_versions")) as entries:
                    newest[folder] = max(
                        entry.stat().st_mtime_ns for entry in entries if entry.name.endswith(".manifest")
                    )
            except (OSError, ValueError):
                raise DataError(
                    f"'{listing.names[i]}' below '{path}' is no part of a local Lance dataset: no versions are beside "
                    "it; name the dataset's own folder on this machine"
                ) from None
            _check_complete(folder, newest[folder])
        mtimes[i] = newest[folder]
    return Listing(listing.root, listing.names, listing.sizes, mtimes)


def _check_complete(folder: str, stamp: int) -> None:
    """Raises `DataError` where a data file of the newest version is not there: a listing cannot miss what it lacks."""
    try:
        told, _ = ask({"folder": folder, "fragment": "", "stamp": stamp})
    except ValueError:
        return  # damaged: every file's scan says so, with the file
    with os.scandir(os.path.join(folder, "data")) as entries:
        there = {entry.name for entry in entries}
    missing = sorted(set(told["files"]) - there)
    if missing:
        raise DataError(
            f"'{os.path.join(folder, 'data', missing[0])}' is not there, and version {told['version']} of its Lance "
            "dataset is made of it; restore the file, or write the dataset anew"
        )


def _folder(path: str) -> str:
    """The folder of the dataset that a data file belongs to."""
    return os.path.dirname(os.path.dirname(path))


def _place(file: StoredFile) -> dict[str, str]:
    return {"folder": _folder(file.path), "fragment": os.path.basename(file.path)}


def _schema(file: StoredFile, version: int | None = None) -> pa.Schema:
    which = {"stamp": file.mtime_ns} if version is None else {"version": version}
    _, empty = ask({"folder": _folder(file.path), "fragment": "", **which})
    assert empty is not None
    return empty.schema
