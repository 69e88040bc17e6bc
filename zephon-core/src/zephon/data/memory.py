"""Datasets that are in memory already, behind the same interface: one shard, groups of a few thousand rows."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import byte_lengths, int64_array, string_array
from zephon.data.cache import DecodeCache
from zephon.data.catalog import Catalog
from zephon.data.columns import check_columns, physical_columns, require_somewhere, sound_table, with_paths
from zephon.data.formats.base import Group
from zephon.data.reader import GroupSource, OpenDataset
from zephon.errors import DataError

_GROUP_ROWS = 4096


class _Slices(GroupSource):
    """The groups of a table: nothing to decode, so nothing to cache."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def read(self, shard: int, group: Group) -> pa.Table:
        return self._table.slice(group.offset, group.rows)


def open_table(
    name: str,
    table: pa.Table,
    columns: Sequence[str],
    size_column: str,
    is_text: bool = True,
    optional: Collection[str] = (),
) -> OpenDataset:
    """`table` as a dataset of one shard, "memory", whose digest is that of the values of those `columns` that it has.

    Those that are `optional` may be missing, and are null then.
    """
    label = f"dataset {name} (in memory)"
    text_column = size_column if is_text else None
    needed = list(dict.fromkeys([*columns, size_column]))
    held = {column: with_paths(table.schema, column).names for column in needed}
    missing = [
        column for column in optional if column in held and not set(physical_columns([column])) <= {*held[column]}
    ]
    check_columns(table.schema, [column for column in needed if column not in missing], text_column, label)
    for column in needed:
        if column not in missing:
            require_somewhere(column, held[column], label)
    if not table.num_rows:
        raise DataError(f"dataset '{name}' in memory has no rows; a dataset needs at least one document")
    sound = sound_table(table, needed, text_column, label, 0)
    offsets = np.arange(0, table.num_rows, _GROUP_ROWS, dtype=np.int64)
    rows = np.minimum(_GROUP_ROWS, table.num_rows - offsets)
    lengths = byte_lengths(sound[size_column])
    sizes = np.add.reduceat(lengths, offsets).astype(np.int64)
    kept = sound.select(list(columns))
    catalog = Catalog(
        name=name,
        fmt="memory",
        shard_names=string_array(["memory"]),
        shard_sizes=np.array([sizes.sum()], np.int64),
        shard_digests=string_array([digest_of(kept.drop_columns([each for each in missing if each in columns]))]),
        group_shard=np.zeros(len(offsets), np.int32),
        group_rows=rows,
        group_bytes=sizes,
        group_offset=offsets,
        group_length=rows,
        sequential=False,
    )
    return OpenDataset(catalog, _Slices(kept), DecodeCache(0))


def digest_of(table: pa.Table) -> str:
    """A digest of the values, however they lie in memory: `take` writes every buffer afresh, nulls included."""
    everything = int64_array(np.arange(table.num_rows))
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema.remove_metadata()) as writer:
        writer.write_table(table.take(everything).combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()[:32]
