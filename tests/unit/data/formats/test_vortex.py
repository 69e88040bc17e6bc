"""Vortex files, read by their library."""

import pyarrow as pa
import pytest

from support.io_data import check_rows, opened
from zephon.errors import DataError


def table_of(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    texts = [f"document {n} é" for n in numbers]
    return pa.table({"text": texts, "n": numbers, "meta": [{"text": text} for text in texts]})


def test_vortex_files_give_their_columns(tmp_path):
    import vortex

    for shard in range(2):
        vortex.io.write(table_of(shard * 20_000, 20_000), str(tmp_path / f"{shard}.vortex"))
    dataset = opened(tmp_path, ["text", "n", "meta.text"])
    assert dataset.catalog.fmt == "vortex" and dataset.catalog.n_shards == 2
    texts = table_of(0, 40_000)["text"].to_pylist()
    check_rows(dataset, {"text": texts, "n": list(range(40_000)), "meta.text": texts})
    with pytest.raises(DataError, match=r"column 'n' .* expected text"):
        opened(tmp_path, ["n"])
    (tmp_path / "1.vortex").write_bytes((tmp_path / "1.vortex").read_bytes()[:-100])
    with pytest.raises(DataError, match=r"1\.vortex' cannot be read as vortex"):
        opened(tmp_path, ["text"])
