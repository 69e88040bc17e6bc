"""Datasets on storage: what is there (catalog), and its rows as Arrow columns (reader).

Three nouns, each by an analogy:

* `Dataset`      the spine of a book: a name and where it stands. Opens nothing until asked.
* `Catalog`      its table of contents: shards sorted by name, groups, rows, bytes, a fingerprint. Columns, no text.
* `OpenDataset`  the book open on the desk: `take(rows)` gives any rows in any order, decoded group by group
                 through one `DecodeCache` that all datasets and lanes of a process share.

A *group* is what a format decodes at once: a Parquet row group, an Arrow IPC record batch, about 1 MiB of JSON lines.
A *row id* is a dataset-wide number: shards in name order, rows in file order, from 0.

Everything that goes wrong with data is a `zephon.errors.DataError` that names the file and, where it applies, the row.

    dataset ──> catalog ──> formats ──> storage (files, listings, patterns) ──> store (clients, hub)
       └──────> reader ──────┘   └──> fetch (ranges ahead) ──> node_cache
"""
