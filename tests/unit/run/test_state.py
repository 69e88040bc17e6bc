"""States: small, plain, and refused with a reason where they do not fit."""

import copy
import json
import logging
import pickle
import time

import pytest

from zephon import CheckpointError, DataError, Pipeline, PipelineError, merge_checkpoints
from zephon.io import Dataset
from zephon.run.fingerprint import FINGERPRINT_NAMES
from zephon.run.ledger import LedgerWriter
from zephon.run.state import checksum
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource

WORDS = [f"document {i} has some words in it" for i in range(300)]


def build(tokenizer, *, groups=1, group=0, lanes=4, path=None, seq_len=16, seed=0, shuffle=64, **options):
    dataset = Dataset.from_path("d", path) if path else Dataset.from_dict("d", {"text": WORDS})
    source = StaticMixtureWorkSource(datasets=[dataset], seed=seed, chunk_size=20)
    options = {"runner": "inline", "canonical_replicas": lanes, "global_batch": lanes, **options}
    pipeline = Pipeline(source).options(dp_degree=groups, dp_group_id=group, **options)
    return pipeline.tokenize(tokenizer).pack_flat(seq_len).shuffle(shuffle).batch(1)


def build_many(tokenizer, datasets, **weights):
    """A mixture of many datasets, so that the fingerprint has them in short."""
    mixture = {**{dataset.name: 1.0 for dataset in datasets}, **weights}
    pipeline = Pipeline(StaticMixtureWorkSource(datasets=datasets, mixture=mixture)).options(runner="inline")
    return pipeline.tokenize(tokenizer).pack_flat(8).batch(1)


def advanced(pipeline, batches):
    stream = iter(pipeline)
    for _ in range(batches):
        next(stream)
    return pipeline


def write_shard(path, texts):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def states(tiny_tokenizer):
    """States of both groups of a run, at the end of its fifth round."""
    return [advanced(build(tiny_tokenizer, groups=2, group=g), 10).checkpoint() for g in range(2)]


@pytest.fixture(scope="module")
def inside(tiny_tokenizer):
    """States of both groups, inside their fifth round."""
    return [advanced(build(tiny_tokenizer, groups=2, group=g), 9).checkpoint() for g in range(2)]


def edited(state, *, without=(), **changes):
    """A state of another content with a checksum that is right."""
    content = {key: value for key, value in {**state, **changes}.items() if key not in ("checksum", *without)}
    return {**content, "checksum": checksum(content)}


def test_a_state_is_json_and_its_size_does_not_grow(tiny_tokenizer):
    lanes = 64
    pipeline = build(tiny_tokenizer, lanes=lanes)
    early = advanced(pipeline, 5 * lanes).checkpoint()
    late = advanced(pipeline, 60 * lanes).checkpoint()
    assert early == json.loads(json.dumps(early))
    assert len(json.dumps(late)) <= 4096 + 64 * lanes
    assert len(json.dumps(late)) - len(json.dumps(early)) < 10 * lanes
    long_run = edited(late, rounds=10**12)
    long_run["lanes"] = {str(lane): [10**6, 10**10, 10**6, 16383, 10**6, 10**3] for lane in range(lanes)}
    assert len(json.dumps(long_run)) <= 4096 + 64 * lanes


def test_a_dataset_more_adds_about_a_hundred_bytes_to_a_state(tiny_tokenizer):
    sizes = {}
    for count in (24, 74):
        datasets = [Dataset.from_dict(f"dataset-{d:04}", {"text": [f"text of {d}"] * 3}) for d in range(count)]
        sizes[count] = len(json.dumps(advanced(build_many(tiny_tokenizer, datasets), 1).checkpoint()))
    assert 80 <= (sizes[74] - sizes[24]) / 50 <= 110


