"""The promise: the same global batches whatever runs them, and after any resume."""

import itertools
import json
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support import step_digests
from support.examples import few
from zephon import Pipeline, merge_checkpoints
from zephon.config.topology import divisors
from zephon.io import Dataset, DecodeCache
from zephon.work import StaticMixtureWorkSource, TokenEstimation

# Building pipelines costs some tens of milliseconds each, so there are fewer examples than usual.
SETTINGS = few(4)

texts = st.one_of(
    st.text(alphabet="ab c\n!é木", max_size=60),
    st.sampled_from([None, "", "  \n", "word " * 400, "x" * 3000]),
)


def many_texts(seed, count):
    """More documents than are worth drawing one by one: short ones, blank ones, and now and then a huge one."""
    choose = random.Random(seed)
    kinds = [None, "", " ", "a", "two words", "some words and more of them", "word " * 300, "é木 " * 2_000]
    return choose.choices(kinds, weights=[2, 2, 2, 20, 40, 40, 4, 0.3], k=count)


@st.composite
def sources(draw, *, repeat=True):
    """A work source over random corpora of 1 to 500 documents, at least one of each not blank."""
    count = draw(st.integers(1, 5))
    datasets = []
    for d in range(count):
        rows = draw(
            st.one_of(st.lists(texts, max_size=40), st.builds(many_texts, st.integers(0, 99), st.integers(1, 499)))
        )
        rows.insert(draw(st.integers(0, len(rows))), f"document of dataset {d}")
        datasets.append(Dataset.from_dict(f"d{d}", {"text": rows}, group=None if d % 2 else "even"))
    return StaticMixtureWorkSource(
        datasets=datasets,
        mixture={f"d{d}": draw(st.floats(0.1, 10)) for d in range(count)},
        token_estimation=draw(st.sampled_from([None, TokenEstimation()])),
        seed=draw(st.integers(0, 1000)),
        chunk_size=draw(st.integers(1, 60)),
        shuffle_shards=draw(st.booleans()),
        shuffle_within_shard=draw(st.booleans()),
        shuffle_block_size=draw(st.one_of(st.sampled_from(["auto", "global", "none"]), st.integers(1, 100))),
        repeat=repeat,
    )


def texts_of(dataset):
    opened = dataset.open(["text"], size_column="text", cache=DecodeCache(1 << 20), index_dir=None)
    return opened.take(np.arange(opened.catalog.rows)).column("text").to_pylist()


@st.composite
def packings(draw, seq_len, *, drop=True):
    """Which packing, and its options."""
    kind = draw(st.sampled_from(["wrap", "wrap", "flat", "sequences"] if drop and seq_len >= 30 else ["wrap", "flat"]))
    if kind == "wrap" or seq_len < 8:  # a huge document makes a record of every few tokens, one by one
        return "pack_flat", {}
    options = {
        "num_bins": draw(st.sampled_from([5, 8, 64])),  # one for each dataset at least
        "max_documents_per_record": draw(st.sampled_from([None, 1, 3])),
        "homogeneity": draw(st.sampled_from(["none", "group", "full"])),
    }
    if kind == "sequences":
        return "pack_sequences", {**options, "algorithm": draw(st.sampled_from(["first_fit", "best_fit"]))}
    options["algorithm"] = draw(st.sampled_from(["first_fit", "best_fit", "best_fit_wrap"]))
    # The shortest document of each dataset has less than 30 tokens, so that some document is left.
    options["oversized"] = draw(st.sampled_from(["split", "drop"])) if drop and seq_len >= 30 else "split"
    return "pack_flat", options


@st.composite
def shapes(draw, *, drop=True):
    """Lanes, feeds, records per step, sequence length, packing, window, shuffle buffer."""
    seq_len = draw(st.integers(1, 50))
    lanes = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 60, 64]))
    return {
        "lanes": lanes,
        "feeds": draw(st.sampled_from(["auto", *divisors(lanes)])),
        "global_batch": lanes * draw(st.integers(1, 3)),
        "seq_len": seq_len,
        "pack": draw(packings(seq_len, drop=drop)),
        "window": draw(st.integers(1, 3)),
        "buffer": draw(st.sampled_from([None, 1, 7, 64])),
    }


def build(source, shape, tokenizer, *, groups=1, group=0, microbatch=1, runner="inline", drop_last=True, **options):
    pipeline = (
        Pipeline(source)
        .options(
            runner=runner,
            canonical_replicas=shape["lanes"],
            feeds=shape["feeds"],
            global_batch=shape["global_batch"],
            flush_every_k_chunks=shape["window"],
            dp_degree=groups,
            dp_group_id=group,
            **options,
        )
        .tokenize(tokenizer)
    )
    how, packing = shape["pack"]
    pipeline = getattr(pipeline, how)(shape["seq_len"], **packing)
    if shape["buffer"]:
        pipeline = pipeline.shuffle(shape["buffer"], seed=3)
    return pipeline.batch(microbatch, drop_last=drop_last)


