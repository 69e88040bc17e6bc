"""JSON lines have two ways to read a line, by Arrow and by msgspec. Both give what the json module gives."""

import json
import math
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.data.formats import jsonl
from zephon.data.formats.base import Group
from zephon.errors import DataError

FILE = SimpleNamespace(path="a.jsonl")
KINDS = {"text": "text", "n": "number", "flag": "flag", "meta.text": "text", "meta.in.n": "number", 'q"': "text"}

space = st.sampled_from(["", "", "", " ", "\t", "  "])
strings = st.one_of(
    st.text(st.sampled_from('ab"\\/é🙂 \n{}[]:,\x7f\u2028'), max_size=6).flatmap(
        lambda text: st.booleans().map(lambda escape: json.dumps(text, ensure_ascii=escape))
    ),
    st.sampled_from(['"\\u0041"', '"\\/"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\\\ud800"', '"null"', '"7"', '"NaN"']),
)
numbers = st.one_of(
    st.integers().map(str),
    st.integers(-(10**30), 10**30).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["7", "7.0", "-0", "-0.0", "1e3", "1E+2", "1e999", "9007199254740993", "18446744073709551616"]),
)
scalars = st.one_of(strings, numbers, st.sampled_from(["null", "null", "true", "false", "NaN", "-Infinity"]))


@st.composite
def objects(draw, values):
    keys = st.sampled_from(["text", "n", "flag", "in", "meta", "meta.text", 'q\\"', "\\u0074ext", "x"])
    fields = draw(st.lists(st.tuples(keys, values), max_size=5))
    parts = [f'{draw(space)}"{key}"{draw(space)}:{draw(space)}{value}{draw(space)}' for key, value in fields]
    return "{" + (",".join(parts) or draw(space)) + "}"


@st.composite
def arrays(draw, values):
    return "[" + ",".join(draw(space) + value for value in draw(st.lists(values, max_size=3))) + draw(space) + "]"


any_value = st.recursive(scalars, lambda inner: st.one_of(objects(inner), arrays(inner)), max_leaves=6)
lines = objects(any_value)


@st.composite
def ordinary(draw):
    """A line whose values are of the kinds that columns have, so that Arrow may read it."""
    inner = st.one_of(st.just("null"), numbers)
    texts, flags = st.one_of(st.just("null"), strings), st.sampled_from(["true", "false", "null"])
    below = f'{{"n": {draw(inner)}, "x": {draw(any_value)}}}'
    meta = draw(st.sampled_from(["null", f'{{"text":{draw(texts)}, "in": {below}}}', f'{{"in":{below}}}', "{}"]))
    fields = [
        ("text", draw(texts)),
        ("n", draw(inner)),
        ("flag", draw(flags)),
        ("meta", meta),
        ("meta.text", draw(texts)),
        ("x", draw(any_value)),
        ('q\\"', draw(texts)),
    ]
    kept = [field for field in draw(st.permutations(fields)) if draw(st.integers(0, 4))]
    return "{" + ",".join(f'"{key}":{draw(space)}{value}' for key, value in kept) + "}"


def same(one, other):
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return type(one) is type(other) and one == other


def line_by_line(line, kinds):
    try:
        fields = jsonl._fields(line.encode(), FILE, 1)
        return [jsonl._value(fields, name, kind, FILE, 1) for name, kind in kinds.items()]
    except DataError:
        return None


REFUSED = object()


def by_json(line, name, kind):
    """What the json module says of a column."""
    value = found = json.loads(line, parse_int=float)
    value = found.get(name)
    if value is None and "." in name:
        for part in name.split("."):
            if found is not None and not isinstance(found, dict):
                return REFUSED
            found = None if found is None else found.get(part)
        value = found
    if value is None:
        return None
    if kind == "text":  # other values come as they stand in the file
        return value if isinstance(value, str) else ...
    return value if type(value) is {"number": float, "flag": bool}[kind] else REFUSED


@settings(max_examples=300)
@given(line=st.one_of(lines, ordinary()), drawn=st.data())
def test_msgspec_gives_what_the_json_module_gives(line, drawn):
    name = drawn.draw(st.sampled_from([*KINDS, "meta", "in", "x"]))
    kind = drawn.draw(st.sampled_from(["text", "number", "flag"]))
    found, expected = line_by_line(line, {name: kind}), by_json(line, name, kind)
    if isinstance(expected, str) and "\ud800" in expected:
        expected = REFUSED  # it is no UTF-8
    if expected is REFUSED:
        assert found is None
    elif expected is not ...:
        assert found is not None and same(found[0], expected), (found, expected)


@settings(max_examples=300)
@given(line=lines)
def test_json_text_is_what_stands_in_the_file(line):
    keys = {key for key in json.loads(line) if "." not in key}
    values = line_by_line(line, dict.fromkeys(keys, "json"))
    assert values is not None
    for key, text in zip(keys, values, strict=True):
        value = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)[key]
        if value is None:
            assert text is None
        else:
            assert text in line
            assert json.loads(text, parse_int=str, parse_float=str, parse_constant=str) == value


@settings(max_examples=300)
@given(rows=st.lists(st.one_of(ordinary(), ordinary(), lines), min_size=1, max_size=4))
def test_arrow_gives_what_msgspec_gives(rows):
    data = pa.py_buffer("".join(row + "\n" for row in rows).encode())
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_parse_line_by_line", lambda *_: called.append(1))
        table = jsonl._parse(data, KINDS, FILE, Group(0, len(data), len(rows), 1))
    if called:
        return
    for found, row in zip(table.select(list(KINDS)).to_pylist(), rows, strict=True):
        expected = line_by_line(row, KINDS)
        assert expected is not None and all(map(same, found.values(), expected)), (found, expected)
