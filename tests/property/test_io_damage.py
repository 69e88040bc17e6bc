"""Damaged files: an error that names the file, never a hang, a crash, or an exception of a library.

What a damaged file may do unseen is give other rows, where its format has no checksum: plain JSON lines, Arrow IPC, and
Parquet pages without one. gzip, zstd with checksums and Parquet with page checksums must notice, or give the same rows.
"""

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from io_data import open_path

from zephon.errors import DataError

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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_an_error_of_ours_or_gives_sound_rows(tmp_path, name):
    content, must_notice = FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert open_path(path).take(np.arange(200))["text"].to_pylist() == TEXTS
    generator = random.Random(name)
    errors = 0
    for case in range(250):
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
    assert errors > 50
