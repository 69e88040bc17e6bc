"""Row operators in a pipeline and in a recipe: order, datasets, columns, faults and budgets."""

import json
import logging
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import step_digests
from support.operator_data import (
    Joined,
    fails_on_sevens,
    finished,
    numbered,
    reversed_texts,
    shout,
    source_of,
    texts_of,
)
from zephon import DataError, DataRecipe, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource


def test_operators_run_in_order_on_the_datasets_they_are_for(tiny_tokenizer):
    source = StaticMixtureWorkSource(
        datasets=[
            Dataset.from_dict("a", {"text": ["first words"], "title": ["T"]}),
            Dataset.from_dict("b", {"body": ["second words"], "n": [1]}, text_field="body"),
        ],
        token_estimation=None,
    )
    pipeline = (
        Pipeline(source)
        .text_template("{title}: {text}", datasets=["a"])
        .map_transform(shout, columns=["text"])
        .filter("n == 1 and body == 'second words'", datasets=["b"])
        .map_batches(reversed_texts, columns=["text"], datasets=["b"])
    )
    assert texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer, 20) == {"T: FIRST WORDS", "SDROW DNOCES"}


def test_the_order_of_operators_and_their_datasets_are_checked(tiny_tokenizer):
    base = Pipeline(source_of()).options(runner="inline")
    with pytest.raises(
        PipelineError,
        match="in the order tokenize, filter, pack_flat, batch; they must come as row operators, tokenize",
    ):
        base.tokenize(tiny_tokenizer).filter("number == 1").pack_flat(8).batch(1).explain()
    with pytest.raises(PipelineError, match='is for dataset "wiki", which is not among web'):
        finished(base.filter("number == 1", datasets=["wiki"]), tiny_tokenizer).explain()
    with pytest.raises(PipelineError, match='several operators make tokens of dataset "web"'):
        base.tokenize(tiny_tokenizer).pretokenized().pack_flat(8).batch(1).explain()
    with pytest.raises(PipelineError, match='no operator makes tokens of dataset "web"'):
        two = source_of(datasets=[*source_of().datasets, Dataset.from_dict("b", {"text": ["x"]})])
        Pipeline(two).tokenize(tiny_tokenizer, datasets=["b"]).pack_flat(8).batch(1).explain()
    with pytest.raises(PipelineError, match="stateful_transform twice"):
        finished(base.stateful_transform(Joined()).stateful_transform(Joined()), tiny_tokenizer).explain()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.filter("txt == 'a'"), 'dataset "web": filter.*needs the column "txt".*did you mean "text"'),
        (lambda p: p.map_transform(shout, columns=["body"]), 'map_transform.shout. needs the column "body"'),
        (lambda p: p.map_transform(shout).filter("score > 1"), 'dataset "web".*needs the column "score"'),
        (lambda p: p.map_transform(shout).stateful_transform(Joined(), columns=["no"]), r'\(Joined\) .*column "no"'),
        (lambda p: p.filter("text > 1"), 'dataset "web": the filter "text > 1" cannot be computed'),
        (
            lambda p: p.map_transform(lambda row: {"text": row["number"]}),
            r'dataset "web", after its operators: tokenize: column "text" holds int64; expected text',
        ),
    ],
)
def test_what_does_not_fit_the_data_is_said_before_the_first_batch(tiny_tokenizer, make, words):
    with pytest.raises(PipelineError, match=words):
        finished(make(Pipeline(source_of())), tiny_tokenizer).explain()


def test_a_function_that_raises_is_told_with_dataset_shard_and_row(tiny_tokenizer, tmp_path):
    lines = [json.dumps({"text": f"document {n}", "number": n if n != 77 else 700}) for n in range(1, 100)]
    (tmp_path / "part.jsonl").write_text("\n".join(lines))

    def refuse(row):
        if row["number"] == 700:
            raise ValueError("no such number")
        return row

    source = source_of(datasets=[Dataset.from_path("web", tmp_path)])
    with pytest.raises(DataError, match="on_error") as caught:
        texts_of(finished(Pipeline(source).map_transform(refuse), tiny_tokenizer), tiny_tokenizer)
    assert 'dataset "web", shard part.jsonl, row 76: ValueError: no such number' in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_row_that_ends_a_run_is_the_same_wherever_blocks_are_cut(tiny_tokenizer):
    def fails(row):
        if row["number"] == 300:
            raise ValueError("three hundred")
        return {}

    # The first operator fails over a later row than the second.
    source = source_of(count=400, shuffle_block_size="none", chunk_size=400)
    told = set()
    for lookahead in (1, 1 << 24):
        pipeline = Pipeline(source).map_transform(fails)
        pipeline = pipeline.map_transform(lambda row: {"text": "x" if row["number"] != 290 else 1 / 0})
        pipeline = finished(pipeline, tiny_tokenizer, prefetch_buffer_size=lookahead, canonical_replicas=1)
        with pytest.raises(DataError) as caught:
            list(pipeline)
        told.add(str(caught.value))
    assert len(told) == 1
    assert "row 290: ZeroDivisionError" in told.pop()


