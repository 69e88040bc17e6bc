"""Schedules, order and repetition from the recipe to the stream, and what the plan tells of them."""

import json
import logging
import re

import numpy as np
import pytest

from zephon import DataRecipe, Pipeline, PipelineError, RecipeError
from zephon.cli.plan import Forecast
from zephon.curriculum.mixture import Ending
from zephon.io import Dataset
from zephon.run.build import source_of
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource

TEXTS = {name: [f"{name} {i} " + "word " * (i % 40) for i in range(300)] for name in ("a", "b", "c")}


def data(name, count=300):
    return Dataset.from_dict(name, {"text": TEXTS[name][:count]})


@pytest.fixture
def folder(tmp_path):
    for name, texts in TEXTS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def write(folder, text, name="recipe.toml"):
    sources = "".join(f'[[sources]]\nname = "{n}"\npath = "{n}.jsonl"\n' for n in ("a", "b"))
    (folder / name).write_text(text if "[[sources]]" in text else text + sources)
    return folder / name


SCHEDULE = """
[[schedule]]
mixture = { a = 1 }
[[schedule]]
start_tokens = "20k"
change = "linear"
end_tokens = 40_000
mixture = { a = 1, b = 3 }
"""


def test_a_recipe_with_a_schedule_is_the_source_that_it_says(folder):
    recipe = DataRecipe.from_toml(write(folder, "seed = 3\nmax_repeats = 4\n" + SCHEDULE))
    source = source_of(recipe)
    assert source.schedule == (
        Stage({"a": 1}),
        Stage({"a": 1, "b": 3}, start_tokens=20_000, change="linear", end_tokens=40_000),
    )
    assert source.ending("a") == Ending(5) and source.finite
    assert DataRecipe.from_dict(recipe.to_dict()) == recipe


def test_a_stream_follows_its_schedule(tiny_tokenizer):
    source = ScheduledMixtureWorkSource(
        [data("a"), data("b")],
        schedule=[Stage({"a": 1}), Stage({"b": 1}, start_steps=10), Stage({"a": 1, "b": 1}, start_steps=20)],
    )
    pipeline = Pipeline(source).options(canonical_replicas=2, global_batch=8, runner="inline")
    pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(63).batch(8)
    shares = []
    for _, batch in zip(range(30), pipeline, strict=False):
        shares.append(float(np.average(batch.block.span_dataset == 1, weights=batch.block.span_lengths())))
    assert max(shares[:9]) == 0 and min(shares[11:17]) == 1
    assert 0.35 < np.mean(shares[21:]) < 0.65
    told = pipeline.mixture()
    assert told["a"].target == pytest.approx(told["a"].achieved, abs=0.05)


