"""Lance datasets, read by their library."""

import shutil
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from support.io_data import opened, rows_of
from zephon.errors import DataError
from zephon.io import Dataset


def table_of(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    texts = [f"document {n} é" for n in numbers]
    return pa.table({"text": texts, "n": numbers, "meta": [{"text": text} for text in texts]})


def test_a_lance_dataset_is_read_at_its_newest_version(tmp_path):
    import lance

    folder = tmp_path / "docs.lance"
    lance.write_dataset(table_of(0, 1000), folder, max_rows_per_file=300)
    lance.dataset(folder).delete("n % 7 = 0")
    lance.write_dataset(table_of(1000, 10), folder, mode="append")
    # Arrow files of Arrow's Rust library, whose messages begin elsewhere.
    deleted = [
        sorted(opened(path, ["row_id"], is_text=False).take(np.arange(43))["row_id"].to_pylist())
        for path in (folder / "_deletions").glob("[0-2]-*.arrow")
    ]
    assert all(b - a == 7 for rows in deleted for a, b in pairwise(rows)) and len(deleted) == 3
    kept = [n for n in range(1000) if n % 7] + list(range(1000, 1010))
    dataset = opened(folder, ["n", "text", "meta.text"], "text")
    assert dataset.catalog.fmt == "lance" and dataset.catalog.n_shards == 5
    rows = dataset.take(np.arange(dataset.catalog.rows)).to_pylist()
    assert sorted(row["n"] for row in rows) == kept
    assert all(row["text"] == row["meta.text"] == f"document {row['n']} é" for row in rows)
    # What is written meanwhile is for the next run.
    lance.dataset(folder).delete("n >= 0")
    assert dataset.take(np.arange(dataset.catalog.rows)).to_pylist() == rows
    with pytest.raises(DataError, match="has no rows"):
        opened(folder, ["text"])


def test_an_index_of_a_lance_dataset_holds_until_its_next_version(tmp_path):
    import lance

    folder = tmp_path / "docs.lance"
    lance.write_dataset(table_of(0, 100), folder)
    dataset = Dataset.from_path("x", folder)
    assert dataset.scan("text", index_dir=tmp_path / "index").rows == 100
    lance.dataset(folder).delete("n < 10")
    assert dataset.scan("text", index_dir=tmp_path / "index").rows == 90
    shutil.rmtree(folder / "_versions")
    with pytest.raises(DataError, match="no part of a local Lance dataset"):
        dataset.scan("text", index_dir=tmp_path / "index")


def test_a_lance_dataset_without_one_of_its_data_files_is_refused(tmp_path):
    import lance

    folder = tmp_path / "docs.lance"
    for n in range(3):
        lance.write_dataset(pa.table({"text": [f"{n}a", f"{n}b"]}), folder, mode="append" if n else "create")
    lance.write_dataset(pa.table({"text": ["other"]}), tmp_path / "other.lance")
    assert len(rows_of(tmp_path)) == 7
    lost = sorted((folder / "data").glob("*.lance"))[1]
    content = lost.read_bytes()
    lost.unlink()
    for skips in (False, True):
        with pytest.raises(DataError, match=rf"data/{lost.name}' is not there, and version 3 of its Lance dataset"):
            opened(tmp_path, skips=skips)
    lost.write_bytes(content)
    (folder / "data/stray.lance").write_bytes(content)
    assert len(rows_of(folder)) == 6
    # A fragment of two files: the second holds a column of its own.
    lance.dataset(folder).add_columns({"more": "'x' || text"})
    files = {file.path for part in lance.dataset(folder).get_fragments() for file in part.metadata.files}
    (folder / "data" / sorted(files)[0]).unlink()
    with pytest.raises(DataError, match="is not there, and version 4 of its Lance dataset"):
        opened(folder)


def test_a_lance_dataset_cut_short_is_reported(tmp_path):
    import lance

    original = tmp_path / "docs.lance"
    lance.write_dataset(table_of(0, 1000), original)
    for kind in ("data/*.lance", "_versions/*.manifest"):
        for number, left in enumerate((0, 10, 500)):
            folder = tmp_path / f"{kind[:4]}{number}.lance"  # of one that it has read, the library remembers parts
            shutil.copytree(original, folder)
            (path,) = folder.glob(kind)
            path.write_bytes(path.read_bytes()[:left] if left < 500 else path.read_bytes()[:-left])
            with pytest.raises(DataError, match=rf"{folder.name}/data/.* cannot be read as lance"):
                opened(folder, ["text", "n"])
