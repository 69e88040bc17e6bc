"""What each format reads, what it refuses, and how it says so."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.io_data import SUFFIXES, json_lines, open_path, write_shard
from zephon.data.formats import jsonl
from zephon.data.formats.sequential import SequentialBytes
from zephon.data.storage import StoredFile, list_files
from zephon.errors import DataError, RecipeError
from zephon.io import Dataset

TEXTS = ["one", "", None, "zwölf 漢字 🙂", "line\nbreak", "x" * 5000, "end"]


def texts_of(dataset) -> list[str | None]:
    return dataset.take(np.arange(dataset.catalog.rows))["text"].to_pylist()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_is_found_from_its_ending_and_gives_the_rows_as_large_string(tmp_path, suffix):
    dataset = open_path(write_shard(tmp_path / f"part{suffix}", TEXTS))
    assert texts_of(dataset) == TEXTS
    taken = dataset.take(np.array([6, 0, 3, 0]))
    assert taken["text"].to_pylist() == ["end", "one", TEXTS[3], "one"]
    assert taken.schema.field("text").type == pa.large_string()
    assert dataset.catalog.fmt in suffix
    assert dataset.catalog.sequential == suffix.endswith((".gz", ".zst"))
    assert dataset.take(np.array([], np.int64)).num_rows == 0


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".stream.arrow"])
def test_only_the_wanted_columns_come_back_in_the_wanted_order(tmp_path, suffix):
    dataset = open_path(write_shard(tmp_path / f"part{suffix}", TEXTS), ["n", "text"])
    taken = dataset.take(np.array([5, 1, 2]))
    assert taken.column_names == ["n", "text"]
    assert taken["n"].to_pylist() == [5, 1, 2]


# Which files make up a dataset


def test_two_formats_in_one_folder_are_refused_unless_fmt_picks_one(tmp_path):
    write_shard(tmp_path / "a.jsonl", ["json"])
    write_shard(tmp_path / "b.parquet", ["parquet"])
    with pytest.raises(DataError, match=r"two formats, jsonl \('a.jsonl'\) and parquet \('b.parquet'\).*with fmt"):
        open_path(tmp_path)
    assert texts_of(open_path(tmp_path, fmt="jsonl")) == ["json"]
    assert texts_of(open_path(tmp_path, fmt="parquet")) == ["parquet"]
    with pytest.raises(DataError, match=r"no arrow file \(endings .arrow.*'a.jsonl'"):
        open_path(tmp_path, fmt="arrow")


def test_files_of_no_format_are_passed_over_and_a_named_file_needs_fmt(tmp_path):
    write_shard(tmp_path / "a.jsonl", ["json"])
    (tmp_path / "README.md").write_text("about")
    assert texts_of(open_path(tmp_path)) == ["json"]
    (tmp_path / "a.jsonl").rename(tmp_path / "data.log")
    with pytest.raises(DataError, match=r"no file of .* has an ending of a known format.*with fmt"):
        open_path(tmp_path / "data.log")
    for name in ("data.log", "data.txt"):  # an ending of text is no hindrance
        (tmp_path / "data.log").replace(tmp_path / name)
        assert texts_of(open_path(tmp_path / name, fmt="jsonl")) == ["json"]


def test_an_unknown_format_is_refused_when_the_dataset_is_made():
    with pytest.raises(RecipeError, match=r"fmt is 'parqet'.*did you mean 'parquet'"):
        Dataset.from_path("web", "/data", fmt="parqet")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".stream.arrow"])
def test_a_dataset_without_rows_is_refused_and_an_empty_shard_among_others_is_not(tmp_path, suffix):
    write_shard(tmp_path / f"a{suffix}", [])
    with pytest.raises(DataError, match="has no rows"):
        open_path(tmp_path)
    write_shard(tmp_path / f"b{suffix}", ["row"])
    assert texts_of(open_path(tmp_path)) == ["row"]


# Columns


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_column_is_named_with_those_that_exist(tmp_path, suffix):
    path = write_shard(tmp_path / f"part{suffix}", TEXTS)
    for columns in (["text", "txt"], ["txt"]):
        with pytest.raises(DataError, match=r"no column 'txt' in '.*', which has 'n', 'text'|'text', 'n'.*'text'"):
            open_path(path, columns)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_column_of_numbers_is_refused_as_documents_before_any_row_is_read(tmp_path, suffix):
    path = write_shard(tmp_path / f"part{suffix}", TEXTS)
    with pytest.raises(DataError, match="part"):
        Dataset.from_path("x", path).open(["n"], size_column="n", cache=open_path(path)._cache)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".stream.arrow"])
@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_text_is_read_from_every_arrow_type_that_can_hold_it(tmp_path, suffix, kind):
    values = ["one", None, "zwölf", "one", "", "long enough not to be inlined in a view"]
    table = pa.table({"n": [[1]] * 6, "text": pa.array(values).cast(kind), "z": ["z"] * 6})
    path = tmp_path / f"part{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        make = pa.ipc.new_stream if "stream" in suffix else pa.ipc.new_file
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    dataset = open_path(path)
    assert texts_of(dataset) == values
    assert dataset.take(np.array([4, 3])).schema.field("text").type == pa.large_string()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_shard_whose_text_column_has_only_nulls_is_read(tmp_path, suffix):
    nulls = pa.table({"text": pa.nulls(3)})
    if suffix == ".parquet":
        pq.write_table(nulls, tmp_path / "b.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "b.arrow", nulls.schema) as writer:
            writer.write_table(nulls)
    write_shard(tmp_path / f"a{suffix}", ["one"])
    assert texts_of(open_path(tmp_path)) == ["one", None, None, None]


def test_a_shard_may_lack_any_column_but_the_documents(tmp_path):
    write_shard(tmp_path / "a.parquet", TEXTS)
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"no column 'text' in '.*b\.parquet', which has 'body'"):
        open_path(tmp_path)
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    dataset = open_path(tmp_path, ["text", "n"])
    assert dataset.take(np.array([7, 1])).to_pylist() == [{"text": "x", "n": None}, {"text": "", "n": 1}]
    with pytest.raises(DataError, match=r"no column 'm' in '.*', which has 'n', 'text'"):
        open_path(tmp_path, ["text", "m"])


def test_columns_whose_type_differs_between_shards_are_joined(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b"], "n": pa.array([1, 2], pa.int32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["c"], "n": pa.array([3], pa.int64())}), tmp_path / "b.parquet")
    assert open_path(tmp_path, ["text", "n"]).take(np.array([2, 0]))["n"].to_pylist() == [3, 1]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_text_that_is_not_utf8_is_reported_with_file_and_row(tmp_path, suffix):
    path = write_shard(tmp_path / f"part{suffix}", ["fine", "good", "more", "bad bad bad", "last"])
    raw = path.read_bytes()
    if suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress(gzip.decompress(raw).replace(b"bad bad bad", b"bad \xff\xfe bad")))
    elif suffix == ".jsonl.zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(
                json_lines(["fine", "good", "more", "bad bad bad", "last"]).replace(b"bad bad", b"bad \xff\xfe")
            )
    elif suffix == ".parquet":
        column = pa.array([b"fine", b"good", b"more", b"bad \xff\xfe bad", b"last"]).view(pa.string())
        pq.write_table(pa.table({"text": column}), path, row_group_size=3)
    else:
        path.write_bytes(raw.replace(b"bad bad bad", b"bad \xff\xfe bad "[:11]))
    with pytest.raises(DataError, match=rf"part{suffix}' row 3.*not valid UTF-8.*0xff"):
        texts_of(open_path(path))
    if ".jsonl" not in suffix:  # whose first rows are looked at when the dataset is opened
        assert open_path(path).take(np.array([0]))["text"].to_pylist() == ["fine"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.dictionary(pa.int8(), pa.binary())], ids=str)
def test_binary_that_is_no_text_is_reported_with_its_row(tmp_path, kind):
    values = pa.array([b"a", None, b"\xe4"])
    table = pa.table({"text": values.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else values})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2, column 'text', is not valid UTF-8"):
        texts_of(open_path(tmp_path))


# Damage


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_short_is_reported_and_never_read_in_part(tmp_path, suffix):
    whole = write_shard(tmp_path / f"part{suffix}", [f"document {n}" for n in range(50)], group_rows=10).read_bytes()
    path = tmp_path / f"cut{suffix}"
    for size in (1, 4, len(whole) // 3, len(whole) // 2, len(whole) - 5, len(whole) - 2):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=rf"cut{suffix}"):
            texts_of(open_path(path))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_another_format_is_reported(tmp_path, suffix):
    path = tmp_path / f"part{suffix}"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4)
    with pytest.raises(DataError, match=rf"part{suffix}"):
        open_path(path)


def test_an_empty_file_of_a_binary_format_is_damaged(tmp_path):
    for suffix in SUFFIXES:
        path = tmp_path / f"part{suffix}"
        path.write_bytes(b"")
        with pytest.raises(DataError, match=r"part.*(no rows|empty|Parquet file|end mark)"):
            open_path(path)


def test_parquet_page_checksums_are_verified_where_a_file_has_them(tmp_path):
    table = pa.table({"text": ["abcdefgh" * 50]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, tmp_path / "a.parquet", write_page_checksum=True, **options)
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw.replace(b"abcdefgh" * 50, b"abcdefgX" + b"abcdefgh" * 49, 1))
    with pytest.raises(DataError, match=r"a\.parquet' \(rows from 0\) cannot be read as parquet"):
        texts_of(open_path(tmp_path))


# JSON lines


def write_lines(path, data: bytes):
    path.write_bytes(data)
    return open_path(path)


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b'{"text":"a"}\n{"text":"b"}', ["a", "b"]),
        (b'{"text":"a"}\r\n{"text":"b"}\r\n', ["a", "b"]),
        (b'\n{"text":"a"}\n\n  \t\n{"text":"b"}\n\n', [None, "a", None, None, "b", None]),
        (b'\xef\xbb\xbf{"text":"a"}\n{"text":"b"}\n', ["a", "b"]),
        (b' {"text":"a"} \n\t{"text":"b"}\t\n', ["a", "b"]),
        (b'{"text":null}\n{"text":"x"}\n{}\n{"other":1}\n', [None, "x", None, None]),
        (b'{"text":"a","text":"b"}\n', ["b"]),
        (b'{"te\\u0078t":"\\ud83d\\ude42\\u0000\\/\\n\\u00e9"}\n', ["🙂\0/\né"]),
        (b'{"n":{"text":"no"},"text":"a"}\n{"n":[1,"x",{}],"text":"b"}\n', ["a", "b"]),
        (b'{"text":"}\\n{","x":NaN}\n{"text":"b","x":1e999}\n', ["}\n{", "b"]),
        (b'{"text":"a","x":"\xff"}\n{"text":"b","x":"\\ud800"}\n', ["a", "b"]),
        (b'{"text":"a","x":' + b"9" * 5000 + b'}\n{"text":"b","x":{"text":1}}\n\n', ["a", "b", None]),
        (b'{"text":"a","x":' + b"[" * 200 + b"]" * 200 + b"}\n", ["a"]),
    ],
)
def test_json_lines_are_read_one_row_per_line(tmp_path, data, texts):
    assert texts_of(write_lines(tmp_path / "a.jsonl", data)) == texts


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text":"a"', "is not valid JSON"),
        (b'{"text":"a"}{"text":"b"}', "is not valid JSON .*trailing characters"),
        (b'{"text":"tab\there"}', "is not valid JSON"),
        (b'["text"]', "holds an array, not a JSON object"),
        (b'"text"', "holds a string, not a JSON object"),
        (b'{"text":7}', "holds a number in 'text', and text was expected"),
        (b'{"text":true}', "holds a boolean in 'text'"),
        (b'{"text":{"a":1}}', "holds an object in 'text'"),
        (b'{"text":"\\ud800"}', r"is not valid UTF-8 in 'text' .a lone surrogate"),
        (b'{"text":"a\\udc00b"}', r"is not valid UTF-8 in 'text'"),
        (b"\x00", "is not valid JSON"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path, line, reason):
    good = b'{"text":"good"}\n'
    for before in (0, 3, 100):
        path = tmp_path / f"{before}.jsonl"
        with pytest.raises(DataError, match=rf"{before}\.jsonl' row {before} \(line {before + 1}\) {reason}"):
            texts_of(write_lines(path, good * before + line + b"\n" + good * 2))


@pytest.mark.parametrize("line", [b'{"text":"\xff\xfe"}', b'{"text":7}', b'{"text":"a"', b"{}{}"])
def test_a_bad_line_beyond_the_first_rows_is_reported_when_it_is_read(tmp_path, line):
    good = b'{"text":"good"}\n'
    dataset = write_lines(tmp_path / "a.jsonl", good * 1000 + line + b"\n" + good)
    with pytest.raises(DataError, match=r"a\.jsonl' row 1000"):
        dataset.take(np.array([0]))


def test_nesting_that_is_too_deep_is_an_error_and_no_crash(tmp_path):
    deep = b'{"text":"a","x":' + b"[" * 10**6 + b"]" * 10**6 + b"}\n"
    with pytest.raises(DataError, match=r"row 0 \(line 1\) is not valid JSON"):
        write_lines(tmp_path / "a.jsonl", deep)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_that_is_too_long_is_refused_with_its_number(tmp_path, monkeypatch, suffix, end):
    monkeypatch.setattr(jsonl, "RUN_BYTES", 64)
    monkeypatch.setattr(jsonl, "_MAX_LINE_BYTES", 1000)
    good, empty = b'{"text":"good"}\n', len(b'{"text":""}')

    def write(before, length):
        data = good * before + b'{"text":"' + b"a" * (length - empty) + b'"}' + end
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(gzip.compress(data) if suffix else data)
        return path

    for before in (0, 1, 30):
        assert len(texts_of(open_path(write(before, 1000)))[before]) == 1000 - empty
        assert Dataset.from_path("d", write(before, 1000)).columns() == {"text": "text"}
        for length in (1001, 5000):
            with pytest.raises(DataError, match=rf"row {before} \(line {before + 1}\) is longer than 1,000 bytes"):
                open_path(write(before, length))
    with pytest.raises(DataError, match=r"row 0 \(line 1\) is longer than 1,000 bytes"):
        Dataset.from_path("d", write(0, 1001)).columns()


def test_objects_across_lines_cannot_shift_rows(tmp_path):
    data = b'{"text":"a"}{"text":"b"}\n{"text":\n"c"}\n'
    with pytest.raises(DataError, match="row 0"):
        texts_of(write_lines(tmp_path / "a.jsonl", data))
    with pytest.raises(DataError, match="row 0"):
        texts_of(write_lines(tmp_path / "b.jsonl", json.dumps([{"text": "a"}], indent=1).encode()))


@pytest.mark.parametrize("run_bytes", [16, 64, 1000])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_runs_cover_every_line_once_whatever_the_length_of_lines(tmp_path, monkeypatch, run_bytes, suffix):
    monkeypatch.setattr(jsonl, "RUN_BYTES", run_bytes)
    generator = np.random.default_rng(0)
    for case in range(60):
        lengths = generator.choice([0, 1, 3, 10, 40, 63, 64, 65, 200], generator.integers(1, 12))
        texts = ["x" * int(length) for length in lengths]
        data = b"".join(b'{"text":"%s"}\n' % text.encode() for text in texts)
        if case % 2:
            data = data[:-1]
        path = tmp_path / f"{case}.jsonl{suffix}"
        path.write_bytes(gzip.compress(data) if suffix else data)
        dataset = open_path(path)
        assert texts_of(dataset) == texts
        catalog = dataset.catalog
        assert catalog.group_length.sum() == len(data)
        long_runs = catalog.group_length > run_bytes
        assert (catalog.group_rows[long_runs] == 1).all()


def test_gzip_members_and_zstd_frames_in_a_row_are_one_file(tmp_path):
    first, second = json_lines(["a", "b"]), json_lines(["c"])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(first) + gzip.compress(second))
    assert texts_of(open_path(tmp_path)) == ["a", "b", "c"]


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


# Arrow IPC


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


def test_feather_files_of_the_first_version_are_refused_by_name(tmp_path):
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(DataError, match="Feather V1"):
        open_path(tmp_path)


def test_the_listing_of_a_single_file_is_that_file(tmp_path):
    path = write_shard(tmp_path / "deep/a.jsonl", ["x"])
    assert list_files(str(path)).names == ["a.jsonl"]
