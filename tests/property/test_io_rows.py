"""Whatever the texts, shards and groups: a dataset gives the rows that were written, and one fingerprint."""

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.io_data import SUFFIXES, json_lines, open_path, write_shard
from zephon.data.formats import jsonl
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache

# Every character but lone surrogates, which no file format of text can hold.
characters = st.characters(exclude_categories=("Cs",))
text = st.one_of(
    st.none(),
    st.just(""),
    st.text(characters, max_size=40),
    st.text(st.sampled_from('{}[]"\\\n\r\t ,:é🙂\x00\u2028'), max_size=20),
    st.builds(lambda part, times: part * times, st.text(characters, min_size=1, max_size=8), st.integers(1, 2000)),
)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40)
@given(data=st.data())
def test_take_gives_the_rows_that_were_written(suffix, data):
    rows = data.draw(st.lists(text, min_size=1, max_size=60))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    group_rows = data.draw(st.integers(1, 20))
    wanted = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=100)), np.int64)
    cache_bytes = data.draw(st.sampled_from([0, 500, 1 << 20]))
    with tempfile.TemporaryDirectory() as folder:
        for shard, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
            write_shard(Path(folder) / f"{shard}{suffix}", rows[first:last], group_rows)
        dataset = open_path(Path(folder), cache_bytes=cache_bytes)
        assert dataset.catalog.rows == len(rows)
        assert dataset.take(np.arange(len(rows)))["text"].to_pylist() == rows
        taken = dataset.take(wanted)
        assert taken["text"].to_pylist() == [rows[row] for row in wanted]
        assert taken["text"].num_chunks == 1


@settings(max_examples=60)
@given(
    rows=st.lists(text, min_size=1, max_size=30),
    escape=st.booleans(),
    newline=st.sampled_from([b"\n", b"\r\n", b" \n"]),
    ends=st.booleans(),
    blanks=st.lists(st.integers(0, 30), max_size=3),
    run_bytes=st.sampled_from([20, 100, 1000, 1 << 20]),
    packed=st.booleans(),
)
def test_json_lines_are_rows_however_they_are_written(rows, escape, newline, ends, blanks, run_bytes, packed):
    lines = [json.dumps({"n": [{"text": n}], "text": row}, ensure_ascii=escape).encode() for n, row in enumerate(rows)]
    expected = list(rows)
    for at in blanks:
        lines.insert(at % (len(lines) + 1), b"")
        expected.insert(at % (len(expected) + 1), None)
    content = newline.join(lines) + (newline if ends or not lines[-1] else b"")
    usual, jsonl.RUN_BYTES = jsonl.RUN_BYTES, run_bytes
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ("a.jsonl.gz" if packed else "a.jsonl")
            path.write_bytes(gzip.compress(content) if packed else content)
            dataset = open_path(path)
            assert dataset.take(np.arange(dataset.catalog.rows))["text"].to_pylist() == expected
    finally:
        jsonl.RUN_BYTES = usual


# Lines of pieces that go wrong in every way: objects cut apart, joined, strings with brackets, stray line ends.
pieces = st.sampled_from(
    ['{"text":"a"}', '{"text":', '"b"}', "{", "}", "[", "]", '"', "\\", ":", ",", "\n", "\n", " ", "\r", "1", "null"]
)


@settings(max_examples=400)
@given(parts=st.lists(pieces, min_size=1, max_size=12))
def test_json_lines_are_read_as_the_json_module_reads_each_line_or_refused(parts):
    content = "".join(parts).encode()
    expected: list[str | None] | None = []
    for line in content.removesuffix(b"\n").split(b"\n"):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError:
            expected = None
            break
        if not isinstance(row, dict) or not isinstance(row.get("text"), str | None):
            expected = None
            break
        expected.append(row.get("text"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(content)
        try:
            dataset = open_path(path)
            rows = dataset.take(np.arange(dataset.catalog.rows))["text"].to_pylist()
        except DataError as error:
            assert expected is None or "no column 'text'" in str(error)
        else:
            assert rows == expected


@given(rows=st.lists(text, min_size=1, max_size=50), wanted=st.lists(st.integers(0, 10**6), max_size=50))
def test_a_dataset_in_memory_gives_its_rows(rows, wanted):
    dataset = Dataset.from_dict("mem", {"text": pa.array(rows, pa.string())})
    opened = dataset.open(["text"], size_column="text", cache=DecodeCache(0))
    ids = np.array([row % len(rows) for row in wanted], np.int64)
    assert opened.take(ids)["text"].to_pylist() == [rows[row] for row in ids]
    assert opened.catalog.bytes == sum(len(row.encode()) for row in rows if row)


def test_the_fast_way_reads_ordinary_json_lines(tmp_path, monkeypatch):
    """The tests above would pass with the slow way alone; this one fails when the fast one is not taken."""
    monkeypatch.setattr(jsonl, "_parse_line_by_line", lambda *_: pytest.fail("read line by line"))
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a", None, "é\n{}", "d"]))
    assert open_path(tmp_path).take(np.arange(4))["text"].to_pylist() == ["a", None, "é\n{}", "d"]
