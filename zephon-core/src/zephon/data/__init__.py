"""Datasets on storage: what is there (catalog), and its rows as Arrow columns (reader).

Three nouns, each by an analogy:

* `Dataset`      the spine of a book: a name and where it stands. Opens nothing until asked.
* `Catalog`      its table of contents: shards sorted by name, groups, rows, bytes, a fingerprint. Columns, no text.
* `OpenDataset`  the book open on the desk: `take(rows)` gives any rows in any order, decoded group by group
                 through one `DecodeCache` that all datasets and lanes of a process share.

A *group* is what a format decodes at once: a Parquet row group, an Arrow IPC record batch, about 1 MiB of JSON lines.
A *row id* is a dataset-wide number: shards in name order, rows in file order, from 0.

    Dataset.from_path(name: str, path: str | PathLike, fmt: str | None = None, text_field: str | None = None) -> Dataset
    Dataset.from_dict(name: str, columns: Mapping[str, Sequence], text_field: str | None = None) -> Dataset
    Dataset.from_table(name: str, table: pa.Table, text_field: str | None = None) -> Dataset
    Dataset.open(columns: Sequence[str], *, size_column: str, cache: DecodeCache,
                 index_dir: Path | None = None) -> OpenDataset

    OpenDataset.catalog: Catalog; .name: str
    OpenDataset.take(rows: int64[n]) -> pa.Table         n rows in that order, one chunk per column,
                                                         text as large_string
    OpenDataset.groups_of(rows: int64[n]) -> int64[k]    ascending, unique
    OpenDataset.read_group(group: int) -> pa.Table       exactly catalog.group_rows[group] rows
    OpenDataset.prefetch(group: int) -> None             decode it into the cache
    OpenDataset.describe(row: int) -> str                "shard.parquet:12", for messages
    OpenDataset.close() -> None

    DecodeCache(max_bytes: int)                          byte-counted LRU, single-flight, thread-safe

Everything that goes wrong with data is a `zephon.errors.DataError` that names the file and, where it applies, the row.
"""