def test_rows_left_out_are_counted_and_logged_up_to_the_budget(tiny_tokenizer, caplog):
    whole = Pipeline(source_of(repeat=False)).map_transform(fails_on_sevens)
    pipeline = finished(whole, tiny_tokenizer, on_error="skip", error_budget=0.5, canonical_replicas=1)
    with caplog.at_level(logging.WARNING, "zephon"):
        batches = list(pipeline)
    assert pipeline.mixture()["web"].failed == len(range(0, 200, 7))
    rows = {line["row"] for batch in batches for line in batch.provenance().to_pylist()}
    assert rows <= {n for n in range(200) if n % 7} and len(rows) > 160
    told = [record.message for record in caplog.records if "row left out" in record.message]
    assert 'dataset "web", shard memory, row' in told[0] and len(told) <= 10
    small = finished(whole, tiny_tokenizer, on_error="skip", error_budget=0.01)
    with pytest.raises(DataError, match=r"chunk of 30: 2; error_budget 0\.01 allows 1"):
        list(small)


def test_the_budget_is_judged_alike_wherever_a_lane_is_entered(tiny_tokenizer):
    """Bad rows at both ends of a chunk: neither half is over the budget, the chunk is."""
    columns = {**numbered(60), "number": [0 if n % 30 in (1, 2, 28, 29) else 1 for n in range(60)]}
    source = source_of(columns, shuffle_shards=False, shuffle_within_shard=False)
    pipeline = Pipeline(source).map_transform(fails_on_sevens)

    def built(buffer, budget, **options):
        return finished(
            pipeline, tiny_tokenizer, buffer, on_error="skip", error_budget=budget, canonical_replicas=1, **options
        )

    assert len(step_digests([built(None, 4 / 30, prefetch_buffer_size=1)], 10, 2)) == 10
    middle = built(2, 4 / 30)
    stream = iter(middle)
    for _ in range(15):
        next(stream)
        state = middle.checkpoint()
        if 5 < state["lanes"]["0"][3] < 25:  # the row at which the lane is entered
            break
    assert 5 < state["lanes"]["0"][3] < 25
    with pytest.raises(DataError, match="this chunk of 30: 4;"):
        for _ in zip(range(100), built(2, 3 / 30).restore(state), strict=False):
            pass


def test_long_documents_are_cut_off_or_split(tiny_tokenizer):
    text = "some words that go on " * 30
    base = Pipeline(source_of({"text": [text]})).options(runner="inline")
    whole = len(load_tokenizer(tiny_tokenizer).encode(pa.array([text]))[0]) + 2
    lengths = {}
    for split in (False, True):
        pipeline = base.tokenize(tiny_tokenizer, max_length=50, split_long_samples=split).pack_flat(49).batch(1)
        batches = [batch for _, batch in zip(range(20), pipeline, strict=False)]
        lengths[split] = {line["token_end"] for batch in batches for line in batch.provenance().to_pylist()}
        if not split:
            assert batches[0].tokens[0][[0, -1]].tolist() == [0, 1]  # BOS and EOS are kept
    assert max(lengths[False]) == 50
    assert max(lengths[True]) == whole


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit", "best_fit_wrap"])
def test_parts_of_a_split_row_have_the_tokens_of_the_row_that_they_hold(tiny_tokenizer, algorithm):
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_dict("d", {"text": [f"{n} " + "some words that go on " * 20 for n in range(20)]})],
        repeat=False,
    )
    pipeline = (
        Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer, max_length=30, split_long_samples=True)
    )
    spans = {}
    for batch in pipeline.pack_flat(49, algorithm).batch(1, drop_last=False):
        for line in batch.provenance().to_pylist():
            spans.setdefault(line["row"], []).append((line["token_begin"], line["token_end"]))
    assert len(spans) == 20
    for parts in spans.values():
        begins, ends = zip(*sorted(parts), strict=True)
        assert begins[0] == 0 and begins[1:] == ends[:-1] and ends[-1] > 60


def test_rows_that_a_filter_drops_are_counted_and_some_have_to_be_left(tiny_tokenizer):
    pipeline = finished(Pipeline(source_of(repeat=False)).filter("number >= 50"), tiny_tokenizer)
    list(pipeline)
    assert (pipeline.mixture()["web"].dropped, pipeline.mixture()["web"].rows) == (50, 200)
    with pytest.raises(DataError, match="or left out by the operators"):
        next(iter(finished(Pipeline(source_of()).filter("number > 1000"), tiny_tokenizer)))


def test_data_without_text_are_told_with_what_makes_the_text(tiny_tokenizer):
    pipeline = Pipeline(source_of(count=20)).map_transform(lambda row: {"text": None})
    with pytest.raises(DataError, match="look at what the operators leave of the text"):
        next(iter(finished(pipeline, tiny_tokenizer)))
    with pytest.raises(DataError, match=r"name another column .text_field, field."):
        next(iter(finished(Pipeline(source_of({"text": [""] * 20})), tiny_tokenizer)))


