"""Processes at work for a pipeline: they come and go with it, die without harm, and say what is wrong."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from support.chat_data import CHATML, write_chat_tokenizer
from support.operator_data import fails_on_sevens, shout
from support.process_data import FailsToBegin, Pid, Unsendable, children_of, dies, dies_once, exits, slow, wait_until
from zephon import DataError, Pipeline, PipelineError, WorkerError
from zephon.engine.processes import channel, child
from zephon.engine.runners.process import ProcessRunner
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

RUNNING = Path(__file__).with_name("running.py")
PLACES = [{"runner": "process"}, {"isolate": True}, {"runner": "process", "isolate": True}]


def start(tokenizer, tmp_path, environment=None, **given):
    given = {"tokenizer": str(tokenizer), "done": str(tmp_path / "done"), "batches": 20, **given}
    folders = os.pathsep.join([str(RUNNING.parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(RUNNING), json.dumps(given)],
        env={**os.environ, "PYTHONPATH": folders, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


def finished(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out), err


def build(tokenizer, *functions, options=None, rows=400):
    numbers = list(range(rows))
    data = Dataset.from_dict("d", {"number": numbers, "text": [f"text {n} " * 9 for n in numbers]})
    source = StaticMixtureWorkSource(datasets=[data], token_estimation=False, chunk_size=50, shuffle_shards=False)
    pipeline = Pipeline(source).options(check_operators=False, **(options or {}))
    for function in functions:
        pipeline = pipeline.map_transform(function)
    return pipeline.tokenize(tokenizer, parallelism=1).pack_flat(63).batch(2)


def digests(pipeline, batches=20):
    return [next(batch).digests for batch in [iter(pipeline)] for _ in range(batches)]


_started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    while _started:
        _started.pop().kill()
    gc.collect()
    wait_until(lambda: not children_of(os.getpid()))


@pytest.mark.parametrize("options", PLACES)
def test_functions_of_the_script_itself_run_in_processes_which_end_with_it(tiny_tokenizer, tmp_path, options):
    wanted, _ = finished(start(tiny_tokenizer, tmp_path, options={"runner": "inline"}))
    process = start(tiny_tokenizer, tmp_path, options=options)
    got, err = finished(process)
    assert got == wanted
    assert err == ""
    wait_until(lambda: not children_of(process.pid))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("options", PLACES)
def test_nothing_outlives_a_training_process_that_is_stopped(tiny_tokenizer, tmp_path, options, how):
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    process = start(tiny_tokenizer, tmp_path, options=options, forever=True, slow=True, batches=2)
    assert process.stdout.readline()
    children = children_of(process.pid)
    assert len(children) == (1 if options.get("isolate") else 0) + (2 if options.get("runner") == "process" else 0)
    stopped = time.monotonic()
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (1, -signal.SIGINT, -how)
    if how == signal.SIGINT:
        # One traceback, which is that of the training process.
        assert err.count("Traceback") == 1 and "KeyboardInterrupt" in err
    wait_until(lambda: not [pid for pid in children if Path(f"/proc/{pid}/fd").exists() and _listed(pid)])
    assert time.monotonic() - stopped < 60
    left = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    assert not [file for file in left - before if "zephon" in file.name]


def _listed(pid):
    try:
        return b"zephon.engine.processes.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("options", PLACES)
def test_without_any_room_for_shared_memory_blocks_go_through_the_socket(tiny_tokenizer, tmp_path, options):
    wanted, _ = finished(start(tiny_tokenizer, tmp_path, options={"runner": "inline"}))
    got, _ = finished(start(tiny_tokenizer, tmp_path, options=options, file_bytes=0))
    assert got == wanted


@pytest.mark.parametrize("options", PLACES)
def test_without_memory_files_nameless_files_take_their_place(tiny_tokenizer, tmp_path, monkeypatch, options):
    wanted = digests(build(tiny_tokenizer, shout))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    pipeline = build(tiny_tokenizer, shout, options=options)
    assert digests(pipeline) == wanted
    (pid,) = children_of(os.getpid())[:1]
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    assert any(str(folder) in link for link in links)
    assert not list(folder.iterdir())
    pipeline.close()


def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on_unchanged(tiny_tokenizer, monkeypatch, caplog):
    wanted = digests(build(tiny_tokenizer, shout), 60)
    pipeline = build(tiny_tokenizer, shout, options={"runner": "process"})
    stream, got = iter(pipeline), []
    for n in range(60):
        got.append(next(stream).digests)
        if n % 20 == 5:
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
    assert got == wanted
    pipeline.close()


def test_a_function_that_kills_its_process_once_is_run_again(tiny_tokenizer, tmp_path, monkeypatch, caplog):
    wanted = digests(build(tiny_tokenizer, shout), 200)
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    (tmp_path / "died").write_text("")  # not here
    pipeline = build(tiny_tokenizer, dies_once, shout, options={"runner": "process"})
    _ = pipeline.compiled
    (tmp_path / "died").unlink()
    assert digests(pipeline, 200) == wanted
    assert re.search(r"a worker process of the pipeline \(process \d+\) was ended by signal 9 \(SIGKILL", caplog.text)
    pipeline.close()


@pytest.mark.parametrize(("function", "how"), [(dies, "was ended by signal 9"), (exits, "ended with exit code 3")])
@pytest.mark.parametrize("isolate", [False, True])
def test_a_function_that_always_kills_its_process_ends_the_run_with_one_sentence(
    tiny_tokenizer, monkeypatch, function, how, isolate
):
    monkeypatch.setenv("PARENT", str(os.getpid()))
    pipeline = build(tiny_tokenizer, function, options={"runner": "process", "isolate": isolate})
    with pytest.raises(WorkerError, match=rf'{how}.*So had another .*dataset "d", shard memory, row \d+'):
        digests(pipeline, 200)
    pipeline.close()


def test_an_isolated_engine_that_is_killed_is_an_error_and_no_hang_and_the_run_can_go_on(tiny_tokenizer):
    pipeline = build(tiny_tokenizer, shout, options={"isolate": True})
    got = digests(pipeline, 10)
    (pid,) = children_of(os.getpid())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"the pipeline's process \(process {pid}\) was ended by signal 9 \(SIGKILL"):
        while True:
            got.append(next(iter(pipeline)).digests)
    got += digests(pipeline, 10)  # a new one from the same place
    assert got == digests(build(tiny_tokenizer, shout), len(got))
    pipeline.close()


@pytest.mark.parametrize("options", [{"runner": "threads"}, *PLACES])
def test_a_function_that_fails_is_told_of_in_the_same_words(tiny_tokenizer, options):
    pipeline = build(tiny_tokenizer, fails_late, options=options)
    with pytest.raises(DataError) as caught:
        digests(pipeline, 500)
    assert re.fullmatch(
        r'map_transform\(fails_late\) failed on dataset "d", shard memory, row 333: ValueError: no 333; repair it, or '
        r'leave such rows out with on_error = "skip"\.',
        str(caught.value),
    )
    assert "no 333" in str(caught.value.__cause__)
    pipeline.close()


def fails_late(row):
    if row["number"] == 333:
        raise ValueError("no 333")
    return row


def test_faults_that_are_left_out_are_logged_here(tiny_tokenizer, caplog):
    options = {"on_error": "skip", "error_budget": 1.0, "isolate": True}
    pipeline = build(tiny_tokenizer, fails_on_sevens, options=options)
    digests(pipeline, 20)
    assert "row left out: map_transform(fails_on_sevens) failed" in caplog.text
    pipeline.close()


@pytest.mark.parametrize(
    ("options", "runner", "reason"),
    [
        ({"runner": "process"}, None, 'runner "process"'),
        ({"isolate": True}, None, "isolate"),
        ({"isolate": True}, "threads", "isolate"),
        ({}, "process", 'its runner "process"'),
    ],
)
def test_a_function_that_cannot_be_sent_is_refused_before_the_run(tiny_tokenizer, options, runner, reason):
    data = Dataset.from_dict("d", {"text": ["some"] * 9})
    base = Pipeline(StaticMixtureWorkSource(datasets=[data])).options(**options)
    for function, why in ((lambda row: row, "lambda"), (Unsendable(), "TextIOWrapper")):
        pipeline = base.map_transform(function, runner=runner).tokenize(tiny_tokenizer).pack_flat(8).batch(1)
        with pytest.raises(
            PipelineError, match=f"cannot be sent to another process, as {reason} needs .*{why}.*top of"
        ):
            next(iter(pipeline))


def test_a_function_that_cannot_be_sent_may_stay_while_others_go(tiny_tokenizer, tmp_path):
    data = Dataset.from_dict("d", {"text": [f"some {n}" for n in range(99)]})
    source = StaticMixtureWorkSource(datasets=[data])
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    pipeline = (
        Pipeline(source)
        .options(runner="process")
        .add_op(Pid(there))
        .map_transform(lambda row: row, runner="threads")
        .add_op(Pid(here), runner="threads")
        .tokenize(tiny_tokenizer)
        .pack_flat(8)
        .batch(1)
    )
    next(iter(pipeline))
    workers = {int(file.name) for file in there.iterdir()} - {os.getpid()}
    assert workers and workers <= set(children_of(os.getpid()))
    assert [int(file.name) for file in here.iterdir()] == [os.getpid()]
    pipeline.close()


@pytest.mark.parametrize("runner", [None, "process", "threads"])
@pytest.mark.parametrize(
    "options",
    [{}, {"runner": "process"}, {"runner": "inline"}, {"isolate": True}, {"runner": "process", "isolate": True}],
)
def test_conversations_are_the_same_wherever_they_are_rendered(tmp_path, options, runner):
    """Beside text, after a function that stays, and with some that no template can render."""
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    talks = [
        json.dumps(
            [{"role": "user", "content": f"Hello {n}?"}, {"role": "assistant", "content": f"Yes, {n}. " * (n % 5)}]
        )
        if n % 17 != 3
        else json.dumps([n])
        for n in range(200)
    ]
    data = [
        Dataset.from_dict("talks", {"messages": talks, "number": list(range(200))}),
        Dataset.from_dict("pages", {"text": [f"page {n} " * 5 for n in range(100)], "number": list(range(100))}),
    ]
    source = StaticMixtureWorkSource(datasets=data, token_estimation=False, chunk_size=20, seed=1)

    def build(place, where, stays):
        return (
            Pipeline(source)
            .options(canonical_replicas=2, on_error="skip", error_budget=0.9, check_operators=False, **place)
            .map_transform(dict, runner=stays)
            .tokenize_chat(tokenizer, datasets=["talks"], runner=where, parallelism=1)
            .tokenize(tokenizer, datasets=["pages"])
            .pack_flat(40)
            .shuffle(16)
            .batch(2)
        )

    def told(pipeline):
        made = digests(pipeline, 30), pipeline.checkpoint()
        pipeline.close()
        return made

    wanted = told(build({"runner": "inline"}, None, None))
    pipeline = build(options, runner, "threads" if runner is None and not options.get("isolate") else None)
    stream = iter(pipeline)
    made = [next(stream).digests for _ in range(30)]
    assert (made, pipeline.checkpoint()) == wanted
    assert pipeline.fingerprint() == build({"runner": "inline"}, None, None).fingerprint()
    processes = len(children_of(os.getpid()))
    assert bool(processes) == (
        runner == "process" or bool(options.get("isolate")) or options.get("runner") == "process"
    )
    assert (runner == "process") == ("in processes" in pipeline.explain())
    pipeline.close()


def test_a_conversation_that_cannot_be_rendered_is_told_of_in_the_same_words(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("talks", {"messages": ["[3]"] * 9})])
    words = []
    for runner in ("threads", "process"):
        pipeline = Pipeline(source).options(canonical_replicas=1)
        pipeline = pipeline.tokenize_chat(tokenizer, runner=runner, parallelism=1).pack_flat(40).batch(2)
        with pytest.raises(DataError, match="tokenize_chat failed on dataset") as caught:
            next(iter(pipeline))
        words.append(re.sub(r"row \d", "row", str(caught.value)))
        pipeline.close()
    assert words[0] == words[1]
    with pytest.raises(PipelineError, match="tokenize_chat runner is 'ray'"):
        Pipeline(source).tokenize_chat(tokenizer, runner="ray")


@pytest.mark.parametrize("error", [OSError(11, "no more processes"), ValueError("no such environment")])
def test_a_process_that_cannot_be_started_leaves_nothing_open(tiny_tokenizer, monkeypatch, error):
    def refuse(*_args, **_given):
        raise error

    pipeline = build(tiny_tokenizer, shout, options={"runner": "process"})
    pipeline.explain()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    for _ in range(3):
        with pytest.raises((WorkerError, ValueError), match=str(error.args[-1])):
            next(iter(pipeline))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_running_out_of_files_while_starting_is_told_and_leaves_nothing_open(tiny_tokenizer, monkeypatch):
    def refuse():
        raise OSError(24, "Too many open files")

    pipeline = build(tiny_tokenizer, shout, options={"isolate": True})
    pipeline.explain()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(child, "shared_file", refuse)
    with pytest.raises(WorkerError, match="cannot be started: Too many open files"):
        next(iter(pipeline))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("options", [{"runner": "threads"}, *PLACES])
def test_an_engine_that_cannot_begin_leaves_no_thread_and_no_process(tiny_tokenizer, tmp_path, options):
    data = Dataset.from_dict("d", {"text": [f"text {n}" for n in range(99)]})
    source = StaticMixtureWorkSource(datasets=[data], token_estimation=False)
    pipeline = Pipeline(source).options(**options).stateful_transform(FailsToBegin(tmp_path / "now"))
    pipeline = pipeline.tokenize(tiny_tokenizer, parallelism=2).pack_flat(30).batch(2)
    pipeline.explain()
    (tmp_path / "now").write_text("")
    for _ in range(2):
        with pytest.raises(PipelineError, match="init_state failed for window 0 of lane 0"):
            next(iter(pipeline))
    wait_until(lambda: not children_of(os.getpid()))
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("zephon-tokenize", "zephon-pack"))])


def test_work_handed_to_a_runner_that_is_closed_does_not_wait_for_ever():
    runner = ProcessRunner(tokenize=1)
    assert runner.submit("tokenize", int, "5").result(10) == 5
    runner.close()
    for thread in runner.threads:
        thread.join(10)
    with pytest.raises(CancelledError):
        runner.submit("tokenize", int, "5").result(10)


def test_functions_typed_in_at_a_prompt_are_refused(tiny_tokenizer):
    code = f"""
