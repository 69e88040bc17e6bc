"""A named collection of documents, on storage or in memory, that is not open yet."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from zephon.errors import DataError, RecipeError
from zephon.io.cache import DecodeCache
from zephon.io.catalog import Catalog, scan_shards
from zephon.io.columns import missing_column
from zephon.io.formats import format_named, select_format
from zephon.io.job_listing import job_listing
from zephon.io.memory import open_table
from zephon.io.reader import OpenDataset, ShardFiles
from zephon.io.spans import Spans
from zephon.io.storage import is_remote, list_files, local_path
from zephon.io.stores import shown

__all__ = ["Dataset"]


@dataclass(frozen=True)
class Dataset:
    """One dataset by name; make it with `from_path`, `from_dict` or `from_table`. Opens nothing until `open`.

    fmt: "parquet", "jsonl" or "arrow"; None finds it from the file names. text_field: the column that holds the
    documents; None leaves it to the pipeline.
    """

    name: str
    path: str | None = None
    fmt: str | None = None
    text_field: str | None = None
    table: pa.Table | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise RecipeError(f"a dataset is named {self.name!r}, but a name must be a text that is not empty")
        if (self.path is None) == (self.table is None):
            raise RecipeError(
                f"dataset '{self.name}' needs a path or a table, not both or neither; use from_path or from_dict"
            )
        if self.fmt is not None and not isinstance(self.fmt, str):
            raise RecipeError(f"the format of dataset '{self.name}' is {self.fmt!r}, but must be a name or None")
        if self.fmt is not None:
            format_named(self.fmt)
        if self.text_field is not None and (not isinstance(self.text_field, str) or not self.text_field):
            raise RecipeError(f"text_field of dataset '{self.name}' is {self.text_field!r}, but must name a column")

    @classmethod
    def from_path(
        cls, name: str, path: str | os.PathLike[str], fmt: str | None = None, text_field: str | None = None
    ) -> "Dataset":
        """A file, a folder with all files below it, or a glob, here or in a store (``s3://``, ``hf://``, ...).

        Shards are sorted by their path relative to the folder. Names that start with ``.`` or ``_`` are skipped.

        Raises:
            RecipeError: a name, path or format that cannot be meant. What is at the path is looked at by `open`.
        """
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
            raise RecipeError(f"the path of dataset '{name}' is {path!r}, but must be a file, a folder or a glob")
        return cls(name, os.fspath(path), fmt, text_field)

    @classmethod
    def from_dict(cls, name: str, columns: Mapping[str, Sequence[Any]], text_field: str | None = None) -> "Dataset":
        """Documents in memory, ``{"text": ["one", "two"]}``; all columns have the same length."""
        if isinstance(columns, Mapping):
            for column, values in columns.items():
                if isinstance(values, str | bytes):
                    raise DataError(f"column '{column}' of dataset '{name}' is one text, but must be a list of them")
        try:
            table = pa.table(dict(columns))
        except (pa.ArrowException, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"the columns of dataset '{name}' make no table ({reason}); give lists of equal length, one type each"
            ) from error
        return cls.from_table(name, table, text_field)

    @classmethod
    def from_table(cls, name: str, table: pa.Table, text_field: str | None = None) -> "Dataset":
        """An Arrow table in memory."""
        if not isinstance(table, pa.Table):
            raise RecipeError(f"dataset '{name}' is given {type(table).__name__}, but from_table takes a pyarrow.Table")
        return cls(name, None, None, text_field, table)

    def open(
        self,
        columns: Sequence[str],
        *,
        size_column: str,
        cache: DecodeCache,
        index_dir: Path | None = None,
        spans: Spans | None = None,
    ) -> OpenDataset:
        """The catalog, scanned or from the sidecar index, and a reader of `columns`.

        Args:
            columns: top-level columns to read; nothing else is decoded.
            size_column: the column that holds the documents: its bytes are the sizes of the catalog, and it must be
                text (any string type, or binary that holds UTF-8).
            cache: shared by all datasets of the process.
            index_dir: folder of the sidecar indexes; None scans anew.
            spans: fetches, and keeps, what lies in stores; shared by all datasets of the process.

        Raises:
            DataError: nothing at the path, no rows, mixed formats, a column that is missing or no text, a damaged
                file, a store that is unknown or cannot be reached.
            RecipeError: the node's cache is too small for this dataset.
        """
        columns = list(dict.fromkeys(columns))
        if not columns:
            raise RecipeError(f"no columns of dataset '{self.name}' were asked for; name at least one")
        if self.table is not None:
            return open_table(self.name, self.table, columns, size_column)
        assert self.path is not None
        if is_remote(self.path):
            path = shown(self.path)
            with job_listing(self.path, index_dir) as found:
                fmt, listing = select_format(found, self.fmt, path)
                shards, existing = scan_shards(listing, fmt, self.path, size_column, index_dir)
            spans = spans or Spans(None)
        else:
            path = os.path.abspath(local_path(self.path))
            fmt, listing = select_format(list_files(self.path), self.fmt, path)
            shards, existing = scan_shards(listing, fmt, path, size_column, index_dir)
        for column in columns:
            if existing and column not in existing:
                raise missing_column(column, existing, path)
        catalog = Catalog.from_shards(self.name, fmt, shards, listing.pin)
        if spans is not None and listing.sources is not None:
            sizes = catalog.shard_sizes if catalog.sequential else catalog.group_length
            spans.require(self.name, int(sizes.max()))
        return OpenDataset(catalog, ShardFiles(listing, fmt, catalog, columns, size_column, spans), cache)
