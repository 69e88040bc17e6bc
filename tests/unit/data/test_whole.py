"""Of what a dataset says it is made of, all is read and nothing else, or it is a sentence."""

import gzip
import io
import json
import struct
import subprocess
import tarfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from zephon.data.formats import litdata, mds, samples, sequential
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache


def opened(path: Path, column: str = "text", fmt: str | None = None, **options):
    dataset = Dataset.from_path("whole", path, fmt)
    return dataset.open([column], size_column=column, cache=DecodeCache(1 << 20), **options)


def rows_of(path: Path, column: str = "text", **options) -> list[str | None]:
    dataset = opened(path, column, **options)
    return dataset.take(np.arange(dataset.catalog.rows))[column].to_pylist()


# Tar archives


def archive(first: int, count: int) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for n in range(first, first + count):
            member = tarfile.TarInfo(f"{n:03}.txt")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"%05d" % n))
    return held.getvalue()


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
@pytest.mark.parametrize("blocks", [(100, 101), (96, 104)])
def test_zeros_in_place_of_a_header_are_damage_and_no_end(tmp_path, ending, blocks):
    data = bytearray(archive(0, 101))
    start, stop = (512 * block for block in blocks)
    data[start:stop] = bytes(stop - start)
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(data) if ending == ".tar.gz" else data)
    with pytest.raises(DataError, match=rf"a{ending}' .*byte {start} ends the archive .* more follows at byte {stop}"):
        opened(tmp_path, "txt")
    (tmp_path / "b.tar").write_bytes(archive(0, 3))
    skipping = opened(tmp_path, "txt", skips=True)
    assert skipping.catalog.rows == 3 and [shard.name for shard in skipping.lost] == [f"a{ending}"]


@pytest.mark.parametrize("size", [0, 512, 1024, 1100, 10240, 3 << 20])
def test_an_archive_may_end_in_any_number_of_zeros(tmp_path, size):
    data = archive(0, 3).rstrip(b"\0")
    whole = data + bytes(-len(data) % 512)
    (tmp_path / "a.tar").write_bytes(whole + bytes(512 + size))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(whole + bytes(512 + size)))
    assert rows_of(tmp_path, "txt") == ["00000", "00001", "00002"] * 2


def test_joined_archives_are_read_where_tar_joined_them_and_else_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    one, two = folder / "a.tar", tmp_path / "two.tar"
    one.write_bytes(archive(0, 3))
    two.write_bytes(archive(3, 3))
    subprocess.run(["tar", "-A", "-f", one, two], check=True)
    assert rows_of(folder, "txt") == [f"{n:05}" for n in range(6)]
    one.write_bytes(archive(0, 3) + archive(3, 3))
    with pytest.raises(DataError, match="must be written as one or as files of their own"):
        opened(folder, "txt")


# Lance datasets


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


# LitData's chunks and MDS shards, which an index lists


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


def litdata_index(folder: Path, *names: str) -> None:
    config = {"data_format": ["str"], "data_spec": None, "item_loader": "PyTreeLoader"}
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


# What a small file claims


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
