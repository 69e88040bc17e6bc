"""The promise, with operators on the way: the same global batches on any topology, after any resume, however cut."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import step_digests
from support.chat_data import CHATML, write_chat_tokenizer
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
    valued,
)
from zephon import Pipeline, merge_checkpoints
from zephon.config.topology import divisors
from zephon.io import Dataset
from zephon.ops.functions import MapBatches, MapTransform
from zephon.ops.rows import Rows
from zephon.work import StaticMixtureWorkSource

SETTINGS = few(6)


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    return write_chat_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer", CHATML)


def text_of(number):
    return [None, "", f"doc {number}", f"a longer document {number} " * 6, "é木 " * (number % 40)][number % 5]


def bytes_of(number):
    return [b"\xff bad", None, f"bytes {number} é".encode(), "été".encode("latin-1")][number % 4]


def conversation_of(number):
    words = f"say {number} "
    turns = [{"role": "user", "content": words}, {"role": "assistant", "content": words * (number % 9)}]
    return (turns * (number % 3)) or None


@st.composite
def sources(draw):
    datasets = []
    for d in range(draw(st.integers(1, 3))):
        numbers = list(range(1, draw(st.integers(12, 200))))  # no operator below drops number 2
        table = {
            "number": numbers,
            "title": [f"title {n}" for n in numbers],
            "text": [f"some text of dataset {d}" if n == 1 else text_of(n) for n in numbers],
            "raw": [bytes_of(n) for n in numbers],
            "messages": [conversation_of(n) for n in numbers],
            "input_ids": [[n % 50] * (n % 60) for n in numbers],
            "loss": [[(n + i) % 2 for i in range(n % 60)] for n in numbers],
            "places": [[(3 * i) % 100 for i in range(n % 60)] for n in numbers],
        }
        datasets.append(Dataset.from_dict(f"d{d}", table))
    return StaticMixtureWorkSource(
        datasets=datasets,
        token_estimation=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        chunk_size=draw(st.integers(1, 60)),
        shuffle_block_size=draw(st.sampled_from(["auto", "global", "none", 7])),
    )


LENIENT = {"on_error": "skip", "error_budget": 1.0}
ROWS = {
    "filter by expression": lambda p: p.filter("number != 5 and length(title) > 3"),
    "filter by function": lambda p: p.filter(lambda row: row["number"] % 4 != 0, columns=["number"]),
    "map_transform": lambda p: p.map_transform(shout, columns=["text"]),
    "several rows of one": lambda p: p.map_transform(two_of_each),
    "map_batches": lambda p: p.map_batches(reversed_texts, columns=["text"]),
    "map_batches that drops": lambda p: p.map_batches(every_other),
    "text_template": lambda p: p.text_template("{title}: {text}", datasets=["d0"]),
    "add_op": lambda p: p.add_op(Suffix()),
    "rows left out": lambda p: p.map_transform(fails_on_sevens).options(**LENIENT),
    "decode_text": lambda p: p.decode_text("raw").text_template("{raw} {number}"),
    "decode_text that leaves rows out": lambda p: p.decode_text("raw", errors="strict").options(**LENIENT),
    "columns made by a map": lambda p: (
        p.map_transform(valued)
        .filter("score is null or score != 4 and lists.first is null")
        .text_template("{score} {word}: {text}")
        .options(**LENIENT)
    ),
    "stateful_transform": lambda p: p.stateful_transform(Joined(), columns=["text"]),
    "stateful_transform that fails": lambda p: p.stateful_transform(
        JoinedOrFails(), columns=["text", "number"]
    ).options(on_error="skip", error_budget=1.0),
    "stateful_transform that gives more": lambda p: p.stateful_transform(Doubled(), columns=["text"]),
}
TOKENS = {
    "tokenize": lambda p, t, limit: p.tokenize(t, **limit),
    "tokenize_chat": lambda p, t, limit: p.tokenize_chat(t, **limit),
    "pretokenized": lambda p, t, limit: p.pretokenized(loss="loss", positions="places", **limit),
}
PACKS = {
    "wrap": lambda p, length: p.pack_flat(length),
    "ensure_mixture": lambda p, length: p.ensure_mixture(64).pack_flat(length),
    "best_fit": lambda p, length: p.pack_flat(length, "best_fit", num_bins=4),
    "first_fit": lambda p, length: p.pack_flat(length, "first_fit", num_bins=4, max_documents_per_record=3),
}


@st.composite
def shapes(draw):
    """Lanes, records per step, sequence length, window, shuffle buffer, operators, packing."""
    lanes = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    tokens = draw(st.sampled_from(["tokenize", "tokenize", *TOKENS]))
    rows = []
    if tokens == "tokenize":
        rows = draw(st.lists(st.sampled_from(list(ROWS)), min_size=1, max_size=3, unique=True))
        stateful = [name for name in rows if name.startswith("stateful")]
        # Afterwards there is nothing but the text.
        rows = [name for name in rows if name not in stateful] + stateful[:1]
    else:
        rows = draw(st.sampled_from([[], ["filter by expression"], ["rows left out"]]))
    pack = draw(st.sampled_from(list(PACKS)))
    limit = draw(st.sampled_from([{}, {"max_length": 20}, {"max_length": 7, "split_long_samples": True}]))
    return {
        "lanes": lanes,
        "global_batch": lanes * draw(st.integers(1, 3)),
        "seq_len": draw(st.integers(1, 50)),
        "window": draw(st.integers(1, 3)),
        "buffer": draw(st.sampled_from([None, 1, 7, 64])),
        "rows": rows,
        "tokens": tokens,
        "limit": limit,
        "pack": pack,
    }


def build(source, shape, tokenizer, *, groups=1, group=0, microbatch=1, runner="inline", **options):
    pipeline = Pipeline(source).options(
        runner=runner,
        canonical_replicas=shape["lanes"],
        global_batch=shape["global_batch"],
        flush_every_k_chunks=shape["window"],
        dp_degree=groups,
        dp_group_id=group,
    )
    for name in shape["rows"]:
        pipeline = ROWS[name](pipeline)
    pipeline = TOKENS[shape["tokens"]](pipeline, tokenizer, shape["limit"])
    pipeline = PACKS[shape["pack"]](pipeline, shape["seq_len"])
    if shape["buffer"]:
        pipeline = pipeline.shuffle(shape["buffer"], seed=3)
    return pipeline.options(**options).batch(microbatch)


@SETTINGS
@given(sources(), shapes(), st.data())
def test_batches_do_not_depend_on_topology_runner_or_the_size_of_blocks(chat_tokenizer, source, shape, data):
    batch = shape["global_batch"]
    wanted = step_digests([build(source, shape, chat_tokenizer)], 3, batch)
    groups = data.draw(st.sampled_from(divisors(shape["lanes"])))
    microbatch = data.draw(st.sampled_from(divisors(batch // groups)))
    runner = data.draw(st.sampled_from(["inline", "threads"]))
    lookahead = data.draw(st.sampled_from([None, 1, 1000]))
    pipelines = [
        build(
            source,
            shape,
            chat_tokenizer,
            groups=groups,
            group=group,
            microbatch=microbatch,
            runner=runner,
            prefetch_buffer_size=lookahead,
        )
        for group in range(groups)
    ]
    assert step_digests(pipelines, 3, batch) == wanted
    for pipeline in pipelines:
        pipeline.close()


@SETTINGS
@given(sources(), shapes(), st.data())
def test_a_run_resumed_again_and_again_goes_on_as_if_never_stopped(chat_tokenizer, source, shape, data):
    batch = shape["global_batch"]
    steps = [data.draw(st.integers(1, 4)) for _ in range(3)]
    wanted = step_digests([build(source, shape, chat_tokenizer)], sum(steps), batch)
    got, states = [], None
    for count in steps:
        groups = data.draw(st.sampled_from(divisors(shape["lanes"])))
        microbatch = data.draw(st.sampled_from(divisors(batch // groups)))
        pipelines = [
            build(source, shape, chat_tokenizer, groups=groups, group=group, microbatch=microbatch)
            for group in range(groups)
        ]
        for pipeline in pipelines if states else []:
            pipeline.restore(states)
        got += step_digests(pipelines, count, batch)
        states = [json.loads(json.dumps(pipeline.checkpoint())) for pipeline in pipelines]
        if data.draw(st.booleans()):
            states = [merge_checkpoints(data.draw(st.permutations(states)))]
    assert got == wanted


@SETTINGS
@given(sources(), shapes(), st.integers(0, 6))
def test_a_run_can_be_entered_at_any_step_without_a_state(chat_tokenizer, tmp_path_factory, source, shape, step):
    batch = shape["global_batch"]
    index = tmp_path_factory.mktemp("index")
    wanted = step_digests([build(source, shape, chat_tokenizer, flush_index=index)], step + 2, batch)
    for options in ({}, {"flush_index": index}):
        pipeline = build(source, shape, chat_tokenizer, **options).seek(step=step)
        assert step_digests([pipeline], 2, batch) == wanted[step:]


@given(st.lists(st.integers(0, 60), max_size=40), st.data())
def test_batch_functions_that_fail_on_some_rows_keep_all_others_wherever_the_rows_are_cut(numbers, data):
    def fails(table):
        if any(number % 7 == 0 for number in table.column("number").to_pylist()):
            raise ValueError("a seven")
        return table

    operator = data.draw(st.sampled_from([MapBatches(fails), MapTransform(fails_on_sevens)]))
    table = pa.table({"number": pa.array(numbers, pa.int64())})
    cut = data.draw(st.integers(0, len(numbers)))
    places, failed = [], []
    for start, part in ((0, table.slice(0, cut)), (cut, table.slice(cut))):
        rows = Rows(part, np.arange(start, start + part.num_rows), skips=True)
        operator.apply(rows)
        assert rows.table.column("number").to_pylist() == [numbers[place] for place in rows.places.tolist()]
        places += rows.places.tolist()
        failed += [place for place, _, _ in rows.failed]
    assert places == [n for n, number in enumerate(numbers) if number % 7]
    assert sorted(failed) == [n for n, number in enumerate(numbers) if number % 7 == 0]
