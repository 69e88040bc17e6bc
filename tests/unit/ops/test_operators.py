"""Operators on rows: what they do, and what they say where they cannot."""

import json
import logging
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support import step_digests
from support.operator_data import (
    Counting,
    Joined,
    Suffix,
    fails_on_sevens,
    numbered_in_its_block,
    reversed_texts,
    shout,
)
from zephon import DataError, DataRecipe, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.expression import Expression
from zephon.ops.rows import DecodeText, Filter, MapBatches, MapTransform, Operator, Rows, TextTemplate
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource

ROWS = {
    "text": ["one", "two spam", None, "four é木", ""],
    "title": ["A", None, None, "D", "E"],
    "number": [1, 2, 3, None, 5],
    "score": [0.5, 2.0, None, 0.25, 1.0],
    "good": [True, False, None, True, False],
    "tags": [["x"], [], None, ["x", "y"], ["z"]],
    "meta": [{"lang": "en"}, {"lang": "de"}, None, {"lang": "en"}, {"lang": None}],
}


def applied(operator, table=None, skips=False):
    table = pa.table(ROWS) if table is None else table
    rows = Rows(table, np.arange(table.num_rows), skips)
    operator.apply(rows)
    return rows


def source_of(columns=None, count=200, **changes):
    columns = columns or {"text": [f"document {n} of some words" for n in range(count)], "number": list(range(count))}
    values = {"datasets": [Dataset.from_dict("web", columns)], "chunk_size": 30, "seed": 1, **changes}
    return StaticMixtureWorkSource(**values)


def finished(pipeline, tokenizer, buffer=None, **options):
    pipeline = pipeline.options(runner="inline", **options).tokenize(tokenizer).pack_flat(31)
    return (pipeline.shuffle(buffer) if buffer else pipeline).batch(2)


def texts_of(pipeline, tokenizer, records=40):
    """The documents in the stream, put together again from what the records hold."""
    decoder = load_tokenizer(tokenizer)
    stream = iter(pipeline)
    tokens = np.concatenate([next(stream).tokens.reshape(-1) for _ in range(records // 2)])
    ends = np.flatnonzero(tokens == decoder.eos_id)
    return [decoder.decode(part[1:]) for part in np.split(tokens, ends + 1)[1:-1] for part in [part[:-1]]]


class TestFilterExpressions:
    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ("length(text) > 3", [1, 3]),
            ("length(text) <= 3 or number == 2", [0, 1, 4]),
            ("number in [1, 3, 5]", [0, 2, 4]),
            ("number not in [1, 3, 5]", [1]),
            ('title in ["A", "D"]', [0, 3]),
            ("number * 2 + 1 >= 7", [2, 4]),
            ("-number < -2", [2, 4]),
            ("score / 2 == 0.5", [4]),
            ("number / 0 > 1", [0, 1, 2, 4]),
            ("text is null", [2]),
            ("title is not null and good", [0, 3]),
            ("not good", [1, 4]),
            ("good == false", [1, 4]),
            ("not contains(text, 'spam')", [0, 3, 4]),
            ('matches(text, "^t|é")', [1, 3]),
            ("starts_with(text, 'f') or ends_with(text, \"e\")", [0, 3]),
            ("length(tags) == 2", [3]),
            ("meta.lang == 'en'", [0, 3]),
            ("count(text, 'o') >= 1 and bytes(text) > length(text)", [3]),
            ("lower(title) == 'a' or upper(text) == 'ONE'", [0]),
            ("`number` = = 1", None),
            ("(number == 1 or number == 2) and good", [0]),
        ],
    )
    def test_keep_what_they_say_and_drop_nulls(self, text, kept):
        if kept is None:
            with pytest.raises(PipelineError, match="is not an expression"):
                Expression(text)
        else:
            assert np.flatnonzero(Expression(text).keep(pa.table(ROWS))).tolist() == kept

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "an expression such as"),
            ("1 == 1", "names no column"),
            ("number >", "at character 9 \\(the end\\) a column, a value or a parenthesis is needed"),
            ("lenght(text) > 3", "no such function; did you mean length"),
            ("number == 1 == 1", "cannot be chained"),
            ("number in [1, 'a']", "all numbers or all texts"),
            ("matches(text, '(')", "no regular expression"),
            ("number is 3", '"null" is needed after is'),
            ("number @ 3", "does not belong"),
            ("__import__('os').system('x') == 1", "at character 17 .* does not belong"),
            ("eval('number') == 1", "no such function"),
            ("(" * 60 + "number", "nested more than"),
            ("number == 1" + " or number == 1" * 250, "more than 200 operators"),
            ("number" + " " * 9000, "at most 8192"),
        ],
    )
    def test_say_where_they_are_none(self, text, words):
        with pytest.raises(PipelineError, match=words):
            Expression(text)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("txt == 'a'", 'needs the column "txt", which is not there; did you mean "text"'),
            ("text > 3", "cannot be computed"),
            ("length(text)", "not true or false"),
            ("meta.language == 'x'", "has no field language"),
        ],
    )
    def test_say_what_does_not_fit_the_columns(self, text, words):
        with pytest.raises(PipelineError, match=words):
            Expression(text).keep(pa.table(ROWS))

    def test_travel_by_pickle(self):
        again = pickle.loads(pickle.dumps(Filter("number == 2")))
        assert applied(again).places.tolist() == [1]


