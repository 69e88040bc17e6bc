"""Damaged files: an error that names the file, never a hang, a crash, or an exception of a library.

A damaged file may give other rows unseen where its format has no checksum; gzip, bzip2, zstd with checksums and Parquet
with page checksums must notice, or give the same rows. A file that is cut short is never read in part, and a flipped
bit never shifts rows where a format says twice where they lie. ZEPHON_FUZZ_CASES: files damaged per dataset.
"""

import bz2
import gzip
import io
import json
import os
import random
import shutil
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache

CASES = int(os.environ.get("ZEPHON_FUZZ_CASES", "100"))
TEXTS = [None if n % 50 == 7 else f"document {n} é漢字 " * (n % 9) for n in range(200)]
TABLE = pa.table({"n": range(200), "text": TEXTS, "list": [[n, n] for n in range(200)]})
JSON = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet(**options) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=64, **options)
    return sink.getvalue().to_pybytes()


def arrow(make, kind="string", compression=None) -> bytes:
    table = TABLE.set_column(1, "text", pa.array(TEXTS).cast(kind))
    sink = pa.BufferOutputStream()
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=64)
    return sink.getvalue().to_pybytes()


def array(*shape) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.arange(20_000, dtype=np.uint16).reshape(shape))
    return sink.getvalue()


def tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for n, text in enumerate(TEXTS):
            for ending, content in (("txt", (text or "").encode()), ("json", json.dumps({"n": n}).encode())):
                info = tarfile.TarInfo(f"folder/{n:04}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


DICTIONARY = pa.dictionary(pa.int32(), pa.string())
FILES = {
    "snappy.parquet": parquet(),
    "plain.parquet": parquet(use_dictionary=False, compression="none", data_page_version="2.0"),
    "checked.parquet": parquet(compression="zstd", write_page_checksum=True),
    "file.arrow": arrow(pa.ipc.new_file),
    "stream.arrow": arrow(pa.ipc.new_stream),
    "zstd.arrow": arrow(pa.ipc.new_file, compression="zstd"),
    "dictionary.arrow": arrow(pa.ipc.new_file, DICTIONARY),
    "dictionaries.arrow": arrow(pa.ipc.new_stream, DICTIONARY),
    "view.arrow": arrow(pa.ipc.new_stream, pa.string_view()),
    "lines.jsonl": JSON,
    "lines.jsonl.gz": gzip.compress(JSON),
    "lines.jsonl.bz2": bz2.compress(JSON),
    "lines.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(JSON),
    "tokens.npy": array(20_000),
    "rows.npy": array(100, 200),
    "text.md": "".join(filter(None, TEXTS)).encode(),
    "samples.tar": tar(),
}
# What a flipped bit changes unseen: nothing, at most so many rows, or how many rows there are.
SEEN, ANY = 0, None
TABLES, WEB = ["text", "list"], ["txt", "__key__", "json.t", "jpg"]
MDS, LITDATA = ["text", "tokens", "open", "n", "raw", "meta"], ["text", "ids", "n", "raw"]
# dataset -> (columns, the first of them the documents; what goes unnoticed). With a slash: written by other libraries.
DATASETS = {
    **{name: (TABLES, ANY) for name in FILES if name.endswith((".parquet", ".arrow"))},
    **{name: (["text"], SEEN) for name in FILES if ".jsonl." in name},
    "checked.parquet": (TABLES, SEEN),
    "lines.jsonl": (["text"], ANY),
    "text.md": (["text", "file_name"], ANY),
    "tokens.npy": (["tokens"], 3),
    "rows.npy": (["tokens"], 100),
    "samples.tar": (["txt", "json.n", "__key__"], 1),
    "a.vortex": (["text", "n"], 200),
    "saved/plain": (["text", "label", "meta.text"], 200),
    "webdataset/plain": (WEB, 1),
    "webdataset/packed": (WEB, SEEN),
    "mds/plain": (MDS, 1),
    "mds/zstd": (MDS, 200),
    "mds/gz": (["text", "tokens"], SEEN),
    "mds/bz2": (["text", "tokens"], SEEN),
    "mds/br": (["text", "tokens"], 200),
    "mds/snappy": (["text", "tokens"], 200),
    "litdata/fields": (LITDATA, 1),
    "litdata/frames": (LITDATA, 200),
    "litdata/items": (LITDATA, 200),
    "litdata/whole": (LITDATA, 200),
    "litdata/arrow": (["text", "n", "meta.text"], 200),
    "litdata/texts": (["text"], 1),
    "litdata/tokens": (["tokens"], 2),
    "megatron/uint16": (["tokens"], 2),
    "megatron/sentences": (["tokens"], 2),
}


def damaged(content: bytes, kind: str, generator: random.Random) -> bytes:
    raw = bytearray(content)
    # Half of the time near an end, where the metadata of most formats lies.
    near = [range(len(raw)), range(len(raw)), range(min(600, len(raw))), range(max(0, len(raw) - 600), len(raw))]
    at = generator.choice(generator.choice(near))
    if kind == "cut":
        return bytes(raw[:at])
    if kind == "flip":
        raw[at] ^= 1 << generator.randrange(8)
    elif kind == "bytes":
        for _ in range(generator.randint(1, 20)):
            raw[generator.choice(generator.choice(near))] = generator.randrange(256)
    elif kind == "zeros":
        raw[at : at + 32] = bytes(len(raw[at : at + 32]))
    elif kind == "noise":
        raw[at : at + 32] = generator.randbytes(len(raw[at : at + 32]))
    elif kind == "insert":
        raw[at:at] = generator.randbytes(generator.randint(1, 100))
    else:
        del raw[at : at + generator.randint(1, 100)]
    return bytes(raw)


def rows_of(folder, columns) -> list[dict]:
    options = {"size_column": columns[0], "cache": DecodeCache(0), "is_text": columns[0] != "tokens"}
    dataset = Dataset.from_path("damaged", folder).open(columns, **options)
    table = dataset.take(np.arange(min(dataset.catalog.rows, 1000)))
    table.validate(full=True)
    return table.to_pylist()


def write(name, folder, peer_data) -> list:
    """Writes a dataset, and gives those of its files that are worth damaging."""
    if name in FILES:
        folder.mkdir()
        (folder / name).write_bytes(FILES[name])
    elif name == "a.vortex":
        import vortex

        folder.mkdir()
        vortex.io.write(pa.table({"text": [text or "" for text in TEXTS], "n": range(200)}), str(folder / name))
    else:
        shutil.copytree(peer_data / name, folder)
    # One shard is enough, and quick: the first file of each ending, and what describes them.
    files = sorted(path for path in folder.iterdir() if "cache-" not in path.name and path.name != "dataset_info.json")
    files = [path for n, path in enumerate(files) if path.suffix not in {before.suffix for before in files[:n]}]
    return [path for path in files if not (path.name == "index.json" and "mds" in name)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("cases", [16, pytest.param(CASES, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", DATASETS)
def test_a_damaged_file_is_an_error_of_ours_or_gives_its_rows(cases, name, tmp_path, request):
    columns, unnoticed = DATASETS[name]
    folder = tmp_path / "damaged"
    files = write(name, folder, request.getfixturevalue("peer_data") if "/" in name else None)
    expected, generator, errors = rows_of(folder, columns), random.Random(name), 0
    for _ in range(cases):
        path = generator.choice(files)
        content = path.read_bytes()
        kind = generator.choice(["cut", "cut", "flip", "flip", "bytes", "zeros", "noise", "insert", "remove"])
        path.write_bytes(damaged(content, kind, generator))
        try:
            rows = rows_of(folder, columns)
        except DataError as error:
            errors += 1
            assert "\n" not in str(error) and (path.stem in str(error) or "damaged" in str(error))
        else:
            if kind == "cut":  # an index can be cut to another sound one
                assert rows == expected or path.suffix == ".json" or name in ("lines.jsonl", "text.md")
            elif unnoticed == SEEN:
                assert rows == expected
            elif kind == "flip" and unnoticed is not ANY and path.suffix != ".json":
                assert len(rows) == len(expected)
                assert sum(row != before for row, before in zip(rows, expected, strict=True)) <= unnoticed
        path.write_bytes(content)
    assert errors > cases // 8
