"""Text out of bytes and out of several columns."""

import io
import tarfile

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


JSON_VALUES = [
    ("1.10", "1.1"),
    ("10000000000", "10000000000"),
    ("-0.5", "-0.5"),
    ("20000000000.0", "20000000000"),
]


def same(row):
    return dict(row)


@pytest.mark.parametrize("function", [same, lambda table: table, None], ids=["map", "batches", "none"])
def test_numbers_of_json_lines_that_came_through_a_function_are_printed_as_whole_numbers(
    tiny_tokenizer, tmp_path, function
):
    lines = "".join(f'{{"n": {written}}}\n' for written, _ in JSON_VALUES * 20)
    (tmp_path / "a.jsonl").write_text(lines + '{"n": 9007199254740993}\n')
    source = StaticMixtureWorkSource(datasets=[Dataset.from_path("web", tmp_path)], shuffle_shards=False)
    pipeline = Pipeline(source)
    if function is not None:
        pipeline = (pipeline.map_transform if function is same else pipeline.map_batches)(function)
    pipeline = pipeline.text_template("x {n}", into="m").text_template("{m} {n}")
    pipeline = finished(pipeline, tiny_tokenizer, on_error="skip", error_budget=0.5)
    texts = texts_of(pipeline, tiny_tokenizer)
    large = set() if function else {"9007199254740993"}  # a float cannot tell it from its neighbour
    assert texts == {f"x {n} {n}" for n in {text for _, text in JSON_VALUES} | large}
    assert (pipeline.mixture()["web"].failed > 0) == (function is not None)


@pytest.mark.parametrize("where", ["template", "text_field"])
def test_texts_among_lists_of_json_lines_are_printed_without_quotes(tiny_tokenizer, tmp_path, where):
    rows = ['{"note": "a \\"b\\"", "t": "x"}\n', '{"note": ["a", 1.10], "t": "y"}\n']
    (tmp_path / "a.jsonl").write_text("".join(rows * 40))
    template = "{t}: {note}"
    dataset = Dataset.from_path("web", tmp_path, text_field=template if where == "text_field" else None)
    pipeline = Pipeline(StaticMixtureWorkSource(datasets=[dataset], shuffle_shards=False))
    pipeline = pipeline if where == "text_field" else pipeline.text_template(template)
    assert texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer) == {'x: a "b"', 'y: ["a", 1.10]'}


def tar_of(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("kind", ["txt", "tar"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-8"])
def test_text_files_and_members_are_decoded_as_the_recipe_says(tiny_tokenizer, tmp_path, kind, encoding):
    contents = {f"{n}.txt": f"no {n}: é".encode(encoding) for n in range(9)} | {"bad.txt": "é ".encode("latin-1")}
    if kind == "tar":
        tar_of(tmp_path / "a.tar", contents | {"x.json": b'{"text": "no member"}'})
    else:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
    field = "text" if kind == "txt" else "txt"
    source = StaticMixtureWorkSource(datasets=[Dataset.from_path("web", tmp_path, text_field=field)])
    texts = texts_of(finished(Pipeline(source).decode_text("text", encoding), tiny_tokenizer), tiny_tokenizer)
    bad = {"latin-1": "é ", "utf-8": "\ufffd ", "utf-16": "\u20e9"}[encoding]
    assert texts == {f"no {n}: é" for n in range(9)} | {bad}
    with pytest.raises(DataError, match=r"UTF-16|UTF-8" if encoding != "utf-8" else "not valid UTF-8"):
        next(iter(finished(Pipeline(source), tiny_tokenizer)))


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
