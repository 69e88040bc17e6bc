"""Code of the user's own: what a fingerprint sees of it, what the check of transforms with a memory finds, and what is
said where it fails."""

import collections
import datetime
import enum
import functools
import json
import logging
import operator
import os
import pathlib
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.operator_data import Doubled, Joined, Suffix
from zephon import DataError, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.identity import identity_of
from zephon.ops.rows import MapTransform
from zephon.ops.stateful import Stateful, StatefulTransform
from zephon.work import StaticMixtureWorkSource


def source_of(count=200, **changes):
    columns = {"text": [f"document {n} of some words" for n in range(count)], "number": list(range(count))}
    values = {"datasets": [Dataset.from_dict("web", columns)], "chunk_size": 30, "seed": 1, **changes}
    return StaticMixtureWorkSource(**values)


def finished(pipeline, tokenizer, **options):
    return pipeline.options(runner="inline", **options).tokenize(tokenizer).pack_flat(31).batch(2)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass
class Config:
    limit: int
    inner: Any = None


class Callable:
    def __init__(self, **values):
        self.__dict__.update(values)

    def __call__(self, row):
        return row

    def method(self, row):
        return row


def plain(row, limit=5, *, words=frozenset({"b", "a"})):
    return row


def closing_over(value):
    def function(row):
        return value

    return function


VALUES = {
    "numbers": (1, 2),
    "floats": (1.0, 1.5),
    "whole and not": (1, 1.0),
    "text": ("1", 1),
    "bytes": (b"a", "a"),
    "truth": (True, 1),
    "none": (None, ""),
    "tuples and lists": ((1, 2), [1, 2]),
    "nesting": ([[1], 2], [[1, 2]]),
    "sets": ({"x", "y"}, {"x", "z"}),
    "dicts": ({"a": 1}, {"a": 2}),
    "rules in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "arrays": (np.arange(3), np.arange(3) + 1),
    "types of arrays": (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "days": (np.array(["2024-01-01"], dtype="M8[D]"), np.array(["2024-01-02"], dtype="M8[D]")),
    "columns": (pa.array([1, 2]), pa.array([1, 3])),
    "patterns": (re.compile("a"), re.compile("b")),
    "flags": (re.compile("a"), re.compile("a", re.IGNORECASE)),
    "enums": (Kind.ONE, Kind.TWO),
    "dataclasses": (Config(1, Config(2)), Config(1, Config(3))),
    "paths": (pathlib.Path("/a"), pathlib.Path("/b")),
    "dates": (datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)),
    "counters": (collections.Counter("aab"), collections.Counter("abb")),
    "ordered": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    "functions": (plain, closing_over),
    "closures": (closing_over(1), closing_over(2)),
    "objects": (Callable(a=1), Callable(a=2)),
    "partials": (functools.partial(plain, limit=1), functools.partial(plain, limit=2)),
    "modules": (os, sys),
    "classes": (Config, Callable),
}


