"""Rows of a `datasets.Dataset` of Hugging Face, read from the Arrow tables that it maps into memory.

Nothing is converted or copied to another place: a group is some neighbouring rows, in the order that shuffle, select
and the like have given them. Groups and identity depend on the content alone, not on how it lies in files, so they are
the same on every machine. The library is not imported here: who has such an object has it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon.columns.arrow import byte_lengths, string_array, values_of
from zephon.data.cache import DecodeCache
from zephon.data.catalog import Catalog
from zephon.data.columns import check_columns, physical_columns, require_somewhere, sound_table, top_level, with_paths
from zephon.data.formats.base import Group, run_bounds
from zephon.data.memory import digest_of
from zephon.data.reader import GroupSource, OpenDataset
from zephon.errors import DataError, RecipeError

_SAMPLE_ROWS = 1024
_SAMPLE_BYTES = 64 << 20


def check_dataset(name: str, dataset: Any) -> None:
    """Refuse what is not a `datasets.Dataset` whose rows are those that lie in its tables.

    Raises:
        RecipeError: what it is instead, and what to do.
    """
    library = sys.modules.get("datasets")
    what = f"dataset '{name}' is a {type(dataset).__module__.partition('.')[0]}.{type(dataset).__name__}"
    if library is not None and isinstance(dataset, library.DatasetDict | library.IterableDatasetDict):
        splits = ", ".join(repr(split) for split in dataset)
        raise RecipeError(f"{what} with the splits {splits}; expected one split. Pass dataset[{next(iter(dataset))!r}]")
    if library is not None and isinstance(dataset, library.IterableDataset):
        raise RecipeError(
            f"{what}, which is read from its start only; expected a datasets.Dataset, read in any order. "
            f"Load it without streaming=True, or name its files: Dataset.from_path('{name}', 'hf://ORG/NAME/SPLIT')"
        )
    if library is None or not isinstance(dataset, library.Dataset):
        raise RecipeError(f"{what}; expected a datasets.Dataset, such as load_dataset(..., split='train')")
    if dataset.format["type"] == "custom":
        raise RecipeError(
            f"{what} with a transform (set_transform), which changes rows as they are read; expected rows as they are "
            "stored. Apply it with dataset.map(), or give it to the pipeline: map_transform()"
        )


class _MappedRows(GroupSource):
    """Groups of rows as sound columns. Pickled as the dataset is: by the paths of its files, where it has files."""

    def __init__(self, dataset: Any, columns: Sequence[str], text_column: str | None, label: str) -> None:
        tops = top_level(columns, dataset.column_names)
        self._rows = dataset.select_columns(tops).with_format("arrow")
        self._columns, self._text_column, self._label = list(columns), text_column, label

    def read(self, shard: int, group: Group) -> pa.Table:
        table = self._rows[group.offset : group.offset + group.rows]
        return sound_table(table, self._columns, self._text_column, self._label, group.offset)


def open_dataset(
    name: str,
    dataset: Any,
    columns: Sequence[str],
    size_column: str,
    is_text: bool,
    cache: DecodeCache,
    optional: Collection[str] = (),
) -> OpenDataset:
    """A `datasets.Dataset` as a dataset of one shard, "rows"; see `Dataset.open`.

    Columns that are `optional` may be missing, and are null then.

    Raises:
        DataError: no rows, or a column that is missing or no text.
    """
    label = f"dataset {name} (datasets.Dataset)"
    schema, text_column = dataset.data.schema, size_column if is_text else None
    held = {column: with_paths(schema, column).names for column in dict.fromkeys([*columns, size_column])}
    missing = {each for each in optional if each in held and not set(physical_columns([each])) <= {*held[each]}}
    check_columns(schema, [column for column in held if column not in missing], text_column, label)
    for column in held.keys() - missing:
        require_somewhere(column, held[column], label)
    if not len(dataset):
        raise DataError(f"dataset '{name}' is a datasets.Dataset without rows; a dataset needs at least one document")
    sizes = _row_bytes(dataset, top_level([size_column], dataset.column_names))
    bounds = run_bounds(sizes)
    rows, offsets = np.diff(bounds), bounds[:-1]
    group_bytes = np.add.reduceat(sizes, offsets)
    catalog = Catalog(
        name=name,
        fmt="datasets",
        shard_names=string_array(["rows"]),
        shard_sizes=np.array([sizes.sum()], np.int64),
        shard_digests=string_array([_identity(dataset, sizes)]),
        group_shard=np.zeros(len(rows), np.int32),
        group_rows=rows,
        group_bytes=group_bytes,
        group_offset=offsets,
        group_length=rows,
        sequential=False,
    )
    return OpenDataset(catalog, _MappedRows(dataset, columns, text_column, label), cache)


def _row_bytes(dataset: Any, columns: Sequence[str]) -> npt.NDArray[np.int64]:
    """int64[n_rows]: bytes of `columns` by row; of the tables only the offsets are read."""
    stored = [byte_lengths(dataset.data.column(name)) for name in columns]
    sizes: npt.NDArray[np.int64] = np.sum(stored, axis=0, dtype=np.int64)
    mapping = dataset._indices  # of shuffle, select and so on; the library has no other name for it
    return sizes if mapping is None else sizes[values_of(mapping.column(0))]


def _identity(dataset: Any, sizes: npt.NDArray[np.int64]) -> str:
    """A digest of the sizes of all rows, and of all columns of up to 1,024 rows, evenly spread."""
    n = len(sizes)
    count = min(n, _SAMPLE_ROWS, max(16, _SAMPLE_BYTES // max(1, int(sizes.mean()))))
    chosen = np.arange(count) * (n - 1) // max(1, count - 1)
    digest = hashlib.sha256(sizes.astype("<i8").tobytes())
    rows = dataset.with_format("arrow")
    for first in range(0, count, 64):  # a few at a time, for they may be long
        digest.update(digest_of(rows[chosen[first : first + 64].tolist()]).encode())
    return digest.hexdigest()[:32]
