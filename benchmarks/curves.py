"""What a token costs as a run grows: flat lines are good, and everything else is a defect or has its reason.

Each curve changes one thing: lanes, sources, shards, length of documents, size of row groups, sequence length, records
per microbatch, tokenizer threads. The text is the same (see `benchmarks.text`), written anew for each shape.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Setup, corpus, in_process
from benchmarks.throughput import measure

MAX_TEXT = 64_000_000  # bytes of text per shape

CURVES: dict[str, list[int]] = {
    "lanes": [1, 8, 64, 256, 1024],
    "sources": [1, 4, 16, 50, 200],
    "shards": [10, 1000, 5000, 20_000],
    "document bytes": [50, 200, 1000, 10_000, 10_000_000],
    "row group MB": [1, 8, 64, 1000],
    "sequence length": [512, 2048, 8192, 131_072],
    "microbatch": [1, 2, 8, 32, 64],
    "threads": [1, 2, 4, 8],
}


def texts(job: dict[str, Any], nbytes: int) -> Iterator[str]:
    """Documents of both sources in turn, once round."""
    import pyarrow.parquet as pq

    def source(path: str) -> Iterator[str]:
        for file in sorted(Path(path).glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches(256, columns=["text"]):
                yield from batch.column(0).to_pylist()

    streams, size = [source(path) for path in job["sources"].values()], 0
    while streams and size < nbytes:
        for stream in list(streams):
            if (text := next(stream, None)) is None:
                streams.remove(stream)
            else:
                size += len(text.encode())
                yield text


def cut(documents: Iterator[str], characters: int) -> Iterator[str]:
    """The same text in documents of so many characters."""
    held = ""
    for text in documents:
        held += text
        while len(held) >= characters:
            yield held[:characters]
            held = held[characters:]


def shape(job: dict[str, Any], folder: Path, curve: str, value: int) -> dict[str, Any]:
    """The job of a point of a curve; its data are written unless they are there."""
    simple = {"lanes": "lanes", "sequence length": "seq_len", "microbatch": "microbatch", "threads": "threads"}
    if curve in simple:
        return {**job, simple[curve]: value}
    folder = folder / f"{curve.replace(' ', '-')}-{value}"
    if not folder.exists():
        work = folder.with_suffix(".tmp")
        shutil.rmtree(work, ignore_errors=True)
        nbytes = 1_100_000_000 if (curve, value) == ("row group MB", 1000) else MAX_TEXT
        documents: Iterator[str] = texts(job, nbytes)
        if curve == "document bytes":
            documents = cut(documents, value)
        _write(work, list(documents), *_layout(curve, value))
        work.rename(folder)
    return {**job, "sources": {path.name: str(path) for path in sorted(folder.iterdir())}}


def _layout(curve: str, value: int) -> tuple[int, int, int]:
    """(sources, shards over all of them, bytes of a row group)."""
    sources = value if curve == "sources" else 2
    return sources, value if curve == "shards" else sources, value * 10**6 if curve == "row group MB" else 8 << 20


def _write(folder: Path, documents: list[str], sources: int, shards: int, group_bytes: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    per_group = max(1, group_bytes * len(documents) // sum(len(text.encode()) for text in documents))
    for shard in range(shards):
        path = folder / f"source-{shard % sources:03d}" / f"{shard // sources:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": pa.array(documents[shard::shards], pa.large_string())})
        pq.write_table(table, path, row_group_size=per_group, compression="zstd")


def bench(setup: Setup) -> None:
    base = corpus(setup)
    for curve, values in CURVES.items():
        if not setup.wants(curve.replace(" ", "-")):
            continue
        print(f"\n{curve:>16}{'CPU ms/M tokens':>17}{'M tokens/s':>12}{'first batch':>13}{'peak':>10}")
        for value in values:
            job = shape({**base, "tokens": min(setup.tokens, 3e7)}, setup.folder / "curves", curve, value)
            found = in_process(measure, job)
            print(
                f"{value:>16,}{found['cpu_ms_per_million']:>17.1f}{found['million_tokens_per_s']:>12.1f}"
                f"{found['first_batch_s']:>11.2f} s{found['peak_mb']:>7.0f} MB",
                flush=True,
            )
