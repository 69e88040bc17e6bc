"""What holds for every format: rows and columns, what is refused, and damage."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import step_digests
from support.io_data import SUFFIXES, open_path, texts_of, write_shard
from zephon import DataRecipe, Pipeline
from zephon.columns.damage import Damaged
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache

TEXTS = ["one", "", None, "zwölf 漢字 🙂", "line\nbreak", "x" * 5000, "end"]


def write_table(path, table) -> None:
    """Two rows to a group."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return
    with (pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def is_encoded(kind) -> bool:
    return pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind)


def encoded(kind, values) -> pa.Array:
    plain = pa.array(values, kind.value_type)
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(pa.array([0, None, 0], kind.index_type), plain[:1])
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(values) + 1), kind.run_end_type), plain)


def raiser(error):
    def fail(*args, **options):
        raise error

    return fail


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
    both = open_path(tmp_path, ["n", "text"]).take(np.array([5, 1]))
    assert both.column_names == ["n", "text"] and both["n"].to_pylist() == [5, 1]
    with pytest.raises(DataError, match="part"):  # numbers are no documents
        Dataset.from_path("x", tmp_path).open(["n"], size_column="n", cache=DecodeCache(0))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".stream.arrow"])
def test_a_dataset_without_rows_is_refused_and_an_empty_shard_among_others_is_not(tmp_path, suffix):
    write_shard(tmp_path / f"a{suffix}", [])
    with pytest.raises(DataError, match="has no rows"):
        open_path(tmp_path)
    write_shard(tmp_path / f"b{suffix}", ["row"])
    assert texts_of(open_path(tmp_path)) == ["row"]
    if suffix != ".jsonl":  # a frame without rows that nobody has given columns
        write_table(tmp_path / f"a{suffix}", pa.table({}))
        assert texts_of(open_path(tmp_path)) == ["row"]
        assert set(Dataset.from_path("x", tmp_path).columns()) == {"text", "n"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_column_is_named_with_those_that_exist(tmp_path, suffix):
    path = write_shard(tmp_path / f"part{suffix}", TEXTS)
    for columns in (["text", "txt"], ["txt"]):
        with pytest.raises(DataError, match=r"no column 'txt' in '.*', which has 'n', 'text'|'text', 'n'.*'text'"):
            open_path(path, columns)


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
    write_table(path, table)
    dataset = open_path(path)
    assert texts_of(dataset) == values
    assert dataset.take(np.array([4, 3])).schema.field("text").type == pa.large_string()


VIEW = pa.string_view()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".stream.arrow"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.dictionary(pa.int32(), VIEW), "a"),
        (pa.list_(VIEW), ["a", None, "long enough not to be inlined in a view"]),
        (pa.large_list(pa.binary_view()), [b"a"]),
        (pa.list_(VIEW, 2), ["a", "b"]),
        (pa.struct({"a": VIEW, "n": pa.int64()}), {"a": "b", "n": 1}),
        (pa.map_(VIEW, VIEW), [("k", "v")]),
        (
            pa.list_(pa.struct({"role": VIEW, "content": VIEW})),
            [{"role": "a", "content": "b"}],
        ),
        (pa.run_end_encoded(pa.int32(), pa.string()), "a"),
    ],
    ids=str,
)
def test_types_that_arrow_picks_no_rows_of_come_as_others(tmp_path, suffix, kind, value):
    column = pa.array([value, None, value], kind) if not is_encoded(kind) else encoded(kind, [value, None, value])
    path = tmp_path / f"part{suffix}"
    try:
        write_table(path, pa.table({"text": ["a", "b", "c"], "x": column}))
    except pa.ArrowException:  # no file of this kind has such a column, so there is nothing to read
        assert suffix == ".parquet"
        return
    taken = open_path(path, ["text", "x"]).take(np.array([2, 1, 0]))["x"]
    assert taken.to_pylist() == [value, None, value]
    assert "string_view" not in str(taken.type)


