"""Compressed files are decompressed about once, in whatever order they are read."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from support.io_data import json_lines, open_path, texts_of
from zephon.columns.damage import Damaged
from zephon.data.formats.sequential import SequentialBytes
from zephon.data.storage import StoredFile
from zephon.errors import DataError


def test_gzip_members_and_zstd_frames_in_a_row_are_one_file(tmp_path):
    first, second = json_lines(["a", "b"]), json_lines(["c"])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(first) + gzip.compress(second))
    assert texts_of(open_path(tmp_path)) == ["a", "b", "c"]
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(first) + bytes(100_000))  # as tapes pad it
    assert texts_of(open_path(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("window_log", [27, 28])
def test_zstd_with_a_window_that_is_too_large_is_no_damage(tmp_path, window_log):
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(packer.compress(json_lines(["a", "b"])) + packer.flush())
    if window_log == 27:
        assert texts_of(open_path(tmp_path)) == ["a", "b"]
    else:
        with pytest.raises(DataError, match="has zstd windows of 256 MiB; expected at most 128") as error:
            open_path(tmp_path, skips=True)
        assert not isinstance(error.value, Damaged)


def counted_reads(monkeypatch) -> list[int]:
    """Uncompressed bytes that come out of decompressors from now on."""
    counts: list[int] = []
    original = pa.CompressedInputStream

    class Counting:
        def __init__(self, *args):
            self.stream = original(*args)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

        def read_buffer(self, count):
            data = self.stream.read_buffer(count)
            counts.append(len(data))
            return data

    monkeypatch.setattr(pa, "CompressedInputStream", Counting)
    return counts


@pytest.mark.parametrize("order", ["ascending", "look-ahead", "two lanes", "repeats"])
def test_a_compressed_shard_is_decompressed_about_once_for_nearly_ascending_reads(tmp_path, monkeypatch, order):
    data = np.random.default_rng(0).integers(32, 127, 4_000_000, dtype=np.uint8).tobytes()
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(data, 1))
    stat = path.stat()
    counts = counted_reads(monkeypatch)
    source = SequentialBytes(StoredFile(str(path), stat.st_size, stat.st_mtime_ns), "gzip")
    step = 50_000
    offsets = list(range(0, len(data), step))
    if order == "look-ahead":  # workers overtake one another within 8 groups
        offsets = [o for i in range(0, len(offsets), 8) for o in reversed(offsets[i : i + 8])]
    elif order == "two lanes":
        half = len(offsets) // 2
        offsets = [o for pair in zip(offsets[:half], offsets[half:], strict=True) for o in pair]
    elif order == "repeats":
        offsets = [o for o in offsets for _ in range(2)]
    for offset in offsets:
        assert source.read(offset, step).to_pybytes() == data[offset : offset + step]
    assert sum(counts) <= 1.6 * len(data)
    source.close()


def test_a_compressed_shard_can_be_read_in_any_order(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(data, 1))
    stat = path.stat()
    source = SequentialBytes(StoredFile(str(path), stat.st_size, stat.st_mtime_ns), "gzip")
    generator = np.random.default_rng(1)
    for _ in range(200):
        offset, length = int(generator.integers(0, len(data))), int(generator.integers(1, 5000))
        assert source.read(offset, length).to_pybytes() == data[offset : offset + length]
