"""Token ids that are there already, with masks and positions."""

import json

import numpy as np
import pyarrow as pa
import pytest

from zephon import CheckpointError, DataError, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import Rows
from zephon.work import StaticMixtureWorkSource

IDS = [[1, 2, 3], [], None, [4], [5, 6, 7, 8, 9]]


def encoded(columns, skips=False, bos=None, eos=None, vocab=100, **options):
    from types import SimpleNamespace

    spec = Pretokenized(**options)
    table = pa.table(
        {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in columns.items()}
    )
    rows = Rows(table, np.arange(table.num_rows), skips)
    made = spec.encoder(SimpleNamespace(vocab_size=vocab), bos, eos).encode(rows)
    cut = made.offsets[1:-1]
    parts = [
        None if column is None else [p.tolist() for p in np.split(column, cut)]
        for column in (made.tokens, made.loss, made.positions)
    ]
    return made.places.tolist(), *parts, {place: reason for place, _, reason in rows.failed}


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.list_(pa.int32()),
        pa.large_list(pa.uint16()),
        pa.list_(pa.uint64()),
        pa.large_list(pa.int8()),
        pa.list_view(pa.int32()),
    ],
)
def test_ids_come_from_any_list_of_whole_numbers(kind):
    column = (
        pa.array([[0], *IDS], pa.list_(pa.int64())).cast(kind)
        if not pa.types.is_list_view(kind)
        else pa.array([[0], *IDS], kind)
    )
    places, tokens, loss, positions, _ = encoded({"input_ids": column.slice(1)})
    assert (places, tokens, loss, positions) == ([0, 3, 4], [[1, 2, 3], [4], [5, 6, 7, 8, 9]], None, None)


def test_ids_come_from_json_text_and_lists_of_one_length():
    texts = [None if ids is None else json.dumps(ids) for ids in IDS]
    assert encoded({"input_ids": texts})[1] == [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert encoded({"input_ids": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))})[1] == [[1, 2], [3, 4]]


def test_masks_labels_and_positions_go_with_them():
    columns = {
        "input_ids": IDS,
        "loss": [[0, 1, 1], [], None, [1], [0, 0, 1, 0, 1]],
        "labels": [[-100, 2, 3], [], None, [4], [-100, -100, 7, -100, 9]],
        "at": [[0, 0, 1], [], None, [7], [4, 3, 2, 1, 0]],
    }
    wanted = [[False, True, True], [True], [False, False, True, False, True]]
    _, _, loss, positions, _ = encoded(columns, loss="loss", positions="at")
    assert (loss, positions) == (wanted, [[0, 0, 1], [7], [4, 3, 2, 1, 0]])
    assert encoded(columns, labels="labels")[2] == wanted
    flags = [None if row is None else [bool(flag) for flag in row] for row in columns["loss"]]
    assert encoded({**columns, "loss": flags}, loss="loss")[2] == wanted


def test_long_rows_are_cut_or_split_with_all_that_belongs_to_them():
    columns = {"input_ids": IDS, "loss": [[0, 1, 1], [], None, [1], [0, 0, 1, 0, 1]]}
    places, tokens, loss, _, _ = encoded(columns, loss="loss", max_length=2)
    assert (places, tokens) == ([0, 3, 4], [[1, 2], [4], [5, 6]]) and loss == [[False, True], [True], [False, False]]
    places, tokens, loss, _, _ = encoded(columns, loss="loss", max_length=2, split_long_samples=True)
    assert places == [0, 0, 3, 4, 4, 4] and tokens == [[1, 2], [3], [4], [5, 6], [7, 8], [9]]
    assert loss[-1] == [True]
    _, tokens, loss, _, _ = encoded(
        columns, loss="loss", bos=90, eos=91, max_length=4, tokenizer_id="t", special_tokens="bos_eos"
    )
    assert tokens == [[90, 1, 2, 91], [90, 4, 91], [90, 5, 6, 91]] and loss[0] == [True, False, True, True]


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({"input_ids": [1, 100]}, {}, "token id 100; expected one from 0 to 99"),
        ({"input_ids": [-1]}, {}, "token id -1"),
        ({"input_ids": [1, None]}, {}, "holds a null in its list"),
        ({"loss": [1, 1, 1, 1]}, {"loss": "loss"}, '"loss" holds 4 values for 2 ids'),
        ({"loss": None}, {"loss": "loss"}, '"loss" holds 0 values for 2 ids'),
        ({"loss": [1, 2]}, {"loss": "loss"}, "holds 2; expected 0 or 1"),
        ({"labels": [1, 5]}, {"labels": "labels"}, "holds 5 for id 2; expected -100 or the id"),
        ({"at": [-1, 0]}, {"positions": "at"}, "the position -1"),
    ],
)
def test_rows_that_do_not_fit_are_told_and_alone_left_out(changed, options, words):
    row = {"input_ids": [1, 2], "loss": [1, 1], "labels": [1, -100], "at": [0, 1]}
    rows = [row, {**row, **changed}, row]
    places, tokens, _, _, failed = encoded({key: [r[key] for r in rows] for key in row}, skips=True, **options)
    assert (places, tokens) == ([0, 2], [[1, 2], [1, 2]]) and words in failed[1]


