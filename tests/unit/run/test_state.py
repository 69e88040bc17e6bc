"""States: small, plain, and refused with a reason where they do not fit."""

import copy
import json
import pickle
import time

import numpy as np
import pytest

from zephon import CheckpointError, DataError, Pipeline, ZephonError, merge_checkpoints
from zephon.io import Dataset
from zephon.run.fingerprint import FINGERPRINT_NAMES
from zephon.run.ledger import LedgerWriter
from zephon.run.state import checksum
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource

WORDS = [f"document {i} has some words in it" for i in range(300)]


def build(tokenizer, *, groups=1, group=0, lanes=4, texts=WORDS, path=None, seq_len=16, seed=0, **options):
    dataset = Dataset.from_path("d", path) if path else Dataset.from_dict("d", {"text": texts})
    source = StaticMixtureWorkSource(datasets=[dataset], seed=seed, chunk_size=20)
    options = {"runner": "inline", "canonical_replicas": lanes, "global_batch": lanes, **options}
    return (
        Pipeline(source)
        .options(dp_degree=groups, dp_group_id=group, **options)
        .tokenize(tokenizer)
        .pack_flat(seq_len)
        .shuffle(64)
        .batch(1)
    )


def advanced(pipeline, batches):
    stream = iter(pipeline)
    for _ in range(batches):
        next(stream)
    return pipeline


@pytest.fixture
def states(tiny_tokenizer):
    """States of both groups of a run, at the end of its fifth round."""
    return [advanced(build(tiny_tokenizer, groups=2, group=g), 10).checkpoint() for g in range(2)]


def sealed(state):
    """A state made by hand: its checksum is right, whatever it says."""
    content = {key: value for key, value in state.items() if key != "checksum"}
    return {**content, "checksum": checksum(content)}


def edited(state, **changes):
    return sealed({**copy.deepcopy(state), **changes})


def test_a_state_is_json_and_its_size_does_not_grow(tiny_tokenizer):
    lanes = 64
    pipeline = build(tiny_tokenizer, lanes=lanes)
    early = advanced(pipeline, 10 * lanes).checkpoint()
    late = advanced(pipeline, 300 * lanes).checkpoint()
    assert early == json.loads(json.dumps(early))
    assert len(json.dumps(late)) <= 4096 + 64 * lanes
    assert len(json.dumps(late)) - len(json.dumps(early)) < 10 * lanes
    long_run = edited(late, rounds=10**12)
    long_run["lanes"] = {str(lane): [10**6, 10**10, 10**6, 16383, 10**6, 10**3] for lane in range(lanes)}
    assert len(json.dumps(long_run)) <= 4096 + 64 * lanes