from zephon import Pipeline, PipelineError
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource
def function(row):
    return row
source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {{"text": ["a"] * 9}})])
pipeline = Pipeline(source).options(runner="process").map_transform(function)
try:
    next(iter(pipeline.tokenize({str(tiny_tokenizer)!r}).pack_flat(8).batch(1)))
except PipelineError as error:
    print(error)
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "defined in a notebook or at a prompt" in made.stdout


def test_a_script_without_its_main_guard_is_told_so(tiny_tokenizer, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(f"""
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource
def function(row):
    return row
source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {{"text": ["a"] * 9}})])
pipeline = Pipeline(source).options(runner="process").map_transform(function)
next(iter(pipeline.tokenize({str(tiny_tokenizer)!r}).pack_flat(8).batch(1)))
""")
    made = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 1
    assert 'put what it runs under if __name__ == "__main__":' in made.stderr.splitlines()[-1]


def test_a_forked_process_leaves_the_processes_of_its_parent_alone(tiny_tokenizer):
    for options in PLACES:
        pipeline = build(tiny_tokenizer, shout, options=options)
        stream = iter(pipeline)
        next(stream)
        pid = os.fork()
        if pid == 0:
            try:
                there = next(stream).digests
                pipeline.close()
                del stream, pipeline
                gc.collect()
                os._exit(0 if there else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        for _ in range(30):
            next(stream)
        pipeline.close()


def test_batches_that_are_kept_stay_as_they_are_and_do_not_stop_the_engine(tiny_tokenizer):
    wanted = [batch.tokens.copy() for batch, _ in zip(build(tiny_tokenizer, shout), range(300), strict=False)]
    pipeline = build(tiny_tokenizer, shout, options={"isolate": True, "prefetch_batches": 2})
    kept = [batch for batch, _ in zip(pipeline, range(300), strict=False)]
    pipeline.close()
    assert all((batch.tokens == tokens).all() for batch, tokens in zip(kept, wanted, strict=True))


def test_closing_does_not_wait_for_slow_functions(tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("PARENT", "")
    pipeline = build(tiny_tokenizer, slow, options={"runner": "process"}, rows=4000)
    next(iter(pipeline))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("zephon-")]
    pipeline.close()
    wait_until(lambda: not any(t.is_alive() for t in threads if t.name != "zephon-reaper"), 10)


def test_shared_memory_grows_and_an_earlier_view_stays_good():
    stretch = channel.Stretch(channel.shared_file())
    other = channel.Stretch(os.dup(stretch.fd))
    stretch.reserve(10)[:] = 7
    view = other.read(10)
    stretch.reserve(5 << 20)[:] = 8
    assert (view == 8).all()  # the same memory
    assert (other.read(5 << 20) == 8).all()
    stretch.close()
    other.close()
    assert (view == 8).all()
