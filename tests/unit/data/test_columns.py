"""Column names of every kind, shards that differ, and text and token files."""

import bz2
import gzip
import io
import json
import tarfile
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.io_data import open_path, opened, rows_of
from support.io_data import texts_of as column
from zephon.data.formats import base, jsonl
from zephon.errors import DataError, RecipeError
from zephon.io import Dataset, DecodeCache


def write(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


KINDS = [".parquet", ".arrow", ".jsonl"]


# Paths and templates


@pytest.mark.parametrize("suffix", KINDS)
def test_a_path_reads_text_inside_of_structs(tmp_path, suffix):
    metas = [{"a": {"text": "one"}, "n": 1}, None, {"a": {"text": None}}, {"a": None}]
    write(tmp_path / f"a{suffix}", pa.Table.from_pylist([{"meta": meta} for meta in metas * 2]))
    dataset = opened(tmp_path, ["meta.a.text"])
    assert column(dataset, "meta.a.text") == ["one", None, None, None] * 2
    assert dataset.take(np.array([4])).schema.field("meta.a.text").type == pa.large_string()
    assert dataset.catalog.bytes > 0
    with pytest.raises(DataError, match=r"no column 'meta\.b|no column 'mata"):
        opened(tmp_path, ["mata.text"])


@pytest.mark.parametrize("suffix", KINDS)
def test_a_column_whose_name_has_a_dot_comes_before_a_path(tmp_path, suffix):
    write(tmp_path / f"a{suffix}", pa.table({"meta.text": ["flat"], "meta": [{"text": "deep"}]}))
    assert column(opened(tmp_path, ["meta.text"]), "meta.text") == ["flat"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_fields_of_structs_may_have_dots_in_their_names(tmp_path, suffix):
    write(tmp_path / f"a{suffix}", pa.Table.from_pylist([{"m": {"a.b": "x", "c": {"d.e": "y"}, "a": {"b": "z"}}}]))
    assert rows_of(tmp_path, "m.a.b") == ["x"]  # the longest name comes first
    assert rows_of(tmp_path, "m.c.d.e") == ["y"]
    with pytest.raises(DataError, match=r"no column 'm.c.d'"):
        rows_of(tmp_path, "m.c.d")


DOTTED = [{"m.a": {"b": "u"}}, {"m": {"a.b": "v"}}, {"m": {"a": {"b": "w"}}}, {"m.a.b": "x", "m": {"a.b": "no"}}, {}]


@pytest.mark.parametrize("space", ["", " "], ids=["by Arrow", "line by line"])
def test_keys_of_json_lines_may_have_dots_in_their_names(tmp_path, space):
    (tmp_path / "a.jsonl").write_text("".join(f"{space}{json.dumps(row)}\n" for row in DOTTED))
    assert rows_of(tmp_path, "m.a.b") == ["u", "v", "w", "x", None]


def test_keys_of_json_in_tar_archives_may_have_dots_in_their_names(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for n, row in enumerate(DOTTED):
            content = json.dumps(row).encode()
            member = tarfile.TarInfo(f"{n}.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert rows_of(tmp_path, "json.m.a.b") == ["u", "v", "w", "x", None]


def test_parquet_reads_the_wanted_leaf_of_a_struct_alone(tmp_path):
    meta = [{"text": "a" * 10, "blob": b"x" * 100_000}] * 4
    pq.write_table(pa.table({"meta": meta}), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    assert opened(tmp_path, ["meta.text"]).catalog.bytes < 1000


@pytest.mark.parametrize("suffix", KINDS)
def test_a_template_puts_several_columns_into_one_text(tmp_path, suffix):
    table = pa.table(
        {
            "title": ["T1", None, "T3", None],
            "year": [1999, 2000, None, None],
            "meta": [{"text": "one"}, {"text": "two"}, {"text": ""}, {"text": None}],
        }
    )
    write(tmp_path / f"a{suffix}", table)
    name = "# {title} ({year})\n\n{meta.text}{{}}"
    dataset = opened(tmp_path, [name, "title"])
    year = "2000"
    expected = ["# T1 (1999)\n\none{}", f"#  ({year})\n\ntwo{{}}", "# T3 ()\n\n{}", None]
    assert column(dataset, name) == expected
    assert column(dataset, "title") == ["T1", None, "T3", None]
    with pytest.raises(DataError, match="no column 'nope'"):
        opened(tmp_path, ["{title}{nope}"])


SMALL = ["5", "-0", "9999999999", "10000000000", "-12345678901", str(2**53 - 1), "0.5", "123456789012.5"]
LARGE = [str(2**53), str(2**53 + 1), "1234567890123456789", str(-(10**30))]


@pytest.mark.parametrize("numbers", [SMALL, SMALL + LARGE], ids=["fast", "by line"])
def test_whole_numbers_of_json_lines_stand_in_templates_as_in_the_file(tmp_path, monkeypatch, numbers):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {n}, "t": "x"}}\n' for n in [*numbers, "null", "1e10"]))
    if numbers is SMALL:
        monkeypatch.setattr(jsonl, "_parse_line_by_line", lambda *_: pytest.fail("read line by line"))
    dataset = opened(tmp_path, ["{t}{n}", "n"])
    expected = ["1.234567890125e+11" if n == "123456789012.5" else n for n in numbers]
    assert column(dataset, "{t}{n}") == [f"x{n}" for n in [*expected, "", "10000000000"]]
    assert dataset.take(np.arange(2)).column("n").to_pylist() == [5.0, 0.0]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_template_prints_whole_floats_as_pandas_makes_them_of_ids_with_gaps(tmp_path, suffix):
    table = pa.table({"t": ["a", "b", "c", "d"], "id": [12345678901.0, None, -(2.0**53 - 1), 123456789012.5]})
    if suffix == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    expected = ["a 12345678901", "b ", f"c -{2**53 - 1}", "d 1.234567890125e+11"]
    assert column(opened(tmp_path, ["{t} {id}"]), "{t} {id}") == expected


def test_a_template_prints_decimals(tmp_path):
    prices = pa.array(["1.50", "12345678901234.00", None]).cast(pa.decimal128(20, 2))
    pq.write_table(pa.table({"price": prices, "t": ["a", "b", "c"]}), tmp_path / "a.parquet")
    assert column(opened(tmp_path, ["{t}: {price}"]), "{t}: {price}") == ["a: 1.50", "b: 12345678901234.00", "c: "]


def test_a_template_works_in_memory_and_in_a_pipeline_name(tmp_path):
    dataset = Dataset.from_dict("m", {"a": ["x"], "b": [{"c": "y"}]}, text_field="{a} {b.c}")
    opened_ = dataset.open(["{a} {b.c}"], size_column="{a} {b.c}", cache=DecodeCache(0))
    assert column(opened_, "{a} {b.c}") == ["x y"]


@pytest.mark.parametrize("name", ["{title", "{}", "{title!r}", "{title:>10}", "{{title}}", "}{a}"])
def test_a_template_that_cannot_be_read_is_refused(name):
    with pytest.raises(RecipeError, match="text template"):
        Dataset.from_path("x", "data", text_field=name)


def test_a_template_refuses_columns_that_are_no_text(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "list": [[1]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'list' .* has the type list"):
        opened(tmp_path, ["{text}{list}"])


def test_json_lines_refuse_text_where_a_path_needs_an_object(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"meta": {"text": "one"}}\n{"meta": "two"}\n')
    with pytest.raises(DataError, match=r"row 1 .* holds a string in 'meta', where 'meta.text' needs an object"):
        opened(tmp_path, ["meta.text"])


def test_json_lines_read_paths_the_fast_way(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"meta": {"text": "one"}}\n{"meta": {"text": null}, "meta.text": "flat"}\n')
    monkeypatch.setattr(jsonl, "_parse_line_by_line", lambda *_: pytest.fail("read line by line"))
    assert column(opened(tmp_path, ["meta.text"]), "meta.text") == ["one", "flat"]


@pytest.mark.parametrize("other", ["", ', "x": NaN', ', "x": "\\ud800"', ', "n": "one"'])
def test_json_lines_leave_nested_values_as_they_stand(tmp_path, other):
    nested = '{"a":3, "id": 9007199254740993, "big": 123456789012345678901234567890, "é": ["ü", 1.50, "\\u00e9"]}'
    (tmp_path / "a.jsonl").write_text(f'{{"n": 1, "meta": {nested}{other}}}\n' * 2, encoding="utf-8")
    assert column(opened(tmp_path, ["{meta}"]), "{meta}") == [nested, nested]


def test_numbers_among_texts_are_printed_as_they_stand(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 9007199254740993}\n{"text": "b", "id": null}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "c", "id": "x7"}\n{"text": "d", "id": true}\n')
    assert column(opened(tmp_path, ["{id}"]), "{id}") == ["9007199254740993", None, "x7", "true"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_json_lines_take_columns_that_first_appear_late(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(jsonl, "RUN_BYTES", 64)
    late = [{"a": "z", "é": "y"}, {"a": None, "meta": {"n": 7}}, {"text": "late"}]
    data = "".join(json.dumps(row) + "\n" for row in [{"a": "x"}] * 100 + late).encode()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    template = "{a}{é}{meta.n}"
    assert column(opened(tmp_path, [template]), template) == ["x"] * 100 + ["zy", "7", None]
    assert column(opened(tmp_path, ["text"]), "text") == [None] * 102 + ["late"]
    for nowhere in ("{a}{b}", "b", "{a}{b.c}"):
        with pytest.raises(DataError, match=r"no column '"):
            opened(tmp_path, [nowhere])


# Shards that differ


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_has_one_type_whichever_shard_a_row_comes_from(tmp_path, suffix):
    shards = [
        {"text": ["a"], "n": pa.array([1], pa.int8()), "s": ["x"], "f": pa.array([1], pa.int32())},
        {"text": ["b"], "n": pa.array([2], pa.int64()), "s": pa.nulls(1), "f": pa.array([0.5], pa.float32())},
        {"text": ["c"], "n": pa.array([3], pa.uint16()), "s": pa.array(["y"], pa.large_string()), "more": [1]},
        {"text": pa.array(["d"], pa.large_string())},
        {"text": pa.nulls(1), "n": pa.nulls(1)},
    ]
    for number, shard in enumerate(shards):
        write(tmp_path / f"{number}{suffix}", pa.table(shard))
    dataset = opened(tmp_path, ["text", "n", "s", "f", "more"])
    kinds = {
        "text": pa.large_string(),
        "n": pa.int64(),
        "s": pa.large_string(),
        "f": pa.float64(),
        "more": pa.int64(),
    }
    for row in range(5):  # each from a shard of its own
        assert {field.name: field.type for field in dataset.take(np.array([row])).schema} == kinds
        assert {field.name: field.type for field in dataset.read_group(row).schema} == kinds
    assert column(dataset, "text") == ["a", "b", "c", "d", None]
    assert column(dataset, "n") == [1, 2, 3, None, None]
    assert column(dataset, "s") == ["x", None, "y", None, None]
    assert column(dataset, "f") == [1.0, 0.5, None, None, None]
    assert column(dataset, "more") == [None, None, 1, None, None]


def test_a_number_that_does_not_fit_the_common_type_is_named(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"text": ["a"], "n": pa.array([2**63], pa.uint64())}))
    write(tmp_path / "b.parquet", pa.table({"text": ["b"], "n": pa.array([-1], pa.int8())}))
    with pytest.raises(DataError, match=r"column 'n' of '.*a.parquet', rows .* the type uint64 where .*int64"):
        column(opened(tmp_path, ["text", "n"]), "n")


def test_json_lines_agree_on_what_a_column_holds_over_all_shards(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "tag": null}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b", "tag": "x", "score": 1}\n')
    (tmp_path / "c.jsonl").write_text('{"text": "c", "tag": "y"}\n')
    dataset = opened(tmp_path, ["text", "tag", "score"])
    assert column(dataset, "tag") == [None, "x", "y"]
    assert column(dataset, "score") == [None, 1.0, None]


# bzip2


def test_json_lines_with_bzip2_are_read_whole_or_refused(tmp_path):
    lines = [json.dumps({"text": f"document {n}"}).encode() + b"\n" for n in range(1000)]
    # As parallel writers do it: several streams, one after the other.
    content = bz2.compress(b"".join(lines[:400])) + bz2.compress(b"".join(lines[400:]))
    path = tmp_path / "a.jsonl.bz2"
    path.write_bytes(content)
    dataset = open_path(path)
    assert dataset.catalog.sequential
    assert column(dataset, "text") == [f"document {n}" for n in range(1000)]
    for size in (1, 10, len(content) // 4, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"a\.jsonl\.bz2"):
            open_path(path)


# Text and Markdown


def test_a_text_file_is_a_document(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("# Title\n\nText é")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "sub/c.markdown").write_text("")
    dataset = opened(tmp_path, ["text", "file_name"])
    assert dataset.catalog.fmt == "text"
    assert column(dataset, "text") == ["marked", "# Title\n\nText é", ""]
    assert column(dataset, "file_name") == ["a.txt", "b.md", "c.markdown"]


def test_text_beside_data_is_passed_over_unless_it_is_named(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a.jsonl").write_text('{"text": "data"}\n')
    assert column(opened(tmp_path, ["text"]), "text") == ["data"]
    assert column(opened(tmp_path, ["text"], fmt="text"), "text") == ["about"]


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good \xff bad")
    with pytest.raises(DataError, match=r"a.txt' row 0, column 'text', is not valid UTF-8 \(byte 0xff at 5\)"):
        column(opened(path, ["text"]), "text")
    path.write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match=r"a.txt' is text in UTF-16.*convert"):
        opened(path, ["text"])


# Token files


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", "<i8", "|u1", "<u8"])
@pytest.mark.parametrize("n", [1, 8192, 20000])
def test_an_npy_file_of_one_dimension_is_cut_into_rows(tmp_path, dtype, n):
    tokens = (np.arange(n) % 251).astype(dtype)
    np.save(tmp_path / "a.npy", tokens)
    rows = column(opened(tmp_path, ["tokens"], is_text=False), "tokens")
    assert [len(row) for row in rows] == [8192] * (n // 8192) + [n % 8192] * bool(n % 8192)
    assert list(chain(*rows)) == tokens.tolist()


def test_an_npy_file_of_two_dimensions_has_a_row_per_row(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "RUN_BYTES", 300)
    tokens = np.arange(50 * 20, dtype=np.uint32).reshape(50, 20)
    np.save(tmp_path / "a.npy", tokens)
    dataset = opened(tmp_path, ["tokens"], is_text=False)
    assert dataset.catalog.n_groups > 10
    assert column(dataset, "tokens") == tokens.tolist()


def test_npy_files_that_hold_no_tokens_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    for array, reason in [
        (np.array([{"a": 1}], object), "pickled Python objects"),
        (np.zeros(3), "float64 of shape"),
        (np.zeros((2, 2, 2), np.int32), "one or two dimensions"),
        (np.asfortranarray(np.zeros((2, 3), np.int32)), "Fortran order"),
        (np.array(5), "one or two dimensions"),
    ]:
        np.save(path, array, allow_pickle=True)
        with pytest.raises(DataError, match=rf"a\.npy' .*{reason}"):
            opened(path, ["tokens"], is_text=False)
    np.save(path, np.array([5, -1, 7]))
    with pytest.raises(DataError, match=r"a\.npy' .*holds -1, and token ids are 0 to"):
        column(opened(path, ["tokens"], is_text=False), "tokens")


@pytest.mark.parametrize("fmt", ["uint16", "uint32"])
@pytest.mark.parametrize("name", ["train.bin", "part.npy", "tokens"])
def test_plain_numbers_are_read_where_their_type_is_named(tmp_path, fmt, name):
    tokens = np.arange(10_000).astype(fmt)
    tokens.tofile(tmp_path / name)
    dataset = opened(tmp_path / name, ["tokens"], fmt=fmt, is_text=False)
    assert list(chain(*column(dataset, "tokens"))) == tokens.tolist()
    if name == "part.npy":
        with pytest.raises(DataError, match='say which with fmt = "uint16" or "uint32"'):
            opened(tmp_path, ["tokens"], is_text=False)
    (tmp_path / name).write_bytes(b"odd")
    with pytest.raises(DataError, match=f"no whole number of {fmt}"):
        opened(tmp_path / name, ["tokens"], fmt=fmt, is_text=False)


def test_a_compressed_archive_is_read_once_for_ascending_reads(tmp_path, monkeypatch):
    import io
    import tarfile

    from zephon.data.storage import StoredFile

    monkeypatch.setattr(base, "RUN_BYTES", 5000)
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for n in range(100):
            info = tarfile.TarInfo(f"{n:03}.txt")
            info.size = 1000
            archive.addfile(info, io.BytesIO(b"%03d" % n + b"x" * 997))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(sink.getvalue()))
    dataset = opened(tmp_path, ["txt"])
    assert dataset.catalog.n_groups > 20
    opens = []
    original = StoredFile.open
    monkeypatch.setattr(StoredFile, "open", lambda self, *ranges: opens.append(self.path) or original(self, *ranges))
    for group in range(dataset.catalog.n_groups):
        dataset.read_group(group)
    assert len(opens) == 1
