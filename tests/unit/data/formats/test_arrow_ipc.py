"""Arrow IPC files and streams, and datasets that save_to_disk has written."""

import shutil
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest

from peers.rows import LABELS, TEXTS
from support.io_data import check_rows, open_path, opened, texts_of
from zephon.columns.damage import Damaged
from zephon.data.storage import StoredFile
from zephon.errors import DataError


def test_arrow_reads_fetch_only_the_bytes_of_wanted_columns(tmp_path, monkeypatch):
    rows = 2000
    table = pa.table({"a": ["a" * 500] * rows, "text": ["t" * 10] * rows, "z": [list(range(50))] * rows})
    fetched: list[int] = []
    original = StoredFile.open

    class Counting:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read_at(self, count, offset):
            fetched.append(count)
            return self.file.read_at(count, offset)

        def seek(self, offset):
            return self.file.seek(offset)

        def readinto(self, buffer):
            fetched.append(len(buffer))
            return self.file.readinto(buffer)

    monkeypatch.setattr(StoredFile, "open", lambda self: Counting(original(self)))
    for make, name in ((pa.ipc.new_file, "f.arrow"), (pa.ipc.new_stream, "s.arrow")):
        with make(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=500)
        fetched.clear()
        dataset = open_path(tmp_path / name)
        assert sum(fetched) < 50_000, "a scan reads no column data"
        assert dataset.catalog.bytes == pytest.approx(10 * rows, rel=0.02)  # padding
        fetched.clear()
        assert texts_of(dataset) == ["t" * 10] * rows
        assert sum(fetched) < 100_000 < (tmp_path / name).stat().st_size
        group = dataset.read_group(0)
        assert group.get_total_buffer_size() < 2 * group.nbytes, "the unwanted columns are not kept alive"


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_arrow_batches_are_read_and_their_true_size_is_known(tmp_path, compression):
    texts = ["some text, again and again " * 40] * 100
    options = pa.ipc.IpcWriteOptions(compression=compression)
    table = pa.table({"n": range(100), "text": texts})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=30)
    dataset = open_path(tmp_path)
    assert texts_of(dataset) == texts
    assert dataset.catalog.bytes == pytest.approx(sum(map(len, texts)), rel=0.02)


def test_dictionaries_that_change_within_an_arrow_stream_are_followed(tmp_path):
    parts = [pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "d", "c"]).dictionary_encode()]
    schema = pa.schema([("text", parts[0].type)])
    with pa.ipc.new_stream(tmp_path / "a.arrow", schema) as writer:
        for part in parts:
            writer.write_batch(pa.record_batch([part], schema=schema))
    dataset = open_path(tmp_path)
    assert texts_of(dataset) == ["a", "b", "c", "d", "c"]
    assert dataset.take(np.array([4, 0]))["text"].to_pylist() == ["c", "a"]


def test_old_arrow_files_without_continuation_marks_are_read(tmp_path):
    table = pa.table({"n": [1, 2, 3], "text": ["a", "b", "c"]})
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True, metadata_version=pa.ipc.MetadataVersion.V4)
    for make, name in ((pa.ipc.new_file, "f.arrow"), (pa.ipc.new_stream, "s.arrow")):
        with make(tmp_path / name, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=2)
        assert texts_of(open_path(tmp_path / name)) == ["a", "b", "c"]


@pytest.mark.parametrize("embedded", [b"\x04\0\0\0\xf2\xff\xff\xff", b"\xff\xff\xff\xff\0\0\0\0", bytes(8)])
def test_of_an_arrow_file_the_footer_decides(tmp_path, embedded):
    # Polars writes a schema that is no message before the batches; others leave gaps, or an end mark.
    texts = ["a", "b", None, "c"] * 5
    table = pa.table({"text": pa.array(texts).dictionary_encode(), "l": [["x", "y"]] * 20})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    raw = bytearray((tmp_path / "a.arrow").read_bytes())
    length = 8 + int.from_bytes(raw[12:16], "little")
    raw[8 : 8 + length] = embedded + bytes(length - len(embedded))
    (tmp_path / "a.arrow").write_bytes(raw)
    check_rows(opened(tmp_path, ["text", "l"]), {"text": texts, "l": [["x", "y"]] * 20})


def test_feather_files_of_the_first_version_are_refused_by_name(tmp_path):
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(DataError, match="Feather V1"):
        open_path(tmp_path)


def test_a_saved_dataset_is_read_without_what_map_has_left_beside_it(peer_data):
    assert list((peer_data / "saved/plain").glob("cache-*.arrow"))
    dataset = opened(peer_data / "saved/plain", ["text", "label", "meta.text"])
    assert dataset.catalog.n_shards == 3
    check_rows(dataset, {"text": TEXTS, "label": LABELS, "meta.text": TEXTS})


def test_a_saved_filter_gives_the_rows_that_were_kept(peer_data):
    kept = [text for text, label in zip(TEXTS, LABELS, strict=True) if label % 2 == 0]
    check_rows(opened(peer_data / "saved/filtered", ["text"]), {"text": kept})


def test_splits_are_read_one_at_a_time(peer_data):
    with pytest.raises(DataError, match=r"several splits \(test, train\); append the one to read"):
        opened(peer_data / "saved/splits", ["text"])
    check_rows(opened(peer_data / "saved/splits/train", ["text"]), {"text": TEXTS})


def test_a_saved_dataset_that_lacks_a_file_is_refused(peer_data, tmp_path):
    shutil.copytree(peer_data / "saved/plain", tmp_path / "copy")
    (tmp_path / "copy/data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"state.json' names 'data-00001-of-00003.arrow', which is not there"):
        opened(tmp_path / "copy", ["text"])
    (tmp_path / "copy/state.json").write_text("[]")
    with pytest.raises(DataError, match=r"state.json' cannot be read"):
        opened(tmp_path / "copy", ["text"])


def test_dates_of_javascript_that_are_no_whole_days_are_read(tmp_path):
    times = pa.array([86_400_000, 100_000_000, None]).view(pa.date64())
    table = pa.table({"text": ["a", "b", "c"], "day": times, "in": pa.StructArray.from_arrays([times], ["day"])})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write(table)
    for name in ("day", "in.day"):
        dataset = opened(tmp_path, name, is_text=False)
        assert dataset.take(np.arange(3))[name].cast(pa.int64()).to_pylist() == [86_400_000, 100_000_000, None]


def test_a_column_of_a_type_that_pyarrow_lacks_is_refused_alone(tmp_path):
    table = pa.table({"text": ["a"], "x": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write(table)
    data = (tmp_path / "a.arrow").read_bytes()
    for at in range(len(data)):  # where the unit of the interval stands: from 2 to that of JavaScript's, 0
        changed = data[:at] + b"\0" + data[at + 1 :]
        with suppress(pa.ArrowException, OSError, KeyError):
            if data[at] == 2 and str(pa.ipc.open_stream(changed).schema.field("x").type) == "month_interval":
                (tmp_path / "a.arrow").write_bytes(changed)
    assert texts_of(open_path(tmp_path)) == ["a"]
    with pytest.raises(DataError, match=r"'x' of .* has the type month_interval; expected one of which") as info:
        opened(tmp_path, "x", is_text=False).read_group(0)
    assert not isinstance(info.value, Damaged)
