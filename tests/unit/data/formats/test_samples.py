"""MDS shards and LitData's chunks: their columns, what an index says of them, and what they claim."""

import gzip
import json
import struct
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from peers.rows import TEXTS, TOKENS
from support.io_data import check_rows, opened, rows_of
from zephon.data.formats import litdata, mds, samples, sequential
from zephon.errors import DataError

N = len(TEXTS)


@pytest.mark.parametrize("folder", ["plain", "zstd", "gz", "bz2", "br", "snappy"])
def test_mds_shards_give_their_columns(peer_data, folder):
    columns = ["text", "tokens", "open", "fixed", "n", "small", "score", "raw", "meta", "meta.text"]
    dataset = opened(peer_data / "mds" / folder, columns[:-1])
    assert dataset.catalog.fmt == "mds" and dataset.catalog.n_shards > 1
    assert dataset.catalog.sequential == (folder != "plain")
    check_rows(
        dataset,
        {
            "text": TEXTS,
            "tokens": [ids.tolist() for ids in TOKENS],
            "open": [ids.tolist() for ids in TOKENS],
            "fixed": [list(range(n, n + 4)) for n in range(N)],
            "n": list(range(N)),
            "small": list(range(N)),
            "score": [n / 4 for n in range(N)],
            "raw": [bytes([n % 256]) * (n % 5) for n in range(N)],
        },
    )
    assert dataset.take(np.array([3])).schema.field("tokens").type == pa.large_list(pa.uint32())
    assert json.loads(dataset.take(np.array([3]))["meta"][0].as_py()) == {"text": TEXTS[3]}


def test_mds_refuses_pickles_and_token_ids_as_text(peer_data):
    with pytest.raises(DataError, match=r"column 'anything' .* pickled Python objects"):
        opened(peer_data / "mds/plain", ["text", "anything"]).take(np.arange(2))
    with pytest.raises(DataError, match=r"large_list<.*uint32>.*read by the operator pretokenized"):
        opened(peer_data / "mds/plain", ["tokens"])
    check_rows(opened(peer_data / "mds/plain", ["tokens"], is_text=False), {"tokens": [t.tolist() for t in TOKENS]})


@pytest.mark.parametrize("folder", ["fields", "frames", "items", "whole"])
def test_litdata_chunks_of_fields_give_their_columns(peer_data, folder):
    dataset = opened(peer_data / "litdata" / folder, ["text", "ids", "n", "score", "even", "raw"])
    assert dataset.catalog.fmt == "litdata" and dataset.catalog.n_shards == 4
    assert dataset.catalog.sequential == (folder == "whole")
    check_rows(
        dataset,
        {
            "text": TEXTS,
            "ids": [ids.tolist() for ids in TOKENS],
            "n": list(range(N)),
            "score": [n / 4 for n in range(N)],
            "even": [n % 2 == 0 for n in range(N)],
            "raw": [b"x" * (n % 3) for n in range(N)],
        },
    )


@pytest.mark.parametrize("folder", ["arrow", "arrow-zstd"])
def test_litdata_chunks_of_nested_rows_give_their_columns(peer_data, folder):
    meta = [{"text": text, "tags": ["a"] * (n % 3)} for n, text in enumerate(TEXTS)]
    dataset = opened(peer_data / "litdata" / folder, ["text", "n", "meta.text", "meta"])
    check_rows(dataset, {"text": TEXTS, "n": list(range(N)), "meta.text": TEXTS, "meta": meta})


def test_litdata_items_that_are_one_text_or_one_array_have_a_column(peer_data):
    check_rows(opened(peer_data / "litdata/texts", ["text"]), {"text": TEXTS})
    tokens = opened(peer_data / "litdata/tokens", ["tokens"], is_text=False)
    check_rows(tokens, {"tokens": [ids.tolist() for ids in TOKENS]})


def test_litdata_refuses_pickles(peer_data):
    with pytest.raises(DataError, match=r"column 'what' .* pickled Python objects"):
        opened(peer_data / "litdata/pickled", ["text", "what"]).take(np.arange(2))
    check_rows(opened(peer_data / "litdata/pickled", ["text"]), {"text": TEXTS})