@pytest.mark.parametrize("taken_over", [0, 1, 2])
@pytest.mark.parametrize("mixture", [False, True])
def test_the_size_of_a_state_with_a_stock_and_after_takeovers_is_bounded(tiny_tokenizer, mixture, taken_over):
    lanes, count, source, state = 32, 24, None, None
    datasets = [Dataset.from_dict(f"corpus-{d}", {"text": [f"text of {d}"] * 3}) for d in range(count)]
    for nth in range(taken_over + 1):
        weights = {dataset.name: 1 + nth * (dataset is datasets[0]) for dataset in datasets}
        source = StaticMixtureWorkSource(datasets, mixture=weights, chunk_size=16, continues=source)
        pipeline = Pipeline(source).options(runner="inline", canonical_replicas=lanes).tokenize(tiny_tokenizer)
        pipeline = (pipeline.ensure_mixture(lanes) if mixture else pipeline).pack_flat(8).batch(lanes)
        state = advanced(pipeline.restore(state) if state else pipeline, 1).checkpoint()
    skips = [10**6] * (len(state["lanes"]["0"]) - 6)
    long_run = {str(lane): [10**6, 10**10, 10**6, 16383, 10**6 << 32 * mixture, 10**3, *skips] for lane in range(lanes)}
    cuts = {str(lane): [10**6, 16383] for lane in range(lanes)}
    state |= {"rounds": 10**12, "lanes": long_run}
    state |= {"earlier": [each | {"cuts": cuts} for each in state.get("earlier", [])]}
    per_lane = 64 + 10 * count * mixture + 26 * taken_over
    assert len(json.dumps(state)) <= 4096 + 64 + lanes * per_lane + 40 * count * taken_over


def test_taking_a_state_is_quick(tiny_tokenizer):
    pipeline = advanced(build(tiny_tokenizer, lanes=64), 64)
    pipeline.checkpoint()
    began = time.perf_counter()
    for _ in range(20):
        pipeline.checkpoint()
    assert time.perf_counter() - began < 20 * 0.5  # far from its usual fraction of a millisecond: only a runaway fails


def test_a_state_of_many_datasets_stays_small_and_still_names_what_has_grown(tmp_path, tiny_tokenizer):
    def many(shards_of_7=2):
        for d in range(24):
            for shard in range(shards_of_7 if d == 7 else 2):
                write_shard(tmp_path / f"corpus-{d}" / f"{shard}.jsonl", [f"text {d} {shard}"])
        return build_many(
            tiny_tokenizer, [Dataset.from_path(f"corpus-{d}", tmp_path / f"corpus-{d}") for d in range(24)]
        )

    state = advanced(many(), 3).checkpoint()
    assert len(json.dumps(state)) <= 4096 + 64
    many().restore(json.loads(json.dumps(state)))
    with pytest.raises(CheckpointError, match=r"dataset corpus-7: has grown from 2 shards \(2 rows\) to 3"):
        many(shards_of_7=3).restore(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: "nonsense", "a state is a dict"),
        (lambda s: {"epoch": 3}, "without the version"),
        (lambda s: edited(s, zephon=99), "has version 99"),
        (lambda s: {**s, "rounds": 4}, "damaged or was edited"),
        (lambda s: {**s, "lanes": {**s["lanes"], "0": [0, 0, 0, 0, 1, 0]}}, "damaged or was edited"),
        (lambda s: {k: v for k, v in s.items() if k != "checksum"}, "damaged or was edited"),
        (lambda s: {**s, "fingerprint": {"a": {1, 2}}}, "damaged or was edited"),
        (lambda s: edited(s, without=["lanes"]), "missing required field `lanes`"),
        (lambda s: edited(s, without=["rounds"]), "missing required field `rounds`"),
        (lambda s: edited(s, rounds=-1), "`int` >= 0 - at `$.rounds`"),
        (lambda s: edited(s, rounds="5"), "got `str` - at `$.rounds`"),
        (lambda s: edited(s, lanes={"0": [0, 0]}), "length >= 6 - at `$.lanes"),
        (lambda s: edited(s, lanes={"x": [0] * 6}), "got `str` - at `key` in `$.lanes`"),
        (lambda s: edited(s, lanes={"0": [0, 10**6, 0, 0, 0, 0]}), "after the 5 rounds"),
        (lambda s: edited(s, tokens_per_row=[1.0, 2.0]), "tokens_per_row"),
    ],
)
def test_a_damaged_or_foreign_state_is_refused_and_the_pipeline_stays_usable(tiny_tokenizer, states, change, text):
    pipeline = advanced(build(tiny_tokenizer, groups=2), 3)
    before = pipeline.checkpoint()
    with pytest.raises(CheckpointError) as caught:
        pipeline.restore([change(states[0])])
    assert text in str(caught.value)
    assert pipeline.checkpoint() == before
    assert next(iter(pipeline)).sequence_numbers.tolist() == [5]


