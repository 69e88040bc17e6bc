"""JSON lines: a row per line, whatever stands in it, and what makes a line a damaged one."""

import gzip
import json

import numpy as np
import pytest

from support.io_data import open_path, rows_of, texts_of
from zephon.columns.damage import Damaged
from zephon.data.formats import jsonl
from zephon.errors import DataError
from zephon.io import Dataset


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


@pytest.mark.parametrize("depth", [500, 5000, 10**6])
@pytest.mark.parametrize("before", [b"", b'{"text":"b"}\n' * 100, b'{"text":"b"}\n' * 100 + b"\n"])
def test_values_nested_however_deep_are_the_same_on_any_line(tmp_path, before, depth):
    nested = b"[" * depth + b'"]"' + b"]" * depth
    deep = b'{"x":%s,"text":"a","y":{"z":[{}]}}\n' % nested
    dataset = write_lines(tmp_path / "a.jsonl", before + deep)
    assert texts_of(dataset)[-1] == "a"
    if not before:
        assert rows_of(tmp_path / "a.jsonl", "x", is_text=False) == [nested.decode()]
        assert rows_of(tmp_path / "a.jsonl", "y", is_text=False) == ['{"z":[{}]}']


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
    for before, what in ((b"{}\n", "row 1"), (b"", r"without a line per object.*jq -c \. FILE")):
        with pytest.raises(DataError, match=what):
            texts_of(write_lines(tmp_path / "a.jsonl", before + data))
    for value, indent in (([{"text": "a"}], 1), ([{"text": "a"}], None), ({"text": "a"}, 1)):
        with pytest.raises(DataError, match=r"expected a line per row.*jq -c") as error:
            texts_of(write_lines(tmp_path / "b.json", json.dumps(value, indent=indent).encode()))
        assert not isinstance(error.value, Damaged)


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


GOOD = b'{"text":"a"}\n{"text":"b"}\n'
ARRAY = json.dumps([{"text": "a"}, {"text": "b"}]).encode()


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("x.json.gz", gzip.compress(ARRAY, mtime=0), r"one JSON value.*jq -c '\.\[\]'"),
        ("x.json", b"\xef\xbb\xbf" + ARRAY, r"one JSON value.*jq -c '\.\[\]'"),
        ("x.json.gz", gzip.compress(json.dumps([{"text": "a"}], indent=1).encode(), mtime=0), "one JSON value"),
        (
            "x.json",
            json.dumps({"text": "a", "n": 1}, indent=1).encode() * 2,
            r"without a line per object.*jq -c \. FILE",
        ),
        ("x.json", b'{"text":"a"}{"text":"b"}', r"jq -c \. FILE"),
        ("x.json", json.dumps({"data": [{"text": "a"}]}, indent=1).encode(), r"jq -c '\.KEY\[\]'"),
        ("x.json", b'[\n{"text":"a"},\n{"text":"b"}\n]\n', "one JSON value"),
        ("x.json", b'[{"text":"a"},\n{"text":"b"},\n{"text":"c"}\n]\n', "one JSON value"),
        ("x.json", b'{"data":[\n{"text":"a"},\n{"text":"b"}\n]}\n', r"jq -c '\.KEY\[\]'"),
        ("x.jsonl.gz", gzip.compress(GOOD.decode().encode("utf-16"), mtime=0), "text in UTF-16"),
        ("x.jsonl", GOOD.decode().encode("utf-16-le"), "text in UTF-16"),
        ("x.jsonl", GOOD.decode().encode("utf-16-be"), "text in UTF-16"),
        ("x.jsonl", GOOD.decode().encode("utf-32"), "text in UTF-32"),
        ("x.jsonl", GOOD.decode().encode("utf-32-be"), "text in UTF-32"),
        (
            "x.jsonl.gz",
            gzip.compress(gzip.compress(GOOD, mtime=0), mtime=0),
            "gzip, inside of its compression.*decompress it",
        ),
        ("x.json", b'{"text":["a","b"]}', "one JSON object with all values of a column"),
        ("x.json", b'{"text":{"0":"a","1":"b"}}', "one JSON object with all values of a column"),
        ("x.jsonl", GOOD.replace(b"\n", b"\r"), "CR alone"),
        ("x.jsonl", b"<!DOCTYPE html><html></html>\n", "a web page"),
        ("x.jsonl", b"/annex/objects/SHA256E-s123--abc.jsonl\n", "git-annex.*git annex get"),
        ("x.jsonl", b"one\ntwo\n", "no JSON lines, but begins with 'one'"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_never_left_out_as_a_bad_row(tmp_path, name, data, what):
    (tmp_path / ("good.json" if name == "x.json" else "good.jsonl")).write_bytes(GOOD)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=what) as error:
        open_path(tmp_path, skips=True)
    assert not isinstance(error.value, Damaged)


@pytest.mark.parametrize("bad", [b"[1]", b"<a>", b"\x1f\x8b", b'{"text":["a"]}', b"{", b"{\0\0", b"\xff\xfe{\0"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_first_line_that_is_no_good_is_a_damaged_row_among_good_ones(tmp_path, bad, suffix):
    data = bad + b"\n" + GOOD
    (tmp_path / f"x.jsonl{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    table = open_path(tmp_path, skips=True).take(np.arange(3))
    assert table["text"].to_pylist() == [None, "a", "b"]


@pytest.mark.parametrize("data", [b"\0" * 50, b'{"text":"cut o'])
def test_zeros_and_an_object_that_is_cut_off_are_damage(tmp_path, data):
    (tmp_path / "x.jsonl").write_bytes(data)
    assert open_path(tmp_path, skips=True).take(np.arange(1))["text"].to_pylist() == [None]