def test_taking_a_state_is_quick(tiny_tokenizer):
    pipeline = advanced(build(tiny_tokenizer, lanes=64), 640)
    pipeline.checkpoint()
    began = time.perf_counter()
    for _ in range(20):
        pipeline.checkpoint()
    assert time.perf_counter() - began < 20 * 0.5  # far from its usual fraction of a millisecond: only a runaway fails


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: "nonsense", "a state is a dict"),
        (lambda s: 5, "a state is a dict"),
        (lambda s: {}, "no state of a pipeline"),
        (lambda s: {"epoch": 3}, "no state of a pipeline"),
        (lambda s: edited(s, zephon=99), "has version 99"),
        (lambda s: {**s, "rounds": 4}, "damaged or was edited"),
        (lambda s: {**s, "lanes": {**s["lanes"], "0": [0, 0, 0, 0, 1, 0]}}, "damaged or was edited"),
        (lambda s: {k: v for k, v in s.items() if k != "checksum"}, "damaged or was edited"),
        (lambda s: {**s, "fingerprint": {1: 2, "a": 3}}, "damaged or was edited"),
        (lambda s: {**s, "fingerprint": {"a": {1, 2}}}, "damaged or was edited"),
        (lambda s: edited(s, zephon=True), "has version True"),
        (lambda s: sealed({k: v for k, v in s.items() if k != "lanes"}), "missing required field `lanes`"),
        (lambda s: sealed({k: v for k, v in s.items() if k != "rounds"}), "missing required field `rounds`"),
        (lambda s: edited(s, rounds=-1), "`int` >= 0 - at `$.rounds`"),
        (lambda s: edited(s, rounds=True), "got `bool` - at `$.rounds`"),
        (lambda s: edited(s, rounds="5"), "got `str` - at `$.rounds`"),
        (lambda s: edited(s, extra=10**9), "does not fit 4 lanes"),
        (lambda s: edited(s, lanes_total=10**12), "$.lanes_total"),
        (lambda s: edited(s, lanes={"0": [0, 0]}), "length >= 6 - at `$.lanes"),
        (lambda s: edited(s, lanes={"0": [0, 0, 0, 0, 0, -1]}), "`int` >= 0 - at `$.lanes"),
        (lambda s: edited(s, lanes={"0": [0, 10**6, 0, 0, 0, 0]}), "after the 5 rounds"),
        (lambda s: edited(s, lanes={"77": [0] * 6}), "'77' is no lane"),
        (lambda s: edited(s, lanes={"../x": [0] * 6}), "is no lane"),
        (lambda s: edited(s, tokens_per_row=["many"]), "tokens_per_row"),
        (lambda s: edited(s, tokens_per_row=[1.0, 2.0]), "tokens_per_row"),
        (lambda s: edited(s, lanes={"0" * 5000: [0] * 6}), "is no lane"),
        (lambda s: edited(s, fingerprint=[1]), "fingerprint"),
        (lambda s: edited(s, skipped=[[5, 2]]), "skipped"),
    ],
)
def test_a_damaged_or_foreign_state_is_refused_and_the_pipeline_stays_usable(tiny_tokenizer, states, change, text):
    pipeline = advanced(build(tiny_tokenizer, groups=2), 3)
    before = pipeline.checkpoint()
    bad = change(states[0])
    with pytest.raises(CheckpointError) as caught:
        pipeline.restore([bad] if not isinstance(bad, dict) else bad)
    assert text in str(caught.value)
    assert pipeline.checkpoint() == before
    assert next(iter(pipeline)).sequence_numbers.tolist() == [5]


def test_a_missing_lane_is_named(tiny_tokenizer, states):
    with pytest.raises(CheckpointError, match="does not hold lanes 2-3, which group 0 of 1 owns"):
        build(tiny_tokenizer).restore(states[0])
    build(tiny_tokenizer).restore(states)
    build(tiny_tokenizer, groups=2, group=1).restore(states[1])


def test_two_different_states_for_one_lane_are_refused(tiny_tokenizer, states):
    other = copy.deepcopy(states[0])
    other["lanes"]["1"][4] += 1
    other = sealed(other)
    with pytest.raises(CheckpointError, match="says lane 1 is at"):
        merge_checkpoints([states[0], other])
    merge_checkpoints([states[0], copy.deepcopy(states[0]), states[1]])


def test_states_of_different_moments_or_runs_do_not_merge(tiny_tokenizer, states):
    later = advanced(build(tiny_tokenizer, groups=2, group=1), 12).checkpoint()
    with pytest.raises(CheckpointError, match="number of rounds used is 5 in one and 6 in the other"):
        merge_checkpoints([states[0], later])
    foreign = advanced(build(tiny_tokenizer, groups=2, group=1, seed=9), 10).checkpoint()
    with pytest.raises(CheckpointError, match="seed: was 0, is 9"):
        merge_checkpoints([states[0], foreign])
    with pytest.raises(CheckpointError, match="no state to merge"):
        merge_checkpoints([])


def test_a_state_from_inside_a_round_serves_its_own_group_only(tiny_tokenizer):
    inside = [advanced(build(tiny_tokenizer, groups=2, group=g), 9).checkpoint() for g in range(2)]
    build(tiny_tokenizer, groups=2, group=1).restore(inside[1])
    with pytest.raises(CheckpointError, match="inside a round"):
        build(tiny_tokenizer, groups=2, group=0).restore(edited(inside[1], lanes=inside[0]["lanes"]))
    with pytest.raises(CheckpointError, match="inside a round"):
        build(tiny_tokenizer).restore(inside)