TEXT_COLUMN = {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}


def packed(texts: list[str], head: bytes) -> bytes:
    """A chunk of LitData or, with the description of the columns as `head`, an MDS shard."""
    bodies = [struct.pack("<I", len(text)) + text.encode() for text in texts]
    ends = np.cumsum([8 + 4 * len(texts) + len(head), *map(len, bodies)])
    return struct.pack("<I", len(texts)) + ends.astype("<u4").tobytes() + head + b"".join(bodies)


def chunk(folder: Path, name: str, *texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(packed(list(texts), b""))


def shard(folder: Path, name: str, *texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = packed(list(texts), json.dumps(TEXT_COLUMN).encode())
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def litdata_index(folder: Path, *names: str, **options) -> None:
    config = {"data_format": ["str"], "data_spec": None, "item_loader": "PyTreeLoader", **options}
    (folder / "index.json").write_text(json.dumps({"chunks": [{"filename": n} for n in names], "config": config}))


def mds_index(folder: Path, *shards: tuple[str | None, str | None]) -> None:
    told = [{"raw_data": r and {"basename": r}, "zip_data": z and {"basename": z}} for r, z in shards]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": told}))


def test_the_index_of_litdata_decides_which_chunks_are_read(tmp_path):
    for part in ("a", "b"):
        chunk(tmp_path / part, "chunk-0-0.bin", part + "0")
        chunk(tmp_path / part, "chunk-0-1.bin", part + "1")
    litdata_index(tmp_path / "a", "chunk-0-0.bin", "chunk-0-1.bin")
    litdata_index(tmp_path / "b", "chunk-0-1.bin")
    assert rows_of(tmp_path) == ["a0", "a1", "b1"]
    (tmp_path / "a/chunk-0-1.bin").unlink()
    for skips in (False, True):
        with pytest.raises(DataError, match=r"a/index.json' names 'chunk-0-1.bin', which is not there"):
            opened(tmp_path, skips=skips)
    assert rows_of(tmp_path / "a/chunk-0-0.bin", fmt="litdata") == ["a0"]
    with pytest.raises(DataError, match=r"holds no file that its index.json names, but for example 'chunk-0-0.bin'"):
        opened(tmp_path / "b/chunk-0-0.bin", fmt="litdata")
    litdata_index(tmp_path / "a", "../b/chunk-0-0.bin")
    with pytest.raises(DataError, match=r"names '../b/chunk-0-0.bin', which is not there"):
        opened(tmp_path)
    for broken in ({"config": {}}, {"chunks": [{}]}, {"chunks": 3}, [], {"chunks": [{"filename": 1}]}):
        told = json.loads((tmp_path / "b/index.json").read_text())
        (tmp_path / "a/index.json").write_text(json.dumps(broken if broken == [] else {**told, **broken}))
        with pytest.raises(DataError, match=r"a/index.json' is no index of LitData, or damaged"):
            opened(tmp_path)


def test_litdata_refuses_encrypted_chunks_and_arrays_of_several_dimensions(tmp_path):
    chunk(tmp_path, "chunk-0-0.bin", "a")
    litdata_index(tmp_path, "chunk-0-0.bin", encryption={"level": "chunk"})
    with pytest.raises(DataError, match="are encrypted, and cannot be read"):
        opened(tmp_path)
    litdata_index(tmp_path, "chunk-0-0.bin", data_format=["numpy:1"])
    with pytest.raises(DataError, match=r"column 'value' of .* is stored as numpy, which is not read"):
        opened(tmp_path, "value", is_text=False).take(np.arange(1))


def test_the_index_of_mds_shards_decides_where_there_is_one(tmp_path):
    shard(tmp_path / "a", "shard.00000.mds", "a0")
    shard(tmp_path / "a", "shard.00001.mds.gz", "a1")
    shard(tmp_path / "a", "shard.00002.mds", "a2")
    shard(tmp_path / "a", "shard.00002.mds.gz", "a2")
    shard(tmp_path / "b", "shard.00000.mds", "b0")
    assert len(rows_of(tmp_path)) == 5
    first, second = ("shard.00000.mds", None), ("shard.00001.mds", "shard.00001.mds.gz")
    mds_index(tmp_path / "a", first, second, ("shard.00002.mds", "shard.00002.mds.gz"))
    assert rows_of(tmp_path) == ["a0", "a1", "a2", "b0"]
    mds_index(tmp_path / "a", first, second)
    assert rows_of(tmp_path) == ["a0", "a1", "b0"]
    (tmp_path / "a/index.json").unlink()
    mds_index(tmp_path, ("a/shard.00000.mds", None), ("b/shard.00000.mds", None))  # merged
    assert rows_of(tmp_path) == ["a0", "b0"]
    (tmp_path / "index.json").write_text('{"about": "something else"}')
    assert len(rows_of(tmp_path)) == 5
    mds_index(tmp_path / "a", first, ("shard.00003.mds", "shard.00003.mds.gz"))
    for skips in (False, True):
        with pytest.raises(DataError, match=r"a/index.json' names 'shard.00003.mds', which is not there"):
            opened(tmp_path, skips=skips)
    for broken in ("{", "[]", "3", '{"shards": 3}', '{"shards": [{}]}', '{"shards": [{"raw_data": {}}]}', "[" * 10**5):
        (tmp_path / "a/index.json").write_text(broken)
        with pytest.raises(DataError, match=r"a/index.json' is no index of MDS shards, or damaged"):
            opened(tmp_path)


BOMBS = {
    "zeros": struct.pack("<I", (1 << 27) - 1) + bytes(64 << 20),
    "empty samples": struct.pack("<2I", 1 << 24, 4 * ((1 << 24) + 2)) + struct.pack("<I", 1 << 27) * (1 << 24),
    "no end": packed(["one"], b"") + bytes(64 << 20),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["shard.00000.mds.gz", "shard.00000.mds.zstd", "chunk-0-0.zstd.bin"])
def test_a_small_file_that_becomes_a_large_one_is_refused_before_it_is_read(tmp_path, name, bomb, monkeypatch):
    data = BOMBS[bomb]
    if "mds" in name and bomb == "no end":
        data = packed(["one"], json.dumps(TEXT_COLUMN).encode()) + bytes(64 << 20)
    codec = pa.Codec("gzip" if name.endswith(".gz") else "zstd")
    (tmp_path / name).write_bytes(codec.compress(data, asbytes=True))
    litdata_index(tmp_path, name)
    if "mds" in name:
        (tmp_path / "index.json").unlink()
    read = []
    inner = sequential.open_stream

    @contextmanager
    def counted(file, codec):
        with inner(file, codec) as stream:
            yield Counted(stream, read)

    for module in (mds, litdata, samples):
        monkeypatch.setattr(module, "open_stream", counted)
    with pytest.raises(DataError, match=rf"{name}' cannot be read as (mds|litdata) \(it"):
        opened(tmp_path)
    assert sum(read) < 4 << 20


class Counted:
    def __init__(self, stream, read):
        self._stream, self._read = stream, read

    def read(self, length):
        data = self._stream.read(length)
        self._read.append(len(data))
        return data


def test_an_mds_array_of_another_length_than_its_shape_says_is_damage():
    def values(shape: bytes):
        data = pa.py_buffer(shape + np.arange(3, dtype="<i4").tobytes())
        spans = np.array([0]), np.array([data.size])
        (starts, ends), dtype = mds._values_of(data, spans, name="a", dtype="int32", shape="", path="x")
        return np.frombuffer(data, np.uint8)[starts[0] : ends[0]].view(dtype).tolist()

    one_dimension_of_1_byte, of_2_bytes = 4, 5
    assert values(bytes([one_dimension_of_1_byte, 3])) == values(bytes([of_2_bytes, 3, 0])) == [0, 1, 2]
    for shape in ([one_dimension_of_1_byte, 2], [of_2_bytes, 3], [of_2_bytes, 3, 1]):
        with pytest.raises(ValueError, match=r"column 'a' is not as long as its shape says|is cut off"):
            values(bytes(shape))
