"""The trial before the run: what it finds of functions and of transforms with a memory."""

import logging

import pytest

from support.operator_data import Counting, Doubled, Joined, Suffix, finished, numbered_in_its_block, source_of
from zephon import DataError, Pipeline, PipelineError
from zephon.ops.stateful import Stateful


class Kept(Stateful):
    """Holds three rows back; where, is for others to say."""

    def init_state(self):
        return {"rows": [], "me": self}

    def push(self, state, row):
        state["rows"].append(row)
        return state["rows"].pop(0) if len(state["rows"]) > 2 else None

    def flush(self, state):
        return list(state["rows"])


class OneState(Kept):
    def __init__(self):
        self.state = {"rows": []}

    def init_state(self):
        self.state["rows"].clear()
        return self.state


class OnItsClass(Kept):
    rows = None

    def init_state(self):
        OnItsClass.rows = []

    def push(self, state, row):
        self.rows.append(row)
        return {"text": f"{row['text']} {len(self.rows)}"}

    def flush(self, state):
        return None


class OnlyAtTheEnd(Kept):
    """What flush gives shows what another window has pushed."""

    def init_state(self):
        self.count = 0
        return []

    def push(self, state, row):
        self.count += 1
        return row

    def flush(self, state):
        return {"text": str(self.count)}


class CountingPush(Kept):
    calls = 0

    def push(self, state, row):
        CountingPush.calls += 1
        return {"text": f"{row['text']} {CountingPush.calls}"}


class CountingTransform(Kept):
    calls = 0

    def transform(self, row):
        CountingTransform.calls += 1
        return {"text": f"{row['text']} {CountingTransform.calls}"}


OF_ROWS = "gives another result when it is called again, or with other rows beside it"
OF_STATE = "gives other rows when it is called again, or while a window of another lane is open"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.map_transform(Counting()), rf'Counting. {OF_ROWS}.*"web", row 0'),
        (lambda p: p.map_batches(numbered_in_its_block), OF_ROWS),
        (lambda p: p.stateful_transform(OneState()), OF_STATE),
        (lambda p: p.stateful_transform(OnItsClass()), f'{OF_STATE}.*"web", row 1. Make all of the state anew'),
        (lambda p: p.stateful_transform(OnlyAtTheEnd()), f'{OF_STATE}.*"web", at the end of the window'),
        (lambda p: p.stateful_transform(CountingPush()), OF_STATE),
        (lambda p: p.stateful_transform(CountingTransform()), OF_ROWS),
    ],
)
def test_functions_that_break_the_rules_are_found_before_the_run(tiny_tokenizer, make, words):
    pipeline = finished(make(Pipeline(source_of())), tiny_tokenizer)
    with pytest.raises(PipelineError, match=f"^the stream would depend on how it is run, since .*{words}"):
        pipeline.explain()
    pipeline.options(check_operators=False).explain()


@pytest.mark.parametrize(("kind", "count"), [(Kept, 1), (Kept, 2), (Joined, 200), (Doubled, 200)])
def test_transforms_that_keep_to_their_state_pass(tiny_tokenizer, kind, count):
    finished(Pipeline(source_of(count=count)).stateful_transform(kind()), tiny_tokenizer).explain()


def test_functions_that_do_not_pickle_are_told_but_run(tiny_tokenizer):
    pipeline = finished(Pipeline(source_of()).map_transform(lambda row: row), tiny_tokenizer)
    assert "cannot be sent to worker processes" in pipeline.explain()
    assert "cannot be sent" not in finished(Pipeline(source_of()).add_op(Suffix()), tiny_tokenizer).explain()


def test_operators_behind_a_filter_are_tried_on_rows_that_it_leaves(tiny_tokenizer, caplog):
    def fails(row):
        raise ValueError("always")

    pipeline = Pipeline(source_of(count=3000)).filter("number > 2500").map_transform(fails)
    with pytest.raises(DataError, match=r"row 25\d\d: map_transform\(.*fails\) failed: ValueError: always"):
        _ = finished(pipeline, tiny_tokenizer).compiled
    pipeline = Pipeline(source_of(count=3000)).filter("number > 0").filter("number == 1111").map_transform(dict)
    with caplog.at_level(logging.WARNING, "zephon"):
        _ = finished(pipeline, tiny_tokenizer).compiled
    assert 'filter("number == 1111") leaves none of the ' in caplog.text
    assert "what comes after it is not checked" in caplog.text
