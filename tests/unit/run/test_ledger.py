"""The ledger of a run over all its starts: what was rolled back does not count, and two runs are not taken for one."""

import os
import shutil
import signal
import threading
import time
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


@pytest.fixture
def base(tiny_tokenizer, tmp_path):
    pipeline = Pipeline(source_of()).options(ledger=tmp_path, runner="inline")
    return pipeline.tokenize(tiny_tokenizer).pack_flat(19).batch(2)


def test_a_run_resumed_with_another_global_batch_is_one_run(run):
    run("whole", 8)
    run("parts", 4, run("parts", 2), batch=2 * BATCH, groups=2)
    whole, parts = read_ledger(run.folder / "whole"), read_ledger(run.folder / "parts")
    assert (whole.global_batch, parts.global_batch) == (BATCH, None)
    assert (whole.steps, parts.steps) == (((0, 0, BATCH),), ((0, 0, BATCH), (2 * BATCH, 2, 2 * BATCH)))
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


def test_of_two_live_pipelines_the_second_is_refused_unless_they_are_ranks_of_one_job(base, tmp_path, monkeypatch):
    first = base.options()
    next(iter(first))
    for address, port in (("", ""), ("localhost", "2"), ("10.0.0.1", "1")):
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", port)
        peers = [base.options() for _ in range(2)]
        with pytest.raises(DataError, match="in which another pipeline writes at present"):
            next(iter(peers[0]))
        first.close()
        next(iter(peers[0]))
        if port:  # ranks of one group, such as tensor-parallel ones
            next(iter(peers[1]))
            peers[1].close()
        del first
        first = peers[0]
    del first, peers
    files = list(tmp_path.glob("*.ledger"))
    other = base.options(canonical_replicas=2, dp_degree=2, dp_group_id=1)
    with pytest.raises(DataError, match="a run with other data"):
        next(iter(other))
    assert len(list(tmp_path.glob("*.ledger"))) == len(files) == len(list(tmp_path.glob("*.spans")))


@pytest.mark.parametrize("end", ["killed", "forked"])
def test_what_a_crash_leaves_behind_does_not_block_a_resume(base, tmp_path, end):
    """A process that is killed holds no ledger, and one that it forked does not either."""
    child = os.fork()
    if not child:
        stream = iter(base)
        next(stream)
        if end == "forked" and not os.fork():
            time.sleep(6)
            os._exit(0)
        (tmp_path / "ready").touch()
        time.sleep(6)
        os._exit(0)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    resumed = base.options()
    with pytest.raises(DataError, match="in which another pipeline writes at present"):
        next(iter(resumed))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert next(iter(resumed)).sequence_numbers.tolist() == [0, 1]


def test_a_node_that_died_is_waited_for(base, monkeypatch, caplog):
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.5)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "another")
    first = base.options()
    next(iter(first))
    monkeypatch.undo()
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.5)
    with pytest.raises(DataError, match="on another"):
        next(iter(first.options()))
    assert "waiting for dp1-0-" in caplog.text
    threading.Timer(0.1, first.close).start()
    assert next(iter(first.options()))


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