def test_a_change_of_what_decides_data_is_refused_with_a_line_for_each_and_can_be_accepted(tiny_tokenizer, states):
    changed = build(tiny_tokenizer, seed=1, seq_len=17)
    with pytest.raises(CheckpointError) as caught:
        changed.restore(states)
    assert "  seed: was 0, is 1\n" in str(caught.value) and "  seq_len: was 16, is 17\n" in str(caught.value)
    assert [(c.name, c.before, c.now) for c in caught.value.changes] == [("seed", 0, 1), ("seq_len", 16, 17)]
    assert str(caught.value).endswith("To accept these differences, pass allow_changes=['seed', 'seq_len'].")
    with pytest.raises(CheckpointError, match=r"pass --allow seq_len$") as caught:
        changed.restore(states, allow_changes=["seed"], remedy="--allow")
    assert "  seed" not in str(caught.value)
    changed.restore(states, allow_changes=["seed", "seq_len"])
    assert next(iter(changed)).sequence_numbers.tolist() == [20]


def test_only_what_can_differ_can_be_allowed_to(tiny_tokenizer, states):
    for names, words in (
        (
            ["seed", "nonsense"],
            r"^allow_changes names 'nonsense', which is no difference .* canonical_replicas, .*seq_len",
        ),
        ("tokeniser", r'did you mean "tokenizer"\?'),
        (["dataset x"], r"'dataset x'.*dataset d"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            build(tiny_tokenizer).restore(states, allow_changes=names)
        assert "\n" not in str(caught.value)
    pipeline = build(tiny_tokenizer)
    pipeline.restore(states, allow_changes=[*FINGERPRINT_NAMES, "dataset d"])


def test_every_name_of_a_fingerprint_can_be_allowed(tiny_tokenizer):
    a, b = (Dataset.from_dict(name, {"text": ["some text"] * 9}, group="g") for name in "ab")
    stage = Stage({"a": 1.0, "b": 1.0})
    old = StaticMixtureWorkSource([a], seed=1, reshuffle_on_repeat=False)
    order = {"seed": 1, "reshuffle_on_repeat": False, "per_dataset": {"b": {"shuffle_shards": False, "max_repeats": 1}}}
    new = ScheduledMixtureWorkSource([a, b], schedule=[stage], continues=old, **order)
    names = set()
    for source in (old, new):
        pipeline = Pipeline(source).options(runner="inline").filter("text != ''").tokenize(tiny_tokenizer, max_length=5)
        for packed in (
            pipeline.pack_flat(8, "best_fit", homogeneity="group"),
            pipeline.ensure_mixture().pack_flat(8).shuffle(9),
        ):
            names |= set(packed.batch(1).fingerprint())
    assert {name for name in names if not name.startswith("dataset ")} == set(FINGERPRINT_NAMES)


def test_performance_knobs_may_change(tiny_tokenizer, states):
    knobs = {"runner": "threads", "prefetch_buffer_size": 10**6, "pack_parallelism": 2, "fetch_parallelism": 2}
    tuned = build(tiny_tokenizer, **knobs).restore(states)
    assert next(iter(tuned)).digests == next(iter(build(tiny_tokenizer).restore(states))).digests
    tuned.close()


def test_growth_of_a_dataset_is_called_growth(tmp_path, tiny_tokenizer):
    folder = tmp_path / "d"
    folder.mkdir()

    def shard(name, texts):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    shard("a.jsonl", WORDS)
    shard("b.jsonl", WORDS)
    state = advanced(build(tiny_tokenizer, path=folder), 8).checkpoint()
    shard("c.jsonl", WORDS[:50])
    with pytest.raises(CheckpointError, match=r"dataset d: has grown from 2 shards \(600 rows\) to 3 \(650 rows\)"):
        build(tiny_tokenizer, path=folder).restore(state)
    build(tiny_tokenizer, path=folder).restore(state, allow_changes=["dataset d"])
    (folder / "c.jsonl").unlink()
    build(tiny_tokenizer, path=folder).restore(state)
    shard("b.jsonl", WORDS[::-1])
    with pytest.raises(CheckpointError, match="dataset d: content was"):
        build(tiny_tokenizer, path=folder).restore(state)


def test_the_topology_error_of_another_number_of_lanes(tiny_tokenizer, states):
    with pytest.raises(CheckpointError, match="canonical_replicas: was 4, is 8"):
        build(tiny_tokenizer, lanes=8, global_batch=8).restore(states)
    with pytest.raises(CheckpointError, match="4 lanes"):
        build(tiny_tokenizer, lanes=8, global_batch=8).restore(states, allow_changes=["canonical_replicas"])


def test_a_state_of_many_datasets_stays_small_and_still_names_what_changed(tmp_path, tiny_tokenizer):
    def many(grown=None):
        for d in range(24):
            (tmp_path / f"corpus-{d}").mkdir(exist_ok=True)
            for shard in range(2 + (d == grown)):
                line = json.dumps({"text": f"text {d} {shard}"})
                (tmp_path / f"corpus-{d}" / f"{shard}.jsonl").write_text(line + "\n")
        datasets = [Dataset.from_path(f"corpus-{d}", tmp_path / f"corpus-{d}") for d in range(24)]
        pipeline = Pipeline(StaticMixtureWorkSource(datasets=datasets)).options(runner="inline")
        return pipeline.tokenize(tiny_tokenizer).pack_flat(8).batch(1)

    state = advanced(many(), 3).checkpoint()
    assert len(json.dumps(state)) <= 4096 + 64
    many().restore(json.loads(json.dumps(state)))
    with pytest.raises(CheckpointError, match=r"dataset corpus-7: has grown from 2 shards \(2 rows\) to 3"):
        many(grown=7).restore(state)


def test_the_states_of_all_ranks_may_be_given_inside_a_round_too(tiny_tokenizer):
    running = [advanced(build(tiny_tokenizer, groups=2, group=g), 9) for g in range(2)]
    inside = [pipeline.checkpoint() for pipeline in running]
    for group, pipeline in enumerate(running):
        resumed = build(tiny_tokenizer, groups=2, group=group).restore(inside)
        assert next(iter(resumed)).digests == next(iter(pipeline)).digests


@pytest.mark.parametrize("runner", ["threads", "inline"])
def test_what_happens_inside_a_loop_takes_effect_in_the_loop(tiny_tokenizer, runner):
    pipeline = build(tiny_tokenizer, runner=runner)
    reference = [batch.digests for _, batch in zip(range(100), build(tiny_tokenizer), strict=False)]
    seen, state = [], None
    for n, batch in enumerate(pipeline):
        seen.append(int(batch.sequence_numbers[0]))
        assert batch.digests == reference[seen[-1]]
        if n == 4:
            pipeline.skip(3, 5)  # records 12 to 19
        if n == 13:
            state = pipeline.checkpoint()
            pipeline.close()
        if n == 16:
            pipeline.seek(step=2)
        if n == 20:
            pipeline.restore(state)
        if n == 24:
            break
    assert seen == [*range(12), *range(20, 25), *range(8, 12), *range(22, 26)]
    assert (pipeline.checkpoint()["rounds"], pipeline.checkpoint()["extra"]) == (6, 2)
    pipeline.close()


def test_a_torn_list_of_states_is_refused_inside_a_round_too(tiny_tokenizer):
    torn = [advanced(build(tiny_tokenizer, groups=2, group=g), n).checkpoint() for g, n in ((0, 41), (1, 5))]
    foreign = advanced(build(tiny_tokenizer, groups=2, group=1, seed=4), 41).checkpoint()
    for states, text in ((torn, "number of rounds used"), ([torn[0], foreign], "seed: was 0, is 4")):
        with pytest.raises(CheckpointError, match=text):
            build(tiny_tokenizer, groups=2, group=0).restore(states)


def test_restored_ratios_travel_with_a_pickle_and_after_a_close(tmp_path, tiny_tokenizer):
    folder = tmp_path / "g"
    folder.mkdir()

    def build_mixture():
        datasets = [Dataset.from_path("g", folder), Dataset.from_dict("b", {"text": WORDS})]
        source = StaticMixtureWorkSource(datasets=datasets, chunk_size=20)
        return Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer).pack_flat(16).batch(1)

    (folder / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in WORDS[:50]))
    state = advanced(build_mixture(), 8).checkpoint()
    (folder / "1.jsonl").write_text("".join(json.dumps({"text": text * 20}) + "\n" for text in WORDS[:50]))
    grown = build_mixture().restore(state, allow_changes="dataset g")
    assert grown.checkpoint()["tokens_per_row"] == state["tokens_per_row"]
    pickled = pickle.loads(pickle.dumps(grown))
    for _ in range(100):
        assert next(iter(pickled)).digests == next(iter(grown)).digests
    assert pickled.checkpoint() == grown.checkpoint()


