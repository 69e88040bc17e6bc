"""The same batches, states and accounts, wherever the work runs."""

import json

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from support.examples import few
from support.operator_data import (
    Doubled,
    Joined,
    JoinedOrFails,
    Suffix,
    every_other,
    fails_on_sevens,
    reversed_texts,
    shout,
    two_of_each,
)
from support.process_data import keeps_number
from zephon import Pipeline, merge_checkpoints
from zephon.config.topology import divisors
from zephon.io import Dataset
from zephon.run.ledger import compare, read_ledger
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource

# Each example starts some processes.
SETTINGS = few(3, phases=[Phase.explicit, Phase.reuse, Phase.generate])

ROWS = {
    "expression": lambda p, runner: p.filter("number != 5"),
    "filter": lambda p, runner: p.filter(keeps_number, runner=runner),
    "map_transform": lambda p, runner: p.map_transform(shout, columns=["text"], runner=runner),
    "several": lambda p, runner: p.map_transform(two_of_each, datasets=["d0"], runner=runner),
    "map_batches": lambda p, runner: p.map_batches(reversed_texts, columns=["text"], runner=runner),
    "dropping": lambda p, runner: p.map_batches(every_other, runner=runner),
    "add_op": lambda p, runner: p.add_op(Suffix(), runner=runner),
    "faults": lambda p, runner: p.map_transform(fails_on_sevens, runner=runner),
    "joined": lambda p, runner: p.stateful_transform(Joined(), columns=["text"], runner=runner),
    "failing": lambda p, runner: p.stateful_transform(JoinedOrFails(), columns=["text", "number"], runner=runner),
    "doubled": lambda p, runner: p.stateful_transform(Doubled(), columns=["text"], runner=runner),
}
STATEFUL = ("joined", "failing", "doubled")
PACKINGS = {
    "wrap": lambda p, n: p.pack_flat(n),
    "ensure_mixture": lambda p, n: p.ensure_mixture(64).pack_flat(n),
    "best_fit": lambda p, n: p.pack_flat(n, "best_fit", num_bins=4),
    "sequences": lambda p, n: p.pack_sequences(n, num_bins=4),
}


def text_of(number):
    return [None, "", f"doc {number}", f"a longer document {number} " * 4, "é木 " * (number % 30)][number % 5]


@st.composite
def runs(draw):
    """What decides the data of a run."""
    rows = draw(st.lists(st.sampled_from(list(ROWS)), max_size=3, unique=True))
    stateful = [name for name in rows if name in STATEFUL][:1]  # afterwards there is nothing but the text
    datasets = [
        Dataset.from_dict(
            f"d{d}", {"number": list(range(1, rows + 1)), "text": [text_of(n) or "some" for n in range(rows)]}
        )
        for d, rows in enumerate(draw(st.lists(st.integers(20, 200), min_size=1, max_size=2)))
    ]
    order = {"seed": draw(st.integers(0, 99)), "chunk_size": draw(st.integers(1, 60)), "token_estimation": False}
    lanes = draw(st.sampled_from([1, 2, 4]))
    batch = lanes * draw(st.integers(1, 3))
    if draw(st.booleans()):
        weights = {dataset.name: n + 1.0 for n, dataset in enumerate(datasets)}
        stages = [Stage(weights), Stage({"d0": 1.0}, start_steps=3)]
        source = ScheduledMixtureWorkSource(datasets=datasets, schedule=stages, **order)
    else:
        source = StaticMixtureWorkSource(datasets=datasets, **order)
    return {
        "source": source,
        "lanes": lanes,
        "batch": batch,
        "rows": [name for name in rows if name not in STATEFUL] + stateful,
        "packing": draw(st.sampled_from(list(PACKINGS))),
        "seq_len": draw(st.integers(8, 40)),
        "shuffle": draw(st.sampled_from([None, 16])),
    }


@st.composite
def places(draw):
    """Where work runs, with which look-ahead and cache: what decides no data."""
    return {
        "rows": draw(st.lists(st.sampled_from([None, "process", "threads"]), min_size=3, max_size=3)),
        "options": {
            "runner": draw(st.sampled_from(["process", "threads", "process", "inline"])),
            "isolate": draw(st.booleans()),
            "prefetch_buffer_size": draw(st.sampled_from([None, 1000, 10**8])),
            "prefetch_batches": draw(st.sampled_from([None, 1, 5])),
            "fetch_parallelism": draw(st.sampled_from([None, 1, 3])),
            "pack_parallelism": draw(st.sampled_from([None, 3])),
            "io_options": {"cache": {"enabled": False, "memory_bytes": draw(st.sampled_from([1, 10**8]))}},
        },
    }


