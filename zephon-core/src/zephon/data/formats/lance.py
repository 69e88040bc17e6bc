"""Lance datasets, read with their own library: a shard is a fragment, named by its first data file.

A Lance dataset is a folder of data files and of versions, each of which says which files count and which of their rows
are deleted. The newest version counts when the dataset is listed, and is read to the end of the run even where further
ones are written meanwhile. Files of older versions have no rows. A group is a run of a fragment's rows.
Layout and library: https://github.com/lancedb/lance.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.data.columns import top_level
from zephon.data.fetch import Spans
from zephon.data.formats.base import Format, Group, Groups, Shard, library, run_bounds
from zephon.data.formats.content import content_by_mark
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError


class Lance(Format):
    """Lance datasets. Group offset = first row of the fragment, length = version of the dataset."""

    name = "lance"
    suffixes = (".lance",)

    def open_shard(self, file: StoredFile) -> Shard:
        return _LanceShard(file)

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        """Each data file with the time of its dataset's newest version as its own.

        So what an index remembers of a fragment holds until the dataset gets another version.

        Raises:
            DataError: a dataset in a store; data files without a dataset round them, or a dataset that lacks one.
        """
        if listing.sources is not None:
            raise DataError(
                f"Lance datasets are read from local folders by their library, and '{path}' lies in a store; copy it "
                "to this machine or mount it, or write it as Parquet"
            )
        mtimes = listing.mtimes.copy()
        newest: dict[str, int] = {}
        for i in keep:
            folder = _folder(os.path.join(listing.root, listing.names[i]))
            if folder not in newest:
                try:
                    with os.scandir(os.path.join(folder, "_versions")) as entries:
                        newest[folder] = max(e.stat().st_mtime_ns for e in entries if e.name.endswith(".manifest"))
                except (OSError, ValueError):
                    raise DataError(
                        f"'{listing.names[i]}' below '{path}' is no part of a local Lance dataset: no versions are "
                        "beside it; name the dataset's own folder on this machine"
                    ) from None
                _check_complete(folder, newest[folder])
            mtimes[i] = newest[folder]
        return Listing(listing.root, listing.names, listing.sizes, mtimes).select(keep)


class _LanceShard(Shard):
    def __init__(self, file: StoredFile) -> None:
        super().__init__(file)
        _refuse_other_content(file.path)
        self._folder, self._name = _folder(file.path), os.path.basename(file.path)
        self.schema = _dataset(self._folder, None, file.mtime_ns)[0].schema

    def scan(self, size_column: str) -> tuple[str, Groups]:
        dataset, fragments = _dataset(self._folder, None, self.file.mtime_ns)
        fragment = fragments.get(self._name)
        if fragment is None:
            return hashlib.sha256().hexdigest()[:32], []
        with library("lance", self.file.path):
            fragment.validate()  # that its data files hold as many rows as the version says
            sizes = [file.file_size_bytes or 0 for file in fragment.metadata.files]
            for file, size in zip(fragment.metadata.files, sizes, strict=True):
                now = os.path.getsize(os.path.join(self._folder, "data", file.path)) if size else 0
                if now != size:
                    raise ValueError(f"{file.path} has {now} bytes, where the version says {size}")
            rows = fragment.count_rows()
        # Data files are never written again, and their names are; so this is all that decides the fragment's rows.
        content = json.dumps(fragment.metadata.to_json(), sort_keys=True)
        row_bytes = max(1, sum(sizes) // max(rows, 1))
        bounds = run_bounds(np.full(rows, row_bytes, np.int64))
        counts = np.diff(bounds)
        versions = np.full(len(counts), dataset.version, np.int64)
        groups = np.stack([counts, counts * row_bytes, bounds[:-1], versions], axis=1)
        return hashlib.sha256(content.encode()).hexdigest()[:32], groups

    def ranges(self, group: Group, columns: Sequence[str]) -> None:
        return None

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        if (size := os.path.getsize(self.file.path)) != self.file.size:
            raise ValueError(f"it has {size} bytes, and was listed with {self.file.size}")
        wanted = top_level(columns, self.schema.names) or self.schema.names[:1]
        fragment = _dataset(self._folder, group.length, 0)[1][self._name]
        with library("lance", self.file.path):
            return fragment.to_table(columns=wanted, offset=group.offset, limit=group.rows).combine_chunks()


def _check_complete(folder: str, stamp: int) -> None:
    """Raises `DataError` where a data file of the newest version is missing, which no listing can show."""
    try:
        dataset, fragments = _dataset(folder, None, stamp)
    except DataError:
        raise
    except Exception:
        for name in os.listdir(versions := os.path.join(folder, "_versions")):
            if name.endswith(".manifest"):
                _refuse_other_content(os.path.join(versions, name))
        return  # damaged: every file's scan says so, with the file
    files = {file.path for fragment in fragments.values() for file in fragment.metadata.files}
    if missing := sorted(files - set(os.listdir(os.path.join(folder, "data")))):
        raise DataError(
            f"'{os.path.join(folder, 'data', missing[0])}' is not there, and version {dataset.version} of its "
            "Lance dataset is made of it; restore the file, or write the dataset anew"
        )


def _refuse_other_content(path: str) -> None:
    """Raises `DataError` for a file that is a pointer to the real one, or of another kind."""
    with open(path, "rb") as file:
        if other := content_by_mark(file.read(64), path):
            raise DataError(other)


def _folder(path: str) -> str:
    """The folder of the dataset that a data file belongs to."""
    return os.path.dirname(os.path.dirname(path))


@functools.lru_cache(maxsize=16)
def _dataset(folder: str, version: int | None, stamp: int) -> tuple[Any, dict[str, Any]]:
    """A dataset and its fragments by name; with version None, as of its newest version, written at `stamp`."""
    with library("lance", folder) as lance:
        dataset = lance.dataset(folder, version=version)
        return dataset, {os.path.basename(part.metadata.files[0].path): part for part in dataset.get_fragments()}