def test_a_schedule_in_steps_needs_a_global_batch(tiny_tokenizer):
    source = ScheduledMixtureWorkSource([data("a")], schedule=[Stage({"a": 1}), Stage({"a": 1}, start_steps=5)])
    with pytest.raises(RecipeError, match="global_batch"):
        next(iter(Pipeline(source).tokenize(tiny_tokenizer).pack_flat(8).batch(1)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"exhausted_policy": "stop", "max_repeats": 2}, "contradict"),
        ({"exhausted_policy": "stop", "stop_after_passes": 2}, "contradict"),
        ({"max_repeats": 2, "stop_after_passes": 2}, "contradict"),
        ({"repeat": False, "exhausted_policy": "repeat"}, "contradict"),
        ({"repeat": False, "max_repeats": 1}, "contradict"),
        ({"stop_after_passes": 0}, "at least 1"),
        ({"reshuffle_on_repeat": 1}, "expected true or false"),
        ({"per_dataset": {"x": {}}}, 'unknown dataset in per_dataset "x"'),
        ({"mixture": {"a": 1, "b": 1}}, 'unknown dataset in mixture "b"'),
        ({"mixture": {}}, "no weight for ['a']"),
        ({"mixture": {"a": 0}}, 'the weight of "a" is 0.0 and all weights add up to 0.0'),
        ({"chunk_size": 2**21}, "chunk_size is 2097152; expected an integer from 1 to 1048576."),
        ({"token_estimation": "yes"}, "expected a TokenEstimation"),
        ({"per_dataset": {"a": {"weight": 1}}}, "shuffle_shards"),
        ({"per_dataset": {"a": {"shuffle_block_size": 0}}}, 'of "a"'),
        ({"continues": 5}, "work source"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_a_sentence(given, words):
    with pytest.raises(RecipeError) as caught:
        StaticMixtureWorkSource([data("a")], **given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_scheduled_source_has_no_mixture_besides():
    with pytest.raises(RecipeError, match="both a mixture and a schedule"):
        ScheduledMixtureWorkSource([data("a")], mixture={"a": 1}, schedule=[Stage({"a": 1})])


def test_a_run_ends_with_the_dataset_that_has_had_its_passes(tiny_tokenizer):
    source = StaticMixtureWorkSource([data("a", 50), data("b")], per_dataset={"a": {"stop_after_passes": 3}})
    pipeline = Pipeline(source).options(canonical_replicas=2, runner="inline").tokenize(tiny_tokenizer)
    rows = {}
    for batch in pipeline.pack_flat(16).batch(1, drop_last=False):
        for line in batch.provenance().to_pylist():
            if line["token_begin"] == 0:
                rows.setdefault(line["dataset"], []).append(line["row"])
    assert sorted(rows["a"]) == sorted([*range(50)] * 3)
    assert 100 < len(rows["b"]) < 400


def test_without_reshuffling_every_pass_is_in_the_same_order(tiny_tokenizer):
    def rows(**given):
        source = StaticMixtureWorkSource([data("a", 40)], seed=2, **given)
        made = Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer).pack_flat(8).batch(1).compiled
        return made.plan.curriculum.chunk(0, 0).row[:80].tolist()

    same, other = rows(reshuffle_on_repeat=False), rows()
    assert same[:40] == same[40:] == other[:40] != other[40:]


def test_settings_of_a_dataset_are_part_of_the_fingerprint(tiny_tokenizer):
    def fingerprint(**given):
        source = StaticMixtureWorkSource([data("a"), data("b")], token_estimation=None, **given)
        return Pipeline(source).tokenize(tiny_tokenizer).pack_flat(8).batch(1).compiled.fingerprint

    plain = fingerprint()
    for given in (
        {"per_dataset": {"a": {"shuffle_block_size": 5}}},
        {"per_dataset": {"a": {"max_repeats": 5}}},
        {"reshuffle_on_repeat": False},
        {"max_repeats": 3},
        {"stop_after_passes": 3},
    ):
        assert fingerprint(**given) != plain
    assert fingerprint(exhausted_policy="stop") == fingerprint(repeat=False)
    assert fingerprint(exhausted_policy="repeat") == plain


def test_shares_handed_out_and_passes_are_logged_window_by_window(tiny_tokenizer, caplog):
    tiny = Dataset.from_dict("tiny", {"text": TEXTS["b"][1:2]})
    source = StaticMixtureWorkSource([data("a"), tiny], mixture={"a": 1, "tiny": 3}, chunk_size=60)
    pipeline = Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer).pack_flat(31).batch(4)
    with caplog.at_level(logging.INFO, logger="zephon"):
        for _ in zip(range(60), pipeline, strict=False):
            pass
    lines = [record.message for record in caplog.records if record.message.startswith("mixture: a ")]
    assert 3 < len(lines) <= pipeline.checkpoint()["lanes"]["0"][0]
    shares = [re.findall(r"a ([\d.]+)% of 25.00% \(since the last line ([\d.]+)%", line)[0] for line in lines]
    assert all(abs(float(share) - 25) < 8 for pair in shares for share in pair)
    assert pipeline.mixture()["tiny"].passes == pytest.approx(60 * 4 * 32 * 0.75 / 7, rel=0.2)
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and re.match(r"tiny has had 1\d\d passes; lower its weight", warned[0])
    assert re.search(r"  tiny: weight 3, 75.00% of tokens.*, a pass every \d+ tokens of the run", pipeline.explain())