INLINE = {"rows": [None] * 3, "options": {"runner": "inline"}}


def build(run, tokenizer, place=INLINE, *, groups=1, group=0, microbatch=1, **options):
    pipeline = Pipeline(run["source"]).options(
        canonical_replicas=run["lanes"],
        global_batch=run["batch"],
        flush_every_k_chunks=2,
        dp_degree=groups,
        dp_group_id=group,
        on_error="skip",
        error_budget=1.0,
        **{**place["options"], **options},
    )
    for name, runner in zip(run["rows"], place["rows"], strict=False):
        pipeline = ROWS[name](pipeline, runner)
    pipeline = PACKINGS[run["packing"]](pipeline.tokenize(tokenizer, parallelism=1), run["seq_len"])
    if run["shuffle"]:
        pipeline = pipeline.shuffle(run["shuffle"], seed=3)
    return pipeline.batch(microbatch)


def records(pipeline, count):
    made = []
    for batch in pipeline:
        made += zip(batch.sequence_numbers.tolist(), batch.digests, strict=True)
        if len(made) >= count:
            break
    return made


@SETTINGS
@given(runs(), places(), places(), st.data())
def test_no_choice_of_runner_changes_a_batch_a_state_or_the_ledger(
    tiny_tokenizer, tmp_path_factory, run, one, other, data
):
    """Begun in one place and gone on with in another, on one group and on several."""
    first, skipped, more = (run["batch"] * data.draw(st.integers(1, 4)) for _ in range(3))
    here, there = (tmp_path_factory.mktemp("ledger") for _ in range(2))
    reference = build(run, tiny_tokenizer, ledger=here)
    wanted = records(reference, first)
    wanted_state = reference.checkpoint()
    step = first // run["batch"]
    reference.skip(step, step + skipped // run["batch"])
    wanted += records(reference, more)

    pipeline = build(run, tiny_tokenizer, one, ledger=there)
    got = records(pipeline, first)
    state = json.loads(json.dumps(pipeline.checkpoint()))
    assert state == wanted_state
    pipeline.close()
    groups = data.draw(st.sampled_from(divisors(run["lanes"])))
    pieces = []
    for group in range(groups):
        part = build(run, tiny_tokenizer, other, groups=groups, group=group, ledger=there).restore(state)
        part.skip(step, step + skipped // run["batch"])
        pieces.append(part)
        got += records(part, more // groups)
    merged = merge_checkpoints([part.checkpoint() for part in pieces])
    for part in (*pieces, reference):
        part.close()
    assert sorted(got) == sorted(wanted)
    assert merged["lanes"] == reference.checkpoint()["lanes"]
    assert compare(read_ledger(here), read_ledger(there)) is None
    assert [len(read_ledger(folder).sequence) for folder in (here, there)] == [first + more] * 2


@pytest.mark.deep
@SETTINGS
@given(runs(), places(), st.integers(0, 6))
def test_a_run_in_processes_can_be_entered_at_any_step(tiny_tokenizer, tmp_path_factory, run, place, step):
    index = tmp_path_factory.mktemp("index")
    written = build(run, tiny_tokenizer, place, flush_index=index)
    wanted = records(written, (step + 2) * run["batch"])
    written.close()
    pipeline = build(run, tiny_tokenizer, place, flush_index=index).seek(step=step)
    assert records(pipeline, 2 * run["batch"]) == wanted[step * run["batch"] :]
    pipeline.close()


@SETTINGS
@given(runs(), places())
def test_accounts_at_the_end_of_the_data_are_the_same(tiny_tokenizer, run, place):
    names = [dataset.name for dataset in run["source"].datasets]
    source = StaticMixtureWorkSource(
        datasets=run["source"].datasets, repeat=False, token_estimation=False, chunk_size=7
    )
    accounts = []
    for where in (INLINE, place):
        pipeline = build({**run, "source": source, "rows": run["rows"]}, tiny_tokenizer, where)
        made = [digest for batch in pipeline for digest in batch.digests]
        mixture = pipeline.mixture()
        accounts.append((made, [mixture[name] for name in names], pipeline.packing(), pipeline.left_over))
        pipeline.close()
    assert accounts[0] == accounts[1]
