"""Types of what functions give: fixed before the run, and a fault where a later value does not fit."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from support.operator_data import applied, finished, numbered, source_of, texts_of
from zephon import DataError, Pipeline, PipelineError
from zephon.ops.functions import MapBatches, MapTransform
from zephon.ops.stateful import Stateful
from zephon.ops.trial import Sample, probe

BIG = 2**60 + 1


def probed(operator, *tables):
    samples, first = [], 0
    for table in tables:
        samples.append(Sample(np.arange(first, first + table.num_rows), table))
        first += table.num_rows
    operators, sample, _ = probe([operator], iter(samples), "web")
    return operators[0], sample


def ranges(*bounds):
    return [pa.table({"number": list(range(a, b))}) for a, b in pairwise(bounds)]


@pytest.mark.parametrize(
    ("values", "kind", "misfits"),
    [
        ([1, 0.5, None, 2**53 + 1], "double", [3]),
        ([0.5, BIG], "double", [1]),
        ([BIG, 1], "int64", []),
        ([2**64, 1, -(2**63) - 1], "int64", [0, 2]),
        ([None, "a", 1, b"a"], "large_string", [2, 3]),
        ([True, 1, False], "bool", [1]),
        ([1, True], "int64", [1]),
        ([[], [1], [0.5]], "list<item: double>", []),
        ([{"a": 1}, {"b": "x"}, {"a": "x"}], "struct<a: int64, b: string>", [2]),
        ([np.int64(3), np.float32(0.5)], "double", []),
        ([[float("nan")], [1.0]], "list<item: double>", []),
        (["a\ud800", "b", ["c\ud800"]], "large_string", [0, 2]),
        ([object(), 1], "int64", [0]),
        ([None, None], "null", []),
    ],
)
def test_types_of_mixed_values(values, kind, misfits):
    rows = applied(MapTransform(lambda row: {"x": values[row["number"]]}), *ranges(0, len(values)))
    assert str(rows.table.schema.field("x").type) == kind
    assert [place for place, _, _ in rows.failed] == misfits
    sound = [value for n, value in enumerate(values) if n not in misfits]
    for value, back in zip(sound, rows.table.column("x").to_pylist(), strict=True):
        back = {key: item for key, item in back.items() if item is not None} if isinstance(back, dict) else back
        assert value == back or "nan" in repr(value)


def test_columns_keep_what_they_had_where_the_rows_tried_say_less():
    meta = pa.array([{"a": None, "b": 1}] * 3, pa.struct([("a", pa.int32()), ("b", pa.int64())]))
    table = pa.table({"number": [1, 2, 3], "meta": meta, "day": pa.array([None] * 3, pa.date32())})
    types = dict(probed(MapTransform(lambda row: row), table)[0].types)
    assert (types["meta"].field("a").type, types["day"]) == (pa.int32(), pa.date32())


def test_more_rows_are_tried_where_the_first_say_nothing():
    late = MapTransform(lambda row: {"score": row["number"] / 4 if row["number"] > 200 else None})
    typed, sample = probed(late, *ranges(0, 64, 128, 256))
    assert dict(typed.types)["score"] == pa.float64()
    assert sample.table.num_rows == 64
    field = MapTransform(lambda row: {"m": [{"role": "user", **({"name": "y"} if row["number"] == 100 else {})}]})
    assert "name: string" in str(dict(probed(field, *ranges(0, 64, 128, 192))[0].types)["m"])
    nothing = MapTransform(lambda row: {"new": None, "number": None})
    assert dict(probed(nothing, *ranges(0, 2))[0].types) == {"number": pa.int64(), "new": pa.large_string()}


def test_a_column_that_no_row_had_is_a_fault_unless_its_type_is_told():
    def rare(row):
        return {"rare": 0.5} if row["number"] == 99 else {"rare": None} if row["number"] == 98 else {}

    [late] = ranges(98, 100)
    rows = applied(probed(MapTransform(rare), *ranges(0, 2))[0], late)
    assert rows.table.column_names == ["number"]
    assert 'it gave a column "rare", which no row tried before the run has' in rows.failed[0][2]
    operator = MapTransform(rare, types={"rare": "float64"})
    rows = applied(probed(operator, *ranges(0, 2))[0], late)
    assert rows.table.column("rare").to_pylist() == [None, 0.5]
    assert operator.identity() != MapTransform(rare).identity()
    with pytest.raises(PipelineError, match=r"map_transform types is .* types of Arrow by the names of columns"):
        MapTransform(rare, types={"rare": "flaot"})


def test_functions_of_tables_keep_their_types_too():
    def halves(table):
        numbers = table.column("number").to_pylist()
        if numbers[0] >= 10:
            return pa.table({"half": [str(number) for number in numbers]})
        return pa.table(
            {"half": [None if number == 0 else number / 2 if number % 2 else number // 2 for number in numbers]}
        )

    operator = probed(MapBatches(halves), *ranges(1, 3))[0]
    for table in ranges(0, 1, 3, 5):
        assert applied(operator, table).table.schema.field("half").type == pa.float64()
    assert [place for place, _, _ in applied(operator, *ranges(20, 22)).failed] == [0, 1]


@pytest.mark.parametrize("lookahead", [1, 1 << 20])
def test_types_do_not_depend_on_where_blocks_are_cut(tiny_tokenizer, lookahead):
    class Halved(Stateful):
        def push(self, state, row):
            return {"half": row["number"] / 2 if row["number"] % 2 else row["number"] // 2}

        def transform(self, row):
            return {"more": row["half"] if row["half"] % 1 else int(row["half"])}

    pipeline = Pipeline(source_of(count=60)).stateful_transform(Halved()).text_template("{half} {more}")
    kept = texts_of(finished(pipeline, tiny_tokenizer, prefetch_buffer_size=lookahead), tiny_tokenizer)
    assert kept == {f"{n / 2:g} {n / 2:g}" for n in range(60)}


def test_a_value_that_comes_late_and_does_not_fit_is_a_fault_of_its_row(tiny_tokenizer):
    def late(row):
        return {"score": {1500: 0.5, 1600: "none", 1700: True, 1800: 2**70}.get(row["number"], row["number"])}

    pipeline = Pipeline(source_of(numbered(2000), chunk_size=500)).map_transform(late)
    with pytest.raises(DataError, match=r'dataset "web", shard memory, row 1\d00: it gave .* for column "score"'):
        texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer, 3000)
    skipping = finished(pipeline, tiny_tokenizer, on_error="skip", error_budget_rows=4)
    kept = texts_of(skipping, tiny_tokenizer, 800)
    assert not kept & {f"document {n} of some words" for n in (1500, 1600, 1700, 1800)}
    assert "document 1501 of some words" in kept
