"""Datasets of Hugging Face, read from the Arrow tables that they map into memory."""

import pickle

import datasets
import numpy as np
import pyarrow as pa
import pytest

from support.runs import build_all, go_on
from zephon import Pipeline
from zephon.errors import DataError, RecipeError
from zephon.io import Dataset, DecodeCache
from zephon.work import StaticMixtureWorkSource

N = 3000
ROWS = {
    "text": [f"document {n} " * (n % 17) + "é木" for n in range(N)],
    "number": list(range(N)),
    "meta": [{"lang": "de" if n % 3 else "en", "note": None} for n in range(N)],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A dataset of several files and record batches, mapped into memory."""
    folder = tmp_path_factory.mktemp("saved")
    datasets.Dataset.from_dict(ROWS).save_to_disk(folder, num_shards=3)
    return datasets.load_from_disk(folder)


def opened(dataset, columns=("text", "number"), size_column="text"):
    given = Dataset.from_huggingface("hub", dataset)
    return given.open(list(columns), size_column=size_column, cache=DecodeCache(1 << 20))


VIEWS = {
    "as saved": lambda d: d,
    "shuffled": lambda d: d.shuffle(seed=3),
    "selected": lambda d: d.select([7, 7, 2999, 0, 1500]),
    "a range": lambda d: d.select(range(900, 2100)),
    "split": lambda d: d.train_test_split(0.1, seed=1)["test"],
    "joined": lambda d: datasets.concatenate_datasets([d.select(range(50)), d.shuffle(seed=1)]),
    "columns changed": lambda d: d.remove_columns("text").rename_column("note", "text"),
    "with a format": lambda d: d.with_format("numpy", columns=["number"]),
    "in memory": lambda d: datasets.Dataset.from_dict(ROWS),
}


@pytest.mark.parametrize("view", VIEWS)
def test_rows_are_those_of_the_dataset_in_its_order(saved, view):
    base = saved.add_column("note", [f"note {n}" for n in range(N)]) if view == "columns changed" else saved
    dataset = VIEWS[view](base)
    catalog = opened(dataset).catalog
    assert catalog.rows == len(dataset)
    rows = np.random.default_rng(0).integers(0, len(dataset), 200)
    taken = opened(dataset).take(rows)
    plain = dataset.with_format(None)
    assert taken["text"].to_pylist() == [plain[row]["text"] for row in rows.tolist()]
    assert taken["number"].to_pylist() == [plain[row]["number"] for row in rows.tolist()]
    assert catalog.bytes == sum(len(text.encode()) for text in plain["text"])


def test_columns_may_be_paths_and_templates(saved):
    template = "{meta.lang}: {text}"
    taken = opened(saved, [template, "meta.lang"], template).take(np.array([2, 3]))
    assert taken[template].to_pylist() == [f"de: {ROWS['text'][2]}", f"en: {ROWS['text'][3]}"]
    assert taken["meta.lang"].to_pylist() == ["de", "en"]


def test_the_identity_is_that_of_the_content_wherever_it_lies(saved, tmp_path):
    def fingerprint(dataset):
        return opened(dataset).catalog.fingerprint

    expected = fingerprint(saved)
    in_one_file = datasets.Dataset.from_dict(ROWS)
    in_one_file.save_to_disk(tmp_path / "other place", num_shards=1)
    for same in (in_one_file, datasets.load_from_disk(tmp_path / "other place"), pickle.loads(pickle.dumps(saved))):
        assert fingerprint(same) == expected
    assert fingerprint(saved.shuffle(seed=3)) == fingerprint(saved.shuffle(seed=3).flatten_indices()) != expected
    for name, row, value in (
        ("text", 1234, "longer or shorter"),
        ("text", N - 1, ROWS["text"][-1].replace("2", "1")),  # as long as before
        ("number", 0, 1),
        ("meta", 0, {"lang": "en", "note": "n"}),
    ):
        changed = {**ROWS, name: [*ROWS[name][:row], value, *ROWS[name][row + 1 :]]}
        assert fingerprint(datasets.Dataset.from_dict(changed)) != expected, name
    assert fingerprint(saved.select(range(N - 1))) != expected


def test_rows_are_not_copied_and_travel_as_paths(tmp_path):
    text = {"text": [f"{n} " + "x" * 10_000 for n in range(3000)]}
    datasets.Dataset.from_dict(text).save_to_disk(tmp_path)
    dataset = datasets.load_from_disk(tmp_path)
    before = pa.total_allocated_bytes()
    ready = opened(dataset, ["text"])
    ready.take(np.arange(0, 3000, 100))
    assert pa.total_allocated_bytes() - before < 5e6  # of 30 MB
    travelling = pickle.dumps(ready)
    assert len(travelling) < 100_000
    assert pickle.loads(travelling).take(np.array([2999]))["text"].to_pylist() == text["text"][-1:]


SHAPE = {"lanes": 4, "batch": 8, "seq_len": 32}


def test_batches_do_not_depend_on_groups_and_resumes(saved, tiny_tokenizer):
    source = StaticMixtureWorkSource([Dataset.from_huggingface("hub", saved.shuffle(seed=5))], seed=1)
    expected, _ = go_on(build_all(source, tiny_tokenizer, **SHAPE), 12, 8)
    first, states = go_on(build_all(source, tiny_tokenizer, **SHAPE, groups=2), 5, 8)
    rest, _ = go_on(build_all(source, tiny_tokenizer, **SHAPE, groups=4), 7, 8, states)
    assert first + rest == expected


@pytest.mark.deep
def test_batches_are_the_same_in_other_processes(saved, tiny_tokenizer):
    source = StaticMixtureWorkSource([Dataset.from_huggingface("hub", saved.shuffle(seed=5))], seed=1)
    expected, _ = go_on(build_all(source, tiny_tokenizer, **SHAPE), 12, 8)
    isolated, _ = go_on(build_all(source, tiny_tokenizer, **SHAPE, isolate=True), 12, 8)
    (plain,) = build_all(source, tiny_tokenizer, **SHAPE)
    operators = plain._operators
    processed = Pipeline(source).options(canonical_replicas=4, global_batch=8).map_transform(shorter, runner="process")
    threaded = Pipeline(source).options(canonical_replicas=4, global_batch=8).map_transform(shorter, runner="threads")
    runs = [go_on([each._derive(operators=(*each._operators, *operators))], 12, 8)[0] for each in (processed, threaded)]
    assert isolated == expected and runs[0] == runs[1] != expected


def shorter(row):
    return {"text": row["text"][:50]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: datasets.DatasetDict(train=d, test=d), r"DatasetDict with the splits 'train', 'test'.*\['train'\]"),
        (
            lambda d: object.__new__(datasets.IterableDataset),  # whose making imports torch
            r"IterableDataset.*without streaming=True.*hf://",
        ),
        (lambda d: d.with_transform(lambda rows: rows), r"with a transform .set_transform.*dataset.map"),
        (lambda d: d.data.table, r"pyarrow.Table; expected a datasets.Dataset"),
    ],
)
def test_what_cannot_be_read_in_any_order_as_stored_is_refused(saved, make, message):
    with pytest.raises(RecipeError, match=message):
        Dataset.from_huggingface("hub", make(saved))


def test_an_optional_column_that_is_missing_is_null(saved):
    given = Dataset.from_huggingface("hub", saved)
    columns = {"columns": ["text", "tools"], "size_column": "text", "optional": {"tools": None}}
    taken = given.open(**columns, cache=DecodeCache(1 << 20)).take(np.array([5]))
    assert taken.to_pylist() == [{"text": ROWS["text"][5], "tools": None}]


def test_missing_columns_and_rows_are_refused(saved):
    with pytest.raises(DataError, match=r"no column 'txt'.*did you mean 'text'"):
        opened(saved, ["txt"], "txt")
    with pytest.raises(DataError, match="expected text"):
        opened(saved, ["number"], "number")
    with pytest.raises(DataError, match="without rows"):
        opened(saved.select([]))
