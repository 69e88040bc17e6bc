"""Columns of JSON lines that first occur after the rows by which files are known: read where named, never left out."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chat_data import CHATML, chat_tokenizer
from support.operator_data import finished, texts_of
from zephon import DataError, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def pipeline_over(path, name=None):
    dataset = Dataset.from_path("talk", path, text_field=name)
    return Pipeline(StaticMixtureWorkSource(datasets=[dataset], shuffle_shards=False))


def written(folder, rows, **late):
    """A file of JSON lines whose last row has more columns than the others."""
    lines = [json.dumps(row) + "\n" for row in [*rows, {**rows[0], **late}]]
    (folder / "a.jsonl").write_text("".join(lines))
    return folder


def chat_over(path, operators=lambda pipeline: pipeline, **options):
    pipeline = operators(pipeline_over(path)).options(runner="inline", canonical_replicas=1)
    batches = iter(pipeline.tokenize_chat(chat_tokenizer(), chat_template=CHATML, **options).pack_flat(63).batch(1))
    return [next(batches) for _ in range(60)]


@pytest.mark.parametrize(
    ("late", "fine"),
    [
        ({"system": "Be brief."}, {"system": "system"}),
        ({"history": [["a", "b"]]}, {"ignored": ["history"]}),
        ({"functions": [{"name": "f"}]}, {"tools": None, "ignored": ["functions"]}),
        ({"system": "", "history": [], "images": None}, None),
    ],
)
@pytest.mark.parametrize("operators", ["none", "function", "stateful"])
def test_a_late_column_of_conversations_that_is_not_used_is_refused_by_its_row(tmp_path, late, fine, operators):
    path = written(tmp_path, [{"messages": MESSAGES}] * 100, **late)
    change = {"function": lambda p: p.map_transform(lambda row: {"messages": row["messages"], "n": len(row)})}
    change |= {"stateful": lambda p: p.stateful_transform(Passing(), columns=["messages"])}
    if fine is not None:
        refused = rf'row 100: tokenize_chat does not use column "{next(iter(late))}"'
        with pytest.raises(DataError, match=refused):
            chat_over(path, change.get(operators, lambda p: p))
    if operators == "none":
        chat_over(path, **(fine or {}))


class Passing:
    def init_state(self):
        return None

    def push(self, state, row):
        return row

    def flush(self, state):
        return None


def test_a_filter_uses_a_late_column_of_conversations(tmp_path):
    path = written(tmp_path, [{"messages": MESSAGES}] * 100, system="Be brief.")
    chat_over(path, lambda p: p.filter("system is null"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_columns_beside_conversations_inside_of_objects_are_refused_too(tmp_path, kind):
    rows = [{"data": {"messages": MESSAGES, "system": None if n < 100 else "Be brief."}} for n in range(101)]
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    else:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for n, row in enumerate(rows):
                content = json.dumps(row["data"]).encode()
                member = tarfile.TarInfo(f"{n:03}.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    folder = "json" if kind == "tar" else "data"
    with pytest.raises(DataError, match=rf'does not use column "{folder}\.system"'):
        chat_over(tmp_path, field=f"{folder}.messages")
    chat_over(tmp_path, field=f"{folder}.messages", system=f"{folder}.system")


@pytest.mark.parametrize(
    "operators",
    [
        lambda p: p.filter("score is null or score > 0.5").text_template("{text}{lang}"),
        lambda p: p.map_transform(lambda row: {"text": row["text"] + (row["lang"] or "")}, columns=["text", "lang"]),
        lambda p: p.text_template("{text}{meta.lang}"),
    ],
)
@pytest.mark.parametrize("where", ["same file", "second file"])
def test_a_late_column_that_an_operator_names_is_read(tmp_path, tiny_tokenizer, operators, where):
    late = {"lang": "fi", "score": 0.75, "meta": {"lang": "fi"}}
    first = [{"text": f"document {n}."} for n in range(90)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*first, {**first[0], **late}]))
    if where == "second file":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first))
    texts = texts_of(finished(operators(pipeline_over(tmp_path)), tiny_tokenizer), tiny_tokenizer)
    assert {"document 0.", "document 0.fi"} <= texts


def test_a_column_that_no_row_has_is_refused_before_the_run(tmp_path, tiny_tokenizer):
    path = written(tmp_path, [{"text": 'It says "lang" here.'}] * 90, note='"lang"')
    with pytest.raises(PipelineError, match=r'filter.* needs the column "lang", which is not there'):
        next(iter(finished(pipeline_over(path).filter("lang == 'fi'"), tiny_tokenizer)))


def test_a_warning_about_the_files_of_a_dataset_is_logged_once(tmp_path, tiny_tokenizer, caplog):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "one"}\n' * 100)
    finished(pipeline_over(tmp_path).filter("text != 'two'"), tiny_tokenizer).explain()
    assert caplog.text.count("holds the splits") == 1


def test_a_filter_names_a_path_into_json_in_backticks(tmp_path, tiny_tokenizer):
    rows = [{"text": f"{n % 2}", "meta": {"lang": ["fi", "en"][n % 2]}} for n in range(90)]
    path = written(tmp_path, rows, meta={"lang": "no"})
    with pytest.raises(PipelineError, match=r"since meta is text, perhaps JSON: then write `meta\.lang`"):
        next(iter(finished(pipeline_over(path).filter("meta.lang == 'fi'"), tiny_tokenizer)))
    pipeline = finished(pipeline_over(path).filter("`meta.lang` == 'fi'"), tiny_tokenizer)
    assert texts_of(pipeline, tiny_tokenizer) == {"0"}
