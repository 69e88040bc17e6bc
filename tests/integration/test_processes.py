"""Processes at work for a pipeline: they come and go with it, die without harm, and say what is wrong."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from support import running
from support.chat_data import CHATML, write_chat_tokenizer
from support.operator_data import fails_on_sevens, shout
from support.process_data import FailsToBegin, Pid, Unsendable, children_of, dies, dies_once, exits, slow, wait_until
from zephon import DataError, Pipeline, PipelineError, WorkerError
from zephon.engine.processes import channel
from zephon.engine.processes.channel import Channel, Closed
from zephon.engine.runners import ThreadsRunner
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

PROCESS, ISOLATE, BOTH = {"runner": "process"}, {"isolate": True}, {"runner": "process", "isolate": True}
UNCACHED = {"io_options": {"cache": {"enabled": False}}}
PLACES = [PROCESS, ISOLATE, BOTH]
TESTS = Path(__file__).parents[1]


def start(tokenizer, **given):
    """A training script of its own, see support/running.py."""
    process = subprocess.Popen(
        [sys.executable, running.__file__, json.dumps({"tokenizer": str(tokenizer), "batches": 20, **given})],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


def run_script(tmp_path, tokenizer, body):
    """A training script with a function of its own, `function`, and a pipeline that uses it in processes."""
    script = tmp_path / "script.py"
    script.write_text(f"""
from zephon import Pipeline, PipelineError
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource
def function(row):
    return row
