"""Filters: what expressions keep, and what they say where they are none or do not fit."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.operator_data import applied, finished, numbered, source_of, texts_of
from zephon import DataError, DataRecipe, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.filter import Expression, Filter
from zephon.work import StaticMixtureWorkSource

BIG = 2**60 + 1
ROWS = pa.table(
    {
        "text": ["one", "two spam", None, "four é木", ""],
        "title": ["A", None, None, "D", "E"],
        "number": [1, 2, 3, None, 5],
        "score": [0.5, 2.0, None, 0.25, 1.0],
        "good": [True, False, None, True, False],
        "tags": [["x"], [], None, ["x", "y"], ["z"]],
        "meta": [{"lang": "en"}, {"lang": "de"}, None, {"lang": "en"}, {"lang": None}],
        "class": [1, 2, 3, 4, 5],
        "größe": [1, 2, 3, 4, 5],
        "no name": [1, 2, 3, 4, 5],
    }
)
NUMBERS = pa.table(
    {
        "i8": pa.array([1, 2], pa.int8()),
        "n": pa.array([1, BIG]),
        "u": pa.array([2**63, 2**64 - 1], pa.uint64()),
        "word": pa.array(["a", "b"]).dictionary_encode(),
        "none": pa.nulls(2),
    }
)


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
        ("title IS NOT NULL and\n good", [0, 3]),
        ("not good", [1, 4]),
        ("good == false", [1, 4]),
        ("not contains(text, 'spam')", [0, 3, 4]),
        ("contains(text, '\"')", []),
        ('matches(text, "^t|é")', [1, 3]),
        ('matches(text, "\\\\bspam\\\\b")', [1]),
        ("starts_with(text, 'f') or ends_with(text, \"e\")", [0, 3]),
        ("length(tags) == 2", [3]),
        ("meta.lang == 'en'", [0, 3]),
        ("count(text, 'o') >= 1 and bytes(text) > length(text)", [3]),
        ("lower(title) == 'a' or upper(trim(text)) == 'ONE'", [0]),
        ("abs(-number) == 2", [1]),
        ("(number == 1 or number == 2) and good", [0]),
        ("class == 1 or größe == 2 or `no name` == 3", [0, 1, 2]),
    ],
)
def test_expressions_keep_what_they_say_and_drop_nulls(text, kept):
    assert applied(Filter(text), ROWS, skips=False).places.tolist() == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("i8 in [300, 1]", [0]),
        ("i8 in [1.0, 2.5, 1e999]", [0]),
        ("i8 not in [300]", [0, 1]),
        ("n in [1.5]", []),
        (f"n == {BIG}", [1]),
        ("n > 1.5", [1]),
        ("n + 0.5 > 1.7", [1]),
        ("n == -9223372036854775808", []),
        ("u > -1 and u > n", [0, 1]),
        ("u == 18446744073709551615", [1]),
        ("u in [18446744073709551615]", [1]),
        ("word in ['a'] and contains(word, 'a')", [0]),
        ("none == 1 or none in ['a'] or none in [1] or not none or none and true or none == none", []),
        ("length(none) > 1 or contains(none, 'a') or lower(none) == 'a' or none.x > 1 or none", []),
        ("none is null", [0, 1]),
    ],
)
def test_numbers_of_any_type_compare_and_null_is_null(text, kept):
    assert applied(Filter(text), NUMBERS, skips=False).places.tolist() == kept


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an expression such as"),
        ("1 == 1", "names no column"),
        ("number >", r"at character 9 \(the end\) this cannot be parsed"),
        ("number == 1 number", r"at character 13 \('number'\) this cannot be parsed"),
        ("lenght(text) > 3", "no such function; did you mean length"),
        ("length(text, 'a') > 3", "length takes 1 argument, and 2 are given"),
        ("number == 1 == 1", "cannot be chained"),
        ("number in [1, 'a']", "all numbers or all texts"),
        ("matches(text, '(')", "at character 15 .* matches cannot take this"),
        ("number is 3", '"null" is needed after is'),
        ("number ** 2 > 1", "a column, a value or a parenthesis is needed"),
        ("title == 'a' 'b'", "at character 10"),
        ("number @ 3", r"at character 8 \('@'\) this does not belong"),
        ("number == 1 # or not", r"\('#'\) this does not belong"),
        ("__import__('os').system('x') == 1", "at character 17 .* does not belong"),
        ("eval('number') == 1", "no such function"),
        ("number == 99999999999999999999999", r"whole numbers go from -2\*\*63 to 2\*\*64 - 1; write a greater one"),
        ("number in [-9223372036854775809]", r"whole numbers go from -2\*\*63 to 2\*\*64 - 1"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_place(text, words):
    with pytest.raises(PipelineError, match=words):
        Expression(text)
    recipe = DataRecipe.from_dict({"sources": [{"name": "a", "path": "a", **({"filter": text} if text else {})}]})
    if text:
        with pytest.raises(PipelineError, match=words):
            Pipeline.from_recipe(recipe, tokenizer="t", seq_len=8, microbatch_size=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("txt == 'a'", 'needs the column "txt", which is not there; did you mean "text"'),
        ("text > 3", "cannot be computed .* its columns are text string"),
        ("text in [1]", "cannot be computed"),
        ("text / 2 > 1", "cannot be computed"),
        ("number in ['a']", "cannot be computed"),
        ("length(text)", "not true or false"),
        ("meta.language == 'x'", "has no field language"),
    ],
)
def test_what_no_row_can_be_computed_of_is_refused_at_once(text, words):
    with pytest.raises(PipelineError, match=words):
        applied(Filter(text), ROWS)


def test_filters_travel_by_pickle_and_stand_in_a_fingerprint_by_their_text():
    again = pickle.loads(pickle.dumps(Filter("number == 2 and good is not null", datasets=["web"])))
    assert applied(again, ROWS).places.tolist() == [1]
    assert again.identity() == "filter number == 2 and good is not null ('number', 'good') ('web',)"


def test_functions_filter_too_and_a_result_that_is_neither_true_nor_false_is_a_fault():
    rows = applied(Filter(lambda row: np.arange(row["number"]) if row["number"] == 2 else row["number"] or 1 / 0), ROWS)
    assert rows.places.tolist() == [0, 2, 4]
    assert [(place, "Error" in reason) for place, _, reason in sorted(rows.failed)] == [(1, True), (3, True)]


def test_a_product_that_is_too_large_is_a_fault_of_its_row(tiny_tokenizer):
    source = source_of({**numbered(), "number": [2**62 if n == 333 else n for n in range(400)]})
    pipeline = Pipeline(source).filter("number * 4 >= 0")
    expected = (
        r'filter\("number \* 4 >= 0"\) failed on dataset "web", shard memory, row 333: it cannot be computed '
        r"\(overflow\); number 4611686018427387904"
    )
    with pytest.raises(DataError, match=expected):
        texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer)
    kept = texts_of(finished(pipeline, tiny_tokenizer, on_error="skip"), tiny_tokenizer, 300)
    assert kept == {f"document {n} of some words" for n in range(400) if n != 333}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("rest", ["== {}", "!= {}", "> {}", "in [1, {}]", "not in [{}]", "+ 1 == {}"])
def test_a_whole_number_beyond_those_of_floats_is_not_compared_with_floats(tmp_path, kind, rest):
    """Ids of JSON lines: a filter for one of them kept its neighbours, too."""
    ids = [2**53 + n for n in range(8)]
    for name, kept in (("id", 2**53 + 1), ("-id", -(2**53) - 1)):
        if kind == "jsonl":
            (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "t{n}", "id": {n}}}\n' for n in ids))
        else:
            pq.write_table(
                pa.table({"text": [f"t{n}" for n in ids], "id": [float(n) for n in ids]}), tmp_path / "a.parquet"
            )
        source = StaticMixtureWorkSource([Dataset.from_path("a", tmp_path)])
        pipeline = Pipeline(source).options(canonical_replicas=1).filter(f"{name} {rest.format(kept)}")
        with pytest.raises(PipelineError, match=rf"floats, as numbers of JSON lines are, and {kept} is beyond 2\*\*53"):
            pipeline.pretokenized("id").pack_flat(8).batch(1).explain()


def test_floats_are_compared_with_large_floats_and_whole_numbers_with_whole_numbers():
    table = pa.table({"f": [1e18, 1e19], "n": [2**60, BIG]})
    for text, kept in (("f == 1e18", [0]), ("f in [1e19]", [1]), (f"n == {BIG}", [1]), ("n + f > 3e18", [1])):
        assert Expression(text).kept(table, pytest.fail).tolist() == kept
