"""Transforms with a memory: rows that they cannot use, windows that fail, faults that are told once."""

import logging
import re

import pytest

from support.operator_data import finished, source_of
from zephon import DataError, Pipeline, PipelineError
from zephon.ops.stateful import Stateful


class Failing(Stateful):
    """Fails at number 100 in push, or at the end of a window with it, in the way it is told."""

    def __init__(self, how):
        self.how = how

    def init_state(self):
        if self.how == "init_state":
            raise ValueError("no state")
        return {"bad": False}

    def push(self, state, row):
        if row["number"] != 100:
            return row
        state["bad"] = True
        return {
            "raises": lambda: 1 // 0,
            "key": lambda: [row, {5: 1}],
            "kind": lambda: 7,
            "text": lambda: {**row, "text": "\ud800"},
            "kept": lambda: {"_row": 1},
        }.get(self.how, lambda: row)()

    def flush(self, state):
        if state["bad"] and self.how == "flush":
            raise ValueError("no end")
        return {"flush key": {1: 2}, "flush text": {"text": 5}}.get(self.how) if state["bad"] else None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "ZeroDivisionError"),
        ("key", r"it gave a column named 5; expected a text other than '_row'"),
        ("kept", "it gave a column named '_row'"),
        ("kind", "it gave int; expected a dict, a list of dicts or None"),
        ("text", "half a surrogate pair"),
    ],
)
def test_a_row_that_push_cannot_use_is_named_or_left_out(tiny_tokenizer, how, words):
    pipeline = finished(Pipeline(source_of(repeat=False)).stateful_transform(Failing(how)), tiny_tokenizer)
    with pytest.raises(DataError, match=words) as told:
        list(pipeline)
    assert "shard memory, row 100" in str(told.value) and "\n" not in str(told.value)
    skipping = pipeline.options(on_error="skip")
    rows = {line["row"] for batch in skipping for line in batch.provenance().to_pylist()}
    assert 100 not in rows and rows >= set(range(80))
    assert skipping.mixture()["web"].failed == 1


def test_a_row_that_fails_in_the_sample_is_named_before_the_run(tiny_tokenizer):
    class Early(Failing):
        def push(self, state, row):
            return super().push(state, {**row, "number": row["number"] + 97})

    pipeline = finished(Pipeline(source_of()).stateful_transform(Early("key")), tiny_tokenizer)
    with pytest.raises(DataError, match=r"row 3: stateful_transform.*a column named 5"):
        pipeline.explain()
    pipeline.options(on_error="skip", error_budget=0.2).explain()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("flush", r"flush failed at the end of window \d+ of lane \d \(ValueError: no end\)"),
        ("flush key", r"flush failed at the end of window \d+ of lane \d \(TypeError: it gave a column named 1"),
        ("flush text", r'it gave 5 \(int\) for column "text".* It came from flush at the end of window \d+ of lane'),
    ],
)
def test_what_goes_wrong_at_the_end_of_a_window_names_it(tiny_tokenizer, how, words, on_error):
    source = source_of(repeat=False)
    pipeline = finished(Pipeline(source).stateful_transform(Failing(how)), tiny_tokenizer, on_error=on_error)
    with pytest.raises(PipelineError, match=words) as told:
        list(pipeline)
    assert "\n" not in str(told.value)


def test_a_state_that_cannot_be_made_is_told_with_its_window(tiny_tokenizer):
    made = Pipeline(source_of()).stateful_transform(Failing("init_state"))
    with pytest.raises(PipelineError, match=r'dataset "web": .*init_state failed \(ValueError: no state\)'):
        finished(made, tiny_tokenizer).explain()

    class Third(Failing):
        made = 0

        def init_state(self):
            Third.made += 1
            if Third.made > 40:
                raise ValueError("no more")
            return super().init_state()

    pipeline = finished(Pipeline(source_of()).stateful_transform(Third("")), tiny_tokenizer)
    with pytest.raises(PipelineError, match=r"init_state failed for window \d+ of lane \d \(ValueError: no more\)"):
        for _ in pipeline:
            pass


@pytest.mark.parametrize("stateful", [False, True])
def test_a_process_logs_a_row_once_in_all_lanes_and_passes_and_after_a_restore(tiny_tokenizer, caplog, stateful):
    def fails_now_and_then(row):
        if row["number"] % 40 == 3:
            raise ValueError("no")
        return row

    class Passing(Stateful):
        def push(self, state, row):
            return fails_now_and_then(row)

    pipeline = Pipeline(source_of(max_repeats=2, chunk_size=5))
    pipeline = pipeline.stateful_transform(Passing()) if stateful else pipeline.map_transform(fails_now_and_then)
    pipeline = finished(pipeline, tiny_tokenizer, error_budget_rows=5, on_error="skip").options(runner="inline")
    with caplog.at_level(logging.WARNING, "zephon"):
        next(iter(pipeline))
        pipeline.restore(pipeline.checkpoint())
        assert sum(1 for _ in pipeline) > 20
    texts = [record.getMessage() for record in caplog.records if "row left out" in record.getMessage()]
    assert sorted(int(re.search(r"row (\d+):", text)[1]) for text in texts) == [3, 43, 83, 123, 163]


def test_one_that_gives_each_row_once_in_a_window_goes_on_over_a_small_source(tiny_tokenizer):
    class Once(Stateful):
        def init_state(self):
            return set()

        def push(self, state, row):
            is_new = row["number"] < limit and row["number"] not in state
            state.add(row["number"])
            return row if is_new else None

    limit = 50
    pipeline = finished(Pipeline(source_of(count=50, chunk_size=12_000)).stateful_transform(Once()), tiny_tokenizer)
    numbers = [batch.sequence_numbers for _, batch in zip(range(60), pipeline, strict=False)]
    assert len(numbers) == 60
    limit = 0
    with pytest.raises(DataError, match="only white space, or left out by the operators"):
        next(iter(finished(Pipeline(source_of(count=50, chunk_size=30)).stateful_transform(Once()), tiny_tokenizer)))