source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {{"text": ["a"] * 9}})])
pipeline = Pipeline(source).options(runner="process").map_transform(function)
pipeline = pipeline.tokenize({str(tokenizer)!r}).pack_flat(8).batch(1)
{body}
""")
    return script


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


@pytest.fixture(scope="module")
def inline_digests(tiny_tokenizer):
    out, err = start(tiny_tokenizer, options={"runner": "inline"}).communicate(timeout=120)
    return json.loads(out), err


class TestLife:
    """Processes start with the pipeline and never outlive it."""

    # A limit of 0 bytes per file leaves no shared memory: arrays go through sockets.
    @pytest.mark.parametrize(("options", "more"), [(PROCESS, {}), (BOTH, {}), (BOTH | UNCACHED, {"file_bytes": 0})])
    def test_functions_of_the_script_run_in_processes_which_end_with_it(
        self, tiny_tokenizer, inline_digests, options, more
    ):
        process = start(tiny_tokenizer, options=options, **more)
        out, err = process.communicate(timeout=120)
        assert (json.loads(out), err) == inline_digests
        assert inline_digests[1] == ""
        wait_until(lambda: not children_of(process.pid))

    @pytest.mark.parametrize(
        ("options", "how"),
        [
            (PROCESS, signal.SIGINT),
            (BOTH, signal.SIGKILL),
            *(
                pytest.param(options, how, marks=pytest.mark.deep)
                for options in PLACES
                for how in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
            ),
        ],
    )
    def test_nothing_outlives_a_training_process_that_is_stopped(self, tiny_tokenizer, options, how):
        process = start(tiny_tokenizer, options=options, forever=True, slow=True, batches=2)
        assert process.stdout.readline()
        children = children_of(process.pid)
        assert len(children) == (1 if options.get("isolate") else 0) + (2 if options.get("runner") == "process" else 0)
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (1, -signal.SIGINT, -how)
        if how == signal.SIGINT:  # one traceback, that of the training process
            assert err.count("Traceback") == 1 and "KeyboardInterrupt" in err
        wait_until(lambda: not set(children) & set(children_of(process.pid)))

    @pytest.mark.parametrize("options", [PROCESS, ISOLATE])
    def test_a_process_that_cannot_be_started_leaves_nothing_open(self, tiny_tokenizer, monkeypatch, options):
        def refuse(*_args, **_given):
            raise OSError(24, "Too many open files")

        pipeline = build(tiny_tokenizer, shout, options=options)
        pipeline.explain()
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(subprocess, "Popen", refuse)
        for _ in range(3):
            with pytest.raises(WorkerError, match="cannot be started: Too many open files"):
                next(iter(pipeline))
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before

    @pytest.mark.parametrize("options", [{"runner": "threads"}, *PLACES])
    def test_an_engine_that_cannot_begin_leaves_no_thread_and_no_process(self, tiny_tokenizer, tmp_path, options):
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
        names = "zephon-tokenize"
        wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(names)])

    def test_a_forked_process_leaves_the_processes_of_its_parent_alone(self, tiny_tokenizer):
        pipeline = build(tiny_tokenizer, shout, options=BOTH)
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

    def test_closing_does_not_wait_for_slow_functions(self, tiny_tokenizer, monkeypatch):
        monkeypatch.setenv("PARENT", "")
        pipeline = build(tiny_tokenizer, slow, options=PROCESS, rows=4000)
        next(iter(pipeline))
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("zephon-")]
        pipeline.close()
        wait_until(lambda: not any(t.is_alive() for t in threads if t.name != "zephon-reaper"), 10)

    def test_calls_submitted_to_a_closed_runner_are_cancelled(self):
        runner = ThreadsRunner(tokenize=1)
        assert runner.submit("tokenize", int, "5").result(10) == 5
        runner.close()
        for thread in runner.threads:
            thread.join(10)
        with pytest.raises(CancelledError):
            runner.submit("tokenize", int, "5").result(10)


class TestDeath:
    def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on_unchanged(self, tiny_tokenizer):
        wanted = digests(build(tiny_tokenizer, shout), 60)
        pipeline = build(tiny_tokenizer, shout, options=PROCESS)
        stream, got = iter(pipeline), []
        for n in range(60):
            got.append(next(stream).digests)
            if n % 20 == 5:
                for pid in children_of(os.getpid()):
                    with suppress(ProcessLookupError):  # a child of a child ends with its parent
                        os.kill(pid, signal.SIGKILL)
        assert got == wanted
        pipeline.close()

    def test_a_function_that_kills_its_process_once_is_run_again(self, tiny_tokenizer, tmp_path, monkeypatch, caplog):
        wanted = digests(build(tiny_tokenizer, shout), 200)
        monkeypatch.setenv("DIED", str(tmp_path / "died"))
        (tmp_path / "died").write_text("")  # not here
        pipeline = build(tiny_tokenizer, dies_once, shout, options=PROCESS)
        _ = pipeline.compiled
        (tmp_path / "died").unlink()
        assert digests(pipeline, 200) == wanted
        assert re.search(
            r"a worker process of the pipeline \(process \d+\) was ended by signal 9 \(SIGKILL", caplog.text
        )
        pipeline.close()

    @pytest.mark.parametrize(
        ("function", "how", "options"),
        [(dies, "was ended by signal 9", BOTH), (exits, "ended with exit code 3", PROCESS)],
    )
    def test_a_function_that_always_kills_its_process_ends_the_run_with_one_sentence(
        self, tiny_tokenizer, monkeypatch, function, how, options
    ):
        monkeypatch.setenv("PARENT", str(os.getpid()))
        pipeline = build(tiny_tokenizer, function, options=options)
        with pytest.raises(
            WorkerError, match=rf'{how}.*working on .*dataset "d", shard memory, row \d+.*, as was the worker'
        ):
            digests(pipeline, 200)
        pipeline.close()

    def test_an_isolated_engine_that_is_killed_is_an_error_and_the_run_can_go_on(self, tiny_tokenizer):
        pipeline = build(tiny_tokenizer, shout, options=ISOLATE)
        got = digests(pipeline, 10)
        (pid,) = children_of(os.getpid())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            WorkerError, match=rf"the pipeline's process \(process {pid}\) was ended by signal 9 \(SIGKILL"
        ):
            while True:
                got.append(next(iter(pipeline)).digests)
        got += digests(pipeline, 10)  # a new one from the same place
        assert got == digests(build(tiny_tokenizer, shout), len(got))
        pipeline.close()


class TestErrors:
    @pytest.mark.parametrize("options", [{"runner": "threads"}, *PLACES])
    def test_a_function_that_fails_is_reported_in_the_same_words(self, tiny_tokenizer, options):
        pipeline = build(tiny_tokenizer, fails_late, options=options)
        with pytest.raises(DataError) as caught:
            digests(pipeline, 500)
        assert re.match(
            r'map_transform\(fails_late\) failed on dataset "d", shard memory, row 333: ValueError: no 333',
            str(caught.value),
        )
        assert "no 333" in str(caught.value.__cause__)
        pipeline.close()

    def test_faults_that_are_left_out_are_logged_here(self, tiny_tokenizer, caplog):
        options = {"on_error": "skip", "error_budget": 1.0, **BOTH}
        pipeline = build(tiny_tokenizer, fails_on_sevens, options=options)
        digests(pipeline, 20)
        assert "row left out: map_transform(fails_on_sevens) failed" in caplog.text
        pipeline.close()

    @pytest.mark.parametrize(
        ("options", "runner", "reason"),
        [
            (PROCESS, None, 'runner "process"'),
            (ISOLATE, "threads", "isolate"),
            ({}, "process", 'its runner "process"'),
        ],
    )
    def test_a_function_that_cannot_be_sent_is_refused_before_the_run(self, tiny_tokenizer, options, runner, reason):
        data = Dataset.from_dict("d", {"text": ["some"] * 9})
        base = Pipeline(StaticMixtureWorkSource(datasets=[data])).options(**options)
        for function, why in ((lambda row: row, "lambda"), (Unsendable(), "TextIOWrapper")):
            pipeline = base.map_transform(function, runner=runner).tokenize(tiny_tokenizer).pack_flat(8).batch(1)
            with pytest.raises(
                PipelineError, match=f"cannot be sent to another process, as {reason} needs .*{why}.*top of"
            ):
                next(iter(pipeline))

    def test_functions_typed_in_at_a_prompt_are_refused(self, tiny_tokenizer, tmp_path):
        code = run_script(tmp_path, tiny_tokenizer, "next(iter(pipeline))").read_text()
        made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert "defined in a notebook or at a prompt" in made.stderr

    def test_a_script_without_a_main_guard_is_told_so(self, tiny_tokenizer, tmp_path):
        script = run_script(tmp_path, tiny_tokenizer, "next(iter(pipeline))")
        made = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
        assert made.returncode == 1
        assert 'Put the code that runs under if __name__ == "__main__":' in made.stderr.splitlines()[-1]


class TestPlaces:
    """Single operators in processes or in threads."""

    def test_a_function_that_cannot_be_sent_may_stay_while_others_go(self, tiny_tokenizer, tmp_path):
        data = Dataset.from_dict("d", {"text": [f"some {n}" for n in range(99)]})
        here, there = tmp_path / "here", tmp_path / "there"
        here.mkdir()
        there.mkdir()
        pipeline = (
            Pipeline(StaticMixtureWorkSource(datasets=[data]))
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

    @pytest.mark.parametrize(
        ("options", "runner"),
        [({}, "process"), (PROCESS, "threads"), (BOTH, None)],
    )
    def test_conversations_are_the_same_wherever_they_are_rendered(self, tmp_path, options, runner):
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
        runs = []
        for place, where, stays in (
            ({"runner": "inline"}, None, None),
            (options, runner, None if options == BOTH else "threads"),
        ):
            pipeline = (
                Pipeline(source)
                .options(canonical_replicas=2, on_error="skip", error_budget=0.9, check_operators=False, **place)
                .map_transform(dict, runner=stays)
                .tokenize_chat(tokenizer, datasets=["talks"], runner=where, parallelism=1)
                .tokenize(tokenizer, datasets=["pages"])
                .pack_flat(40)
                .shuffle(16)
                .batch(2)
            )
            runs.append((digests(pipeline, 30), pipeline.checkpoint(), pipeline.fingerprint()))
            assert (where == "process") == ("in processes" in pipeline.explain())
            pipeline.close()
        assert runs[0] == runs[1]


class TestMemory:
    def test_batches_that_are_kept_stay_as_they_are_and_do_not_stop_the_engine(self, tiny_tokenizer):
        wanted = [batch.tokens.copy() for batch, _ in zip(build(tiny_tokenizer, shout), range(300), strict=False)]
        pipeline = build(tiny_tokenizer, shout, options={**ISOLATE, "prefetch_batches": 128})
        kept = [batch for batch, _ in zip(pipeline, range(300), strict=False)]
        pipeline.close()
        assert all((batch.tokens == tokens).all() for batch, tokens in zip(kept, wanted, strict=True))

    @pytest.mark.parametrize("memory", ["memory file", "temporary file", "none"])
    def test_arrays_arrive_whole_however_long_they_are_kept(self, monkeypatch, tmp_path, memory):
        if memory == "temporary file":
            monkeypatch.delattr(os, "memfd_create", raising=False)
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        elif memory == "none":
            monkeypatch.setattr(channel, "_memory_file", lambda _size: (_ for _ in ()).throw(OSError(28, "no room")))
        here, there = map(Channel, Pipe())
        descriptors = set()
        kept = []
        for n in range(12):
            sent = [np.arange(n, dtype=np.int32), np.full(10_000 * (n % 5 + 1), n), "text", np.empty((0, 3))]
            sender = threading.Thread(target=here.send, args=(sent,))  # through a socket it waits for the reader
            sender.start()
            got = there.receive()
            sender.join()
            assert all((a == b).all() if isinstance(a, np.ndarray) else a == b for a, b in zip(got, sent, strict=True))
            got[1][:3] += 1  # it belongs to the receiver
            if n % 2:
                kept.append((n, got[1]))
            there.send(None)
            here.receive()
            del got
            descriptors.add(len(os.listdir("/proc/self/fd")))
        assert all(array[0] == n + 1 and (array[3:] == n).all() for n, array in kept)
        assert max(descriptors) - min(descriptors) <= 8 and not list(tmp_path.iterdir())
        here.close()
        with pytest.raises(Closed):
            there.receive()
        with pytest.raises(Closed):
            there.send(1)


def fails_late(row):
    if row["number"] == 333:
        raise ValueError("no 333")
    return row
