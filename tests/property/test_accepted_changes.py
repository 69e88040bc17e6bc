"""Changes that allow_changes accepts lose no row and repeat what the refusal says; others cannot be accepted."""

import re

import numpy as np
import pytest

from support import train_tiny_tokenizer
from support.operator_data import Doubled, shout
from zephon import CheckpointError, Pipeline
from zephon.io import Dataset
from zephon.run.fingerprint import FINGERPRINT_NAMES
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource, TokenEstimation

LANES = 3
ENDS = {"seed": 1, "chunk_size": 9, "repeat": False}
TEXTS = {name: [f"{name} {i} " + "word " * (i * 7 % 23) for i in range(rows)] for name, rows in (("a", 40), ("b", 30))}
ROWS = {(name, row) for name, texts in TEXTS.items() for row in range(len(texts))}
A, B = (Dataset.from_dict(name, {"text": texts}, group=name) for name, texts in TEXTS.items())


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, tiny_tokenizer):
    return {"": tiny_tokenizer, "other": train_tiny_tokenizer(tmp_path_factory.mktemp("other"), bos="<|begin|>")}


def build(
    tokenizers,
    *,
    source=None,
    tokenizer="",
    map_transform=None,
    stateful=None,
    mixture=None,
    seq_len=20,
    algorithm="wrap",
    homogeneity="none",
    shuffle=12,
    drop_last=False,
    tokenize=(),
    order=(),
    **options,
):
    source = source or StaticMixtureWorkSource([A, B], **{**ENDS, **dict(order)})
    pipeline = Pipeline(source).options(
        **{"runner": "inline", "canonical_replicas": LANES, "feeds": LANES, "global_batch": 2 * LANES, **options}
    )
    pipeline = pipeline.map_transform(map_transform) if map_transform else pipeline
    pipeline = pipeline.stateful_transform(stateful, columns=["text"]) if stateful else pipeline
    pipeline = pipeline.tokenize(tokenizers[tokenizer], **dict(tokenize))
    pipeline = pipeline.ensure_mixture(mixture) if mixture else pipeline
    pipeline = pipeline.pack_flat(seq_len, algorithm, homogeneity=homogeneity)
    return (pipeline.shuffle(shuffle) if shuffle else pipeline).batch(LANES, drop_last=drop_last)


def rows_of(batches):
    spans = [span for batch in batches for span in batch.provenance().to_pylist()]
    return [(span["sequence_number"], (span["dataset"], span["row"])) for span in spans]


BINS = {"algorithm": "best_fit"}
CHANGES = [
    ("shuffle", {}, {"shuffle": 30}),
    ("shuffle", {"shuffle": 30}, {"shuffle": None}),
    ("seq_len", {}, {"seq_len": 33}),
    ("tokenizer", {}, {"tokenizer": "other"}),
    ("special_tokens", {}, {"tokenize": {"special_tokens": "eos"}}),
    ("documents", {"map_transform": shout}, {"map_transform": shout, "tokenize": {"max_length": 9}}),
    ("row_operators", {"map_transform": shout}, {"map_transform": lambda row: {"text": row["text"] + "!"}}),
    ("row_operators", {"stateful": Doubled()}, {"map_transform": shout}),
    ("pack_algorithm", {}, BINS),
    ("pack_algorithm", BINS, {"algorithm": "best_fit_wrap"}),
    ("groups", {**BINS, "homogeneity": "full"}, {**BINS, "homogeneity": "group"}),
    ("ensure_mixture", {}, {"mixture": 6}),
    ("ensure_mixture", {"mixture": 6}, {"mixture": 12}),
    ("ensure_mixture", {"mixture": 6}, {}),
]


