"""The ledger of a run over all its starts: what was rolled back does not count, and two runs are not taken for one."""

import shutil
from itertools import count, islice

import msgspec
import pytest

from zephon import DataError, Pipeline
from zephon.io import Dataset
from zephon.run import ledger as module
from zephon.run.ledger import compare, read_ledger
from zephon.work import StaticMixtureWorkSource

LANES, BATCH = 2, 4
TEXTS = [f"document {n} " + "of some words " * (n % 7) for n in range(60)]


def source_of(*names, seed=0, **settings):
    datasets = [Dataset.from_dict(name, {"text": [f"{name} {text}" for text in TEXTS]}) for name in names or ("a",)]
    return StaticMixtureWorkSource(datasets=datasets, seed=seed, chunk_size=10, **settings)


@pytest.fixture
def run(tiny_tokenizer, tmp_path, monkeypatch):
    """Makes a start of a run on any number of groups: gives its states."""
    starts = count()

    def start(
        folder, steps, state=None, *, source=None, groups=1, batch=BATCH, skip=None, seek=None, shuffle=8, **restore
    ):
        job = f"job {next(starts)}"
        monkeypatch.setattr(module, "_job", lambda: job)
        pipelines = []
        for group in range(groups):
            shape = {"canonical_replicas": LANES, "global_batch": batch, "dp_degree": groups, "dp_group_id": group}
            pipeline = Pipeline(source or source_of()).options(**shape, runner="inline", ledger=tmp_path / folder)
            pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(19).shuffle(shuffle).batch(2)
            if state:
                pipeline.restore(state, **restore)
            if skip:
                pipeline.skip(*skip)
            if seek:
                pipeline.seek(step=seek)
            pipelines.append(pipeline)
        for pipeline in pipelines:
            assert sum(len(each) for each in islice(pipeline, steps * batch // groups // 2)) == steps * batch // groups
        states = [pipeline.checkpoint() for pipeline in pipelines]
        for pipeline in pipelines:
            pipeline.close()
        return states

    start.folder = tmp_path
    return start


def test_a_run_resumed_with_another_global_batch_is_one_run(run):
    run("whole", 8)
    run("parts", 4, run("parts", 2), batch=2 * BATCH, groups=2)
    whole, parts = read_ledger(run.folder / "whole"), read_ledger(run.folder / "parts")
    assert (whole.global_batch, parts.global_batch, parts.global_batches) == (BATCH, None, (BATCH, 2 * BATCH))
    assert compare(whole, parts) is None
    assert parts.groups[[0, 8]].tolist() == [[1, 2], [2, 2]]
    run("other", 8, source=source_of(seed=1))
    difference = compare(parts, read_ledger(run.folder / "other"))
    assert difference.step is None and difference.text.startswith("lane 0 (record 0)")


def test_a_takeover_and_an_accepted_change_go_on_in_the_ledger_and_rewind_it(run):
    states = run("one", 5, source=source_of("b"))
    early = run("two", 2, source=source_of("b"))
    run("two", 4, early, source=source_of("b"))  # rolled back
    taken_over = run("two", 3, early, source=source_of("a", "b", continues=source_of("b")))
    changed = run("one", 2, states, source=source_of("b"), shuffle=6, allow_changes=["shuffle"])
    run("one", 2, changed, source=source_of("b"), shuffle=6)
    one, two = read_ledger(run.folder / "one"), read_ledger(run.folder / "two")
    assert (len(one.sequence), len(two.sequence)) == (36, 20)
    assert two.documents(0).startswith("b row")
    seen = " ".join(two.documents(record) for record in range(20))
    assert "a row" in seen and "dataset" not in seen
    assert compare(one, two).sequence >= 8
    assert taken_over


def test_steps_left_out_after_a_rollback_are_not_in_the_ledger(run, caplog):
    states = run("run", 3)
    run("run", 7, states)
    assert "counts as rolled back" not in caplog.text
    run("run", 1, states, skip=(4, 6))
    assert "goes up to record 39, and this run goes on from record 12" in caplog.text
    run("run", 5, states, groups=2, skip=(4, 6))
    assert "goes up to record 15, and this run goes on from record 13" in caplog.text
    assert sorted(read_ledger(run.folder / "run").step_digests(BATCH)) == [1, 2, 3, 4, 7, 8, 9, 10]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_ledger_of_a_run_with_other_data_is_refused_at_start_and_when_read(run, groups):
    run("run", 2)
    with pytest.raises(DataError, match="holds the ledger of a run with other data"):
        run("run", 2, source=source_of(seed=1), seek=5, groups=groups)
    run("other", 2, source=source_of(seed=1), seek=5, groups=groups)
    shutil.copytree(run.folder / "other", run.folder / "run", dirs_exist_ok=True)
    with pytest.raises(DataError, match="of different runs, of other data"):
        read_ledger(run.folder / "run")


@pytest.mark.parametrize("same_job", [True, False])
def test_of_two_live_jobs_the_one_begun_last_counts_and_it_says_so(
    tmp_path, tiny_tokenizer, monkeypatch, caplog, same_job
):
    base = Pipeline(source_of()).options(ledger=tmp_path).tokenize(tiny_tokenizer).pack_flat(19).batch(2)
    streams = []
    for port in (1, 1 if same_job else 2):
        monkeypatch.setenv("MASTER_PORT", f"{port}")
        streams.append(iter(base.options()))
        next(streams[-1])
    assert ("goes on from record 0" in caplog.text) != same_job  # ranks of one group, such as tensor-parallel ones
    next(streams[0])
    assert len(read_ledger(tmp_path).sequence) == 2


def test_ledgers_of_the_version_before_are_read_and_gone_on_with(run):
    states = run("run", 2)
    (file,) = (run.folder / "run").glob("*.ledger")
    content = file.read_bytes()
    head = msgspec.json.decode(content[:512])
    old = {key: head[key] for key in ("lanes", "global_batch", "dp_degree", "dp_group_id", "datasets")}
    file.write_bytes(msgspec.json.encode({"zephon_ledger": 1, **old}).ljust(511) + b"\n" + content[512:])
    run("run", 2, states)
    run("whole", 4)
    assert compare(read_ledger(run.folder / "run"), read_ledger(run.folder / "whole")) is None
    assert len(read_ledger(run.folder / "run").step_digests(BATCH)) == 4


def test_names_of_many_datasets_are_kept(run):
    names = [f"a dataset with quite a long name, number {n}" for n in range(30)]
    run("run", 2, source=source_of(*names))
    assert read_ledger(run.folder / "run").datasets == names