class TestMaps:
    def test_a_map_replaces_adds_drops_and_multiplies(self):
        def change(row):
            if row["number"] is None:
                return None
            if row["number"] == 2:
                return [{"text": "a"}, {"text": "b", "new": 1}]
            return {"number": row["number"] * 10}

        rows = applied(MapTransform(change, columns=["number"]))
        assert rows.places.tolist() == [0, 1, 1, 2, 4]
        assert rows.table.column("text").to_pylist() == ["one", "a", "b", None, ""]
        assert rows.table.column("number").to_pylist() == [10, 2, 2, 30, 50]
        assert rows.table.column("new").to_pylist() == [None, None, 1, None, None]
        assert rows.table.column("title").to_pylist() == ["A", None, None, None, "E"]

    def test_rows_that_fail_are_named_or_left_out(self):
        rows = applied(MapTransform(lambda row: {"text": row["text"].upper()}), skips=True)
        assert rows.places.tolist() == [0, 1, 3, 4]
        assert rows.failed[0][0] == 2 and "AttributeError" in rows.failed[0][2]
        wrong = applied(MapTransform(lambda row: 5 if row["number"] == 1 else row), skips=True)
        assert "it gave int" in wrong.failed[0][2]
        half = applied(MapTransform(lambda row: {"text": "\ud800"} if row["number"] == 1 else row), skips=True)
        assert "surrogate" in half.failed[0][2]

    def test_a_batch_function_that_changes_the_number_of_rows_has_to_say_which(self):
        with pytest.raises(PipelineError, match="got 5 rows and gave 2"):
            applied(MapBatches(lambda table: table.slice(0, 2).drop_columns(["_row"])))
        with pytest.raises(PipelineError, match="another order"):
            applied(MapBatches(lambda table: table.take(pa.array([1, 0]))))
        with pytest.raises(PipelineError, match=r"pyarrow\.Table is needed"):
            applied(MapBatches(lambda table: None))
        rows = applied(MapBatches(lambda table: table.filter(pc.is_valid(table.column("title")))))
        assert rows.places.tolist() == [0, 3, 4]

    def test_a_value_of_another_type_than_those_before_it_is_a_fault_of_its_row(self):
        rows = applied(MapTransform(lambda row: {"x": row["number"] or "none"}), skips=True)
        assert rows.places.tolist() == [0, 1, 2, 4]
        [(place, _, reason)] = rows.failed
        assert place == 3
        assert reason == "it gave 'none' (str) for column \"x\", which is int64 in the rows tried first"

    def test_text_is_decoded_and_made_of_several_columns(self):
        table = pa.table({"text": pa.array([b"ab", b"\xff\xfe", None, "é".encode()], pa.binary())})
        assert applied(DecodeText(), table).table.column("text").to_pylist() == ["ab", "��", None, "é"]
        assert applied(DecodeText(errors="ignore"), table).table.column("text").to_pylist() == ["ab", "", None, "é"]
        strict = applied(DecodeText(errors="strict"), table, skips=True)
        assert strict.places.tolist() == [0, 2, 3] and "UnicodeDecodeError" in strict.failed[0][2]
        latin = applied(DecodeText(encoding="latin-1"), table)
        assert latin.table.column("text").to_pylist()[1] == "ÿþ"
        made = applied(TextTemplate("{{{title}}} {number}: {score}"))
        assert made.table.column("text").to_pylist() == ["{A} 1: 0.5", "{} 2: 2", "{} 3: ", "{D} : 0.25", "{E} 5: 1"]
        assert applied(TextTemplate("{title}")).table.column("text").to_pylist() == ["A", None, None, "D", "E"]

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda p: p.filter(3), "takes an expression or a function"),
            (lambda p: p.map_transform("upper"), "takes a function of a row"),
            (lambda p: p.map_batches(None), "takes a function of an Arrow table"),
            (lambda p: p.stateful_transform(object()), "has no init_state"),
            (lambda p: p.decode_text(encoding="utf-99"), "name of a text encoding"),
            (lambda p: p.decode_text(encoding="zlib"), "name of a text encoding"),
            (lambda p: p.decode_text(errors="no"), '"replace", "ignore" or "strict"'),
            (lambda p: p.text_template("no column"), "names no column"),
            (lambda p: p.text_template("{a} }"), "stray"),
            (lambda p: p.filter("number == 1", columns=["number"]), "says itself which columns"),
            (lambda p: p.filter("number == 1", datasets=[]), "a list of names is needed"),
            (lambda p: p.tokenize("t", max_length=0), "max_length is 0"),
            (lambda p: p.tokenize("t", split_long_samples=True), "needs max_length"),
            (lambda p: p.tokenize_chat("t", los="all"), "no option 'los' \\(did you mean loss"),
            (lambda p: p.prefetch(0), "prefetch_batches is 0"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_where_it_is_written(self, make, words):
        with pytest.raises(PipelineError, match=words):
            make(Pipeline(source_of()))


class TestPipelines:
    def test_operators_run_in_order_on_the_datasets_they_are_for(self, tiny_tokenizer):
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
        assert set(texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer)) == {"T: FIRST WORDS", "SDROW DNOCES"}

    def test_the_order_of_operators_and_their_datasets_are_checked(self, tiny_tokenizer):
        base = Pipeline(source_of()).options(runner="inline")
        with pytest.raises(PipelineError, match="must come as row operators, tokenize, pack_flat, shuffle, batch"):
            base.tokenize(tiny_tokenizer).filter("number == 1").pack_flat(8).batch(1).explain()
        with pytest.raises(PipelineError, match='is for dataset "wiki", which is not among web'):
            finished(base.filter("number == 1", datasets=["wiki"]), tiny_tokenizer).explain()
        with pytest.raises(PipelineError, match="makes tokens in several ways"):
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
            (lambda p: p.filter("text > 1"), 'dataset "web": the filter "text > 1" cannot be computed'),
        ],
    )
    def test_what_does_not_fit_the_data_is_said_before_the_first_batch(self, tiny_tokenizer, make, words):
        with pytest.raises(PipelineError, match=words):
            finished(make(Pipeline(source_of())), tiny_tokenizer).explain()

    def test_a_function_that_raises_is_told_with_dataset_shard_and_row(self, tiny_tokenizer, tmp_path):
        lines = [json.dumps({"text": f"document {n}", "number": n if n != 77 else 700}) for n in range(1, 100)]
        (tmp_path / "part.jsonl").write_text("\n".join(lines))

        def refuse(row):
            if row["number"] == 700:
                raise ValueError("no such number")
            return row

        source = source_of(datasets=[Dataset.from_path("web", tmp_path)])
        pipeline = finished(Pipeline(source).map_transform(refuse), tiny_tokenizer)
        with pytest.raises(DataError) as caught:
            for _ in zip(range(100), pipeline, strict=False):
                pass
        message = str(caught.value)
        assert 'dataset "web", shard part.jsonl, row 76: ValueError: no such number' in message
        assert "on_error" in message and isinstance(caught.value.__cause__, ValueError)

    def test_rows_left_out_are_counted_and_logged_up_to_the_budget(self, tiny_tokenizer, caplog):
        source = source_of(repeat=False)
        whole = Pipeline(source).map_transform(fails_on_sevens)
        pipeline = finished(whole, tiny_tokenizer, on_error="skip", error_budget=0.5)
        with caplog.at_level(logging.WARNING, "zephon"):
            batches = list(pipeline)
        assert pipeline.mixture()["web"].failed == len(range(0, 200, 7))
        rows = {line["row"] for batch in batches for line in batch.provenance().to_pylist()}
        assert rows <= {n for n in range(200) if n % 7} and len(rows) > 160
        told = [record.message for record in caplog.records if "row left out" in record.message]
        assert 'dataset "web", shard memory, row' in told[0] and len(told) <= 10
        small = finished(whole, tiny_tokenizer, on_error="skip", error_budget=0.01)
        with pytest.raises(DataError, match=r"left out of a chunk of 30, and error_budget 0\.01 allows 1"):
            list(small)

    def test_the_budget_is_judged_alike_wherever_a_lane_is_entered(self, tiny_tokenizer):
        """Bad rows at both ends of a chunk: neither half is over the budget, the chunk is."""
        texts = [f"document {n} of some words" for n in range(60)]
        columns = {"text": texts, "number": [0 if n % 30 in (1, 2, 28, 29) else 1 for n in range(60)]}
        source = source_of(columns, shuffle_shards=False, shuffle_within_shard=False)
        pipeline = Pipeline(source).map_transform(fails_on_sevens)
        enough = finished(pipeline, tiny_tokenizer, on_error="skip", error_budget=4 / 30, prefetch_buffer_size=1)
        assert len(step_digests([enough], 10, 2)) == 10
        middle = finished(pipeline, tiny_tokenizer, 2, on_error="skip", error_budget=4 / 30)
        stream = iter(middle)
        for _ in range(15):
            next(stream)
            state = middle.checkpoint()
            if 5 < state["lanes"]["0"][3] < 25:  # the row at which the lane is entered
                break
        assert 5 < state["lanes"]["0"][3] < 25
        resumed = finished(pipeline, tiny_tokenizer, 2, on_error="skip", error_budget=3 / 30)
        with pytest.raises(DataError, match="row 4 left out of a chunk of 30"):
            for _ in zip(range(100), resumed.restore(state), strict=False):
                pass

    def test_long_documents_are_cut_off_or_split(self, tiny_tokenizer):
        text = "some words that go on " * 30
        source = source_of({"text": [text]})
        base = Pipeline(source).options(runner="inline")
        whole = len(load_tokenizer(tiny_tokenizer).encode(pa.array([text]))[0]) + 2
        lengths = {}
        for split in (False, True):
            pipeline = base.tokenize(tiny_tokenizer, max_length=50, split_long_samples=split).pack_flat(49).batch(1)
            stream = iter(pipeline)
            lines = [line for _ in range(20) for line in next(stream).provenance().to_pylist()]
            lengths[split] = {line["token_end"] for line in lines}
            if not split:
                first = next(iter(pipeline)).tokens[0]
                assert first[0] == 0 and first[-1] == 1  # BOS and EOS are kept
        assert max(lengths[False]) == 50
        assert max(lengths[True]) == whole

    def test_a_change_of_an_operator_is_a_difference_that_a_restore_names(self, tiny_tokenizer):
        state = finished(Pipeline(source_of()).filter("number > 3"), tiny_tokenizer).checkpoint()
        other = finished(Pipeline(source_of()).filter("number > 4"), tiny_tokenizer)
        with pytest.raises(Exception, match="row_operators: was"):
            other.restore(state)
        finished(Pipeline(source_of()).filter("number > 3"), tiny_tokenizer).restore(state)

    def test_mixture_tells_rows_that_a_filter_dropped(self, tiny_tokenizer):
        pipeline = finished(Pipeline(source_of(repeat=False)).filter("number >= 50"), tiny_tokenizer)
        list(pipeline)
        assert (pipeline.mixture()["web"].dropped, pipeline.mixture()["web"].rows) == (50, 200)

    def test_a_filter_that_drops_everything_ends_with_a_sentence(self, tiny_tokenizer):
        with pytest.raises(DataError, match="or left out by the operators"):
            next(iter(finished(Pipeline(source_of()).filter("number > 1000"), tiny_tokenizer)))

    def test_pandas_and_jinja_stay_out_of_pipelines_that_do_not_need_them(self, tiny_tokenizer):
        code = f"""
import sys
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource
source = StaticMixtureWorkSource(datasets=[Dataset.from_table("a", __import__("pyarrow").table(dict(
    text=__import__("zephon.columns.arrow", fromlist=["x"]).column_of(["some text"] * 50))))])
pipeline = (Pipeline(source).filter("length(text) > 3").map_transform(lambda row: {{"text": row["text"] + "!"}})
    .tokenize({str(tiny_tokenizer)!r}).pack_flat(16).batch(2))
next(iter(pipeline)); pipeline.close()
print("pandas" in sys.modules, "jinja2" in sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "False"], done.stderr

    @pytest.mark.parametrize("lanes", [1, 8])
    def test_columns_are_made_of_blocks_of_which_a_filter_leaves_nothing(self, tiny_tokenizer, lanes):
        columns = {"n": list(range(200)), "text": [f"row {n} " + "word " * 1500 for n in range(200)]}
        source = source_of(columns, repeat=False, shuffle_shards=False, shuffle_within_shard=False)
        plain = Pipeline(source)
        filtered = plain.filter("n >= 180").map_transform(lambda row: {"clean": row["text"]}, columns=["text"])
        mapped = plain.map_transform(lambda row: {"clean": row["text"]} if row["n"] >= 180 else None)
        for pipeline in (filtered, mapped.filter("length(clean) > 1")):
            made = pipeline.options(canonical_replicas=lanes).tokenize(tiny_tokenizer, field="clean")
            made = made.pack_flat(64).batch(1, drop_last=False)
            assert sum(1 for _ in made) > 0
            assert next(iter(made.mixture().values())).dropped == 180

    def test_a_setup_that_fails_ends_the_run_and_blames_no_row(self, tiny_tokenizer):
        class Broken(Operator):
            def setup(self):
                raise OSError("no such model")

            def __call__(self, table):
                return table

        pipeline = Pipeline(source_of(token_estimation=None)).options(on_error="skip", canonical_replicas=1)
        pipeline = pipeline.add_op(Broken()).tokenize(tiny_tokenizer).pack_flat(64).batch(1)
        with pytest.raises(PipelineError, match=r"setup of .*Broken.* failed in a worker: .*no such model"):
            next(iter(pipeline))


class TestChecks:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (
                lambda p: p.map_transform(Counting()),
                'Counting. gives another result when it is called again.*"web", row 0',
            ),
            (lambda p: p.map_batches(numbered_in_its_block), "depend on which rows are put together"),
        ],
    )
    def test_functions_that_break_the_rules_are_found_before_the_run(self, tiny_tokenizer, make, words):
        with pytest.raises(PipelineError, match=words):
            finished(make(Pipeline(source_of())), tiny_tokenizer).explain()
        finished(make(Pipeline(source_of())), tiny_tokenizer, check_operators=False).explain()

    def test_functions_that_do_not_pickle_are_told_but_run(self, tiny_tokenizer, caplog):
        pipeline = finished(Pipeline(source_of()).map_transform(lambda row: row), tiny_tokenizer)
        assert "cannot be sent to worker processes" in pipeline.explain()
        assert "cannot be sent" not in finished(Pipeline(source_of()).add_op(Suffix()), tiny_tokenizer).explain()

    def test_an_operator_is_set_up_once_in_every_worker(self):
        operator = MapBatches(pickle.loads(pickle.dumps(Suffix("!"))))
        assert applied(operator).table.column("text").to_pylist()[0] == "one!"
        assert operator.function.opened is None  # the copies were set up, and not the object itself


class TestRecipes:
    def test_everything_that_is_data_comes_from_the_recipe(self, tiny_tokenizer, tmp_path):
        (tmp_path / "a.jsonl").write_text(
            "\n".join(json.dumps({"title": f"t{n}", "body": f"words {n}", "year": n}) for n in range(50))
        )
        (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"other {n}"}) for n in range(50)))
        recipe = DataRecipe.from_dict(
            {
                "token_estimation": False,
                "shuffle_after_pack": False,
                "max_document_tokens": 40,
                "sources": [
                    {
                        "name": "a",
                        "path": "a.jsonl",
                        "text_template": "{title} ({year}): {body}",
                        "filter": "year >= 25 and length(text) > 3",
                        "special_tokens": "eos",
                    },
                    {"name": "b", "path": "b.jsonl"},
                ],
            },
            base=tmp_path,
        )
        assert DataRecipe.from_dict(recipe.to_dict()) == recipe
        pipeline = Pipeline.from_recipe(
            recipe, tokenizer=str(tiny_tokenizer), seq_len=31, microbatch_size=2, runner="inline"
        )
        tokenizer = load_tokenizer(tiny_tokenizer)
        stream = iter(pipeline)
        text = tokenizer.decode(np.concatenate([next(stream).tokens.reshape(-1) for _ in range(40)]))
        assert "t30 (30): words 30<|eos|>" in text and "<|bos|>other 7<|eos|>" in text
        assert "<|bos|>t" not in text and "t24 (" not in text

    def test_a_filter_that_is_none_is_told_with_its_place(self, tmp_path):
        recipe = DataRecipe.from_dict({"filter": "length(", "sources": [{"name": "a", "path": "a"}]})
        with pytest.raises(PipelineError, match='"length\\(" is not an expression'):
            Pipeline.from_recipe(recipe, tokenizer="t", seq_len=8, microbatch_size=1)

    @pytest.mark.parametrize(
        "key, value, wanted",
        [
            ("text_field", "meta.text", "words of 7"),
            ("text_field", "{title}: {meta.text}", "t7: words of 7"),
            ("text_template", "{title}: {meta.text}", "t7: words of 7"),
        ],
    )
    def test_documents_of_paths_and_templates_can_be_filtered(self, tmp_path, tiny_tokenizer, key, value, wanted):
        rows = [{"title": f"t{i}", "meta": {"text": f"words of {i}"}, "odd": bool(i % 2)} for i in range(10)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(
            'filter = "odd"\nrepeat = false\ncanonical_replicas = 1\nspecial_tokens = "eos"\n'
            f'[[sources]]\nname = "a"\npath = "rows.jsonl"\n{key} = "{value}"\n'
        )
        pipeline = Pipeline.from_recipe(
            recipe, tokenizer=tiny_tokenizer, seq_len=128, microbatch_size=1, drop_last=False
        )
        tokenizer = load_tokenizer(tiny_tokenizer)
        text = "".join(
            tokenizer.decode(row[:length])
            for batch in pipeline
            for row, length in zip(batch.tokens, batch.lengths, strict=True)
        )
        documents = text.removesuffix("<|eos|>").split("<|eos|>")
        assert sorted(documents) == sorted(wanted.replace("7", str(i)) for i in (1, 3, 5, 7, 9))