@pytest.mark.parametrize(("name", "before", "after"), CHANGES)
def test_an_accepted_change_loses_no_row_and_repeats_what_it_says(tokenizers, name, before, after):
    first = build(tokenizers, **before)
    used, states = [], []
    for batch in first:
        used.append(batch)
        if len(used) % 2 == 0:  # a step
            states.append((len(used), first.checkpoint()))
    for taken, state in states[:: 1 + len(states) // 5]:
        second = build(tokenizers, **after)
        with pytest.raises(CheckpointError) as caught:
            second.restore(state)
        assert name in [change.name for change in caught.value.changes]
        second.restore(state, allow_changes=[change.name for change in caught.value.changes])
        going_on = list(build(tokenizers, **after).restore(second.checkpoint()))
        earlier, later = rows_of(used[:taken]), rows_of(list(second))
        assert rows_of(going_on) == later and (not later or later[0][0] == taken * LANES)
        assert {row for _, row in [*earlier, *later]} == ROWS
        repeated = int(re.search(r"the rows of ([\d,]+) records", str(caught.value))[1])
        starts = {int(lane): start[1] for lane, start in state["lanes"].items()}
        again = [n for n in range(taken * LANES) if n // LANES >= starts[n % LANES]]
        assert repeated >= len(again)
        if not before.keys() & {"stateful", "mixture"}:
            assert repeated == len(again)
            # A row that is in two records is in both halves.
            twice = {row for _, row in earlier} & {row for _, row in later}
            assert len(twice - {row for number, row in earlier if number in again}) <= LANES
        with pytest.raises(CheckpointError, match="restore one of its states"):
            second.seek(step=1)


PLACES = {
    "canonical_replicas": {"canonical_replicas": 1, "feeds": 1},
    "seed": {"order": {"seed": 2}},
    "chunk_size": {"order": {"chunk_size": 10}},
    "order": {"order": {"shuffle_shards": False}},
    "orders": {"order": {"per_dataset": {"a": {"shuffle_block_size": "none"}}}},
    "reshuffle_on_repeat": {"order": {"reshuffle_on_repeat": False}},
    "end": {"order": {"repeat": True}},
    "endings": {"order": {"repeat": True, "max_repeats": 1}},
    "feeds": {"feeds": 1},
    "flush_every_k_chunks": {"flush_every_k_chunks": 2},
    "token_estimation": {"order": {"token_estimation": TokenEstimation(1)}},
    "dataset b": {"order": {"mixture": {"a": 1, "b": 3}}},
    "datasets": {"source": StaticMixtureWorkSource([A], **ENDS)},
    "schedule": {"source": ScheduledMixtureWorkSource([A, B], **ENDS, schedule=[Stage({"a": 1, "b": 1})])},
}


@pytest.mark.parametrize("name", PLACES)
def test_a_change_of_the_places_of_rows_cannot_be_accepted(tokenizers, name):
    first = build(tokenizers)
    next(iter(first))
    state = first.checkpoint()
    with pytest.raises(
        CheckpointError, match=rf"{name}.* cannot be accepted. Places in the state would mean other rows"
    ):
        build(tokenizers, **PLACES[name]).restore(state, allow_changes=[*FINGERPRINT_NAMES, "dataset a", "dataset b"])


def test_every_name_of_a_difference_is_tried():
    exact = {"tokenizer_backend", "formats", "document_details", "image_pixels"}
    measured = {"tokens_per_row", "stream_version", "continues"}
    assert {*PLACES, *(name for name, _, _ in CHANGES)} - {"dataset b"} | exact | measured == set(FINGERPRINT_NAMES)


def test_the_way_that_a_refusal_names_works(tokenizers):
    """A weight cannot be accepted, and a source that continues the other one takes over."""
    first = build(tokenizers)
    used = [batch for _, batch in zip(range(4), first, strict=False)]
    old = StaticMixtureWorkSource([A, B], **ENDS)
    weights = {**ENDS, "mixture": {"a": 1, "b": 3}}
    with pytest.raises(CheckpointError, match=r"dataset b: the weight[\s\S]*continues of a work source"):
        build(tokenizers, order=weights).restore(first.checkpoint(), allow_changes=["dataset b"])
    second = build(tokenizers, source=StaticMixtureWorkSource([A, B], continues=old, **weights)).restore(
        first.checkpoint()
    )
    rows = [row for _, row in rows_of([*used, *second])]
    assert set(rows) == ROWS


def test_a_takeover_after_an_accepted_change_loses_no_row_and_both_at_once_are_refused(tokenizers):
    first = build(tokenizers)
    used = [batch for _, batch in zip(range(4), first, strict=False)]
    old = StaticMixtureWorkSource([A, B], **ENDS)
    new = StaticMixtureWorkSource([B, A], mixture={"a": 1, "b": 2}, continues=old, **ENDS)
    with pytest.raises(CheckpointError, match="shuffle: was"):
        build(tokenizers, source=new, shuffle=30).restore(first.checkpoint())
    with pytest.raises(CheckpointError, match="restore the state under the earlier recipe with these changes first"):
        build(tokenizers, source=new, shuffle=30).restore(first.checkpoint(), allow_changes="shuffle")
    changed = build(tokenizers, source=old, shuffle=30).restore(first.checkpoint(), allow_changes="shuffle")
    second = build(tokenizers, source=new, shuffle=30).restore(changed.checkpoint())
    later = rows_of(list(build(tokenizers, source=new, shuffle=30).restore(second.checkpoint())))
    assert {row for _, row in [*rows_of(used), *later]} == ROWS and later == rows_of(list(second))
    with pytest.raises(
        CheckpointError, match=r"continues cannot be accepted. A run that took over from another goes on"
    ):
        build(tokenizers, source=new, shuffle=20).restore(second.checkpoint(), allow_changes=["shuffle", "continues"])


def test_a_takeover_after_an_accepted_change_begins_with_the_first_rows_of_a_new_source():
    old_data = Dataset.from_dict("a", {"input_ids": [[number] * 20 for number in range(600)]})
    new_data = Dataset.from_dict("c", {"input_ids": [[10**4 + number] * 20 for number in range(60)]})
    settings = {"token_estimation": False, "seed": 1, "chunk_size": 16}
    old = StaticMixtureWorkSource([old_data], {"a": 1}, **settings)
    new = StaticMixtureWorkSource([old_data, new_data], {"a": 1, "c": 1}, continues=old, **settings)

    def pipe(source, seed):
        pipeline = Pipeline(source).options(canonical_replicas=1, runner="inline").pretokenized().pack_flat(32)
        return pipeline.shuffle(16, seed=seed).batch(2)

    for steps in (0, 16, 32, 40):
        first = pipe(old, 3)
        stream = iter(first)
        for _ in range(steps):
            next(stream)
        changed = pipe(old, 9).restore(first.checkpoint(), allow_changes=["shuffle"])
        stream = iter(pipe(new, 9).restore(changed.checkpoint()))
        tokens = np.concatenate([next(stream).tokens.ravel() for _ in range(110)])
        assert set(range(10**4, 10**4 + 60)) <= set(tokens.tolist())
