"""Holding the mixture locally: the same promises as without, records of one dataset, and shares over any stretch."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import step_digests
from support.examples import few
from support.runs import build_all, go_on, shapes
from zephon import CheckpointError, Pipeline, PipelineError
from zephon.config.topology import divisors
from zephon.io import Dataset
from zephon.ops.turns import Turns
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource

SETTINGS = few(4)


@st.composite
def sources(draw, *, repeat=True):
    """Datasets whose documents differ much in length."""
    chance = random.Random(draw(st.integers(0, 99)))
    datasets, count = [], draw(st.integers(1, 4))
    for d in range(count):
        longest = draw(st.sampled_from([3, 30, 300]))
        rows = [f"d{d} {i} " + "word " * chance.randrange(longest) for i in range(draw(st.integers(1, 600)))]
        datasets.append(Dataset.from_dict(f"d{d}", {"text": [*rows, None, " "]}))
    return StaticMixtureWorkSource(
        datasets=datasets,
        mixture={f"d{d}": draw(st.floats(0.1, 10)) for d in range(count)},
        seed=draw(st.integers(0, 1000)),
        chunk_size=draw(st.integers(20, 700)),
        repeat=repeat,
    )


@SETTINGS
@given(sources(), shapes(["ensure_mixture"]), st.data())
def test_a_run_is_the_same_on_any_topology_and_runner_and_after_any_resume(tiny_tokenizer, source, shape, data):
    steps = [data.draw(st.integers(1, 5)) for _ in range(3)]
    wanted = step_digests(build_all(source, tiny_tokenizer, **shape), sum(steps), shape["batch"])
    got, states = [], None
    for count in steps:
        choices = {
            "groups": st.sampled_from(divisors(shape["lanes"])),
            "prefetch_buffer_size": st.sampled_from([None, 1, 3000]),
            "runner": st.sampled_from(["inline", "threads"]),
        }
        pipelines = build_all(source, tiny_tokenizer, **shape, **data.draw(st.fixed_dictionaries(choices)))
        digests, states = go_on(pipelines, count, shape["batch"], states)
        got += digests
    assert got == wanted


@SETTINGS
@given(sources(repeat=False), shapes(["ensure_mixture"]))
def test_a_finite_run_uses_every_token_once_in_records_of_one_dataset_but_for_those_that_waited_for_too_long(
    tiny_tokenizer, source, shape
):
    covered, mixed = {}, 0
    (pipeline,) = build_all(source, tiny_tokenizer, **shape, drop_last=False)
    for batch in pipeline:
        lines = batch.provenance().to_pylist()
        mixed += len({line["dataset"] for line in lines}) > 1
        for line in lines:
            covered.setdefault((line["dataset"], line["row"]), []).append((line["token_begin"], line["token_end"]))
    for pieces in covered.values():
        pieces.sort()
        assert pieces[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert len(covered) == sum(dataset.table.num_rows - 2 for dataset in source.datasets)
    # Those that waited for too long, at the end of a window, and the last of each lane.
    windows = -(-pipeline.compiled.plan.curriculum.chunks_of(0) // shape["window"]) * shape["lanes"]
    assert mixed <= windows * len(source.datasets)


@given(st.sampled_from([1, 2, 3, 5, 8, 16, 21, 34, 55, 64, 96]), st.lists(st.integers(1, 1000), min_size=1, max_size=5))
def test_turns_are_spread_evenly_over_every_lane_and_over_all_lanes_from_any_record_on(lanes, weights):
    turns = [Turns(lane, lanes) for lane in range(lanes)]
    order = list(range(len(weights)))
    got = np.array([[t.choose(n, weights, order) for t in turns] for n in range(2000 // lanes + 60)]).reshape(-1)
    wanted = np.array(weights) / sum(weights)
    for length in (60, 500):
        for d in order:
            sums = np.concatenate([[0], np.cumsum(got == d)])
            assert np.abs(sums[length:] - sums[:-length] - length * wanted[d]).max() <= 6
    for lane in range(lanes):
        own = got[lane::lanes][:60]
        assert all(abs((own == d).sum() - len(own) * wanted[d]) <= 4 for d in order)


def test_shares_hold_over_every_stretch_where_documents_differ_in_length(tiny_tokenizer):
    chance = random.Random(1)
    short = ["word " * chance.randrange(4, 12) for _ in range(4000)]
    long = ["more words " * chance.randrange(20, 60) for _ in range(800)]
    source = StaticMixtureWorkSource(
        [Dataset.from_dict("short", {"text": short}), Dataset.from_dict("long", {"text": long})],
        mixture={"short": 0.3, "long": 0.7},
    )
    worst = {}
    for ensure in (False, True):
        pipeline = Pipeline(source).options(canonical_replicas=8, runner="inline").tokenize(tiny_tokenizer)
        pipeline = (pipeline.ensure_mixture() if ensure else pipeline).pack_flat(31).shuffle(256).batch(64)
        blocks = [batch.block for batch in itertools.islice(pipeline, 100)]
        counts = [
            np.add.reduceat(np.where(b.span_dataset == 0, b.span_lengths(), 0), b.span_offsets[:-1]) for b in blocks
        ]
        sums = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        worst[ensure] = np.abs((sums[1000:] - sums[:-1000]) / 32_000 - 0.3).max()
    assert worst[True] < 0.01 < worst[False]


def test_a_resume_goes_no_further_back_than_the_stock_though_a_dataset_fills_a_record_in_a_long_time(tiny_tokenizer):
    common = Dataset.from_dict("common", {"text": [f"common {i} " + "word " * (i % 40) for i in range(3000)]})
    rare = Dataset.from_dict("rare", {"text": [f"rare {i}" for i in range(50)]})
    source = StaticMixtureWorkSource([common, rare], mixture={"common": 0.999, "rare": 0.001}, chunk_size=200)

    def fresh():
        shape = {"lanes": 2, "batch": 4, "seq_len": 63, "microbatch": 4, "algorithm": "ensure_mixture", "held": 20}
        return build_all(source, tiny_tokenizer, **shape)[0]

    pipeline, gone, seen = fresh(), iter(fresh()), 0
    for batch in itertools.islice(pipeline, 1200):
        assert batch.digests == next(gone).digests
        seen += sum(line["dataset"] == "rare" for line in batch.provenance().to_pylist())
        state = pipeline.checkpoint()
        for window, _, chunk, _, _, _, *skips in state["lanes"].values():
            assert len(skips) == 2 and window - chunk <= 4
    assert seen > 5 and max(window for window, *_ in state["lanes"].values()) > 20
    again = fresh().restore(json.loads(json.dumps(state)))
    assert next(iter(again)).digests == next(gone).digests


def shares_by_part(pipeline, part, parts):
    """Shares of the first dataset in `parts` stretches of `part` tokens each."""
    counts = np.array([batch.tokens_by_dataset() for batch in itertools.islice(pipeline, part * parts // 6400)])
    pipeline.close()
    sums = counts.reshape(parts, -1, 2).sum(axis=1)
    return sums[:, 0] / sums.sum(axis=1)


def even_rows():
    """Two datasets of token ids, one with rows ten times as long."""
    lengths = {"long": 500, "short": 50}
    return [Dataset.from_dict(name, {"input_ids": [[7] * n] * 400}) for name, n in lengths.items()]


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("chunk_size", [64, 4096])
def test_a_schedule_is_followed_without_lead_or_lag(lanes, chunk_size):
    stages = [Stage({"long": 9, "short": 1}), Stage({"long": 1, "short": 9}, start_tokens=640_000)]
    source = ScheduledMixtureWorkSource(even_rows(), schedule=stages, chunk_size=chunk_size)
    pipeline = Pipeline(source).options(canonical_replicas=lanes, runner="inline").pretokenized()
    shares = shares_by_part(pipeline.ensure_mixture(1000).pack_flat(99).batch(64), 64_000, 20)
    assert np.abs(shares - np.repeat([0.9, 0.1], 10)).max() < 0.02


@pytest.mark.parametrize("chunk_size", [64, 4096])
def test_a_mixture_that_takes_over_begins_when_the_stock_is_used_up(chunk_size):
    def build(source):
        pipeline = Pipeline(source).options(canonical_replicas=4, runner="inline").pretokenized()
        return pipeline.ensure_mixture(1000).pack_flat(99).shuffle(40).batch(64)

    def source_of(share, **more):
        mixture = {"long": share, "short": 1 - share}
        return StaticMixtureWorkSource(even_rows(), mixture=mixture, chunk_size=chunk_size, **more)

    first = source_of(0.9)
    before = build(first)
    for _ in itertools.islice(before, 50):
        pass
    state = before.checkpoint()
    before.close()
    shares = shares_by_part(build(source_of(0.1, continues=first)).restore(state), 32_000, 20)
    # A stock of 100,000 tokens, and up to 256 records of each lane until it can be entered.
    assert np.abs(shares[:3] - 0.9).max() < 0.02 and np.abs(shares[7:] - 0.1).max() < 0.02


def test_a_lane_that_gives_out_the_last_of_its_stock_is_not_taken_over():
    def build(share, **more):
        rows = [Dataset.from_dict(name, {"input_ids": [[7] * 32] * 100}) for name in "ab"]
        source = StaticMixtureWorkSource(rows, mixture={"a": share, "b": 1}, seed=1, repeat=False, **more)
        pipeline = Pipeline(source).options(canonical_replicas=1, runner="inline", flush_every_k_chunks=2)
        return source, pipeline.pretokenized().ensure_mixture(4).pack_flat(31).batch(1)

    source, first = build(0.2)
    for _ in itertools.islice(first, 198):
        pass
    state = first.checkpoint()
    first.close()
    _, second = build(5, continues=source)
    with pytest.raises(CheckpointError, match="Continue from a state of at most"):
        second.restore(state)


def test_bins_cannot_be_combined_with_it(tiny_tokenizer):
    source = StaticMixtureWorkSource([Dataset.from_dict("a", {"text": ["x"]})])
    pipeline = Pipeline(source).tokenize(tiny_tokenizer).ensure_mixture().pack_flat(8, "best_fit").batch(1)
    with pytest.raises(PipelineError, match="take one or the other"):
        iter(pipeline)
    with pytest.raises(PipelineError, match="buffer_size"):
        pipeline.ensure_mixture(0)
