"""Runs as properties of streams build them: a pipeline for each data-parallel group, of some shape."""

import json

from hypothesis import strategies as st

from support import step_digests
from zephon import Pipeline


@st.composite
def shapes(draw, algorithms=("wrap", "ensure_mixture", "best_fit")):
    """Arguments of `build_all`."""
    lanes = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return {
        "lanes": lanes,
        "batch": lanes * draw(st.integers(1, 3)),
        "seq_len": draw(st.integers(1, 60)),
        "window": draw(st.integers(1, 3)),
        "buffer": draw(st.sampled_from([None, 1, 7, 64])),
        "algorithm": draw(st.sampled_from(algorithms)),
        "held": draw(st.sampled_from([1, 30, 300])),
    }


def build_all(
    source,
    tokenizer,
    *,
    lanes=1,
    batch=None,
    seq_len=8,
    window=1,
    buffer=None,
    algorithm="wrap",
    held=None,
    groups=1,
    microbatch=1,
    drop_last=True,
    **options,
):
    """The pipelines of all groups; `held` is the stock of ensure_mixture."""
    pipelines = []
    for group in range(groups):
        pipeline = Pipeline(source).options(
            canonical_replicas=lanes,
            global_batch=batch,
            flush_every_k_chunks=window,
            dp_degree=groups,
            dp_group_id=group,
            **{"runner": "inline", **options},
        )
        pipeline = pipeline.tokenize(tokenizer)
        if algorithm == "ensure_mixture":
            pipeline = pipeline.ensure_mixture(held).pack_flat(seq_len)
        else:
            pipeline = pipeline.pack_flat(seq_len, algorithm)
        if buffer:
            pipeline = pipeline.shuffle(buffer, seed=3)
        pipelines.append(pipeline.batch(microbatch, drop_last=drop_last))
    return pipelines


def go_on(pipelines, steps, batch, states=None):
    """The digests of some steps, and the states after them; pipelines are restored from states before, if any."""
    for pipeline in pipelines if states else ():
        pipeline.restore(states)
    digests = step_digests(pipelines, steps, batch) if steps else []
    states = [json.loads(json.dumps(pipeline.checkpoint())) for pipeline in pipelines]
    for pipeline in pipelines:
        pipeline.close()
    return digests, states
