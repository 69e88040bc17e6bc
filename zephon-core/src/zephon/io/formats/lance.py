"""Lance datasets, read with their own library: a shard is a fragment, named by its first data file.

A Lance dataset is a folder of data files and of versions, each of which says which files count and which of their rows
are deleted. The newest version counts when the dataset is listed, and is read to the end of the run even where further
ones are written meanwhile. Files of older versions have no rows. A group is a run of a fragment's rows.
Layout and library: https://github.com/lancedb/lance.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.errors import DataError
from zephon.io.columns import check_columns, sound_table, top_level
from zephon.io.formats.arrow_ipc import check_claims
from zephon.io.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors, library, run_bounds
from zephon.io.storage import Listing, StoredFile

__all__ = ["Lance", "as_listed"]

_MAX_DATASETS = 16
_lock = threading.Lock()
_datasets: dict[tuple[str, int], tuple[Any, dict[str, Any]]] = {}


class Lance:
    """The `Format` of Lance datasets. Group offset = first row of the fragment, length = version of the dataset."""

    name = "lance"
    suffixes = (".lance",)

    def is_sequential(self, name: str) -> bool:
        return False

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        with corrupt_data_errors(file, self.name), library("lance", "lance", file.path) as lance:
            dataset, fragments = _opened(lance, file, file.mtime_ns)
            check_columns(dataset.schema, [size_column], size_column if is_text else None, file.path)
            fragment = fragments.get(os.path.basename(file.path))
            digest = hashlib.sha256()
            if fragment is None:
                return ShardScan.of(digest.hexdigest()[:32], dataset.schema, [])
            fragment.validate()  # that its data files hold as many rows as the version says
            rows = fragment.count_rows()
            # Data files are never written again, and their names are; so this is all that makes the fragment's rows.
            digest.update(json.dumps(fragment.metadata.to_json(), sort_keys=True).encode())
            per_row = max(1, sum(_sizes(fragment)) // max(rows, 1))
            bounds = run_bounds(np.full(rows, per_row, np.int64))
            counts = np.diff(bounds)
            version = np.full(len(counts), dataset.version, np.int64)
            groups = np.stack([counts, counts * per_row, bounds[:-1], version], axis=1)
            return ShardScan.of(digest.hexdigest()[:32], dataset.schema, groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        with corrupt_data_errors(file, self.name), library("lance", "lance", file.path) as lance:
            return dict.fromkeys(_opened(lance, file, file.mtime_ns)[0].schema.names)

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
        with (
            corrupt_data_errors(file, Lance.name, f" (rows from {group.first_row})"),
            library("lance", "lance", file.path) as lance,
        ):
            dataset, fragments = _opened(lance, file, file.mtime_ns, group.length)
            check_columns(dataset.schema, self._columns, self._text_column, file.path, strict=False)
            wanted = top_level(self._columns, dataset.schema.names) or dataset.schema.names[:1]
            fragment = fragments[os.path.basename(file.path)]
            table = fragment.to_table(columns=wanted, offset=group.offset, limit=group.rows).combine_chunks()
            if table.num_rows != group.rows:
                raise ValueError(f"{table.num_rows} rows, where {group.rows} were listed")
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        pass


def as_listed(listing: Listing, path: str) -> Listing:
    """The data files of Lance datasets, each with the time of its dataset's newest version as its own.

    So what an index remembers of a fragment holds until the dataset gets another version.

    Raises:
        DataError: a dataset in a store; data files without a dataset round them.
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
        mtimes[i] = newest[folder]
    return Listing(listing.root, listing.names, listing.sizes, mtimes)


def _folder(path: str) -> str:
    """The folder of the dataset that a data file belongs to."""
    return os.path.dirname(os.path.dirname(path))


def _check_deletions(folder: str, fragment: dict[str, Any]) -> None:
    """Reads the list of deleted rows of a fragment first: the library ends the process over one that is damaged."""
    told = fragment["deletion_file"]
    if told is None or told["file_type"] != "array":
        return
    name = f"{fragment['id']}-{told['read_version']}-{told['id']}.arrow"
    path = os.path.join(folder, "_deletions", name)
    found = os.stat(path)
    check_claims(StoredFile(path, found.st_size, found.st_mtime_ns), 64 + 8 * told["num_deleted_rows"])
    with pa.OSFile(path, "rb") as file, pa.ipc.open_file(file) as reader:
        table = reader.read_all()
    table.validate(full=True)
    if table.num_rows != told["num_deleted_rows"]:
        raise ValueError(f"its list of deleted rows has {table.num_rows}, where {told['num_deleted_rows']} were noted")


def _sizes(fragment: Any) -> list[int]:
    return [file.file_size_bytes or 0 for file in fragment.metadata.files]


def _opened(lance: Any, file: StoredFile, stamp: int, version: int | None = None) -> tuple[Any, dict[str, Any]]:
    """The dataset of a data file, and its fragments by the name of their first data file."""
    key = (_folder(file.path), stamp if version is None else -version)
    with _lock:
        if key not in _datasets:
            dataset = lance.dataset(key[0], version=version)
            fragments = {}
            for fragment in dataset.get_fragments():
                _check_deletions(key[0], fragment.metadata.to_json())
                fragments[os.path.basename(fragment.metadata.files[0].path)] = fragment
            if len(_datasets) >= _MAX_DATASETS:
                _datasets.clear()
            _datasets[key] = dataset, fragments
        return _datasets[key]