def test_a_forecast_is_what_the_curriculum_gives(tiny_tokenizer):
    source = ScheduledMixtureWorkSource(
        [data("a"), data("b")],
        schedule=[Stage({"a": 1}), Stage({"b": 1}, start_tokens=30_000, change="cosine", end_tokens=90_000)],
        chunk_size=100,
        per_dataset={"a": {"max_repeats": 9}},
    )
    made = Pipeline(source).options(canonical_replicas=4).tokenize(tiny_tokenizer).pack_flat(8).batch(1).compiled
    forecast = Forecast(made)
    assert forecast.tokens is None
    assert forecast.shares(0, 20_000) == pytest.approx([1, 0], abs=1e-6)
    assert forecast.shares(95_000, 99_000) == pytest.approx([0, 1], abs=1e-6)
    curriculum = made.plan.curriculum
    for index in (1, 3, 7):
        rows = [sum(each) for each in zip(*(curriculum.rows_before(lane, index) for lane in range(4)), strict=True)]
        tokens = sum(r * t for r, t in zip(rows, made.tokens_per_row.values(), strict=True))
        assert forecast.rows(tokens) == pytest.approx(rows, abs=6)


def test_recipes_can_continue_recipes_but_not_in_a_circle(folder, tiny_tokenizer):
    write(folder, "", "old.toml")
    new = '[[sources]]\nname = "b"\npath = "b.jsonl"\n[[sources]]\nname = "c"\npath = "c.jsonl"\nweight = 2\n'
    write(folder, 'continue_from = "old.toml"\n' + new, "new.toml")

    def open_run(name):
        return Pipeline.from_recipe(folder / name, tokenizer=tiny_tokenizer, seq_len=15, microbatch_size=2)

    old = open_run("old.toml")
    stream = iter(old)
    for _ in range(5):
        next(stream)
    state = old.checkpoint()
    old.close()
    run = open_run("new.toml").restore(state)
    names = [set(batch.provenance()["dataset"].to_pylist()) for _, batch in zip(range(1200), run, strict=False)]
    assert "a" in set().union(*names[:600]) and "a" not in set().union(*names[1000:])
    again = open_run("new.toml").restore(run.checkpoint())
    assert next(iter(again)).digests == next(iter(run)).digests
    run.close()
    again.close()
    write(folder, 'continue_from = "two.toml"\n', "one.toml")
    write(folder, 'continue_from = "one.toml"\n', "two.toml")
    with pytest.raises(RecipeError, match="circle"):
        open_run("one.toml")


def test_ensure_mixture_from_the_recipe(folder, tiny_tokenizer):
    path = write(folder, "ensure_mixture = true\n")
    run = Pipeline.from_recipe(path, tokenizer=tiny_tokenizer, seq_len=15, microbatch_size=2)
    assert "ensure_mixture" in run.explain()
    path = write(folder, 'ensure_mixture = true\npack_algorithm = "best_fit"\n')
    with pytest.raises(PipelineError, match="one or the other"):
        Pipeline.from_recipe(path, tokenizer=tiny_tokenizer, seq_len=15, microbatch_size=2).explain()


@pytest.mark.parametrize("mixture", [{"a": 0, "b": 3}, {"a": 2, "b": 0}])
@pytest.mark.parametrize("kind", ["static", "finite", "schedule", "ensure_mixture"])
def test_a_source_of_weight_0_is_not_read_and_the_others_are(tiny_tokenizer, mixture, kind):
    order = {"chunk_size": 60, "repeat": kind != "finite"}
    if kind == "schedule":
        source = ScheduledMixtureWorkSource([data("a"), data("b")], schedule=[Stage(mixture)], **order)
    else:
        source = StaticMixtureWorkSource([data("a"), data("b")], mixture=mixture, **order)
    pipeline = Pipeline(source).options(runner="inline", canonical_replicas=2, global_batch=4).tokenize(tiny_tokenizer)
    pipeline = pipeline.ensure_mixture(60) if kind == "ensure_mixture" else pipeline
    pipeline = pipeline.pack_flat(31).shuffle(8).batch(4)
    records = sum(len(batch) for _, batch in zip(range(1 << 20 if kind == "finite" else 60), pipeline, strict=False))
    state, mixed = pipeline.checkpoint(), pipeline.mixture()
    (idle,) = (name for name, weight in mixture.items() if not weight)
    assert records > 100 and "0.00% of tokens" in pipeline.explain()
    assert (mixed[idle].rows, mixed[idle].target, mixed[idle].passes) == (0, 0, 0)
    assert kind != "finite" or sum(each.rows for each in mixed.values()) == 300
    pipeline.close()
    assert pipeline.restore(state).checkpoint() == state
