"""Damaged files: an error that names the file, never a hang, a crash, or an exception of a library.

What a damaged file may do unseen is give other rows, where its format has no checksum: plain JSON lines, Arrow IPC, and
Parquet pages without one. gzip, zstd with checksums and Parquet with page checksums must notice, or give the same rows.
A file that is cut short is never read in part, and a flipped bit never shifts rows where a format says twice where they
lie. ZEPHON_FUZZ_CASES sets how many files are damaged per kind of file; the usual number makes some 4,000 in all.
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

from support.io_data import open_path
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache

CASES = int(os.environ.get("ZEPHON_FUZZ_CASES", "180"))
few_or_many = pytest.mark.parametrize("cases", [24, pytest.param(CASES, marks=pytest.mark.deep)])
TEXTS = [None if n % 50 == 7 else f"document {n} é漢字 " * (n % 9) for n in range(200)]
TABLE = pa.table({"n": range(200), "text": TEXTS, "list": [[n, n] for n in range(200)]})
JSON = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet(**options) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=64, **options)
    return sink.getvalue().to_pybytes()


def arrow(make, table=TABLE, compression=None) -> bytes:
    sink = pa.BufferOutputStream()
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=64)
    return sink.getvalue().to_pybytes()


def text_as(kind) -> pa.Table:
    return TABLE.set_column(1, "text", pa.array(TEXTS).cast(kind))


# name -> (content, whether damage cannot go unseen)
FILES = {
    "snappy.parquet": (parquet(), False),
    "plain.parquet": (parquet(use_dictionary=False, compression="none", data_page_version="2.0"), False),
    "checked.parquet": (parquet(compression="zstd", write_page_checksum=True), True),
    "file.arrow": (arrow(pa.ipc.new_file), False),
    "stream.arrow": (arrow(pa.ipc.new_stream), False),
    "zstd.arrow": (arrow(pa.ipc.new_file, compression="zstd"), False),
    "dictionary.arrow": (arrow(pa.ipc.new_file, text_as(pa.dictionary(pa.int32(), pa.string()))), False),
    "dictionaries.arrow": (arrow(pa.ipc.new_stream, text_as(pa.dictionary(pa.int32(), pa.string()))), False),
    "view.arrow": (arrow(pa.ipc.new_stream, text_as(pa.string_view())), False),
    "lines.jsonl": (JSON, False),
    "lines.jsonl.gz": (gzip.compress(JSON), True),
    "lines.jsonl.bz2": (bz2.compress(JSON), True),
    "lines.jsonl.zst": (zstandard.ZstdCompressor(write_checksum=True).compress(JSON), True),
}


def damaged(content: bytes, generator: random.Random) -> bytes:
    raw = bytearray(content)
    # Half of the time near an end, where the metadata of most formats lies.
    near = [range(len(raw)), range(len(raw)), range(min(600, len(raw))), range(max(0, len(raw) - 600), len(raw))]
    kind = generator.choice(["cut short", "flip", "bytes", "zeros", "noise", "insert", "remove"])
    at = generator.choice(generator.choice(near))
    if kind == "cut short":
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


def content_of_tar() -> bytes:
    """An archive of samples, each text one block and each number another."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for n, text in enumerate(TEXTS):
            for ending, content in (("txt", (text or "").encode()), ("json", json.dumps({"n": n}).encode())):
                info = tarfile.TarInfo(f"folder/{n:04}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


@pytest.mark.timeout(120)
@few_or_many
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_an_error_of_ours_or_gives_sound_rows(cases, tmp_path, name):
    content, must_notice = FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert open_path(path).take(np.arange(200))["text"].to_pylist() == TEXTS
    generator = random.Random(name)
    errors = 0
    for case in range(cases):
        path.write_bytes(damaged(content, generator))
        try:
            dataset = open_path(path, ["text"] if "jsonl" in name or case % 2 else ["text", "list"])
            rows = np.arange(min(dataset.catalog.rows, 1000))
            table = dataset.take(rows)
        except DataError as error:
            errors += 1
            assert name in str(error) and "\n" not in str(error)
        else:
            table.validate(full=True)
            assert table.num_rows == len(rows)
            assert not must_notice or table["text"].to_pylist() == TEXTS
    assert errors > cases // 5


# Datasets that other libraries wrote: folder -> (columns, the first of them the documents; how much goes unnoticed).
# SEEN: all damage is seen. CONTENT: a flipped bit in a text or a number is not, and changes one row. BOUNDS: nor is one
# in what says where rows begin, which changes two.
SEEN, CONTENT, BOUNDS = 0, 1, 2
PEERS = {
    "saved/plain": (["text", "label", "meta.text"], 200),
    "webdataset/plain": (["txt", "__key__", "json.t", "jpg"], CONTENT),
    "webdataset/packed": (["txt", "__key__", "json.t", "jpg"], SEEN),
    "mds/plain": (["text", "tokens", "open", "n", "raw", "meta"], CONTENT),
    "mds/zstd": (["text", "tokens", "open", "n", "raw", "meta"], 200),
    "mds/gz": (["text", "tokens"], SEEN),
    "mds/bz2": (["text", "tokens"], SEEN),
    "mds/br": (["text", "tokens"], 200),
    "mds/snappy": (["text", "tokens"], 200),
    "litdata/fields": (["text", "ids", "n", "raw"], CONTENT),
    "litdata/frames": (["text", "ids", "n", "raw"], 200),
    "litdata/items": (["text", "ids", "n", "raw"], 200),
    "litdata/whole": (["text", "ids", "n", "raw"], 200),
    "litdata/arrow": (["text", "n", "meta.text"], 200),
    "litdata/texts": (["text"], CONTENT),
    "litdata/tokens": (["tokens"], BOUNDS),
    "megatron/uint16": (["tokens"], BOUNDS),
    "megatron/sentences": (["tokens"], BOUNDS),
}


def rows_of(folder, columns) -> list[dict]:
    dataset = Dataset.from_path("damaged", folder).open(
        columns, size_column=columns[0], cache=DecodeCache(0), is_text=columns[0] != "tokens"
    )
    table = dataset.take(np.arange(min(dataset.catalog.rows, 1000)))
    table.validate(full=True)
    return table.to_pylist()


@pytest.mark.timeout(200)
@few_or_many
@pytest.mark.parametrize("name", PEERS)
def test_a_damaged_file_of_another_library_is_an_error_of_ours_or_gives_its_rows(cases, peer_data, tmp_path, name):
    columns, unnoticed = PEERS[name]
    folder = tmp_path / "damaged"
    shutil.copytree(peer_data / name, folder)
    expected = rows_of(folder, columns)
    # One shard is enough, and quick: the first file of each ending, and what describes them.
    files = sorted(path for path in folder.iterdir() if path.suffix != ".arrow" or path.name.startswith("data-00000"))
    files = [path for n, path in enumerate(files) if path.suffix not in {before.suffix for before in files[:n]}]
    files = [
        path
        for path in files
        if path.name not in ("dataset_info.json",) and not (path.name == "index.json" and "mds" in name)
    ]
    generator = random.Random(name)
    errors = 0
    for _ in range(cases // 3):
        path = generator.choice(files)
        content = path.read_bytes()
        kind = generator.choice(["cut", "flip", "any"])
        raw = bytearray(content)
        if kind == "cut":
            del raw[generator.randrange(len(raw)) :]
        elif kind == "flip":
            raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
        else:
            raw = bytearray(damaged(content, generator))
        path.write_bytes(raw)
        try:
            rows = rows_of(folder, columns)
        except DataError as error:
            errors += 1
            assert "\n" not in str(error) and (path.stem in str(error) or "damaged" in str(error))
        else:
            if kind == "cut" and rows != expected:
                # What is cut off is missed: the file's own rows, never some of them or others.
                assert path.suffix == ".json", f"{path.name} cut to {len(raw)} of {len(content)} bytes gave other rows"
            if kind == "flip" and path.suffix != ".json":
                assert len(rows) == len(expected)
                assert sum(row != true for row, true in zip(rows, expected, strict=True)) <= unnoticed
            if unnoticed == SEEN:
                assert rows == expected
        path.write_bytes(content)
    assert errors > cases // 15


@few_or_many
@pytest.mark.parametrize("name", ["tokens.npy", "rows.npy", "text.md", "samples.tar"])
def test_a_damaged_file_of_tokens_or_text_is_an_error_of_ours_or_gives_its_rows(cases, tmp_path, name):
    columns = {"text.md": ["text", "file_name"], "samples.tar": ["txt", "json.n", "__key__"]}.get(name, ["tokens"])
    path = tmp_path / name
    if name.endswith(".npy"):
        tokens = np.arange(20_000, dtype=np.uint16)
        np.save(path, tokens.reshape(100, 200) if name == "rows.npy" else tokens)
    else:
        path.write_bytes("".join(filter(None, TEXTS)).encode() if name == "text.md" else content_of_tar())
    content, expected = path.read_bytes(), rows_of(path, columns)
    generator = random.Random(name)
    for _ in range(cases // 3):
        raw = damaged(content, generator)
        path.write_bytes(raw)
        try:
            rows = rows_of(path, columns)
        except DataError as error:
            assert name in str(error) and "\n" not in str(error)
        else:
            assert len(raw) == len(content) or name in ("text.md", "samples.tar")
            # A piece of an archive that is exchanged for another one of the same length may span two members.
            assert name == "text.md" or sum(a != b for a, b in zip(rows, expected, strict=True)) <= 40


@pytest.mark.timeout(120)
@few_or_many
def test_a_damaged_vortex_file_is_an_error_of_ours_or_gives_as_many_rows(cases, tmp_path):
    import vortex

    path = tmp_path / "a.vortex"
    vortex.io.write(pa.table({"text": [text or "" for text in TEXTS], "n": range(200)}), str(path))
    content, generator = path.read_bytes(), random.Random("vortex")
    for _ in range(cases // 2):
        raw = damaged(content, generator)
        path.write_bytes(raw)
        try:
            rows = rows_of(path, ["text", "n"])
        except DataError as error:
            assert "a.vortex" in str(error) and "\n" not in str(error)
        else:
            assert len(rows) == 200 and raw[-4:] == content[-4:]
