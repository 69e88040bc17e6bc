"""Writes small datasets in every format, for the tests of zephon.io."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zephon.io import Dataset, DecodeCache, OpenDataset

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".arrow", ".stream.arrow")


def json_lines(texts: Sequence[str | None]) -> bytes:
    return "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts)).encode()


def write_shard(path: Path, texts: Sequence[str | None], group_rows: int = 3) -> Path:
    """Rows with a "text" and a number "n", in the format of the ending, `group_rows` to a group where it has a say."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": pa.array(texts, pa.string()), "n": pa.array(range(len(texts)), pa.int64())})
    if path.name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=group_rows)
    elif path.name.endswith(".stream.arrow"):
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=group_rows)
    elif path.name.endswith(".arrow"):
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=group_rows)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(json_lines(texts)))
    elif path.name.endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(json_lines(texts))
    else:
        path.write_bytes(json_lines(texts))
    return path


def open_path(path: Path, columns: Sequence[str] = ("text",), *, cache_bytes: int = 1 << 20, **options) -> OpenDataset:
    index_dir, skips = options.pop("index_dir", None), options.pop("skips", False)
    dataset = Dataset.from_path("corpus", path, **options)
    return dataset.open(columns, size_column="text", cache=DecodeCache(cache_bytes), index_dir=index_dir, skips=skips)


def opened(path: Path, columns="text", size_column=None, *, fmt=None, is_text=True, **options) -> OpenDataset:
    """The columns of a dataset, the first of them its documents by default."""
    columns = [columns] if isinstance(columns, str) else list(columns)
    dataset, cache = Dataset.from_path("data", path, fmt), DecodeCache(1 << 20)
    return dataset.open(columns, size_column=size_column or columns[0], cache=cache, is_text=is_text, **options)


def texts_of(dataset: OpenDataset, column: str = "text") -> list[str | None]:
    return dataset.take(np.arange(dataset.catalog.rows))[column].to_pylist()


def rows_of(path: Path, column: str = "text", **options) -> list[str | None]:
    return texts_of(opened(path, column, **options), column)


def check_rows(dataset: OpenDataset, expected: dict[str, list]) -> None:
    """That a dataset has the `expected` values by column, in file order and in any other."""
    rows = len(next(iter(expected.values())))
    assert dataset.catalog.rows == rows
    for order in (np.arange(rows), np.random.default_rng(0).permutation(rows)):
        taken = dataset.take(order)
        for name, values in expected.items():
            assert taken[name].to_pylist() == [values[row] for row in order], name