class TestFingerprints:
    @pytest.mark.parametrize("name", VALUES)
    def test_another_value_is_another_function_however_it_is_carried(self, name):
        one, other = VALUES[name]
        for carried in (
            closing_over,
            lambda value: functools.partial(plain, limit=value),
            lambda value: functools.partial(plain, value),
            lambda value: Callable(value=value),
            lambda value: Callable(value=[value]).method,
            lambda value: closing_over({"deep": (value,)}),
        ):
            first, again, second = identity_of(carried(one)), identity_of(carried(one)), identity_of(carried(other))
            assert first == again and first.text != second.text
            assert not first.unseen and not second.unseen

    def test_defaults_that_were_set_otherwise_are_seen(self):
        was = identity_of(plain)
        kept = plain.__defaults__
        try:
            plain.__defaults__ = (6,)
            assert identity_of(plain).text != was.text
        finally:
            plain.__defaults__ = kept
        assert identity_of(plain) == was

    def test_functions_of_one_line_and_of_none_are_told_apart(self):
        here = [lambda row: row["a"], lambda row: row["b"]]
        assert identity_of(here[0]).text != identity_of(here[1]).text
        scope: dict[str, Any] = {"__name__": "typed_in"}
        exec("def f(row): return row['n'] > 5\nclass C:\n    def __call__(self, row): return row['n'] > 5", scope)
        typed = [identity_of(scope["f"]).text, identity_of(scope["C"]()).text]
        exec("def f(row): return row['n'] > 6\nclass C:\n    def __call__(self, row): return row['n'] > 6", scope)
        assert typed[0] != identity_of(scope["f"]).text and typed[1] != identity_of(scope["C"]()).text

    def test_callables_that_are_not_written_in_python_have_one_too(self):
        made = [operator.itemgetter("a"), operator.itemgetter("b"), "abc".find, "abd".find, str.upper, str.lower]
        assert len({identity_of(each).text for each in made}) == len(made)
        assert not any(identity_of(each).unseen for each in made)
        assert identity_of(functools.cache(closing_over(1))) != identity_of(functools.cache(closing_over(2)))

    def test_values_that_hold_themselves_or_a_great_deal_come_to_an_end(self):
        ring: list[Any] = [1]
        ring.append(ring)
        assert identity_of(closing_over(ring)) == identity_of(closing_over(ring))
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        assert identity_of(closing_over(deep)).unseen == ("values nested too deeply in outer variable value",)
        wide: list[Any] = [0]
        for _ in range(40):
            wide = [wide, wide]
        assert identity_of(closing_over(wide)).unseen[0].startswith("too many values")

        class Endless(list):
            def __iter__(self):
                return iter(int, 1)

        assert identity_of(closing_over(Endless())).unseen == ("an Endless in outer variable value",)
        words = [f"word {n}" for n in range(200_000)]
        assert not identity_of(closing_over(set(words))).unseen

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: closing_over(threading.Lock()), "a lock in outer variable value"),
            (lambda: Callable(model=Callable(lock=threading.Lock())), "a lock in attribute lock of attribute model"),
            (lambda: functools.partial(plain, limit=sys.stdout), "in partial argument limit"),
        ],
    )
    def test_what_cannot_be_described_is_warned_of_once_unless_there_is_a_version(self, caplog, make, words):
        function = make()
        with caplog.at_level(logging.WARNING, "zephon"):
            described = MapTransform(function)
            text = described.identity()
            assert described.identity() == text == MapTransform(make()).identity()
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2 and words in told[0] and "attribute version" in told[0] and "0x" not in text
        function.version = "3"
        caplog.clear()
        assert MapTransform(function).identity() != text and not caplog.records

    def test_they_are_the_same_in_every_process(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import functools, re, sys, json\n"
            "sys.path[:0] = json.loads(sys.argv[1])\n"
            "import test_user_code as t\n"
            "from operator_data import Suffix, Joined\n"
            "made = [t.closing_over(v) for pair in t.VALUES.values() for v in pair]\n"
            "made += [functools.partial(t.plain, t.Callable(words={'a', 'b', 'c', 'd'})), Suffix('x'), Joined()]\n"
            "print(json.dumps([t.identity_of(each).text for each in made]))\n"
        )
        folders = json.dumps([str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])])
        told = [
            subprocess.run(
                [sys.executable, script, folders],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        ]
        assert told[0] == told[1] and len(set(json.loads(told[0]))) > 50

    @given(st.recursive(st.integers() | st.text() | st.floats() | st.none(), lambda x: st.lists(x) | st.tuples(x, x)))
    def test_whatever_is_plain_has_one_that_stays(self, value):
        assert identity_of(closing_over(value)) == identity_of(closing_over(value))

    def test_what_an_object_remembers_while_it_works_does_not_count(self, tiny_tokenizer):
        class Remembering:
            def __init__(self):
                self.seen = {}

            def __call__(self, row):
                self.seen[row["text"]] = True
                return row

        pipeline = finished(Pipeline(source_of()).map_transform(Remembering()), tiny_tokenizer)
        next(iter(pipeline))
        state = pipeline.checkpoint()
        pipeline.close()
        fresh = finished(Pipeline(source_of()).map_transform(Remembering()), tiny_tokenizer)
        fresh.restore(state)
        again = pipeline.options(prefetch_batches=1)
        again.restore(state)


# ---------------------------------------------------------------------------------------------------------------------


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
        self.state = super().init_state()

    def init_state(self):
        self.state["rows"].clear()
        return self.state


class OneList(OneState):
    def init_state(self):
        self.state["rows"].clear()
        return {"rows": self.state["rows"]}


class OneObject(Kept):
    shared = Callable(rows=[])

    def init_state(self):
        self.shared.rows.clear()
        return {"rows": [], "deep": (1, [self.shared])}


class ItsOwnState(Kept):
    def init_state(self):
        self.rows = []
        return self

    def push(self, state, row):
        state.rows.append(row)

    def flush(self, state):
        return state.rows


class OnItsClass(Kept):
    rows: Any = None

    def init_state(self):
        OnItsClass.rows = []

    def push(self, state, row):
        self.rows.append(row)
        return {"text": f"{row['text']} {len(self.rows)}"}

    def flush(self, state):
        return None


class OnlyAtTheEnd(Kept):
    """What flush gives shows what another window has pushed."""

    def __init__(self):
        self.count = 0

    def init_state(self):
        self.count = 0
        return []

    def push(self, state, row):
        self.count += 1
        return row

    def flush(self, state):
        return {"text": str(self.count)}


class ChangedLater(Kept):
    def push(self, state, row):
        if state["rows"]:
            state["rows"][-1]["text"] += " and so on"
        state["rows"] = [row]
        return row

    def flush(self, state):
        return None


class CountingTransform(Kept):
    calls = 0

    def transform(self, row):
        CountingTransform.calls += 1
        return {"text": f"{row['text']} {CountingTransform.calls}"}


class TestWindows:
    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            (OneState, r"state in common: state is the same dict in two windows"),
            (OneList, r"state in common: state\['rows'\] is the same list"),
            (OneObject, r"state in common: state\['deep'\]\[1\]\[0\] is the same Callable"),
            (ItsOwnState, r"state in common: state is the same ItsOwnState in two windows"),
            (OnItsClass, r'while a window of another lane is open.*dataset "web", row 1\. Keep what it remembers'),
            (OnlyAtTheEnd, r'while a window of another lane is open.*dataset "web", at the end of the window'),
            (ChangedLater, r'changes a row after it has given it: dataset "web", row 0'),
            (CountingTransform, r"gives another result when it is called again"),
        ],
    )
    def test_what_lanes_would_share_is_found_before_the_run(self, tiny_tokenizer, kind, words):
        pipeline = finished(Pipeline(source_of()).stateful_transform(kind()), tiny_tokenizer)
        with pytest.raises(PipelineError, match=f"^the stream would depend on how it is run, since .*{words}"):
            pipeline.explain()
        pipeline.options(check_operators=False).explain()

    @pytest.mark.parametrize("kind", [Kept, Joined, Doubled])
    @pytest.mark.parametrize("count", [1, 2, 3, 200])
    def test_those_that_keep_to_their_state_pass(self, tiny_tokenizer, kind, count):
        finished(Pipeline(source_of(count)).stateful_transform(kind()), tiny_tokenizer).explain()


