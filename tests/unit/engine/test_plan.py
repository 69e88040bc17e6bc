"""Rows of datasets that nothing tells apart are read as one part; what comes out is the same."""

from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zephon import Pipeline
from zephon.engine.plan import Fetcher
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.null())


def texts_of(kind: pa.DataType, n: int) -> pa.Array:
    if pa.types.is_null(kind):
        return pa.nulls(n)
    texts: list = [f"document {i} of {kind} " * (i % 7) or None for i in range(n)]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        texts = [None if text is None else text.encode() for text in texts]
        texts[3] = b"\xff no text"
    return pa.array(texts, kind)


@pytest.mark.parametrize("lanes", [1, 4])
def test_datasets_read_together_give_the_records_that_they_give_apart(tmp_path, tiny_tokenizer, monkeypatch, lanes):
    for d in range(3 * len(TYPES)):
        kind = TYPES[d % len(TYPES)]
        table = pa.table({"content" if d == 1 else "text": texts_of(kind, 200)})
        pq.write_table(table, tmp_path / f"{d}.parquet", row_group_size=50)
    with open(tmp_path / "7.parquet", "r+b") as file:  # a large_string dataset with a damaged row group
        file.seek(60)
        file.write(b"\0" * 40)
    names = [str(d) for d in range(3 * len(TYPES)) if TYPES[d % len(TYPES)] != pa.null()]
    datasets = [
        Dataset.from_path(name, tmp_path / f"{name}.parquet", text_field="content" if name == "1" else None)
        for name in names
    ]

    def records() -> list[list]:
        source = StaticMixtureWorkSource(datasets, dict.fromkeys(names, 1.0), seed=3, chunk_size=300)
        pipeline = (
            Pipeline(source)
            .options(canonical_replicas=lanes, runner="inline", on_error="skip", error_budget=0.9)
            .tokenize(tiny_tokenizer)
            .pack_flat(31)
            .batch(4)
        )
        return [batch.digests for batch in islice(pipeline, 80)]

    parts: list[int] = []
    read = Fetcher.__call__

    def counted(self, *piece):
        block = read(self, *piece)
        parts.append(len(block.parts))
        return block

    monkeypatch.setattr(Fetcher, "__call__", counted)
    together = records()
    assert max(parts) == 2  # "text", and "content" of one
    monkeypatch.setattr(Fetcher, "joining", lambda self, alike: self)
    assert records() == together
    assert max(parts) > 10