def test_a_missing_lane_is_named(tiny_tokenizer, states):
    with pytest.raises(CheckpointError, match="does not hold lanes 2-3, which group 0 of 1 owns"):
        build(tiny_tokenizer).restore(states[0])
    build(tiny_tokenizer).restore(states)
    build(tiny_tokenizer, groups=2, group=1).restore(states[1])


def test_two_different_states_for_one_lane_are_refused(states):
    lanes = copy.deepcopy(states[0]["lanes"])
    lanes["1"][4] += 1
    with pytest.raises(CheckpointError, match="says lane 1 is at"):
        merge_checkpoints([states[0], edited(states[0], lanes=lanes)])
    merge_checkpoints([states[0], copy.deepcopy(states[0]), states[1]])


def test_states_of_different_moments_or_runs_do_not_merge(tiny_tokenizer, states):
    later = advanced(build(tiny_tokenizer, groups=2, group=1), 12).checkpoint()
    foreign = advanced(build(tiny_tokenizer, groups=2, group=1, seed=9), 10).checkpoint()
    for wrong, text in (
        ([states[0], later], "number of rounds used is 5 in one and 6 in the other"),
        ([states[0], foreign], "seed: was 0, is 9"),
        ([], "no state to merge"),
        (5, "this is a int"),
    ):
        with pytest.raises(CheckpointError, match=text):
            merge_checkpoints(wrong)


def test_a_state_from_inside_a_round_serves_its_own_group_only(tiny_tokenizer, inside):
    build(tiny_tokenizer, groups=2, group=1).restore(inside[1])
    with pytest.raises(CheckpointError, match="inside a round"):
        build(tiny_tokenizer, groups=2, group=0).restore(edited(inside[1], lanes=inside[0]["lanes"]))
    with pytest.raises(CheckpointError, match="inside a round"):
        build(tiny_tokenizer).restore(inside)


def test_the_states_of_all_ranks_may_be_given_inside_a_round_too(tiny_tokenizer, inside):
    for group in range(2):
        resumed = build(tiny_tokenizer, groups=2, group=group).restore(inside)
        gone_on = advanced(build(tiny_tokenizer, groups=2, group=group), 9)
        assert next(iter(resumed)).digests == next(iter(gone_on)).digests


def test_a_torn_list_of_states_is_refused_inside_a_round_too(tiny_tokenizer, inside):
    earlier = advanced(build(tiny_tokenizer, groups=2, group=1), 5).checkpoint()
    foreign = advanced(build(tiny_tokenizer, groups=2, group=1, seed=4), 9).checkpoint()
    for other, text in ((earlier, "number of rounds used"), (foreign, "seed: was 0, is 4")):
        with pytest.raises(CheckpointError, match=text):
            build(tiny_tokenizer, groups=2, group=0).restore([inside[0], other])


def test_a_change_of_what_decides_data_is_refused_with_a_line_for_each_and_can_be_accepted(tiny_tokenizer, states):
    changed = build(tiny_tokenizer, shuffle=32, seq_len=17)
    with pytest.raises(CheckpointError) as caught:
        changed.restore(states)
    assert "  seq_len: was 16, is 17\n  shuffle: was 'buffer_size=64 seed=0', is" in str(caught.value)
    first = caught.value.changes[0]
    assert (first.name, first.before, first.now) == ("seq_len", 16, 17)
    assert str(caught.value).endswith(
        "No row is lost then, but what the new packing leaves out; the rows of 20 records, used since lanes could be "
        "entered, come again. "
        "To accept these differences, pass allow_changes=['seq_len', 'shuffle']."
    )
    with pytest.raises(CheckpointError, match=r"pass --allow seq_len$") as caught:
        changed.restore(states, allow_changes=["shuffle"], remedy="--allow")
    assert "  shuffle" not in str(caught.value)
    changed.restore(states, allow_changes=["shuffle", "seq_len"])
    assert next(iter(changed)).sequence_numbers.tolist() == [20]


def test_the_number_of_lanes_cannot_change_even_on_purpose(tiny_tokenizer, states):
    other = build(tiny_tokenizer, lanes=8, global_batch=8)
    with pytest.raises(CheckpointError, match="canonical_replicas: was 4, is 8"):
        other.restore(states)
    with pytest.raises(CheckpointError, match=r"canonical_replicas cannot be accepted.*fixed for the life of a run"):
        other.restore(states, allow_changes=["canonical_replicas"])


