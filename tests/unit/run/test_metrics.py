"""Metrics beside the ledger: a line per step, which crashes and rollbacks leave true."""

from itertools import count, islice

import pytest

from zephon import Pipeline
from zephon.io import Dataset
from zephon.run import ledger as module
from zephon.run.ledger import read_metrics
from zephon.work import StaticMixtureWorkSource

BATCH = 4
TEXTS = {name: [f"{name} {n} " + "of some words " * (n % 7) for n in range(60)] for name in ("a", "b")}
TEXTS["a"][3:30:9] = ["a long " + "document " * 90] * 3
TEXTS["b"][7:10] = ["", " \n", None]


@pytest.fixture
def run(tiny_tokenizer, tmp_path, monkeypatch):
    """Makes a start of a run: gives tokens by source of each microbatch, and the states."""
    starts = count()

    def start(steps, state=None, *, groups=1, batch=BATCH, oversized="split", **options):
        job = f"job {next(starts)}"
        monkeypatch.setattr(module, "_job", lambda: job)
        datasets = [Dataset.from_dict(name, {"text": texts}) for name, texts in TEXTS.items()]
        source = StaticMixtureWorkSource(datasets=datasets, mixture={"a": 3, "b": 1}, seed=1, chunk_size=16)
        pipelines, batches = [], []
        for group in range(groups):
            shape = {"canonical_replicas": 2, "global_batch": batch, "dp_degree": groups, "dp_group_id": group}
            pipeline = Pipeline(source).options(**shape, runner="inline", ledger=tmp_path / "run", **options)
            pipeline = pipeline.filter("not starts_with(text, 'a 5')", datasets=["a"]).tokenize(tiny_tokenizer)
            pipeline = pipeline.pack_flat(63, "best_fit", oversized=oversized).shuffle(8).batch(2)
            pipelines.append(pipeline.restore(state) if state else pipeline)
        for pipeline in pipelines:
            batches += islice(pipeline, steps * batch // groups // 2)
        states = [pipeline.checkpoint() for pipeline in pipelines]
        start.mixture = [pipeline.mixture() for pipeline in pipelines]
        for pipeline in pipelines:
            pipeline.close()
        return batches, states

    start.folder = tmp_path / "run"
    return start


def tokens_of(metrics):
    return {number: sum(step.tokens.values()) for number, step in metrics.steps.items()}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_has_the_tokens_of_its_records_on_any_number_of_ranks(run, groups):
    batches, _ = run(5, groups=groups)
    metrics = read_metrics(run.folder)
    expected = dict.fromkeys(range(1, 6), 0)
    for batch in batches:
        for number, length in zip(batch.sequence_numbers.tolist(), batch.lengths.tolist(), strict=True):
            expected[number // BATCH + 1] += length
    assert tokens_of(metrics) == expected and metrics.places == 64
    assert all(step.records == BATCH and len(step.waits) == groups for step in metrics.steps.values())
    assert all(step.wanted == {"a": 0.75, "b": 0.25} for step in metrics.steps.values())
    by_source = {name: sum(step.tokens.get(name, 0) for step in metrics.steps.values()) for name in "ab"}
    assert by_source == {name: sum(each[name].given for each in run.mixture) for name in "ab"}
    assert metrics.rows == {"a": 60, "b": 60}
    assert all(0 < wait < 60 for step in metrics.steps.values() for wait in step.waits.values())


def test_rows_left_out_have_reason_and_source(run):
    run(12)
    metrics = read_metrics(run.folder)
    (mixture,) = run.mixture
    assert metrics.left["blank"] == {"b": mixture["b"].skipped} and mixture["b"].skipped > 0
    assert metrics.left["filtered"]["a"] == mixture["a"].dropped > 0
    assert set(metrics.left) == {"blank", "filtered"}
    assert metrics.read["a"] <= mixture["a"].rows


def test_documents_too_long_are_left_out_too(run):
    run(20, oversized="drop")
    long = read_metrics(run.folder).left["too long"]
    assert set(long) == {""} and long[""] >= 1


def test_what_was_rolled_back_does_not_count(run):
    _, early = run(3)
    run(6, early)
    again, _ = run(4, early, groups=2)
    metrics = read_metrics(run.folder)
    assert sorted(metrics.steps) == [1, 2, 3, 4, 5, 6, 7]
    assert all(step.records == BATCH for step in metrics.steps.values())
    assert [len(metrics.steps[step].waits) for step in (3, 4)] == [1, 2]
    assert sum(tokens_of(metrics)[step] for step in (4, 5, 6, 7)) == sum(int(batch.lengths.sum()) for batch in again)


def test_steps_are_those_of_the_trainer_when_the_global_batch_changes(run):
    _, states = run(3)
    run(2, states, batch=8)
    assert {number: step.records for number, step in read_metrics(run.folder).steps.items()} == {
        **dict.fromkeys((1, 2, 3), 4),
        **dict.fromkeys((4, 5), 8),
    }


def test_a_file_that_is_cut_off_anywhere_counts_up_to_there(run):
    run(4)
    (file,) = run.folder.glob("*.steps")
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    assert len(lines) == 5
    for cut in range(0, len(content), 7):
        file.write_bytes(content[:cut])
        whole = sum(len(b"".join(lines[: n + 1])) <= cut + 1 for n in range(5))  # a line without its end is whole, too
        assert len(read_metrics(run.folder).steps) == max(0, whole - 1)
    for junk in (b"\xff\x00", b"[]\n", b'{"until": -1}\n'):
        file.write_bytes(b"".join(lines[:3]) + junk + b"".join(lines[3:]))
        assert sorted(read_metrics(run.folder).steps) == [1, 2]
    file.unlink()
    assert read_metrics(run.folder).steps == {}


def test_a_line_takes_little_space(run):
    run(40)
    (file,) = run.folder.glob("*.steps")
    assert file.stat().st_size < 40 * (150 + 2 * 15) + 1000