def test_closing_at_the_end_keeps_the_place_and_what_is_left_over(tiny_tokenizer):
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {"text": WORDS})], repeat=False)
    pipeline = Pipeline(source).options(runner="inline", canonical_replicas=4).tokenize(tiny_tokenizer)
    pipeline = pipeline.pack_flat(16).batch(3)
    count = sum(1 for _ in pipeline)
    state, left = pipeline.checkpoint(), pipeline.left_over
    assert left is not None and state["rounds"] > 0
    pipeline.close()
    assert (pipeline.checkpoint(), pipeline.left_over) == (state, left)
    again = pickle.loads(pickle.dumps(pipeline))
    assert sum(1 for _ in again) == sum(1 for _ in pipeline) == count


def test_one_changed_weight_among_many_is_the_one_that_is_named(tiny_tokenizer):
    def many(**weights):
        names = [f"x{n}" for n in range(14)]
        datasets = [Dataset.from_dict(name, {"text": [f"text of {name}"]}) for name in names]
        source = StaticMixtureWorkSource(datasets=datasets, mixture={**dict.fromkeys(names, 1.0), **weights})
        return Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer).pack_flat(8).batch(1)

    state = advanced(many(), 2).checkpoint()
    with pytest.raises(CheckpointError) as caught:
        many(x3=2.0).restore(state)
    assert "dataset x3: was '1/1/1/" in str(caught.value) and str(caught.value).count("dataset x") == 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p, s: p.restore(None), "NoneType"),
        (lambda p, s: p.restore(5), "int"),
        (lambda p, s: merge_checkpoints("x"), "str"),
        (lambda p, s: p.restore({**s, "zephon": np.array([1, 2])}), "has version"),
        (lambda p, s: p.restore({**s, "checksum": np.array([1, 2])}), "checksum"),
        (lambda p, s: p.restore(s, allow_changes=5), "allow_changes is 5"),
        (lambda p, s: p.skip(0, 10**30), "expected an integer from 0 to"),
        (lambda p, s: p.seek(step=10**30), "expected an integer from 0 to"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_in_a_sentence(tiny_tokenizer, states, call, text):
    with pytest.raises(ZephonError, match=text):
        call(build(tiny_tokenizer, groups=2), states[0])


def test_a_step_is_agreed_on_once_even_if_its_first_batch_has_to_be_taken_again(tmp_path, tiny_tokenizer, monkeypatch):
    asked = []

    def flag(has_record):
        asked.append(has_record)
        return has_record

    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {"text": WORDS})], repeat=False)
    pipeline = Pipeline(source).options(
        runner="inline", canonical_replicas=2, global_batch=4, combine_flag=flag, ledger=tmp_path
    )
    pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(16).batch(2)
    write, failures = LedgerWriter.write, []

    def failing(self, batch):
        if batch.sequence_numbers[0] == 8 and not failures:
            failures.append(batch)
            raise DataError("no space")
        write(self, batch)

    monkeypatch.setattr(LedgerWriter, "write", failing)
    numbers, stream = [], iter(pipeline)
    while True:
        try:
            batch = next(stream, None)
        except DataError:
            continue
        if batch is None:
            break
        numbers += batch.sequence_numbers.tolist()
    assert failures and len(numbers) > 8 and numbers == list(range(len(numbers)))
    assert len(asked) == len(numbers) // 4 + 1