def test_a_dataset_may_name_a_text_that_a_function_makes(tiny_tokenizer):
    dataset = Dataset.from_dict("web", {"body": ["a", "b"] * 50}, text_field="clean")
    pipeline = Pipeline(StaticMixtureWorkSource(datasets=[dataset]))
    pipeline = pipeline.map_transform(lambda row: {"clean": row["body"] * 3})
    assert texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer, 5) == {"aaa", "bbb"}


def test_pandas_and_jinja_stay_out_of_pipelines_that_do_not_need_them(tiny_tokenizer):
    code = f"""
import sys
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource
source = StaticMixtureWorkSource(datasets=[Dataset.from_table("a", __import__("pyarrow").table(dict(
    text=__import__("zephon.columns.arrow", fromlist=["x"]).column_of(["some text"] * 50))))])
pipeline = (Pipeline(source).filter("length(text) > 3 and text in ['some text']").text_template("{{text}}!")
    .map_transform(lambda row: {{"text": row["text"] + "!"}}).tokenize({str(tiny_tokenizer)!r}).pack_flat(16).batch(2))
next(iter(pipeline)); pipeline.close()
print("pandas" in sys.modules, "jinja2" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_everything_that_is_data_comes_from_the_recipe(tiny_tokenizer, tmp_path):
    rows = [{"title": f"t{n}", "body": f"words {n}", "year": n} for n in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"other {n}"}) for n in range(50)))
    first = {
        "name": "a",
        "path": "a.jsonl",
        "text_template": "{title} ({year}): {body}",
        "filter": "year >= 25 and length(text) > 3",
        "special_tokens": "eos",
    }
    settings = {"token_estimation": False, "shuffle_after_pack": False, "max_document_tokens": 40}
    recipe = DataRecipe.from_dict({**settings, "sources": [first, {"name": "b", "path": "b.jsonl"}]}, base=tmp_path)
    assert DataRecipe.from_dict(recipe.to_dict()) == recipe
    pipeline = Pipeline.from_recipe(
        recipe, tokenizer=str(tiny_tokenizer), seq_len=31, microbatch_size=2, runner="inline"
    )
    stream = iter(pipeline)
    tokens = np.concatenate([next(stream).tokens.reshape(-1) for _ in range(40)])
    text = load_tokenizer(tiny_tokenizer).decode(tokens)
    assert "t30 (30): words 30<|eos|>" in text and "<|bos|>other 7<|eos|>" in text
    assert "<|bos|>t" not in text and "t24 (" not in text


def test_a_recipe_decodes_text_in_another_encoding(tmp_path, tiny_tokenizer):
    table = pa.table({"text": pa.array(["déjà vu".encode("latin-1")] * 8, pa.binary())})
    pq.write_table(table, tmp_path / "rows.parquet")
    source = {"name": "a", "path": "rows.parquet", "text_encoding": "latin-1", "special_tokens": "eos"}
    recipe = DataRecipe.from_dict({"canonical_replicas": 1, "sources": [source]}, base=tmp_path)
    pipeline = Pipeline.from_recipe(recipe, tokenizer=tiny_tokenizer, seq_len=31, microbatch_size=1, runner="inline")
    text = load_tokenizer(tiny_tokenizer).decode(next(iter(pipeline)).tokens.reshape(-1))
    assert "<|eos|>déjà vu<|eos|>" in text


@pytest.mark.parametrize(
    "key, value, wanted",
    [
        ("text_field", "meta.text", "words of 7"),
        ("text_field", "{title}: {meta.text}", "t7: words of 7"),
        ("text_template", "{title}: {meta.text}", "t7: words of 7"),
    ],
)
def test_documents_of_paths_and_templates_can_be_filtered(tmp_path, tiny_tokenizer, key, value, wanted):
    rows = [{"title": f"t{i}", "meta": {"text": f"words of {i}"}, "odd": bool(i % 2)} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'filter = "odd"\nrepeat = false\ncanonical_replicas = 1\nspecial_tokens = "eos"\n'
        f'[[sources]]\nname = "a"\npath = "rows.jsonl"\n{key} = "{value}"\n'
    )
    pipeline = Pipeline.from_recipe(recipe, tokenizer=tiny_tokenizer, seq_len=128, microbatch_size=1, drop_last=False)
    decode = load_tokenizer(tiny_tokenizer).decode
    text = "".join(
        decode(row[:length]) for batch in pipeline for row, length in zip(batch.tokens, batch.lengths, strict=True)
    )
    documents = text.removesuffix("<|eos|>").split("<|eos|>")
    assert sorted(documents) == sorted(wanted.replace("7", str(i)) for i in (1, 3, 5, 7, 9))
