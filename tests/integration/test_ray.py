"""The runner "ray" on a cluster of this machine: the same batches, whatever happens to its workers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import ray_running
from support.operator_data import Joined, two_of_each
from support.pages import text_of
from support.process_data import wait_until
from support.ray_cluster import Counts, Nodes, Once, actors_of, add_machine, names_of, rank_pipeline, ray_cluster
from support.vision_data import file_of, image_tokenizer, picture
from zephon import Pipeline, PipelineError, WorkerError
from zephon.engine import pixels
from zephon.engine.processes import actors
from zephon.io import Dataset
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings
from zephon.work import StaticMixtureWorkSource

WORKERS = 2
POOL = {"runner": "ray", "ray_pool": "everyday"}
"""One pool for all tests that harm none of its actors, so that these start once."""
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cluster():
    with ray_cluster() as cluster:
        yield cluster


def build(tokenizer, *functions, rows=400, lanes=2, workers=WORKERS, **options):
    data = [
        Dataset.from_dict("a", {"number": list(range(rows)), "text": [f"text {n} " * 9 for n in range(rows)]}),
        Dataset.from_dict("b", {"number": list(range(9, 99)), "text": [f"some {n} " * 20 for n in range(90)]}),
    ]
    source = StaticMixtureWorkSource(datasets=data, token_estimation=False, chunk_size=50, seed=3)
    pipeline = Pipeline(source).options(canonical_replicas=lanes, check_operators=False, **options)
    for function in functions:
        pipeline = pipeline.map_transform(function)
    return pipeline.tokenize(tokenizer, parallelism=workers).pack_flat(63).shuffle(16).batch(2)


def digests(pipeline, batches=20):
    stream = iter(pipeline)
    return [digest for _ in range(batches) for digest in next(stream).digests]


def test_batches_states_and_accounts_are_those_of_other_runners(cluster, tiny_tokenizer):
    """With functions that other processes cannot import, begun in one place and gone on with in another."""
    suffix = " and more"
    functions = [lambda row: {"text": row["text"] + suffix}, two_of_each]
    reference = build(tiny_tokenizer, *functions, runner="inline")
    wanted, middle = digests(reference), None
    here, there = build(tiny_tokenizer, *functions), build(tiny_tokenizer, *functions, **POOL)
    got = digests(there, 7)
    middle = there.checkpoint()
    assert got + digests(here.restore(middle), 6) == wanted[: 2 * 13]
    again = build(tiny_tokenizer, *functions, **POOL).restore(here.checkpoint())
    assert digests(again, 7) == wanted[2 * 13 :]
    assert again.checkpoint() == reference.checkpoint()
    assert again.fingerprint() == reference.fingerprint()
    assert "runner ray" in again.explain()
    for pipeline in (reference, here, there, again):
        pipeline.close()
    runs = []
    for options in ({"runner": "process"}, POOL):
        pipeline = build(tiny_tokenizer, two_of_each, **options)
        runs.append(digests(pipeline))
        pipeline.close()
    assert runs[0] == runs[1]


def test_the_pipeline_of_the_documentation_runs_on_the_cluster(cluster, tiny_tokenizer):
    data = Dataset.from_dict("a", {"text": [f"text {n} " * 9 for n in range(200)]})
    source = StaticMixtureWorkSource(datasets=[data], token_estimation=False, chunk_size=20)
    names = {"Pipeline": Pipeline, "source": source, "tokenizer": tiny_tokenizer}
    code = text_of("docs/runners.md", "pipeline = Pipeline(source).options(\n")
    exec(code.replace("ADDRESS", cluster.address), names)
    runs = []
    for pipeline in (names["pipeline"], Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer)):
        pipeline = pipeline.options(canonical_replicas=2).pack_flat(63).batch(2)
        assert ("runner ray" in pipeline.explain()) == (not runs)
        runs.append(digests(pipeline))
        pipeline.close()
    assert runs[0] == runs[1]


@pytest.mark.deep
def test_an_engine_in_a_process_of_its_own_has_actors_too(cluster, tiny_tokenizer):
    runs = []
    for options in ({"runner": "inline"}, {"isolate": True, **POOL}, {"isolate": True, "runner": "ray"}):
        pipeline = build(tiny_tokenizer, two_of_each, **options)
        runs.append((digests(pipeline), pipeline.checkpoint()))
        pipeline.close()
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.deep
def test_a_stateful_operator_and_one_that_stays_work_beside_the_actors(cluster, tiny_tokenizer):
    for change in (
        lambda pipeline: pipeline.stateful_transform(Joined(), columns=["text"]),
        lambda pipeline: pipeline.map_transform(lambda row: row, runner="threads"),
    ):
        runs = []
        for options in ({"runner": "inline"}, POOL):
            data = Dataset.from_dict("a", {"number": list(range(200)), "text": [f"text {n} " * 9 for n in range(200)]})
            source = StaticMixtureWorkSource(datasets=[data], token_estimation=False, chunk_size=20)
            base = Pipeline(source).options(canonical_replicas=2, check_operators=False, **options)
            pipeline = change(base.map_transform(two_of_each)).tokenize(tiny_tokenizer, parallelism=WORKERS)
            pipeline = pipeline.pack_flat(63).batch(2)
            runs.append(digests(pipeline))
            pipeline.close()
        assert runs[0] == runs[1]


def test_a_worker_that_dies_is_replaced_and_the_run_goes_on_unchanged(cluster, tiny_tokenizer, tmp_path, caplog):
    """Killed by its function, then from outside, then by Ray."""
    import ray

    trace = tmp_path / "died"
    wanted = digests(build(tiny_tokenizer, Once(trace, "die"), runner="inline"), 60)
    pipeline = build(tiny_tokenizer, Once(trace, "die"), runner="ray", ray_pool="mortal", prefetch_batches=1)
    got = digests(pipeline, 10)
    wait_until(lambda: "A new Ray worker repeats its calls" in caplog.text)
    assert len(trace.read_text().split()) == 1
    before = actors_of("mortal")
    assert sorted(before) == ["mortal-0", "mortal-1"]
    os.kill(before["mortal-0"], signal.SIGKILL)
    got += digests(pipeline, 25)
    ray.kill(ray.get_actor("mortal-1", namespace="zephon"), no_restart=False)
    got += digests(pipeline, 25)
    assert got == wanted
    pipeline.close()
    for name in before:
        ray.kill(ray.get_actor(name, namespace="zephon"))


@pytest.mark.deep
def test_rows_that_kill_two_workers_end_the_run_by_name(cluster, tiny_tokenizer, tmp_path):
    pipeline = build(tiny_tokenizer, Once(tmp_path / "died", "die", times=9), runner="ray", rows=40)
    with pytest.raises(WorkerError, match=r"worker in process \d+ on .* has died .*working on .* rows.*dataset.*row"):
        digests(pipeline, 40)
    assert len((tmp_path / "died").read_text().split()) == 2
    pipeline.close()


@pytest.mark.deep
def test_a_worker_that_does_not_answer_is_ended_and_its_rows_go_to_another(cluster, tiny_tokenizer, tmp_path, caplog):
    trace = tmp_path / "slept"
    wanted = digests(build(tiny_tokenizer, Once(trace, "sleep"), runner="inline", rows=40))
    pipeline = build(tiny_tokenizer, Once(trace, "sleep"), runner="ray", ray_timeout=10, rows=40)
    assert digests(pipeline) == wanted
    assert len(trace.read_text().split()) == 1
    assert "has not answered for 10 seconds" in caplog.text
    pipeline.close()


def test_a_worker_that_gives_other_tokens_is_refused_by_name(cluster, tiny_tokenizer, monkeypatch):
    """Of a pool, and one of its own, which is ended."""
    monkeypatch.setattr(Tokenizer, "probe", lambda _self: "other ids here")
    for count, options in ((2, POOL), (1, {"runner": "ray"})):
        pipeline = build(tiny_tokenizer, workers=count, **options)
        refused = rf"no Ray worker of {count} can be used.*on .*tokens of the probe texts differ"
        with pytest.raises(WorkerError, match=refused):
            digests(pipeline)
        pipeline.close()


def test_a_slow_consumer_stops_the_workers(cluster, tiny_tokenizer, tmp_path):
    counts = Counts(tmp_path)
    rows, bound = 20_000, 40_000
    pipeline = build(tiny_tokenizer, counts, rows=rows, prefetch_buffer_size=bound, prefetch_batches=1, **POOL)
    stream = iter(pipeline)
    next(stream)
    seen = -1
    while counts.count() != seen:  # until the workers stand still
        seen = counts.count()
        time.sleep(0.5)
    assert seen < rows / 4
    for _ in range(50):
        next(stream)
    wait_until(lambda: counts.count() > seen)
    pipeline.close()


def test_ranks_share_a_pool_that_outlives_them(cluster, tiny_tokenizer):
    wanted = {}
    reference = build(tiny_tokenizer, lanes=4, runner="inline", global_batch=4)
    for batch, _ in zip(reference, range(12), strict=False):
        wanted |= dict(zip(batch.sequence_numbers.tolist(), batch.digests, strict=True))
    before = None
    for groups in (2, 1):
        ranks = [
            build(tiny_tokenizer, lanes=4, global_batch=4, dp_degree=groups, dp_group_id=group, **POOL)
            for group in range(groups)
        ]
        for rank in ranks:
            for batch, _ in zip(rank, range(12 // groups), strict=False):
                for number, digest in zip(batch.sequence_numbers.tolist(), batch.digests, strict=True):
                    assert wanted[number] == digest
            rank.close()
        assert before in (None, actors_of("everyday"))
        before = actors_of("everyday")
        assert sorted(before) == ["everyday-0", "everyday-1"]


def test_what_ray_needs_is_said(tiny_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PipelineError, match=r"expected the package ray. Install zephon-core\[ray\]"):
        digests(build(tiny_tokenizer, runner="ray"))


@pytest.mark.deep
def test_actors_decode_images(cluster, tmp_path, monkeypatch, caplog):
    """One of them cannot be decoded, which is reported as it is elsewhere."""
    files = [file_of(picture(40 + n, 60, seed=n)) for n in range(12)]
    files[7] = files[7][: len(files[7]) // 2]
    rows = {"image": files, "text": [f"picture {n} <|image_pad|> of a thing" for n in range(12)]}
    tokenizer = image_tokenizer(tmp_path / "tokenizer")
    runs = []
    for options in ({"runner": "inline"}, POOL):
        source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("shown", rows)], chunk_size=6)
        pipeline = Pipeline(source).options(
            canonical_replicas=2, on_error="skip", error_budget=1.0, digest_pixels=True, **options
        )
        vision = VisionSettings(min_pixels=1024, max_pixels=16_384)
        pipeline = pipeline.tokenize_images(tokenizer, vision=vision, parallelism=WORKERS)
        pipeline = pipeline.pack_flat(256, "best_fit", max_images=3, max_patches=200).batch(2)
        pipeline.explain()
        caplog.clear()
        with monkeypatch.context() as patched:
            if options == POOL:
                patched.setattr(pixels, "image_patches", None)  # what decodes in this process
            made = digests(pipeline, 10)
        runs.append((made, [each.getMessage() for each in caplog.records if "grey in place" in each.getMessage()]))
        pipeline.close()
    assert runs[0] == runs[1] and runs[0][1]


@pytest.mark.deep
def test_a_shared_pool_without_work_ends(cluster, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(actors, "_IDLE_SECONDS", 2.0)
    pipeline = build(tiny_tokenizer, runner="ray", ray_pool="idle", workers=1)
    first = digests(pipeline)
    pipeline.close()
    assert names_of("idle") in (["idle-0"], [])
    wait_until(lambda: not names_of("idle"))
    again = build(tiny_tokenizer, runner="ray", ray_pool="idle", workers=1)
    assert digests(again) == first
    again.close()


# ---------------------------------------------------------------------------------------------------------------------
# With jobs of several processes, and several machines


def start_rank(tokenizer, state, *, group=0, groups=1, batches=40, pool="shared"):
    given = {"tokenizer": str(tokenizer), "group": group, "groups": groups, "batches": batches, "state": str(state)}
    given["options"] = {"runner": "ray", "ray_pool": pool}
    return subprocess.Popen(
        [sys.executable, ray_running.__file__, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        text=True,
    )


def records_of(text):
    pairs = [json.loads(line) for line in text.splitlines()]
    return {n: digest for numbers, digests in pairs for n, digest in zip(numbers, digests, strict=True)}


def expected(tokenizer, records):
    made = {}
    for batch in rank_pipeline(tokenizer, 0, 1, runner="inline"):
        made |= dict(zip(batch.sequence_numbers.tolist(), [each.hex() for each in batch.digests], strict=True))
        if len(made) >= records:
            return made
    return made


@pytest.mark.deep
def test_a_trainer_that_is_killed_finds_its_pool_warm(cluster, tiny_tokenizer, tmp_path):
    made, pids, state = {}, [], tmp_path / "state.json"
    for kill in (True, True, False):
        process = start_rank(tiny_tokenizer, state, batches=60)
        lines = []
        if kill:
            lines = [process.stdout.readline() for _ in range(15)]
            process.kill()
        out, _ = process.communicate(timeout=120)
        made |= records_of("".join(lines) + out.rpartition("\n")[0])
        pids.append(actors_of("shared"))
    assert pids[0] == pids[1] == pids[2] and len(pids[0]) == WORKERS
    assert made.items() <= expected(tiny_tokenizer, max(made) + 1).items()
    assert sorted(made) == list(range(max(made) + 1)) and len(made) >= 60


@pytest.mark.deep
def test_one_two_and_four_processes_share_a_pool(cluster, tiny_tokenizer, tmp_path):
    wanted = expected(tiny_tokenizer, 48)
    for groups in (1, 2, 4):
        ranks = [
            start_rank(tiny_tokenizer, tmp_path / f"{groups}-{n}", group=n, groups=groups, batches=48 // groups)
            for n in range(groups)
        ]
        made = {}
        for rank in ranks:
            out, _ = rank.communicate(timeout=200)
            assert rank.returncode == 0
            made |= records_of(out)
        assert made == wanted
        assert len(actors_of("shared")) == WORKERS


@pytest.mark.deep
def test_a_machine_that_gives_other_tokens_is_left_out_and_one_that_is_lost_does_no_harm(
    cluster, tiny_tokenizer, tmp_path, caplog
):
    """Two machines besides the first: one with a library that tokenizes otherwise, one that disappears."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('default_worker' in each for each in sys.orig_argv):  # not in what else Ray runs\n"
        "    from zephon.tokenizer.tokenizer import Tokenizer\n"
        "    encode = Tokenizer.encode\n"
        "    def other(self, column):\n"
        "        values, offsets = encode(self, column)\n"
        "        return values ^ 1, offsets\n"
        "    Tokenizer.encode = other\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    bad = add_machine(cluster, 2, env_vars={"PYTHONPATH": path})
    # So little look-ahead that all workers have calls at any time.
    settings = {"rows": 20_000, "lanes": 4, "prefetch_buffer_size": 40_000, "prefetch_batches": 1}
    reference = build(tiny_tokenizer, runner="inline", **settings)
    wanted = digests(reference)
    pipeline = build(tiny_tokenizer, runner="ray", workers=4, **settings)
    assert digests(pipeline) == wanted
    wait_until(lambda: bad.node_id[:12] in caplog.text and "tokens of the probe texts differ" in caplog.text)
    pipeline.close()
    good = add_machine(cluster, 2)
    cluster.remove_node(bad)
    (tmp_path / "nodes").mkdir()
    pipeline = build(tiny_tokenizer, Nodes(tmp_path / "nodes"), runner="ray", workers=4, **settings)
    got = []

    def comes(what):
        got.extend(digests(pipeline, 10))
        return what()

    wait_until(lambda: comes((tmp_path / "nodes" / good.node_id).exists))
    cluster.remove_node(good, allow_graceful=False)
    lost = f"Ray node {good.node_id[:12]} .*A new Ray worker repeats its calls"
    wait_until(lambda: comes(lambda: re.search(lost, caplog.text)))
    assert got == wanted + digests(reference, len(got) // 2 - 20)
    for each in (reference, pipeline):
        each.close()