def test_auto_lanes_of_a_run_that_goes_on_are_those_of_its_state(tiny_tokenizer, states):
    other = build(tiny_tokenizer, lanes="auto", global_batch=8)
    assert other.compiled.topology.lanes == 8
    assert next(iter(other.restore(states))).sequence_numbers.tolist() == [20]
    assert other.compiled.topology.lanes == 4


def test_one_changed_weight_among_many_is_the_one_that_is_named(tiny_tokenizer):
    datasets = [Dataset.from_dict(f"x{n}", {"text": [f"text of {n}"]}) for n in range(14)]
    state = advanced(build_many(tiny_tokenizer, datasets), 2).checkpoint()
    with pytest.raises(CheckpointError) as caught:
        build_many(tiny_tokenizer, datasets, x3=2.0).restore(state)
    assert "dataset x3: was '1/1/1/" in str(caught.value) and str(caught.value).count("dataset x") == 2


def test_a_changed_weight_is_told_as_written(tiny_tokenizer):
    datasets = [Dataset.from_dict(name, {"text": [f"text of {name}"]}) for name in "ab"]
    state = advanced(build_many(tiny_tokenizer, datasets, a=4.0, b=3.0), 2).checkpoint()
    with pytest.raises(CheckpointError, match=r"dataset b: the weight to that of a is 0.5 to 2, and was 0.75 to 1"):
        build_many(tiny_tokenizer, datasets, a=2.0, b=0.5).restore(state)


def test_where_the_data_go_on_and_what_is_left_out_is_logged(tiny_tokenizer, states, caplog):
    pipeline = build(tiny_tokenizer, global_batch=4).restore(states)
    with caplog.at_level(logging.INFO, "zephon"):
        pipeline.skip(6, 8)
        next(iter(pipeline))
    assert "left out: steps 7 to 8, records 24 to 31" in caplog.text
    assert "the data go on at record 20, in step 6" in caplog.text


def test_only_what_can_differ_can_be_allowed_to(tiny_tokenizer, states):
    for names, words in (
        (
            ["seed", "nonsense"],
            r'unknown name of a change in allow_changes "nonsense". Expected one of dataset d, document.*seq_len',
        ),
        ("tokeniser", r'Did you mean "tokenizer"\?'),
        (["dataset x"], 'unknown name of a change in allow_changes "dataset x"'),
    ):
        with pytest.raises(CheckpointError, match=words):
            build(tiny_tokenizer).restore(states, allow_changes=names)
    build(tiny_tokenizer).restore(states, allow_changes=[*FINGERPRINT_NAMES, "dataset d"])


def test_every_name_of_a_fingerprint_is_known(tmp_path, tiny_tokenizer):
    a = Dataset.from_dict("a", {"text": ["some text"] * 9}, group="g")
    (tmp_path / "b.part").write_text('{"text": "some text"}\n' * 9)
    b = Dataset.from_path("b", tmp_path / "b.part", "jsonl", group="g")
    stage = Stage({"a": 1.0, "b": 1.0})
    old = StaticMixtureWorkSource([a], seed=1, reshuffle_on_repeat=False)
    order = {"seed": 1, "reshuffle_on_repeat": False, "per_dataset": {"b": {"shuffle_shards": False, "max_repeats": 1}}}
    new = ScheduledMixtureWorkSource([a, b], schedule=[stage], continues=old, **order)
    names = set()
    for source in (old, new):
        pipeline = Pipeline(source).options(runner="inline").text_template("{text}", into="doc")
        pipeline = pipeline.tokenize(tiny_tokenizer, field="doc", max_length=5)
        for packed in (
            pipeline.pack_flat(8, "best_fit", homogeneity="group"),
            pipeline.ensure_mixture().pack_flat(8).shuffle(9),
        ):
            names |= set(packed.batch(1).fingerprint())
    names |= set(packed.options(canonical_replicas=2, feeds=1).batch(1).fingerprint())
    names.add("image_pixels")  # see tests/unit/vision
    assert {name for name in names if not name.startswith("dataset ")} == set(FINGERPRINT_NAMES)


def test_performance_knobs_may_change(tiny_tokenizer, states):
    knobs = {"runner": "threads", "prefetch_buffer_size": 10**6, "pack_parallelism": 2, "fetch_parallelism": 2}
    tuned = build(tiny_tokenizer, **knobs).restore(states)
    assert next(iter(tuned)).digests == next(iter(build(tiny_tokenizer).restore(states))).digests
    tuned.close()


