"""A named collection of documents, on storage or in memory, that is not open yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from zephon.columns.damage import Damaged, LostShard
from zephon.columns.template import template_of
from zephon.data.cache import DecodeCache
from zephon.data.catalog import Catalog, scan_shards
from zephon.data.columns import has_column, physical_columns, require_somewhere
from zephon.data.fetch import Spans
from zephon.data.formats.base import Format
from zephon.data.formats.registry import format_named, select_format
from zephon.data.hugging_face import check_dataset, open_dataset
from zephon.data.index import job_listing
from zephon.data.memory import open_table
from zephon.data.reader import OpenDataset, ShardFiles
from zephon.data.splits import split_warning
from zephon.data.storage import WINDOW_BYTES, Listing, is_remote, list_files, local_path
from zephon.data.store import shown
from zephon.errors import DataError, RecipeError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """One dataset by name; make it with one of the `from_` methods. Opens nothing until `open`.

    fmt: the name of a format (docs/formats.md); None finds it from the file names. text_field: the column that holds
    the documents, a path into structs ("meta.text") or a template over several columns ("{title}\\n\\n{text}"); None
    leaves it to the pipeline. group: a name shared by datasets whose documents may stand in one record where packing
    asks for homogeneous ones.
    """

    name: str
    path: str | None = None
    fmt: str | None = None
    text_field: str | None = None
    table: Any = field(default=None, repr=False, compare=False)  # a pyarrow.Table or datasets.Dataset
    group: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise RecipeError(f"a dataset is named {self.name!r}; expected a text that is not empty")
        if (self.path is None) == (self.table is None):
            raise RecipeError(f"dataset '{self.name}' needs either a path or a table; use from_path or from_dict")
        for key in ("fmt", "text_field", "group"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise RecipeError(f"{key} of dataset '{self.name}' is {value!r}; expected a name or None")
        if self.fmt is not None:
            format_named(self.fmt)
        if self.text_field is not None:
            template_of(self.text_field)  # refuses one that cannot be read

    @classmethod
    def from_path(
        cls,
        name: str,
        path: str | os.PathLike[str],
        fmt: str | None = None,
        text_field: str | None = None,
        *,
        group: str | None = None,
    ) -> Dataset:
        """A file, a folder with all files below it, or a glob, here or in a store (``s3://``, ``hf://``, ...).

        Shards are sorted by their path relative to the folder. Names that start with ``.`` or ``_`` are skipped.

        Raises:
            RecipeError: a name, path or format that cannot be meant. What is at the path is looked at by `open`.
        """
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
            raise RecipeError(f"the path of dataset '{name}' is {path!r}; expected a file, a folder, a glob or a URI")
        return cls(name, os.fspath(path), fmt, text_field, group=group)

    @classmethod
    def from_dict(
        cls,
        name: str,
        columns: Mapping[str, Sequence[Any]],
        text_field: str | None = None,
        *,
        group: str | None = None,
    ) -> Dataset:
        """Documents in memory, ``{"text": ["one", "two"]}``; all columns have the same length."""
        try:
            if any(isinstance(values, str | bytes) for values in columns.values()):
                raise TypeError("a column is one text")
            table = pa.table(dict(columns))
        except (pa.ArrowException, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"the columns of dataset '{name}' make no table ({reason}); give lists of equal length, one type each"
            ) from error
        return cls.from_table(name, table, text_field, group=group)

    @classmethod
    def from_table(
        cls, name: str, table: pa.Table, text_field: str | None = None, *, group: str | None = None
    ) -> Dataset:
        """An Arrow table in memory."""
        if not isinstance(table, pa.Table):
            raise RecipeError(f"the table of dataset '{name}' is a {type(table).__name__}; expected a pyarrow.Table")
        return cls(name, None, None, text_field, table, group)

    @classmethod
    def from_huggingface(
        cls, name: str, dataset: Any, text_field: str | None = None, *, group: str | None = None
    ) -> Dataset:
        """A `datasets.Dataset`, such as a split of `load_dataset`: rows of its Arrow tables, without a copy.

        Raises:
            RecipeError: several splits, an `IterableDataset`, a transform that is applied on access.
        """
        check_dataset(name, dataset)
        return cls(name, None, None, text_field, dataset, group)

    def columns(
        self, index_dir: Path | None = None, *, skips: bool = False, spans: Spans | None = None
    ) -> dict[str, str | None]:
        """The columns of the first file that has any, by name, before anything is opened.

        JSON has no types: there the value says what the column is read as, "text", "number", "flag" or "json" (JSON
        text, for what is nested or mixed), by the first rows of the first file. Elsewhere it is None.

        Args:
            index_dir: as for `open`; ranks of a job list a store once with it.
            skips: pass over what is damaged: bad rows, and files of which nothing can be read.
            spans: fetches, and keeps, what lies in stores.

        Raises:
            DataError: nothing at the path, or a damaged file.
        """
        if self.table is not None:
            return dict.fromkeys(self.table.column_names)
        with self._listed(index_dir) as (found, path):
            fmt, listing = select_format(found, self.fmt, path, spans)
        first: Damaged | None = None
        for number in range(len(listing.names)):
            try:
                columns = fmt.columns_of(listing.file(number, spans))
            except Damaged as error:
                if not skips:
                    raise
                columns = error.rest() if error.rest is not None else {}
                first = first or error
            if columns:
                return columns
        if first is None:
            return {}
        raise DataError(f"no file of '{path}' can be read; the first: {first}") from first

    def columns_of_all(
        self,
        first: Mapping[str, str | None],
        size_column: str,
        named: Sequence[str] = (),
        index_dir: Path | None = None,
        *,
        skips: bool = False,
        spans: Spans | None = None,
    ) -> dict[str, str | None]:
        """The columns of all files, which a scan tells: the `first` ones, those of `columns`, and then the others.

        Args:
            size_column: a column to scan for, as for `open`; another one where it is not among the first.
            named: columns that are looked for in all rows of files without a schema, if their first rows lack them.
            index_dir, skips, spans: as for `columns`.
        """
        if self.table is not None or not first:
            return dict(first)
        if not has_column(size_column, first):
            size_column = next(iter(first))
        found, is_loose = dict(first), any(kind is not None for kind in first.values())
        while size_column:
            lost: list[LostShard] | None = [] if skips else None
            *_, kinds, _ = self._scanned(size_column, index_dir, False, lost=lost, spans=spans, warns=False)
            paths = () if is_loose else physical_columns([size_column])
            found |= {name: kind if is_loose else None for name, kind in kinds.items() if name not in {*found, *paths}}
            late = [name for name in physical_columns(named) if is_loose and not has_column(name, found)]
            size_column, named = "".join(f"{{{name}}}" for name in late), ()
        return found

    def open(
        self,
        columns: Sequence[str],
        *,
        size_column: str,
        cache: DecodeCache,
        index_dir: Path | None = None,
        is_text: bool = True,
        optional: Mapping[str, str | None] = MappingProxyType({}),
        encoded: Collection[str] = (),
        spans: Spans | None = None,
        skips: bool = False,
    ) -> OpenDataset:
        """The catalog, scanned or from the sidecar index, and a reader of `columns`.

        Args:
            columns: columns to read, paths and templates included; nothing else is decoded. One that some files lack is
                null there; its type is the one that holds those of all files.
            size_column: the column that holds the documents: its bytes are the sizes of the catalog, and unless
                `is_text` is False it must be text (any string type, or binary that holds UTF-8).
            cache: shared by all datasets of the process.
            index_dir: folder of the sidecar indexes; None scans anew.
            optional: those of `columns` that may be missing in files of JSON lines, where they are null then, and what
                they hold where the first rows of files do not tell.
            encoded: those that come as bytes where formats know by names alone that they are text.
            spans: fetches, and keeps, what lies in stores; shared by all datasets of the process.
            skips: damaged files count as files without rows and are told in `OpenDataset.lost`; damaged rows are marked
                when read, see `zephon.columns.damage`.

        Raises:
            DataError: nothing at the path, no rows, mixed formats, a column that is missing or no text, a damaged
                file, a store that is unknown or cannot be reached.
            RecipeError: no columns.
        """
        columns = list(dict.fromkeys(columns))
        if not columns:
            raise RecipeError(f"no columns of dataset '{self.name}' were asked for; name at least one")
        if self.table is not None:
            if isinstance(self.table, pa.Table):
                return open_table(self.name, self.table, columns, size_column, is_text, optional)
            return open_dataset(self.name, self.table, columns, size_column, is_text, cache, optional)
        lost: list[LostShard] | None = [] if skips else None
        fmt, listing, catalog, kinds, path = self._scanned(size_column, index_dir, is_text, lost=lost, spans=spans)
        loose = optional if fmt.name == "jsonl" else {}
        for column in columns:
            if column not in loose or template_of(column) is not None:
                require_somewhere(column, kinds, path, is_exact=False)
        if fmt.name not in ("jsonl", "webdataset"):  # those tell nothing of what is in a column
            require_somewhere(size_column, kinds, path)
        if listing.sources is not None:
            spans = spans or Spans(None)
            sizes = catalog.shard_sizes.clip(max=WINDOW_BYTES) if catalog.sequential else catalog.group_length
            spans.require(self.name, int(sizes.max()))
        if fmt.text_by_name:
            kinds |= {name: "large_binary" for name in encoded if kinds.get(name) == "large_string"}
        plain = is_text and columns == [size_column] and template_of(size_column) is None
        files = ShardFiles(
            listing,
            fmt,
            catalog,
            columns,
            size_column,
            spans,
            is_text=is_text,
            kinds=None if plain else {**loose, **kinds},
            skips=skips,
        )
        return OpenDataset(catalog, files, cache, sorted(lost or ()))

    def scan(
        self,
        size_column: str,
        *,
        index_dir: Path | None,
        is_text: bool = True,
        threads: int | None = None,
        progress: Callable[[int, int, int, int], None] | None = None,
        lost: list[LostShard] | None = None,
    ) -> Catalog:
        """The catalog alone; leaves the sidecar index in `index_dir`, so that `open` need not scan.

        What an earlier, interrupted scan has found is not looked for again.

        Args:
            size_column, index_dir, is_text: as for `open`.
            threads: how many files are scanned at a time.
            progress: called with files done, files, bytes of files done, bytes, from the calling thread.
            lost: where damaged files are told, which then end nothing.

        Raises:
            DataError: as `open`.
        """
        return self._scanned(size_column, index_dir, is_text, threads, progress, lost)[2]

    @contextmanager
    def _listed(self, index_dir: Path | None) -> Iterator[tuple[Listing, str]]:
        """The files, and what messages call them; inside, other ranks of the job that want to list a store wait."""
        if self.path is None:
            raise RecipeError(f"dataset '{self.name}' is in memory, and only files have an index")
        if is_remote(self.path):
            with job_listing(self.path, index_dir) as found:
                yield found, shown(self.path)
        else:
            yield list_files(self.path), os.path.abspath(local_path(self.path))

    def _scanned(
        self,
        size_column: str,
        index_dir: Path | None,
        is_text: bool,
        threads: int | None = None,
        progress: Callable[[int, int, int, int], None] | None = None,
        lost: list[LostShard] | None = None,
        spans: Spans | None = None,
        warns: bool = True,
    ) -> tuple[Format, Listing, Catalog, dict[str, str | None], str]:
        """Format, files, what is in each, columns with types (see `scan_shards`), and the path for messages."""
        with self._listed(index_dir) as (found, path):
            fmt, listing = select_format(found, self.fmt, path, spans)
            some = listing.names[:: len(listing.names) // 10_000 + 1]
            if warns and (others := split_warning(some, _card(found))):
                _log.warning("'%s' %s, and all are read; name files or a folder", path, others)
            known_as = str(self.path) if is_remote(str(self.path)) else path
            shards, kinds = scan_shards(
                listing, fmt, known_as, size_column, index_dir, is_text, threads=threads, progress=progress, lost=lost
            )
        if is_text:
            require_somewhere(size_column, kinds, path, is_exact=False)
        return fmt, listing, Catalog.from_shards(self.name, fmt, shards, listing.pin), kinds, path


def _card(found: Listing) -> str:
    """The head of the README.md of a folder on this machine, else ""."""
    if found.sources is None and "README.md" in found.names:
        with suppress(OSError), open(os.path.join(found.root, "README.md"), encoding="utf-8", errors="replace") as card:
            return card.read(1 << 20)
    return ""
