"""`zephon plan`: shares and passes of each source over a run."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.corpus import write_recipe
from zephon import DataRecipe, Pipeline, RecipeError
from zephon.cli.plan import Forecast
from zephon.io import Dataset
from zephon.run.build import chain_of, source_of
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource


def test_plan_draws_the_mixture_and_warns_of_many_passes(zephon, corpus):
    sources = "".join(f'[[sources]]\nname = "{n}"\npath = "{p}"\n' for n, p in (("a", "a.jsonl"), ("b", "b.jsonl.gz")))
    stages = '[[schedule]]\nmixture = { a = 1 }\n[[schedule]]\nstart_steps = 50\nchange = "linear"\nend_steps = 80\n'
    path = corpus / "scheduled.toml"
    path.write_text(f"{sources}{stages}mixture = {{ a = 1, b = 1 }}\n")
    common = [path, "--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8]
    code, out, err = zephon("plan", *common, "--steps", 100, "--max-passes", 2)
    assert code == 0 and not err
    lines = out.splitlines()
    assert lines[0] == "25.6k planned tokens, 100 steps"
    assert lines[1].startswith("a |") and lines[1].endswith("100.0% to 50.0%")
    assert lines[2].startswith("b |" + 25 * " ") and lines[2].endswith("0.0% to 50.0%")
    assert re.search(r"^warning: [ab] has [\d.]+ passes, more than 2", out, re.MULTILINE)
    assert "warning" not in zephon("plan", *common, "--tokens", "1k")[1]
    for options, words in (([], "either --tokens or --steps"), (["--tokens", "x"], 'tokens is "x"')):
        code, _, err = zephon("plan", *common, *options)
        assert code == 2 and words in err and err.count("\n") == 1


@pytest.mark.parametrize("chain", [["one"], ["one", "two"], ["one", "two", "three", "two"]])
def test_plan_and_others_refuse_recipes_that_continue_each_other_in_a_circle(zephon, corpus, tmp_path, chain):
    source = f'[[sources]]\nname = "a"\npath = "{corpus / "a.jsonl"}"\n'
    for name, then in zip(chain, [*chain[1:], chain[0]], strict=True):
        if not (tmp_path / f"{name}.toml").exists():
            (tmp_path / f"{name}.toml").write_text(f'continue_from = "{then}.toml"\n{source}')
    path = tmp_path / "one.toml"
    common = [path, "--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8]
    code, _, err = zephon("plan", *common, "--steps", 10)
    assert code == 2 and "in a circle, " in err and f"{chain[-1]}.toml" in err and err.count("\n") == 1
    with pytest.raises(RecipeError, match="in a circle"):
        source_of(DataRecipe.from_toml(path))


def test_plan_of_a_takeover_reads_the_recipes_before_it(zephon, corpus, tmp_path):
    source = f'[[sources]]\nname = "a"\npath = "{corpus / "a.jsonl"}"\n'
    (tmp_path / "one.toml").write_text(source)
    (tmp_path / "two.toml").write_text(f'continue_from = "one.toml"\n{source}')
    common = ["--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8, "--steps", 10]
    assert "from the takeover on" in zephon("plan", tmp_path / "two.toml", *common)[1]
    changed = DataRecipe.from_toml(tmp_path / "one.toml").replace(
        continue_from=str(tmp_path / "one.toml"), chunk_size=7
    )
    assert len(chain_of(changed)) == 2
    (tmp_path / "one.toml").unlink()
    assert zephon("plan", tmp_path / "two.toml", *common)[0] == 2


@st.composite
def planned(draw):
    """A pipeline and the tokens of a run."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 9, 80])), min_size=1, max_size=3))
    datasets = [
        Dataset.from_dict(f"d{d}", {"text": [f"{d} {n} " * words for n in range(rows)]})
        for d, (rows, words) in enumerate(sizes)
    ]
    weights = st.fixed_dictionaries({dataset.name: st.floats(0.01, 10) for dataset in datasets})
    stages, at = [Stage(draw(weights))], 0
    for change in draw(st.lists(st.sampled_from(["constant", "linear", "cosine"]), max_size=2)):
        at += draw(st.integers(10, 20_000))
        end = {} if change == "constant" else {"end_tokens": at + draw(st.integers(1, 9))}
        stages.append(Stage(draw(weights), start_tokens=at, change=change, **end))
    order = {"repeat": draw(st.booleans()), "chunk_size": draw(st.integers(1, 100)), "token_estimation": None}
    if draw(st.booleans()):
        source = ScheduledMixtureWorkSource(datasets=datasets, schedule=stages, **order)
    else:
        source = StaticMixtureWorkSource(datasets=datasets, mixture=draw(weights), **order)
    options = {"global_batch": 8, "canonical_replicas": draw(st.sampled_from([1, 8]))}
    return Pipeline(source).options(**options), draw(st.integers(1, 50_000))


@given(planned())
def test_shares_that_plan_draws_add_up_to_the_whole(corpus, made):
    pipeline, total = made
    compiled = pipeline.tokenize(corpus / "tokenizer").pack_flat(31).batch(1).compiled
    forecast = Forecast(compiled)
    total = min(total, forecast.tokens or total)
    ratios = list(compiled.tokens_per_row.values())
    for part in range(10):
        shares = forecast.shares(total * part / 10, total * (part + 1) / 10)
        assert math.isclose(sum(shares), 1) and min(shares) >= 0
    read = forecast.rows(total)
    assert math.isclose(sum(rows * ratio for rows, ratio in zip(read, ratios, strict=True)), total, rel_tol=1e-6)


def test_plan_of_data_that_ends_says_where(zephon, corpus):
    recipe = corpus / "finite.toml"
    common = [recipe, "--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8]
    code, out, _ = zephon("plan", *common, "--tokens", "1b")
    assert code == 0 and out.startswith("the data ends after ") and "1.00" in out


@pytest.mark.parametrize("sources", [["a"], ["a", "b"]])
def test_plan_tells_the_steps_that_a_run_over_data_that_ends_makes(zephon, corpus, tmp_path, sources):
    paths = {"a": corpus / "a.jsonl", "b": corpus / "b.jsonl.gz"}
    write_recipe(tmp_path / "r.toml", {name: paths[name] for name in sources}, keys={"repeat": False})
    common = [tmp_path / "r.toml", "--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8]
    pipeline = Pipeline.from_recipe(
        tmp_path / "r.toml", tokenizer=corpus / "tokenizer", seq_len=31, microbatch_size=8, global_batch=8
    )
    made = sum(1 for _ in pipeline)
    code, out, _ = zephon("plan", *common, "--steps", 5000)
    assert code == 0 and out.startswith(f"the data ends after {made} of the 5,000 steps"), out
    code, out, _ = zephon("plan", *common, "--steps", made)
    assert code == 0 and f"planned tokens, {made} steps" in out and "ends" not in out