def test_columns_of_another_type_are_refused_before_the_first_batch(tiny_tokenizer):
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("a", {"input_ids": [[0.5]], "text": ["x"]})])
    with pytest.raises(PipelineError, match=r"holds list<.*double>; expected lists of whole numbers"):
        next(iter(Pipeline(source).options(runner="inline").pretokenized().pack_flat(8).batch(1)))
    with pytest.raises(PipelineError, match='needs the column "ids"'):
        Pipeline(source).pretokenized("ids").pack_flat(8).batch(1).explain()
    with pytest.raises(PipelineError, match="say the same thing twice"):
        Pipeline(source).pretokenized(loss="a", labels="b")
    with pytest.raises(PipelineError, match="needs tokenizer_id"):
        Pipeline(source).pretokenized(special_tokens="eos")


@pytest.mark.parametrize("kind", ["jsonl", "table"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_column_of_text_that_is_named_as_ids_is_refused_before_the_first_batch(tmp_path, kind, on_error):
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n' * 100)
    table = Dataset.from_dict("a", {"text": ["words"] * 100})
    dataset = table if kind == "table" else Dataset.from_path("a", tmp_path)
    pipeline = Pipeline(StaticMixtureWorkSource([dataset])).options(on_error=on_error, error_budget=1.0)
    refused = r'pretokenized cannot use any of the .* rows tried.*row 0: "text" is no list of whole numbers'
    with pytest.raises(DataError, match=refused):
        pipeline.pretokenized("text").pack_flat(7).batch(1).explain()


def test_a_single_column_of_text_is_not_taken_for_token_ids(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')
    pipeline = Pipeline(StaticMixtureWorkSource([Dataset.from_path("a", tmp_path / "a.jsonl")]))
    with pytest.raises(PipelineError, match='needs the column "input_ids", which is not there'):
        next(iter(pipeline.pretokenized().pack_flat(7).batch(1)))


def test_a_pipeline_of_ids_needs_no_tokenizer_and_mixes_with_text(tiny_tokenizer):
    ids = Dataset.from_dict("ids", {"input_ids": [[10, 11, 12]] * 50, "loss": [[0, 1, 1]] * 50})
    alone = Pipeline(StaticMixtureWorkSource(datasets=[ids])).options(runner="inline").pretokenized(loss="loss")
    batch = next(iter(alone.pack_flat(11).batch(2)))
    assert batch.tokens.tolist() == [[10, 11, 12] * 4] * 2
    fields = batch.to_training(as_numpy=True, return_loss_mask=True)
    assert fields["loss_mask"][0].tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    text = Dataset.from_dict("text", {"text": ["some words"] * 50})
    both = (
        Pipeline(StaticMixtureWorkSource(datasets=[ids, text], seed=3))
        .options(runner="inline")
        .pretokenized(loss="loss", datasets=["ids"], tokenizer_id=tiny_tokenizer)
        .tokenize(tiny_tokenizer, datasets=["text"])
        .pack_flat(64)
        .batch(4)
    )
    batch = next(iter(both))
    trained = batch.to_training(as_numpy=True, return_loss_mask=True)["loss_mask"]
    assert 0.6 < trained.mean() < 1 and set(batch.provenance().column("dataset").to_pylist()) == {"ids", "text"}


BESIDE = {
    "loss": "loss",
    "loss_mask": "loss",
    "assistant_masks": "loss",
    "completion_mask": "loss",
    "labels": "labels",
    "position_ids": "positions",
    "weight": None,
    "seq_lengths": None,
}


def ids_beside(tmp_path, kind, columns, count=100):
    """A dataset of token ids: a table, JSON lines, or JSON lines of which only the last row has all columns."""
    rows = [{key: value for key, value in columns.items() if kind != "late" or key == "input_ids"}] * (count - 1)
    rows = [*rows, columns]
    if kind == "table":
        return Dataset.from_table("a", pa.Table.from_pylist(rows))
    if kind == "structs":
        return Dataset.from_table("a", pa.Table.from_pylist([{"data": row} for row in rows]))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Dataset.from_path("a", tmp_path)


def streamed(dataset, before=lambda pipeline: pipeline, **options):
    pipeline = before(Pipeline(StaticMixtureWorkSource([dataset])).options(runner="inline", canonical_replicas=1))
    batches = iter(pipeline.pretokenized(**options).pack_flat(11).batch(1))
    return [next(batches) for _ in range(40)]


@pytest.mark.parametrize("kind", ["table", "structs", "lines", "late"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_column_that_changes_what_is_trained_on_is_used_or_refused_by_name(tmp_path, name, kind):
    value = [-100, 11, 12] if name == "labels" else 1 if name == "weight" else [0, 1, 1]
    dataset = ids_beside(tmp_path, kind, {"input_ids": [10, 11, 12], name: value})
    field, column = ("data.input_ids", f"data.{name}") if kind == "structs" else ("input_ids", name)
    remedy = "no option takes it" if BESIDE[name] is None else f'({BESIDE[name]}="{column}", in a recipe {BESIDE[name]}'
    error = DataError if kind in ("structs", "late") else PipelineError
    with pytest.raises(error, match=f'pretokenized does not use column "{column}"') as info:
        streamed(dataset, field=field)
    assert remedy in str(info.value)
    batches = streamed(dataset, field=field, ignored=[column])
    assert batches[0].tokens[0, :3].tolist() == [10, 11, 12]
    if BESIDE[name] in ("loss", "labels") and kind != "late":
        (batch, *_) = streamed(dataset, field=field, **{BESIDE[name]: column})
        assert batch.to_training(as_numpy=True, return_loss_mask=True)["loss_mask"].mean() < 0.8


def test_a_column_that_a_map_reads_is_its_business_and_one_that_it_makes_is_not(tmp_path):
    dataset = ids_beside(tmp_path, "table", {"input_ids": [10, 11, 12], "labels": [-100, 11, 12]})
    streamed(dataset, lambda p: p.map_transform(lambda row: row))
    streamed(dataset, lambda p: p.filter("length(labels) == 3"))
    text = Dataset.from_dict("a", {"text": ["some words"] * 40})
    made = {"input_ids": [10, 11, 12], "labels": [-100, 11, 12]}
    with pytest.raises(PipelineError, match='pretokenized does not use column "labels"'):
        streamed(text, lambda p: p.map_transform(lambda row: made))
    streamed(text, lambda p: p.map_transform(lambda row: made), labels="labels")


@pytest.mark.parametrize("kind", ["table", "structs", "lines", "late"])
def test_an_attention_mask_of_ones_is_fine_and_padding_is_not(tmp_path, kind):
    folder = "data." if kind == "structs" else ""
    columns = {"input_ids": [10, 11, 12], "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 0]}
    streamed(ids_beside(tmp_path, kind, columns), field=folder + "input_ids")
    padded = ids_beside(tmp_path, kind, {**columns, "attention_mask": [1, 1, 0]})
    with pytest.raises(DataError, match=rf'"{folder}attention_mask" holds 0, so the id there is padding'):
        streamed(padded, field=folder + "input_ids")
    streamed(padded, field=folder + "input_ids", ignored=[folder + "attention_mask"])


def test_a_mask_that_is_named_leaves_others_to_the_user():
    columns = {"input_ids": [10, 11, 12], "labels": [10, 11, 12], "loss_mask": [0, 1, 1], "attention_mask": [1, 0, 1]}
    table = Dataset.from_table("a", pa.Table.from_pylist([columns] * 40))
    streamed(table, loss="attention_mask")


def test_a_run_from_before_the_attention_mask_was_read_goes_on_where_it_is_left_out():
    columns = {"input_ids": [[n, n + 1, n + 2] for n in range(40)], "attention_mask": [[1, 1, 1]] * 40}

    def pipeline(**options):
        source = StaticMixtureWorkSource([Dataset.from_dict("a", columns)], seed=1)
        ids = Pipeline(source).options(runner="inline", canonical_replicas=2, global_batch=2).pretokenized(**options)
        return ids.pack_flat(8).batch(2)

    run = pipeline(ignored=["attention_mask"])
    batches = iter(run)
    next(batches)
    state = run.checkpoint()
    assert state["fingerprint"]["dataset a"]["content"] == "c1a1367b47df7737"  # what earlier versions wrote without it
    with pytest.raises(CheckpointError, match="dataset a: content was 'c1a1367b47df7737', is '8175e0f10db9bd8a'"):
        pipeline().restore(state)
    resumed = pipeline(ignored=["attention_mask"])
    resumed.restore(state)
    assert next(iter(resumed)).tokens.tolist() == next(batches).tokens.tolist()