class Failing(Kept):
    """Fails at number 100 in push, or at the end of a window with it, in the way it is told."""

    def __init__(self, how):
        self.how = how

    def init_state(self):
        if self.how == "init_state":
            raise ValueError("no state")
        return {"rows": [], "bad": False}

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
        return {1: 2} if state["bad"] and self.how == "flush key" else None


class TestFailures:
    @pytest.mark.parametrize(
        ("how", "words"),
        [
            ("raises", "ZeroDivisionError"),
            ("key", r"it gives a column named '5' \(int\); a text other than '_row' is needed"),
            ("kept", "it gives a column named '_row'"),
            ("kind", "it gave int; a dict, a list of dicts or None is needed"),
            ("text", "half a surrogate pair"),
        ],
    )
    @pytest.mark.parametrize("count", [200, 101])
    @pytest.mark.parametrize("runner", ["inline", "threads"])
    def test_a_row_that_push_cannot_use_is_named_or_left_out(self, tiny_tokenizer, how, words, count, runner):
        source = source_of(count, repeat=False)
        pipeline = finished(Pipeline(source).stateful_transform(Failing(how)), tiny_tokenizer, canonical_replicas=2)
        pipeline = pipeline.options(runner=runner)
        with pytest.raises(DataError, match=words) as told:
            list(pipeline)
        assert "shard memory, row 100" in str(told.value) and "\n" not in str(told.value)
        skipping = pipeline.options(on_error="skip")
        rows = {line["row"] for batch in skipping for line in batch.provenance().to_pylist()}
        assert 100 not in rows and rows >= set(range(80))
        assert skipping.mixture()["web"].failed == 1

    def test_a_row_that_fails_in_the_sample_is_named_before_the_run(self, tiny_tokenizer):
        class Early(Failing):
            def push(self, state, row):
                return super().push(state, {**row, "number": row["number"] + 97})

        pipeline = finished(Pipeline(source_of()).stateful_transform(Early("key")), tiny_tokenizer)
        with pytest.raises(DataError, match=r"row 3: stateful_transform.*a column named '5'"):
            pipeline.explain()
        pipeline.options(on_error="skip", error_budget=0.2).explain()

    @pytest.mark.parametrize("on_error", ["raise", "skip"])
    @pytest.mark.parametrize(
        ("how", "words"),
        [
            ("flush", r"flush failed at the end of window \d+ of lane \d \(ValueError: no end\)"),
            ("flush key", r"flush failed at the end of window \d+ of lane \d \(it gives a column named '1'"),
        ],
    )
    def test_what_goes_wrong_at_the_end_of_a_window_names_it(self, tiny_tokenizer, how, words, on_error):
        source = source_of(repeat=False)
        pipeline = finished(Pipeline(source).stateful_transform(Failing(how)), tiny_tokenizer, on_error=on_error)
        with pytest.raises(PipelineError, match=words) as told:
            list(pipeline)
        assert "\n" not in str(told.value)

    def test_a_state_that_cannot_be_made_is_told_with_its_window(self, tiny_tokenizer):
        made = Pipeline(source_of()).stateful_transform(Failing("init_state"))
        with pytest.raises(PipelineError, match=r'dataset "web": .*init_state failed \(ValueError: no state\)'):
            finished(made, tiny_tokenizer).explain()

        class Third(Kept):
            made = 0

            def init_state(self):
                Third.made += 1
                if Third.made > 40:
                    raise ValueError("no more")
                return super().init_state()

        pipeline = finished(Pipeline(source_of()).stateful_transform(Third()), tiny_tokenizer, canonical_replicas=1)
        with pytest.raises(PipelineError, match=r"init_state failed for window \d+ of lane 0 \(ValueError: no more\)"):
            for _ in pipeline:
                pass

    @pytest.mark.parametrize("runner", ["inline", "threads"])
    @pytest.mark.parametrize("stateful", [False, True])
    @pytest.mark.parametrize("used", [7, 12, 31])
    def test_rows_told_of_before_a_state_was_taken_are_not_told_of_again(
        self, tiny_tokenizer, caplog, runner, stateful, used
    ):
        def fails_now_and_then(row):
            if row["number"] % 29 == 3:
                raise ValueError("no")
            return row

        class Passing(Kept):
            def push(self, state, row):
                return fails_now_and_then(row)

        def build():
            order = {"shuffle_shards": False, "shuffle_within_shard": False, "repeat": False, "chunk_size": 5}
            pipeline = Pipeline(source_of(**order))
            pipeline = (
                pipeline.stateful_transform(Passing()) if stateful else pipeline.map_transform(fails_now_and_then)
            )
            pipeline = pipeline.options(canonical_replicas=1, flush_every_k_chunks=3, error_budget_rows=5)
            return finished(pipeline, tiny_tokenizer, on_error="skip").options(runner=runner)

        def told(action):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "zephon"):
                made = action()
            texts = [record.getMessage() for record in caplog.records if "row left out" in record.getMessage()]
            return [int(re.search(r"row (\d+):", text)[1]) for text in texts], made

        def some():
            pipeline = build()
            stream = iter(pipeline)
            batches = [next(stream) for _ in range(used)]
            state = pipeline.checkpoint()
            pipeline.close()
            return state, max(line["row"] for batch in batches for line in batch.provenance().to_pylist())

        first, (state, last) = told(some)
        second, _ = told(lambda: list(build().restore(state)))
        assert sorted({*first, *second}) == [n for n in range(200) if n % 29 == 3]
        # What was read ahead of the state is told of again, and what comes in one piece with it.
        assert all(row >= last - last % 5 for row in second) and second

    def test_columns_that_are_not_there_are_named(self, tiny_tokenizer):
        made = Pipeline(source_of()).map_transform(plain).stateful_transform(Kept(), columns=["nothing"])
        with pytest.raises(PipelineError, match=r'stateful_transform\(Kept\) .*"nothing"'):
            finished(made, tiny_tokenizer).explain()

    def test_a_version_is_part_of_the_identity(self):
        class Versioned(Kept):
            version = "1"

        was = StatefulTransform(Versioned()).identity()
        Versioned.version = "2"
        assert StatefulTransform(Versioned()).identity() != was
        suffix = Suffix()
        suffix.version = "2"
        assert identity_of(suffix) != identity_of(Suffix())
