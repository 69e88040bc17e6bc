"""Threads that take turns as often as they can: the interpreter switches every microsecond instead of every 5 ms.

What a free-threaded interpreter does all the time, two threads between any two operations of each other, happens here
some thousand times per batch.
"""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from zephon import Pipeline, merge_checkpoints
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

WORDS = ["lane", "shard", "record", "round", "step", "token", "cursor", "window", "chunk", "rank", "group", "epoch"]
PACKINGS = {
    "wrap": lambda pipeline: pipeline.pack_flat(48),
    "best_fit": lambda pipeline: pipeline.pack_flat(48, "best_fit", num_bins=4),
    "ensure_mixture": lambda pipeline: pipeline.ensure_mixture(64).pack_flat(48),
}


@pytest.fixture
def switching():
    """Threads switch every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def upper(row):
    return {"text": row["text"].upper() if row["number"] % 3 else row["text"]}


def build(tokenizer, packing="wrap", *, runner="threads", group=0, groups=1, folder=None):
    datasets = [
        Dataset.from_dict(
            name,
            {
                "number": list(range(rows)),
                "text": [f"{name} {n} " + " ".join(WORDS[n * k % 12] for k in range(n % 25)) for n in range(rows)],
            },
        )
        for name, rows in (("a", 150), ("b", 40), ("c", 70))
    ]
    source = StaticMixtureWorkSource(datasets=datasets, mixture={"a": 2.0, "b": 1.0, "c": 1.0}, seed=7, chunk_size=30)
    pipeline = Pipeline(source).options(
        canonical_replicas=4,
        global_batch=8,
        dp_degree=groups,
        dp_group_id=group,
        flush_every_k_chunks=2,
        runner=runner,
        ledger=folder,
    )
    pipeline = pipeline.filter("number != 5").map_transform(upper, columns=["text", "number"])
    parallelism = 1 if runner == "inline" else 4
    return PACKINGS[packing](pipeline.tokenize(tokenizer, parallelism=parallelism)).shuffle(16, seed=1).batch(2)


def stream(pipeline, records):
    """Digests of the next records by sequence number."""
    digests, batches = {}, iter(pipeline)
    while len(digests) < records:
        batch = next(batches)
        digests.update(zip(batch.sequence_numbers.tolist(), batch.digests, strict=True))
    return digests


@pytest.mark.parametrize("packing", list(PACKINGS))
def test_batches_and_states_do_not_depend_on_how_threads_take_turns(tiny_tokenizer, packing, request):
    calm = build(tiny_tokenizer, packing, runner="inline")
    expected = stream(calm, 64)
    request.getfixturevalue("switching")
    threads = build(tiny_tokenizer, packing)
    assert stream(threads, 64) == expected
    assert threads.checkpoint() == calm.checkpoint()
    for pipeline in (calm, threads):
        pipeline.close()


def test_the_ranks_of_a_job_in_threads_of_one_process_do_not_disturb_each_other(tiny_tokenizer, tmp_path, request):
    """All at once: they load the tokenizer, index the same data, share caches and the folder of the ledger."""
    calm = build(tiny_tokenizer, runner="inline")
    expected = stream(calm, 64)
    request.getfixturevalue("switching")
    ranks = [build(tiny_tokenizer, group=group, groups=4, folder=tmp_path / "ledger") for group in range(4)]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(stream, ranks, [16] * 4))
    assert {number: digest for part in parts for number, digest in part.items()} == expected
    assert merge_checkpoints([rank.checkpoint() for rank in ranks])["lanes"] == calm.checkpoint()["lanes"]
    for pipeline in (calm, *ranks):
        pipeline.close()


def test_a_state_taken_by_another_thread_is_of_a_batch_and_leads_on_from_it(tiny_tokenizer, switching):
    pipeline, states, done = build(tiny_tokenizer), [], threading.Event()
    batches = iter(pipeline)
    next(batches)

    def take():
        while not done.is_set():
            states.append(pipeline.checkpoint())

    taker = threading.Thread(target=take)
    taker.start()
    seen = {}
    for count in itertools.count():
        if count >= 24 and len(states) > 10:
            break
        batch = next(batches)
        seen.update(zip(batch.sequence_numbers.tolist(), batch.digests, strict=True))
    done.set()
    taker.join()
    pipeline.close()
    whole = [state for state in states[:: max(1, len(states) // 4)] if 8 <= records_of(state) <= 40]
    for state in whole[:3]:
        resumed = build(tiny_tokenizer)
        resumed.restore(state)
        assert stream(resumed, 8).items() <= seen.items()
        resumed.close()


def records_of(state):
    return state["rounds"] * 4 + state["extra"]
