"""Taking over: a run that goes on with other sources loses no row of those that stay, and repeats none."""

import itertools
import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import few
from support.operator_data import Doubled
from support.runs import build_all, go_on, shapes
from zephon import CheckpointError, Pipeline, PipelineError, RecipeError, ZephonError
from zephon.config.topology import divisors
from zephon.io import Dataset
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource, TokenEstimation

SETTINGS = few(4)


def dataset(name, rows):
    texts = [f"{name} {i} " + "word " * (i * 7 % 23) if i % 9 else None for i in range(rows)]
    return Dataset.from_dict(name, {"text": [*texts, f"{name} last"]})


def tokens_of(batches):
    """How often each token of each row is in some batches."""
    spans = itertools.chain.from_iterable(batch.provenance().to_pylist() for batch in batches)
    return Counter(
        (span["dataset"], span["row"], token)
        for span in spans
        for token in range(span["token_begin"], span["token_end"])
    )


@st.composite
def takeovers(draw):
    """A chain of sources, each of which continues the one before: some leave, some come, weights change."""
    seed = draw(st.integers(0, 99))
    stock = {name: dataset(name, draw(st.integers(1, 120))) for name in "abcde"}
    estimation = draw(st.sampled_from([None, TokenEstimation(1000)]))
    chain, names = [], draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True))
    for nth in range(draw(st.integers(2, 3))):
        if nth:
            names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
        given = {
            "datasets": [stock[name] for name in names],
            "token_estimation": estimation,
            "seed": seed,
            "chunk_size": draw(st.integers(1, 60)),
            "continues": chain[-1] if chain else None,
        }
        if draw(st.booleans()):
            stages = [
                Stage({name: draw(st.floats(0.1, 9)) for name in names}),
                Stage(
                    {name: draw(st.floats(0.1, 9)) for name in names},
                    start_tokens=500,
                    change="linear",
                    end_tokens=2000,
                ),
            ]
            chain.append(ScheduledMixtureWorkSource(**given, schedule=stages))
        else:
            chain.append(StaticMixtureWorkSource(**given, mixture={name: draw(st.floats(0.1, 9)) for name in names}))
    return chain


ONE = {"lanes": 1, "batch": 1}


@SETTINGS
@given(takeovers(), shapes(), st.data())
def test_a_run_taken_over_does_not_depend_on_topology_and_resumes_anywhere(tiny_tokenizer, chain, shape, data):
    steps = [data.draw(st.integers(0, 6)) for _ in chain]
    more = data.draw(st.integers(1, 6))

    def whole(topologies):
        made, states = [], None
        for source, count in zip(chain, steps, strict=True):
            # Twice, so that a state of the run that took over is restored too.
            for part in (count, more):
                pipelines = build_all(source, tiny_tokenizer, **shape, groups=next(topologies))
                digests, states = go_on(pipelines, part, shape["batch"], states)
                made += digests
        return made

    alone = whole(itertools.repeat(1))
    spread = whole(iter(lambda: data.draw(st.sampled_from(divisors(shape["lanes"]))), None))
    assert alone == spread


@SETTINGS
@given(takeovers(), shapes(), st.data())
def test_sources_that_stay_lose_no_row_and_repeat_none(tiny_tokenizer, chain, shape, data):
    """With wrap every token of a lane comes out in order of the curriculum, so rows can be counted from the curriculum:
    those of each lane and dataset, over all takeovers, are the positions 0, 1, 2, ... of its order without gap."""
    states = None
    for source in chain:
        (pipeline,) = build_all(source, tiny_tokenizer, **shape)
        _, states = go_on([pipeline], data.draw(st.integers(1, 5)), shape["batch"], states)
    made = pipeline.compiled
    curriculum, orders = made.plan.curriculum, source.orders(made.datasets, shape["lanes"])
    for lane in range(shape["lanes"]):
        rows = [[] for _ in orders]
        for index in range(data.draw(st.integers(1, 40))):
            assert curriculum.rows_before(lane, index) == [len(each) for each in rows]
            chunk = curriculum.chunk(lane, index)
            for d, row in zip(chunk.dataset.tolist(), chunk.row.tolist(), strict=True):
                rows[d].append(row)
        for order, got in zip(orders, rows, strict=True):
            assert got == order.rows(lane, 0, len(got)).tolist()