def build_all(source, shape, tokenizer, groups, microbatch=1, **options):
    return [
        build(source, shape, tokenizer, groups=groups, group=g, microbatch=microbatch, **options) for g in range(groups)
    ]


@SETTINGS
@given(sources(), shapes(), st.data())
def test_global_batches_do_not_depend_on_dp_degree_or_microbatch_size(tiny_tokenizer, source, shape, data):
    wanted = step_digests([build(source, shape, tiny_tokenizer)], 3, shape["global_batch"])
    groups = data.draw(st.sampled_from(divisors(shape["lanes"])))
    per_group = shape["global_batch"] // groups
    microbatch = data.draw(st.sampled_from(divisors(per_group)))
    assert (
        step_digests(build_all(source, shape, tiny_tokenizer, groups, microbatch), 3, shape["global_batch"]) == wanted
    )


@SETTINGS
@given(sources(), shapes(), st.data())
def test_a_run_resumed_again_and_again_on_other_topologies_goes_on_as_if_never_stopped(
    tiny_tokenizer, source, shape, data
):
    batch = shape["global_batch"]
    steps = [data.draw(st.integers(1, 4)) for _ in range(3)]
    wanted = step_digests([build(source, shape, tiny_tokenizer)], sum(steps), batch)
    got, states = [], None
    for count in steps:
        groups = data.draw(st.sampled_from(divisors(shape["lanes"])))
        microbatch = data.draw(st.sampled_from(divisors(batch // groups)))
        pipelines = build_all(source, shape, tiny_tokenizer, groups, microbatch)
        for pipeline in pipelines if states else []:
            pipeline.restore(states)
        got += step_digests(pipelines, count, batch)
        # Through JSON, as a file would hold it, and taken twice: taking one changes nothing.
        states = [json.loads(json.dumps(pipeline.checkpoint())) for pipeline in pipelines]
        assert states == [pipeline.checkpoint() for pipeline in pipelines]
        for pipeline in data.draw(st.sampled_from([pipelines, []])):
            next(iter(pipeline))  # used by a run that is then killed: the state is of before
        if data.draw(st.booleans()):
            states = [merge_checkpoints(data.draw(st.permutations(states)))]
    assert got == wanted


@SETTINGS
@given(sources(), shapes(), st.data())
def test_a_state_taken_inside_a_step_goes_on_exactly_on_the_same_topology(tiny_tokenizer, source, shape, data):
    groups = data.draw(st.sampled_from(divisors(shape["lanes"])))
    group = data.draw(st.integers(0, groups - 1))
    microbatch = data.draw(st.integers(1, 5))

    def fresh():
        return build(source, shape, tiny_tokenizer, groups=groups, group=group, microbatch=microbatch)

    pipeline = fresh()
    stream = iter(pipeline)
    for _ in range(data.draw(st.integers(0, 12))):
        next(stream)
    resumed = iter(fresh().restore(pipeline.checkpoint()))
    for _ in range(4):
        a, b = next(stream), next(resumed)
        assert a.digests == b.digests and a.sequence_numbers.tolist() == b.sequence_numbers.tolist()


@few(3)
@given(sources(repeat=False), shapes(drop=False), st.data())
def test_a_finite_run_uses_every_document_once_and_all_groups_end_together(tiny_tokenizer, source, shape, data):
    """Groups are stepped in lockstep, as ranks of a job are; the flag is combined by hand."""

    def ranks():
        groups = data.draw(st.sampled_from(divisors(shape["lanes"])))
        per_group = shape["global_batch"] // groups
        return build_all(source, shape, tiny_tokenizer, groups, per_group, drop_last=False, combine_flag=lambda _: True)

    alone = build(source, shape, tiny_tokenizer, microbatch=shape["global_batch"], drop_last=False)
    whole = list(alone)
    covered = {}
    for batch in whole:
        for line in batch.provenance().to_pylist():
            covered.setdefault((line["dataset"], line["row"]), []).append((line["token_begin"], line["token_end"]))
    for d, dataset in enumerate(source.datasets):
        for row, value in enumerate(texts_of(dataset)):
            pieces = sorted(covered.pop((f"d{d}", row), []))
            if value is None or not value.strip():
                assert not pieces
                continue
            assert pieces[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert not covered
    digests = step_digests([alone], len(whole), shape["global_batch"])
    stop, pipelines = data.draw(st.integers(1, len(whole))), ranks()
    got = step_digests(pipelines, stop, shape["global_batch"])
    states = [pipeline.checkpoint() for pipeline in pipelines]
    resumed = [pipeline.restore(states) for pipeline in ranks()]
    if stop < len(whole):
        got += step_digests(resumed, len(whole) - stop, shape["global_batch"])
    assert got == digests
