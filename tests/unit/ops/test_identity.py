"""Fingerprints of user code: what they see, what they warn of, and that they are the same in every process."""

import enum
import functools
import importlib.util
import json
import logging
import operator
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.operator_data import finished, source_of
from zephon import Pipeline
from zephon.ops.functions import MapTransform
from zephon.ops.identity import identity_of
from zephon.ops.stateful import Stateful, StatefulTransform


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
    "whole and not": (1, 1.0),
    "truth": (True, 1),
    "tuples and lists": ((1, 2), [1, 2]),
    "sets": ({"x", "y", "zz"}, {"x", "z"}),
    "rules in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "arrays": (np.arange(3), np.arange(3) + 1),
    "types of arrays": (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64)),
    "columns": (pa.array([1, 2]), pa.array([1, 3])),
    "patterns": (re.compile("a"), re.compile("a", re.IGNORECASE)),
    "enums": (Kind.ONE, Kind.TWO),
    "dataclasses": (Config(1, Config(2)), Config(1, Config(3))),
    "paths": (pathlib.Path("/a"), pathlib.Path("/b")),
    "closures": (closing_over(1), closing_over(2)),
    "objects": (Callable(a=1), Callable(a=2)),
    "partials": (functools.partial(plain, limit=1), functools.partial(plain, limit=2)),
    "in C": (operator.itemgetter("a"), str.upper),
    "classes": (Config, Callable),
}
# One place in each, @@, changes what F does.
SOURCES = {
    "a function": "def F(row): return row + @@",
    "which lambda of a line": "F = [(lambda row: row + 1), (lambda row: row + 2)][@@ % 2]",
    "a lambda's later line": "F = keep(\n    lambda row: row['a'] > 1\n    and row['b'] < @@\n)",
    "what is wrapped": """
        def deco(f):
            @functools.wraps(f)
            def inner(row): return f(row)
            return inner
        @deco
        def F(row): return row + @@
        """,
    "a wrapper": """
        def deco(f):
            @functools.wraps(f)
            def inner(row): return f(row) + @@
            return inner
        @deco
        def F(row): return row
        """,
    "a cache": "@functools.lru_cache(maxsize=9)\ndef F(row): return @@",
    "a base": "class B:\n    def go(self): return @@\nclass C(B):\n    def __call__(s, r): return s.go()\nF = C()",
    "a static method": "class C:\n    @staticmethod\n    def f(row): return @@\nF = C.f",
    "an attribute of a function": "def F(row): return F.n\nF.n = @@",
    "a default that is computed": "def F(row, n=int('@@')): return n",
    "a slot": "class C:\n    __slots__ = ('n',)\n    def __call__(self, row): return self.n\nF = C()\nF.n = @@",
    "functions that it calls": "def F(row): return a(row)\ndef a(row): return b(row)\ndef b(row): return @@",
    "a cached function that it calls": "@functools.cache\ndef a(row): return @@\ndef F(row): return a(row)",
    "a class that it uses": "class C:\n    def go(self): return @@\ndef F(row): return C().go()",
}


def loaded(source, path):
    """F of a module with that source."""
    path.write_text("import functools\ndef keep(f): return f\n" + textwrap.dedent(source) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.F


@pytest.mark.parametrize("name", VALUES)
def test_another_value_is_another_function_however_it_is_carried(name):
    one, other = VALUES[name]
    for carried in (
        closing_over,
        lambda value: functools.partial(plain, limit=value),
        lambda value: Callable(value=[value]).method,
        lambda value: closing_over({"deep": (value,)}),
    ):
        first, again, second = identity_of(carried(one)), identity_of(carried(one)), identity_of(carried(other))
        assert first == again and first[0] != second[0]
        assert not first[1] and not second[1]


@pytest.mark.parametrize("name", SOURCES)
def test_another_source_is_another_function(name, tmp_path):
    made = []
    for folder, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / folder).mkdir()
        made.append(identity_of(loaded(SOURCES[name].replace("@@", text), tmp_path / folder / "mine.py")))
    assert made[0] == made[2] and made[0][0] != made[1][0] and not made[0][1]


def test_other_code_of_the_module_and_values_of_its_globals_make_no_difference(tmp_path):
    source = "import os\nOTHER = @@\nPID = os.getpid() + OTHER\ndef F(row): return row, PID"
    one, other = (identity_of(loaded(source.replace("@@", text), tmp_path / f"{text}.py")) for text in ("1", "2"))
    assert one == other


def test_they_are_the_same_in_every_process():
    values = "[t.identity_of(each)[0] for one, other in t.VALUES.values() for each in (one, t.closing_over(other))]"
    folders = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])]
    script = f"import json, sys\nsys.path[:0] = {folders}\nimport test_identity as t\nprint(json.dumps({values}))"
    environment = {**os.environ, "PYTHONHASHSEED": "12"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    here = [identity_of(each)[0] for one, other in VALUES.values() for each in (one, closing_over(other))]
    assert json.loads(done.stdout) == here and len(set(here)) > 30


def test_what_cannot_be_described_is_warned_of_once_unless_there_is_a_version(caplog):
    function = closing_over(threading.Lock())
    with caplog.at_level(logging.WARNING, "zephon"):
        described = MapTransform(function)
        text = described.identity()
        assert described.identity() == text == MapTransform(closing_over(threading.Lock())).identity()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "cannot describe (lock)" in told[0] and "attribute version" in told[0]
    function.version = "3"
    caplog.clear()
    assert MapTransform(function).identity() != text and not caplog.records
    scope = {}
    exec("def typed_in(row): return row", scope)
    assert identity_of(scope["typed_in"])[1] == ["code without a source"]


def test_a_version_is_part_of_the_identity():
    class Versioned(Stateful):
        version = "1"

        def push(self, state, row):
            return row

    was = StatefulTransform(Versioned()).identity()
    Versioned.version = "2"
    assert StatefulTransform(Versioned()).identity() != was


def test_what_an_object_remembers_while_it_works_does_not_count(tiny_tokenizer):
    class Remembering:
        def __init__(self):
            self.seen = {}

        def __call__(self, row):
            self.seen[row["text"]] = True
            return row

    pipeline = finished(Pipeline(source_of()).map_transform(Remembering()), tiny_tokenizer)
    next(iter(pipeline))
    state = pipeline.checkpoint()
    finished(Pipeline(source_of()).map_transform(Remembering()), tiny_tokenizer).restore(state)
    pipeline.options(prefetch_batches=1).restore(state)


def test_a_change_of_an_operator_is_a_difference_that_a_restore_names(tiny_tokenizer):
    state = finished(Pipeline(source_of()).filter("number > 3"), tiny_tokenizer).checkpoint()
    other = finished(Pipeline(source_of()).filter("number > 4"), tiny_tokenizer)
    with pytest.raises(Exception, match="row_operators: was"):
        other.restore(state)
    finished(Pipeline(source_of()).filter("number > 3"), tiny_tokenizer).restore(state)


def test_equal_objects_with_state_have_one_identity_in_every_process():
    class Counting(Stateful):
        def push(self, state, row):
            return row

    first, second = StatefulTransform(Counting()).identity(), StatefulTransform(Counting()).identity()
    assert first == second and " at 0x" not in first