def test_a_new_mixture_holds_at_once(tiny_tokenizer):
    old = StaticMixtureWorkSource([dataset("a", 900), dataset("b", 900)], mixture={"a": 1, "b": 1}, seed=1)
    new = StaticMixtureWorkSource(
        [dataset("b", 900), dataset("c", 900)], mixture={"b": 1, "c": 3}, continues=old, seed=1
    )
    shape = {"lanes": 4, "batch": 8, "seq_len": 16, "buffer": 16, "microbatch": 8}
    _, states = go_on(build_all(old, tiny_tokenizer, **shape), 10, 8)
    (pipeline,) = build_all(new, tiny_tokenizer, **shape)
    pipeline.restore(states)
    assert pipeline.mixture()["a"].target == 0
    stream = iter(pipeline)
    names = [set(next(stream).provenance().column("dataset").to_pylist()) for _ in range(40)]
    assert any("a" in each for each in names[:3])  # the buffer that was in use
    assert all("a" not in each for each in names[4:])
    assert set().union(*names) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "use",
    [
        lambda pipeline: next(iter(pipeline)),
        Pipeline.checkpoint,
        lambda pipeline: pipeline.skip(1, 2),
        lambda pipeline: pipeline.seek(step=3),
        lambda pipeline: pipeline.seek(sequence_number=0),
    ],
)
def test_without_a_state_a_run_that_takes_over_says_what_it_needs(tiny_tokenizer, tmp_path, use):
    old = StaticMixtureWorkSource([dataset("a", 5)])
    go_on(build_all(old, tiny_tokenizer, flush_index=tmp_path, **ONE), 5, 1)
    new = StaticMixtureWorkSource([dataset("b", 5)], continues=old)
    (pipeline,) = build_all(new, tiny_tokenizer, flush_index=tmp_path, **ONE)
    with pytest.raises(CheckpointError, match="restore a state of the earlier run"):
        use(pipeline)


def test_a_state_of_another_run_cannot_be_taken_over(tiny_tokenizer):
    other = StaticMixtureWorkSource([dataset("a", 6)])
    old = StaticMixtureWorkSource([dataset("a", 5)])
    _, states = go_on(build_all(other, tiny_tokenizer, **ONE), 3, 1)
    (pipeline,) = build_all(StaticMixtureWorkSource([dataset("b", 5)], continues=old), tiny_tokenizer, **ONE)
    with pytest.raises(CheckpointError, match="dataset a"):
        pipeline.restore(states)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"seed": 2}, "a run keeps its seed"), ({"shuffle_block_size": "none"}, "the order settings of")],
)
def test_what_would_lose_the_place_in_a_source_is_refused(changes, words):
    old = StaticMixtureWorkSource([dataset("a", 5)], seed=1)
    with pytest.raises(RecipeError, match=words):
        StaticMixtureWorkSource([dataset("a", 5)], **{"seed": 1, **changes}, continues=old)


