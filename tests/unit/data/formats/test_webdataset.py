"""Tar archives of samples: those of other writers, and what ends an archive."""

import gzip
import io
import json
import subprocess
import tarfile

import numpy as np
import pytest

from peers.rows import LABELS, TEXTS
from support.io_data import check_rows, opened, rows_of
from zephon.errors import DataError

N = len(TEXTS)


@pytest.mark.parametrize("folder", ["plain", "packed"])
def test_webdataset_gives_a_column_per_extension_and_paths_into_json(peer_data, folder):
    dataset = opened(
        peer_data / "webdataset" / folder, ["txt", "__key__", "json", "json.label", "json.t", "jpg", "seg.cls"]
    )
    assert dataset.catalog.fmt == "webdataset" and dataset.catalog.n_shards == 2
    assert dataset.catalog.sequential == (folder == "packed")
    check_rows(
        dataset,
        {
            "txt": TEXTS,
            "__key__": [f"part{n // 100}/{n:06}" for n in range(N)],
            "json.label": [str(label) for label in LABELS],
            "json.t": TEXTS,
            "jpg": [bytes([n % 256]) * 40 if n % 3 == 0 else None for n in range(N)],
            "seg.cls": [str(LABELS[n]) if n % 5 == 0 else None for n in range(N)],
        },
    )
    assert [json.loads(text) for text in dataset.take(np.arange(3))["json"].to_pylist()] == [
        {"label": LABELS[n], "t": TEXTS[n]} for n in range(3)
    ]
    assert dataset.catalog.bytes == sum(len(text.encode()) for text in TEXTS)


def test_webdataset_refuses_pickles_and_bytes_as_documents(peer_data):
    folder = peer_data / "webdataset/plain"
    with pytest.raises(DataError, match=r"column 'state.pyd' .* pickled Python objects, which can run code"):
        opened(folder, ["state.pyd"])
    with pytest.raises(DataError, match=r"column 'state.pyd' .* pickled Python objects"):
        opened(folder, ["txt", "state.pyd"]).take(np.arange(3))
    with pytest.raises(DataError, match=r"column 'jpg' .* is binary by its name.*txt"):
        opened(folder, ["jpg"])
    with pytest.raises(DataError, match=r"no column 'text' in '.*', which has '__key__', 'jpg', 'json'"):
        opened(folder, ["text"])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_tar_archives_of_every_kind_are_read_and_nothing_is_written(peer_data, kind):
    dataset = opened(peer_data / f"webdataset/kinds/kind{kind}.tar", ["txt", "__key__"])
    folder = "é" * 60 if kind != 0 else "e" * 90
    # The last one's name points out of the folder; it is a key like any other.
    keys = [f"{folder}/{'x' * 90}{n}" for n in range(10)] + ["../../outside"]
    check_rows(dataset, {"txt": [*TEXTS[:10], "outside"], "__key__": keys})


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


def test_sparse_members_are_refused(tmp_path):
    data = bytearray(archive(0, 3))
    header = tarfile.TarInfo.frombuf(bytes(data[1024:1536]), "utf-8", "strict")
    header.type = tarfile.GNUTYPE_SPARSE
    data[1024:1536] = header.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DataError, match="the member at byte 1024 is stored as a sparse file"):
        opened(tmp_path, "txt")
