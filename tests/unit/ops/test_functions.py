"""Functions of rows and of tables: what they make of rows, and which rows they cannot use."""

import pickle

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support.operator_data import Suffix, applied, fails_on_sevens, finished, source_of
from zephon import Pipeline, PipelineError
from zephon.ops.functions import MapBatches, MapTransform, Operator

ROWS = pa.table(
    {"text": ["one", "two", None, "four", ""], "title": ["A", None, None, "D", "E"], "number": [1, 2, 3, None, 5]}
)


def test_a_map_replaces_adds_drops_and_multiplies():
    def change(row):
        if row["number"] is None:
            return None
        if row["number"] == 2:
            return [{"text": "a"}, {"text": "b", "new": 1}]
        return {"number": row["number"] * 10}

    rows = applied(MapTransform(change, columns=["number"]), ROWS)
    assert rows.places.tolist() == [0, 1, 1, 2, 4]
    assert rows.table.to_pydict() == {
        "text": ["one", "a", "b", None, ""],
        "title": ["A", None, None, None, "E"],
        "number": [10, 2, 2, 30, 50],
        "new": [None, None, 1, None, None],
    }


def test_rows_that_fail_are_left_out_whole():
    def change(row):
        return {
            1: 5,
            2: [{"x": 1, "y": 1}, {"x": "a", "y": "b"}],
            3: {7: 1},
            5: {"_row": 1},
        }.get(row["number"], {"x": 0, "text": (row["text"] or "").upper()})

    rows = applied(MapTransform(change), ROWS)
    assert rows.table.column("text").to_pylist() == ["FOUR"]
    assert {place: reason for place, _, reason in reversed(rows.failed)} == {  # of one place the first counts
        0: "it gave int; expected a dict, a list of dicts or None",
        1: "it gave 'a' (str) for column \"x\", which is int64 in the rows tried first",
        2: "it gave a column named 7; expected a text other than '_row'",
        4: "it gave a column named '_row'; expected a text other than '_row'",
    }
    raised = applied(MapTransform(lambda row: {"text": row["text"].upper()}), ROWS)
    assert raised.places.tolist() == [0, 1, 3, 4] and "AttributeError" in raised.failed[0][2]
    late = pa.table({"day": pa.array([1, 10**8], pa.date32()), "n": [1, 2]})  # no date of Python's
    assert [place for place, _, _ in applied(MapTransform(dict), late).failed] == [1]


def test_a_function_of_tables_that_changes_the_number_of_rows_has_to_say_which():
    with pytest.raises(PipelineError, match="got 5 rows and gave 2"):
        applied(MapBatches(lambda table: table.slice(0, 2).drop_columns(["_row"])), ROWS)
    with pytest.raises(PipelineError, match="in another order; expected those of its rows"):
        applied(MapBatches(lambda table: table.take(pa.array([1, 0]))), ROWS)
    with pytest.raises(PipelineError, match=r"gave NoneType; expected a pyarrow\.Table"):
        applied(MapBatches(lambda table: None), ROWS)
    rows = applied(MapBatches(lambda table: table.filter(pc.is_valid(table.column("title"))), columns=["title"]), ROWS)
    assert rows.places.tolist() == [0, 3, 4]
    assert rows.table.column("number").to_pylist() == [1, None, 5]  # which the function did not get


def test_a_function_of_tables_that_raises_over_some_rows_keeps_the_others():
    def fails(table):
        if 2 in table.column("number").to_pylist():
            raise ValueError("a two")
        return table

    rows = applied(MapBatches(fails), ROWS)
    assert rows.table.column("text").to_pylist() == ["one", None, "four", ""]
    assert [(place, reason) for place, _, reason in rows.failed] == [(1, "ValueError: a two")]


def test_an_operator_is_set_up_once_in_every_worker():
    operator = MapBatches(pickle.loads(pickle.dumps(Suffix("!"))))
    assert applied(operator, ROWS).table.column("text").to_pylist()[0] == "one!"
    assert operator.function.opened is None  # the copies were set up, and not the object itself


def test_a_setup_that_fails_ends_the_run_and_blames_no_row(tiny_tokenizer):
    class Broken(Operator):
        def setup(self):
            raise OSError("no such model")

        def __call__(self, table):
            return table

    pipeline = Pipeline(source_of()).add_op(Broken())
    with pytest.raises(PipelineError, match=r"setup of .*Broken.* failed in a worker: .*no such model"):
        next(iter(finished(pipeline, tiny_tokenizer, on_error="skip")))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.filter(3), "filter condition is 3; expected an expression or a function"),
        (lambda p: p.filter("number == 1", columns=["number"]), "expected None for both"),
        (lambda p: p.filter("number == 1", datasets=[]), "expected a list of names"),
        (lambda p: p.map_transform("upper"), "takes a function of a row"),
        (
            lambda p: p.map_transform(fails_on_sevens, runner="ray"),
            'runner is \'ray\'; expected "process", "threads" or None',
        ),
        (lambda p: p.map_batches(None), "takes a function of an Arrow table"),
        (lambda p: p.stateful_transform(object()), "has no init_state"),
        (lambda p: p.decode_text(encoding="utf-99"), "name of a text encoding"),
        (lambda p: p.decode_text(encoding="zlib"), "name of a text encoding"),
        (lambda p: p.decode_text(errors="no"), '"replace", "ignore" or "strict"'),
        (lambda p: p.text_template("no column"), "names no column"),
        (lambda p: p.text_template("{a} }"), "is invalid"),
        (lambda p: p.text_template("{a:>10}"), "not just a column's name"),
        (lambda p: p.tokenize("t", max_length=0), "max_length is 0"),
        (lambda p: p.tokenize("t", split_long_samples=True), "needs max_length"),
        (lambda p: p.tokenize_chat("t", los="all"), "unknown option .*los.*loss"),
        (lambda p: p.prefetch(0), "prefetch_batches is 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(make, words):
    with pytest.raises(PipelineError, match=words):
        make(Pipeline(source_of()))