def test_a_transform_with_a_memory_cannot_be_taken_along(tiny_tokenizer):
    """Its places are in what it gave, not in the data; so neither side of a takeover can have one."""

    def build(source, stateful):
        pipeline = Pipeline(source).options(runner="inline", canonical_replicas=1)
        pipeline = pipeline.stateful_transform(Doubled(), columns=["text"]) if stateful else pipeline
        return pipeline.tokenize(tiny_tokenizer).pack_flat(16).batch(1)

    old = StaticMixtureWorkSource([dataset("a", 50)])
    new = StaticMixtureWorkSource([dataset("b", 50)], continues=old)
    with pytest.raises(PipelineError, match=r"takes over from an earlier one .* cannot have a stateful_transform"):
        build(new, True).explain()
    states = {}
    for stateful in (False, True):
        pipeline = build(old, stateful)
        next(iter(pipeline))
        states[stateful] = pipeline.checkpoint()
        pipeline.close()
    for before, after in ((False, True), (True, False), (True, True)):
        with pytest.raises(ZephonError, match=r"a stateful_transform|together with a takeover"):
            build(new, after).restore(states[before], allow_changes=["row_operators", "documents"])
    next(iter(build(new, False).restore(states[False])))


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"buffer": 8},
        {"algorithm": "best_fit"},
        {"algorithm": "best_fit_wrap", "buffer": 8},
        {"algorithm": "ensure_mixture", "held": 8},
    ],
)
def test_a_finite_run_is_taken_over_exactly_at_every_step_or_not_at_all(tiny_tokenizer, lanes, shape):
    """Every token of the sources that stay is used once, counted over both runs."""
    shape = {"lanes": lanes, "batch": lanes, "microbatch": lanes, "seq_len": 30, "drop_last": False, **shape}
    a, b, c = (dataset(name, rows) for name, rows in (("a", 18), ("b", 14), ("c", 10)))
    finite = {"seed": 1, "chunk_size": 9, "repeat": False, "token_estimation": None}
    old = StaticMixtureWorkSource([a, b], **finite)
    new = StaticMixtureWorkSource([b, c, a], mixture={"a": 1, "b": 1, "c": 2}, continues=old, **finite)

    (whole,) = build_all(StaticMixtureWorkSource([a, b, c], **finite), tiny_tokenizer, seq_len=30, drop_last=False)
    expected = tokens_of(whole)
    (first,) = build_all(old, tiny_tokenizer, **shape)
    used, states = [], [first.checkpoint()]
    for batch in first:
        used.append(batch)
        states.append(first.checkpoint())
    refused, last = [], None
    for step, state in enumerate(states):
        (second,) = build_all(new, tiny_tokenizer, **shape)
        try:
            second.restore(state)
        except CheckpointError as error:
            refused.append(step)
            last = int(re.search(r"at most (\d+) records", str(error))[1])
        else:
            assert tokens_of([*used[:step], *second]) == expected
    assert not refused or refused == list(range(last // lanes + 1, len(states)))


@pytest.mark.parametrize("names", [["pages", "more"], ["more", "talks", "pages"]])
def test_recipes_of_chat_and_text_are_taken_over(tmp_path, tiny_tokenizer, names):
    """Sources that end keep the operators of their recipe; tokens of those that stay are used once."""
    answers = [{"role": "assistant", "content": "yes " * n} for n in range(5)]
    talks = [[{"role": "user", "content": f"ask {i}"}, answers[i % 5]] for i in range(30)]
    tables = {
        "pages": [{"text": f"page {i} " + "word " * (i % 11), "lang": "ab"[i % 2]} for i in range(40)],
        "talks": [{"messages": talk} for talk in talks],
        "more": [{"text": f"more {i} " + "word " * (i % 9), "lang": "ab"[i % 2]} for i in range(25)],
    }
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    settings = {
        "pages": {"filter": "lang == 'a'"},
        "talks": {"documents": "chat", "chat_template": template},
        "more": {"filter": "lang == 'b'"},
    }

    def pipeline(which, continue_from=None):
        options = {"canonical_replicas": 1, "chunk_size": 8, "repeat": False, "shuffle_buffer_size": 4}
        lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        lines += [f'continue_from = "{continue_from}"'] if continue_from else []
        for name in which:
            source = {"name": name, "path": f"{name}.jsonl", "weight": 1, **settings[name]}
            lines += ["[[sources]]", *(f"{key} = {json.dumps(value)}" for key, value in source.items())]
        recipe = tmp_path / ("first.toml" if len(which) == 2 and not continue_from else "other.toml")
        recipe.write_text("\n".join(lines))
        given = {"tokenizer": tiny_tokenizer, "seq_len": 24, "microbatch_size": 1, "drop_last": False}
        return Pipeline.from_recipe(recipe, **given, runner="inline")

    first = pipeline(["pages", "talks"])
    used = [batch for _, batch in zip(range(5), first, strict=False)]
    second = pipeline(names, continue_from="first.toml").restore(first.checkpoint())
    after = list(second)
    whole = tokens_of(pipeline(list(tables)))
    got = tokens_of([*used, *after])
    for source in names:
        assert {key: n for key, n in got.items() if key[0] == source} == {
            key: n for key, n in whole.items() if key[0] == source
        }
    again = pipeline(names, continue_from="first.toml").restore(second.checkpoint())
    assert list(again) == []