def test_growth_of_a_dataset_is_called_growth(tmp_path, tiny_tokenizer):
    folder = tmp_path / "d"
    write_shard(folder / "a.jsonl", WORDS)
    write_shard(folder / "b.jsonl", WORDS)
    state = advanced(build(tiny_tokenizer, path=folder), 8).checkpoint()
    write_shard(folder / "c.jsonl", WORDS[:50])
    with pytest.raises(CheckpointError, match=r"dataset d: has grown from 2 shards \(600 rows\) to 3 \(650 rows\)"):
        build(tiny_tokenizer, path=folder).restore(state)
    with pytest.raises(CheckpointError, match="others need a name of their own in a recipe that takes over"):
        build(tiny_tokenizer, path=folder).restore(state, allow_changes=["dataset d"])
    (folder / "c.jsonl").unlink()
    build(tiny_tokenizer, path=folder).restore(state)
    write_shard(folder / "b.jsonl", WORDS[::-1])
    with pytest.raises(CheckpointError, match="dataset d: content was"):
        build(tiny_tokenizer, path=folder).restore(state)


def test_restored_ratios_travel_with_a_pickle_and_after_a_close(tiny_tokenizer):
    def build_mixture(**options):
        datasets = [Dataset.from_dict("g", {"text": WORDS[:50]}), Dataset.from_dict("b", {"text": WORDS})]
        source = StaticMixtureWorkSource(datasets=datasets, chunk_size=20)
        return Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer, **options).pack_flat(16).batch(1)

    state = advanced(build_mixture(), 8).checkpoint()
    shorter = build_mixture(max_length=5).restore(state, allow_changes="documents")
    assert shorter.checkpoint()["tokens_per_row"] == state["tokens_per_row"]
    pickled = pickle.loads(pickle.dumps(shorter))
    for _ in range(100):
        assert next(iter(pickled)).digests == next(iter(shorter)).digests
    assert pickled.checkpoint() == shorter.checkpoint()


def test_a_schedule_in_place_of_weights_is_refused_without_words_about_weights(tiny_tokenizer):
    datasets = [Dataset.from_dict("g", {"text": WORDS[:50]}), Dataset.from_dict("b", {"text": WORDS})]
    weighted = StaticMixtureWorkSource(datasets=datasets, mixture={"g": 1.0, "b": 0.5})
    scheduled = ScheduledMixtureWorkSource(datasets=datasets, schedule=[Stage({"g": 2, "b": 1})])
    first, second = (
        Pipeline(source).options(runner="inline", global_batch=2).tokenize(tiny_tokenizer).pack_flat(16).batch(1)
        for source in (weighted, scheduled)
    )
    for one, other in ((first, second), (second, first)):
        with pytest.raises(CheckpointError, match=r"(?s)dataset b: weight was .*schedule: was .*continue_from") as it:
            other.restore(advanced(one, 4).checkpoint())
        assert "the weight to that of" not in str(it.value)


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
    with pytest.raises(PipelineError, match="expected an integer from 0 to"):
        pipeline.seek(step=10**30)


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


def test_a_step_is_agreed_on_once_even_if_its_first_batch_has_to_be_taken_again(tmp_path, tiny_tokenizer, monkeypatch):
    asked, failures = [], []

    def flag(has_record):
        asked.append(has_record)
        return has_record

    def failing(self, batch, *step, write=LedgerWriter.write):
        if batch.sequence_numbers[0] == 8 and not failures:
            failures.append(batch)
            raise DataError("no space")
        write(self, batch, *step)

    monkeypatch.setattr(LedgerWriter, "write", failing)
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {"text": WORDS})], repeat=False)
    options = {"runner": "inline", "canonical_replicas": 2, "global_batch": 4, "combine_flag": flag, "ledger": tmp_path}
    pipeline = Pipeline(source).options(**options).tokenize(tiny_tokenizer).pack_flat(16).batch(2)
    numbers, stream = [], iter(pipeline)
    with pytest.raises(DataError):
        for batch in stream:
            numbers += batch.sequence_numbers.tolist()
    for batch in stream:
        numbers += batch.sequence_numbers.tolist()
    assert failures and len(numbers) > 8 and numbers == list(range(len(numbers)))
    assert len(asked) == len(numbers) // 4 + 1
