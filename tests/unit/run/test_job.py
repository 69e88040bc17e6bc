"""What the ranks of a training job agree on, as a single rank sees it; the trainers' tests have several."""

import pickle

import numpy as np
import pytest

from zephon import CheckpointError, DataError, DataRecipe, Pipeline, PipelineError
from zephon.io import Dataset
from zephon.loader import (
    Change,
    Mixture,
    Progress,
    check_writable,
    evaluation_recipe,
    job_metrics,
    on_all_ranks,
    on_first_rank,
)
from zephon.work import StaticMixtureWorkSource


def test_metrics_are_of_the_time_since_they_were_last_taken():
    mixture = {"a": Mixture(target=0.5, achieved=0.75, given=300, tokens=320, rows=3, skipped=1, failed=2)}
    now = Progress(batches=6, wait=0.5, places=600, padding=50, tokens=np.array([300]))
    since = Progress(batches=2, wait=0.3, places=200, padding=10)
    assert job_metrics(now, since, cursor=12, mixture=mixture, names=["a"], batches_per_step=2) == {
        "zephon/data_wait(s)": pytest.approx(0.1),
        "zephon/padding(%)": 10.0,
        "zephon/cursor": 12.0,
        "zephon/tokens/a": 300.0,
        "zephon/mixture/a": 1.0,
        "zephon/mixture_target/a": 0.5,
        "zephon/skipped_rows/a": 1.0,
        "zephon/failed_rows/a": 2.0,
    }


def test_metrics_of_a_rank_without_a_loader_are_zero():
    assert set(job_metrics(None, Progress(), mixture={}, names=["a"]).values()) == {0.0}


@pytest.mark.parametrize("repeat", [False, True])
def test_an_evaluation_makes_one_pass_or_as_many_as_needed_whatever_recipe_and_sources_say(repeat):
    source = {"name": "a", "path": "/a", "exhausted_policy": "repeat", "shuffle_shards": False}
    given = {"sources": [source], "stop_after_passes": 3, "canonical_replicas": 64, "shuffle_within_shard": False}
    recipe = evaluation_recipe(DataRecipe.from_dict(given), repeat=repeat)
    assert (recipe.repeat, recipe.stop_after_passes, recipe.sources[0].exhausted_policy) == (repeat, None, None)
    assert (recipe.feeds, recipe.canonical_replicas) == (1, "auto")
    assert (recipe.shuffle_within_shard, recipe.sources[0].shuffle_shards) == (False, False)


def test_errors_reach_other_ranks_with_their_fields():
    error = pickle.loads(pickle.dumps(CheckpointError("no", [Change("seed", 5, 7)], "--allow")))
    assert str(error) == str(CheckpointError("no", [Change("seed", 5, 7)], "--allow")) and error.changes[0].now == 7
    for run in (on_all_ranks, on_first_rank):
        assert run(lambda: 3) == 3
        with pytest.raises(CheckpointError, match="no"):
            run(lambda: (_ for _ in ()).throw(error))


def test_the_rank_that_failed_is_named_on_the_others(monkeypatch):
    monkeypatch.setattr("zephon.run.job.gather", lambda mine: [mine, None, DataError("no space in /x")])
    with pytest.raises(DataError, match=r"^rank 2: no space in /x"):
        on_all_ranks(lambda: 3)


@pytest.mark.parametrize("missing", [True, False])
def test_a_folder_to_write_to_is_made_or_refused_by_name(tmp_path, missing):
    (tmp_path / "file").touch()
    if missing:
        check_writable("--here", str(tmp_path / "new" / "folder"))
        assert (tmp_path / "new" / "folder").is_dir()
    else:
        with pytest.raises(PipelineError, match=r"--here is '.*file/x'; expected a folder .*Not a directory"):
            check_writable("--here", str(tmp_path / "file" / "x"))


def test_the_plan_is_logged_by_the_first_rank_only(tiny_tokenizer, caplog, monkeypatch):
    for rank, times in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {"text": ["some words"] * 9})])
        with caplog.at_level("INFO", logger="zephon"):
            Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer).pack_flat(8).batch(1).fingerprint()
        assert caplog.text.count("pipeline ready") == times