@pytest.mark.parametrize("suffix", [".arrow", ".stream.arrow"])
def test_a_type_that_cannot_be_read_is_named_and_is_no_damage(tmp_path, suffix):
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["a"]))
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), runs)
    write_table(tmp_path / f"part{suffix}", pa.table({"text": ["a", "b"], "x": column}))
    dataset = open_path(tmp_path, ["text", "x"], skips=True)
    with pytest.raises(
        DataError, match=r"column 'x' .* has the type list<item: run_end_encoded.*expected one of"
    ) as error:
        texts_of(dataset)
    assert not isinstance(error.value, Damaged)
    assert texts_of(open_path(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (pa.ArrowNotImplementedError("Support for codec 'lzo' not built"), "pyarrow .* has no support for that"),
        (NotImplementedError("reading of x"), "has no support for that"),
        (AttributeError("'OSFile' object has no attribute 'handle'"), "AttributeError is an error of the program"),
        (TypeError("f() got an unexpected keyword argument"), "TypeError is an error of the program"),
        (NameError("name 'x' is not defined"), "NameError is an error of the program"),
        (ImportError("no module"), "ImportError is an error of the program"),
        (AssertionError(), "AssertionError is an error of the program"),
        (MemoryError("malloc of size 9 failed"), "the machine failed, not the file"),
        (OSError(5, "Input/output error"), "the machine failed, not the file"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_due_to_the_bytes_of_a_file_is_never_left_out_as_damage(tmp_path, monkeypatch, error, said):
    dataset = open_path(write_shard(tmp_path / "a.parquet", TEXTS), skips=True)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", raiser(error))
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", raiser(error))
    with pytest.raises(DataError, match=f"a.parquet' .*cannot be read as parquet.*{said}") as raised:
        texts_of(dataset)
    assert not isinstance(raised.value, Damaged)
    monkeypatch.setattr(pq, "ParquetFile", raiser(error))
    with pytest.raises(DataError, match=said):
        open_path(tmp_path, skips=True)


def test_parquet_reads_in_parts_what_arrow_cannot_read_at_once(tmp_path, monkeypatch):
    # Nested columns with more than 2 GiB of text in a row group.
    path = write_shard(tmp_path / "a.parquet", ["some text"] * 200, group_rows=150)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", raiser(pa.ArrowNotImplementedError("chunked array outputs")))
    both = open_path(path, ["n", "text"]).take(np.arange(200))
    assert both.to_pydict() == {"n": list(range(200)), "text": ["some text"] * 200}


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


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".arrow", ".stream.arrow"])
def test_text_that_is_not_utf8_is_reported_with_file_and_row(tmp_path, suffix):
    path = write_shard(tmp_path / f"part{suffix}", ["fine", "good", "more", "bad bad bad", "last"])
    if suffix == ".parquet":
        column = pa.array([b"fine", b"good", b"more", b"bad \xff\xfe bad", b"last"]).view(pa.string())
        pq.write_table(pa.table({"text": column}), path, row_group_size=3)
    else:
        path.write_bytes(path.read_bytes().replace(b"bad bad bad", b"bad \xff\xfe bad "[:11]))
    with pytest.raises(DataError, match=rf"part{suffix}' row 3.*not valid UTF-8.*0xff"):
        texts_of(open_path(path))
    if suffix != ".jsonl":  # whose first rows are looked at when the dataset is opened
        assert open_path(path).take(np.array([0]))["text"].to_pylist() == ["fine"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.dictionary(pa.int8(), pa.binary())], ids=str)
def test_binary_that_is_no_text_is_reported_with_its_row(tmp_path, kind):
    values = pa.array([b"a", None, b"\xe4"])
    table = pa.table({"text": values.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else values})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2, column 'text', is not valid UTF-8"):
        texts_of(open_path(tmp_path))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_short_is_reported_and_never_read_in_part(tmp_path, suffix):
    whole = write_shard(tmp_path / f"whole{suffix}", [f"document {n}" for n in range(50)], group_rows=10).read_bytes()
    path = tmp_path / f"cut{suffix}"
    other = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4
    for content in (b"", other, *(whole[:size] for size in (1, 4, len(whole) // 2, len(whole) - 5, len(whole) - 2))):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cut"):
            texts_of(open_path(path))


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


def test_parquet_page_checksums_are_verified_where_a_file_has_them(tmp_path):
    table = pa.table({"text": ["abcdefgh" * 50]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, tmp_path / "a.parquet", write_page_checksum=True, **options)
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw.replace(b"abcdefgh" * 50, b"abcdefgX" + b"abcdefgh" * 49, 1))
    with pytest.raises(DataError, match=r"a\.parquet' \(rows from 0\) cannot be read as parquet"):
        texts_of(open_path(tmp_path))


def test_global_batches_of_any_format_do_not_depend_on_dp_degree(peer_data, tiny_tokenizer):
    folders = {
        "webdataset/packed": "{__key__}: {txt}",
        "mds/zstd": "text",
        "litdata/arrow": "meta.text",
        "saved/plain": "{label} {meta.text}",
        "litdata/texts": "text",
    }
    sources = [
        {"name": folder.replace("/", "-"), "path": str(peer_data / folder), "text_field": column}
        for folder, column in folders.items()
    ]
    recipe = DataRecipe.from_dict({"canonical_replicas": 4, "sources": sources})

    def digests(dp_degree: int) -> list[bytes]:
        options = {"tokenizer": tiny_tokenizer, "seq_len": 32, "microbatch_size": 2, "global_batch": 8}
        pipelines = [
            Pipeline.from_recipe(recipe, **options, dp_degree=dp_degree, dp_group_id=group)
            for group in range(dp_degree)
        ]
        return step_digests(pipelines, 8, 8)

    one = digests(1)
    assert len(set(one)) == 8
    assert digests(4) == one
