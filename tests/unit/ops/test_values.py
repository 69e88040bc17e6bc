"""Values that functions give and rows hold: types that do not depend on blocks, and rows that cannot be used."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import step_digests
from zephon import DataError, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.expression import Expression
from zephon.ops.probe import Sample, probe
from zephon.ops.rows import Filter, MapBatches, MapTransform, Rows, TextTemplate
from zephon.ops.stateful import Stateful
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource

BIG = 2**60 + 1


def source_of(columns, **changes):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    values = {"datasets": [Dataset.from_table("web", table)], "chunk_size": 40, "seed": 1, **changes}
    return StaticMixtureWorkSource(**values)


def numbered(count=400, **columns):
    return {"text": [f"document {n} of some words" for n in range(count)], "number": list(range(count)), **columns}


def finished(pipeline, tokenizer, **options):
    pipeline = pipeline.options(**{"runner": "inline", "canonical_replicas": 2, **options})
    return pipeline.tokenize(tokenizer).pack_flat(31).batch(2)


def texts_of(pipeline, tokenizer, batches=120):
    """The documents in the stream, put together again from what the records hold."""
    decoder = load_tokenizer(tokenizer)
    lanes = {0: [], 1: []}
    for batch, _ in zip(pipeline, range(batches), strict=False):
        for number, record in zip(batch.sequence_numbers.tolist(), batch.tokens, strict=True):
            lanes[number % 2].append(record)
    out = set()
    for records in lanes.values():
        tokens = np.concatenate(records)
        ends = np.flatnonzero(tokens == decoder.eos_id)
        out |= {decoder.decode(part[1:-1]) for part in np.split(tokens, ends + 1)[:-1]}
    return out


def probed(operators, table, *more):
    samples, first = [], 0
    for part in (table, *more):
        samples.append(Sample(np.arange(first, first + part.num_rows), part))
        first += part.num_rows
    return probe(operators, iter(samples), "web")


def applied(operator, table, skips=True):
    rows = Rows(table, np.arange(table.num_rows), skips)
    operator.apply(rows)
    return rows


class TestTypesOfMaps:
    def test_a_field_that_is_null_in_a_whole_block_can_be_filtered(self, tiny_tokenizer):
        def language(row):
            return {"language": None if row["number"] % 100 < 90 else "en"}

        pipeline = Pipeline(source_of(numbered(), shuffle_block_size="none")).map_transform(language)
        pipeline = pipeline.filter('language == "en"').text_template("{language} {number}")
        kept = texts_of(finished(pipeline, tiny_tokenizer, prefetch_buffer_size=1), tiny_tokenizer)
        assert kept == {f"en {n}" for n in range(400) if n % 100 >= 90}

    def test_whole_numbers_beside_floats_are_floats_in_every_block(self, tiny_tokenizer):
        def half(row):
            return {"half": row["number"] / 2 if row["number"] % 2 else row["number"] // 2}

        for lookahead in (1, 1 << 20):
            pipeline = Pipeline(source_of(numbered(60))).map_transform(half).text_template("{half}")
            kept = texts_of(finished(pipeline, tiny_tokenizer, prefetch_buffer_size=lookahead), tiny_tokenizer)
            assert kept == {f"{n / 2:g}" for n in range(60)}

    def test_a_value_that_comes_late_and_does_not_fit_is_a_fault_of_its_row(self, tiny_tokenizer):
        def late(row):
            return {"score": {1500: 0.5, 1600: "none", 1700: True, 1800: 2**70}.get(row["number"], row["number"])}

        source = source_of(numbered(2000), chunk_size=500)
        with pytest.raises(DataError, match=r'dataset "web", shard memory, row 1\d00: it gave .* for column "score"'):
            texts_of(finished(Pipeline(source).map_transform(late), tiny_tokenizer), tiny_tokenizer, 3000)
        skipping = finished(Pipeline(source).map_transform(late), tiny_tokenizer, on_error="skip", error_budget_rows=4)
        kept = texts_of(skipping, tiny_tokenizer, 800)
        assert not kept & {f"document {n} of some words" for n in (1500, 1600, 1700, 1800)}
        assert "document 1501 of some words" in kept

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
            ([float("nan"), float("inf")], "double", []),
            (["a\ud800", "b", ["c\ud800"]], "large_string", [0, 2]),
            ([object(), 1], "int64", [0]),
        ],
    )
    def test_types_of_mixed_values(self, values, kind, misfits):
        table = pa.table({"number": list(range(len(values)))})
        rows = applied(MapTransform(lambda row: {"x": values[row["number"]]}), table)
        assert str(rows.table.schema.field("x").type) == kind
        assert [place for place, _, _ in rows.failed] == misfits
        sound = [value for n, value in enumerate(values) if n not in misfits]
        for value, back in zip(sound, rows.table.column("x").to_pylist(), strict=True):
            if isinstance(value, dict):
                assert value == {key: item for key, item in back.items() if item is not None}
            elif kind != "double" or not np.isnan(value or 0):
                assert value == back

    def test_a_row_of_which_one_part_does_not_fit_is_left_out_whole_and_told_once(self):
        table = pa.table({"number": [1, 2, 3]})
        operator = MapTransform(
            lambda row: [{"x": 1, "y": 1}, {"x": "a", "y": "b"}] if row["number"] == 2 else {"x": 0}
        )
        rows = applied(operator, table)
        assert rows.table.column("number").to_pylist() == [1, 3]
        assert len(rows.failed) == 1

    def test_columns_named_wrongly_are_faults(self):
        rows = applied(MapTransform(lambda row: {7 if row["number"] else "_row": 1}), pa.table({"number": [0, 1]}))
        assert [reason for _, _, reason in rows.failed] == [
            "it gave a column named '_row'; a text other than '_row' is needed",
            "it gave a column named 7; a text other than '_row' is needed",
        ]

    def test_more_rows_are_tried_where_the_first_say_nothing(self):
        operator = MapTransform(lambda row: {"score": row["number"] / 4 if row["number"] > 200 else None})
        tables = [pa.table({"number": list(range(a, b))}) for a, b in ((0, 64), (64, 128), (128, 256))]
        found = probed([operator], *tables)
        assert dict(found.operators[0].types)["score"] == pa.float64()
        assert found.sample.table.num_rows == 64

    def test_a_column_that_stays_null_is_what_the_filters_behind_it_ask_for(self):
        operator = MapTransform(lambda row: {"a": None, "b": None, "c": None, "number": None})
        later = [Filter("b > 0.5"), Filter("c and a is null")]
        found = probed([operator, *later], pa.table({"number": [1, 2]}))
        assert dict(found.operators[0].types) == {
            "number": pa.int64(),
            "a": pa.large_string(),
            "b": pa.float64(),
            "c": pa.bool_(),
        }
        rows = applied(found.operators[0], pa.table({"number": [1]}))
        assert rows.table.schema.field("b").type == pa.float64()

    def test_a_column_that_no_row_had_is_a_fault_unless_its_type_is_told(self):
        def rare(row):
            return {"rare": 0.5} if row["number"] == 99 else {"rare": None} if row["number"] == 98 else {}

        table, late = pa.table({"number": [1, 2]}), pa.table({"number": [98, 99]})
        rows = applied(probed([MapTransform(rare)], table).operators[0], late)
        assert rows.table.column_names == ["number"]
        assert 'it gave a column "rare", which no row tried before the run has' in rows.failed[0][2]
        operator = MapTransform(rare, types={"rare": "float64"})
        rows = applied(probed([operator], table).operators[0], late)
        assert rows.table.column("rare").to_pylist() == [None, 0.5]
        assert operator.identity() != MapTransform(rare).identity()
        with pytest.raises(PipelineError, match=r"map_transform types is .* types of Arrow by the names of columns"):
            MapTransform(rare, types={"rare": "flaot"})

    @pytest.mark.parametrize("name", ["new", "number"])
    def test_a_number_that_no_column_can_hold_is_told_as_such_and_not_as_a_column_that_was_missing(self, name):
        table = pa.table({"number": [1, 2]})
        operator = probed([MapTransform(lambda row: {name: 10**30})], table).operators[0]
        told = applied(operator, table).failed[0][2]
        assert f'for column "{name}"; a whole number of 64 bits is needed' in told and "tried" not in told

    def test_fields_of_structs_are_looked_for_in_more_rows_than_the_first(self):
        def messages(row):
            return {"messages": [{"role": "user", "content": "x", **({"name": "y"} if row["number"] == 100 else {})}]}

        found = probed([MapTransform(messages)], *(pa.table({"number": list(range(a, a + 64))}) for a in (0, 64, 128)))
        assert "name: string" in str(dict(found.operators[0].types)["messages"])

    def test_batch_functions_keep_their_types_too(self):
        def halves(table):
            numbers = table.column("number").to_pylist()
            values = (
                [n // 2 if n % 2 == 0 else n / 2 for n in numbers] if numbers[0] < 10 else [str(n) for n in numbers]
            )
            return pa.table({"half": pa.array(values)})

        operator = probed([MapBatches(halves)], pa.table({"number": [1, 2]})).operators[0]
        assert applied(operator, pa.table({"number": [2, 4]})).table.schema.field("half").type == pa.float64()
        rows = applied(operator, pa.table({"number": [20, 40]}))
        assert [place for place, _, _ in rows.failed] == [0, 1]

    def test_what_a_transform_with_a_memory_gives_keeps_its_types(self, tiny_tokenizer):
        class Halved(Stateful):
            def push(self, state, row):
                return {"half": row["number"] / 2 if row["number"] % 2 else row["number"] // 2}

            def transform(self, row):
                return {"more": row["half"] if row["half"] % 1 else int(row["half"])}

        for lookahead in (1, 1 << 20):
            pipeline = Pipeline(source_of(numbered(60))).stateful_transform(Halved()).text_template("{half} {more}")
            kept = texts_of(finished(pipeline, tiny_tokenizer, prefetch_buffer_size=lookahead), tiny_tokenizer)
            assert kept == {f"{n / 2:g} {n / 2:g}" for n in range(60)}


class TestFaultsInValues:
    def test_a_product_that_is_too_large_is_a_fault_of_its_row(self, tiny_tokenizer):
        numbers = [2**62 if n == 333 else n for n in range(400)]
        source = source_of({**numbered(), "number": numbers})
        expected = (
            r'filter\("number \* 4 >= 0"\) failed on dataset "web", shard memory, row 333: it cannot be computed '
            r"\(overflow\); number 4611686018427387904"
        )
        with pytest.raises(DataError, match=expected):
            texts_of(finished(Pipeline(source).filter("number * 4 >= 0"), tiny_tokenizer), tiny_tokenizer)
        skipping = finished(Pipeline(source).filter("number * 4 >= 0"), tiny_tokenizer, on_error="skip")
        kept = texts_of(skipping, tiny_tokenizer, 300)
        assert kept == {f"document {n} of some words" for n in range(400) if n != 333}

    def test_what_no_row_can_be_computed_of_is_refused_at_once(self):
        with pytest.raises(PipelineError, match=r"cannot be computed .* its columns are text"):
            applied(Filter("text * 4 > 0"), pa.table({"text": ["a"]}))

    @pytest.mark.parametrize("how", ["template", "tokenize"])
    def test_bytes_that_are_no_text_are_a_fault_of_their_row(self, tiny_tokenizer, how):
        texts = [b"\xff\xfe" if n == 333 else f"document {n}".encode() for n in range(400)]
        source = source_of({"text": texts, "number": list(range(400))})
        pipeline = Pipeline(source).filter("number >= 0")
        if how == "template":
            pipeline = pipeline.text_template("{text}")
        told = (
            r'failed on dataset "web", shard memory, row 333: column "text" holds bytes that are no UTF-8; decode_text'
        )
        with pytest.raises(DataError, match=told):
            texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer)
        kept = texts_of(finished(pipeline, tiny_tokenizer, on_error="skip"), tiny_tokenizer)
        assert kept == {f"document {n}" for n in range(400) if n != 333}

    def test_the_row_that_ends_a_run_is_the_same_wherever_blocks_are_cut(self, tiny_tokenizer):
        def fails(row):
            if row["number"] == 300:
                raise ValueError("three hundred")
            return {}

        # The first operator fails over a later row than the second.
        source = source_of(numbered(), shuffle_block_size="none", chunk_size=400)
        told = set()
        for lookahead in (1, 1 << 24):
            pipeline = Pipeline(source).map_transform(fails)
            pipeline = pipeline.map_transform(lambda row: {"text": "x" if row["number"] != 290 else 1 / 0})
            pipeline = finished(pipeline, tiny_tokenizer, prefetch_buffer_size=lookahead, canonical_replicas=1)
            with pytest.raises(DataError) as caught:
                for _ in pipeline:
                    pass
            told.add(str(caught.value))
        assert len(told) == 1
        assert "row 290: ZeroDivisionError" in told.pop()

    def test_templates_name_the_column_that_is_no_text(self):
        table = pa.table({"tags": [["a"]], "text": ["b"]})
        with pytest.raises(PipelineError, match=r'column "tags" holds list<.*>, which is no text'):
            applied(TextTemplate("{tags} {text}"), table)


class TestComparisons:
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
            ("f16 > 0", [0]),
            ("word in ['a'] and contains(word, 'a')", [0]),
            ("none == 1 or none in ['a'] or none in [1] or not none or none and true or none == none", []),
            ("length(none) > 1 or contains(none, 'a') or lower(none) == 'a' or none.x > 1 or none", []),
            ("none is null", [0, 1]),
        ],
    )
    def test_of_numbers_of_any_type_and_of_nothing_but_null(self, text, kept):
        table = pa.table(
            {
                "i8": pa.array([1, 2], pa.int8()),
                "n": pa.array([1, BIG]),
                "u": pa.array([2**63, 2**64 - 1], pa.uint64()),
                "f16": pa.array([1.0, -1.0], pa.float16()),
                "word": pa.array(["a", "b"]).dictionary_encode(),
                "none": pa.nulls(2),
            }
        )
        assert np.flatnonzero(Expression(text).keep(table)).tolist() == kept

    @pytest.mark.parametrize(
        "text",
        ["n == 99999999999999999999999", "n in [-9223372036854775809]", f"n > {'9' * 5000}", "n > 2 - " + "9" * 30],
    )
    def test_whole_numbers_beyond_64_bits_are_refused_in_a_sentence(self, text):
        with pytest.raises(PipelineError, match=r"whole numbers go from -2\*\*63 to 2\*\*64 - 1; write a greater one"):
            Expression(text)

    def test_numbers_do_not_go_with_texts(self):
        for text in ("text in [1]", "text / 2 > 1", "n in ['a']", "text == 1"):
            with pytest.raises(PipelineError, match="cannot be computed"):
                Expression(text).keep(pa.table({"text": ["a"], "n": [1]}))


class TestTheCheckBeforeTheRun:
    def test_operators_behind_a_filter_are_tried_on_rows_that_it_leaves(self, tiny_tokenizer):
        def fails(row):
            raise ValueError("always")

        pipeline = Pipeline(source_of(numbered(3000))).filter("number > 2500").map_transform(fails)
        with pytest.raises(DataError, match=r"row 25\d\d: map_transform\(.*fails\) failed: ValueError: always"):
            _ = finished(pipeline, tiny_tokenizer).compiled

    def test_a_filter_that_leaves_nothing_is_named(self, tiny_tokenizer, caplog):
        pipeline = Pipeline(source_of(numbered(3000))).filter("number > 0").filter("number == 1111").map_transform(dict)
        with caplog.at_level(logging.WARNING, "zephon"):
            _ = finished(pipeline, tiny_tokenizer).compiled
        assert 'filter("number == 1111") leaves none of the ' in caplog.text
        assert "what comes after it is not checked" in caplog.text

    def test_columns_made_of_another_type_are_refused_before_the_run(self, tiny_tokenizer):
        pipeline = Pipeline(source_of(numbered())).map_transform(lambda row: {"text": row["number"]})
        expected = r'dataset "web", after its operators: tokenize: column "text" holds int64; text is needed'
        with pytest.raises(PipelineError, match=expected):
            _ = finished(pipeline, tiny_tokenizer).compiled

    def test_a_dataset_may_name_a_text_that_a_function_makes(self, tiny_tokenizer):
        dataset = Dataset.from_dict("web", {"body": ["a", "b"] * 50}, text_field="clean")
        pipeline = Pipeline(StaticMixtureWorkSource(datasets=[dataset]))
        pipeline = pipeline.map_transform(lambda row: {"clean": row["body"] * 3})
        assert texts_of(finished(pipeline, tiny_tokenizer), tiny_tokenizer, 5) == {"aaa", "bbb"}

    def test_data_without_text_are_told_with_what_makes_the_text(self, tiny_tokenizer):
        pipeline = Pipeline(source_of(numbered(20))).map_transform(lambda row: {"text": None})
        with pytest.raises(
            DataError, match='look at what the operators leave of them: tokenize takes the column "text"'
        ):
            next(iter(finished(pipeline, tiny_tokenizer)))
        with pytest.raises(DataError, match=r'name another column .text_field, say.: tokenize takes the column "text"'):
            next(iter(finished(Pipeline(source_of({"text": [""] * 20})), tiny_tokenizer)))


class TestSizes:
    def test_work_is_sized_by_all_columns_that_are_read(self, tiny_tokenizer, tmp_path):
        table = pa.table(
            {"text": ["a"] * 200, "large": [f"{n:05}" * 2000 for n in range(200)], "unread": ["b" * 99] * 200}
        )
        pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
        for dataset in (Dataset.from_path("d", tmp_path), Dataset.from_table("d", table)):
            pipeline = Pipeline(StaticMixtureWorkSource(datasets=[dataset]))
            plain = finished(pipeline, tiny_tokenizer).compiled.plan.row_bytes
            both = finished(pipeline.filter("length(large) > 5"), tiny_tokenizer).compiled.plan.row_bytes
            assert plain.tolist() == [64.0]
            assert 10_000 <= both[0] <= 10_100


def test_the_stream_is_the_same_for_other_groups_where_types_vary(tiny_tokenizer):
    def varied(row):
        return {"value": [None, row["number"], row["number"] / 3, True][row["number"] % 4]}

    def build(groups, group):
        pipeline = Pipeline(source_of(numbered(300))).map_transform(varied).text_template("{value} {text}")
        options = {"canonical_replicas": 4, "dp_degree": groups, "dp_group_id": group, "global_batch": 4}
        options |= {"on_error": "skip", "error_budget": 1.0, "runner": "inline"}
        return pipeline.tokenize(tiny_tokenizer).pack_flat(31).batch(1).options(**options)

    wanted = step_digests([build(1, 0)], 20, 4)
    for groups in (2, 4):
        assert step_digests([build(groups, group) for group in range(groups)], 20, 4) == wanted
