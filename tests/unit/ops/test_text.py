"""Text out of bytes and out of several columns."""

import pyarrow as pa
import pytest

from support.operator_data import applied, finished, source_of, texts_of
from zephon import DataError, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.text import DecodeText, TextTemplate
from zephon.work import StaticMixtureWorkSource

BYTES = pa.table({"text": pa.array([b"ab", b"\xff\xfe", None, "é".encode()], pa.binary())})


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["ab", "��", None, "é"]),
        ({"errors": "ignore"}, ["ab", "", None, "é"]),
        ({"errors": "strict"}, ["ab", None, "é"]),
        ({"encoding": "latin-1"}, ["ab", "ÿþ", None, "Ã©"]),
    ],
)
def test_bytes_are_decoded(options, texts):
    rows = applied(DecodeText(**options), BYTES)
    assert rows.table.column("text").to_pylist() == texts
    assert len(rows.failed) == 4 - len(texts)


def test_templates_fill_in_columns_and_are_null_where_all_of_them_are():
    table = pa.table({"title": ["A", None, "C"], "number": [1, 2, None], "score": [0.5, 2.0, None]})
    made = applied(TextTemplate("{{{title}}} { number }: {score}"), table)
    assert made.table.column("text").to_pylist() == ["{A} 1: 0.5", "{} 2: 2", "{C} : "]
    assert applied(TextTemplate("# {title}", "head"), table).table.column("head").to_pylist() == ["# A", None, "# C"]
    with pytest.raises(PipelineError, match=r'column "tags" holds list<.*>, which is no text'):
        applied(TextTemplate("{tags} {text}"), pa.table({"tags": [["a"]], "text": ["b"]}))


def test_templates_print_numbers_of_json_lines_as_their_files_have_them(tiny_tokenizer, tmp_path):
    ids = [2**53 + 1, 10**10, 7]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"id": {n}, "title": "a"}}\n' for n in ids * 20))
    source = StaticMixtureWorkSource(datasets=[Dataset.from_path("web", tmp_path)], shuffle_shards=False)
    seen = []

    def look(row):
        seen.append(row)
        return row

    pipeline = Pipeline(source).filter("id > 10").text_template("{title} {id}").map_transform(look)
    assert texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer) == {f"a {n}" for n in ids[:2]}
    assert {frozenset(row) for row in seen} == {frozenset(["text", "title", "id"])}
    assert {type(row["id"]) for row in seen} == {float}


@pytest.mark.parametrize("how", ["template", "tokenize"])
def test_bytes_that_are_no_text_are_a_fault_of_their_row(tiny_tokenizer, how):
    texts = [b"\xff\xfe" if n == 133 else f"document {n}".encode() for n in range(200)]
    pipeline = Pipeline(source_of({"text": texts, "number": list(range(200))})).filter("number >= 0")
    if how == "template":
        pipeline = pipeline.text_template("{text}")
    told = r'failed on dataset "web", shard memory, row 133: column "text" holds bytes that are no UTF-8; decode_text'
    with pytest.raises(DataError, match=told):
        texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer)
    kept = texts_of(finished(pipeline, tiny_tokenizer, on_error="skip"), tiny_tokenizer)
    assert kept == {f"document {n}" for n in range(200) if n != 133}
