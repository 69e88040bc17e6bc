"""The experiment on numbers of ranks: its picture and what it says; deep, the experiment itself."""

import hashlib

import pytest

from examples import elastic_training as experiment


def run(losses: list[float], held_out: float, records: str) -> dict:
    steps = range(11, 11 + len(losses))
    return {
        "losses": {str(step): loss for step, loss in zip(steps, losses, strict=True)},
        "held_out": {"1": 9.0, str(steps[-1]): held_out},
        "digests": {str(step): hashlib.sha256(f"{records} {step}".encode()).hexdigest() for step in steps},
    }


def test_the_picture_says_how_far_runs_are_apart(tmp_path):
    resumed = {
        (loader, ranks): run([5.0, 4.0 + apart * ranks], 4.0, f"{loader} {ranks if apart else 1}")
        for loader, apart in (("standard", 0.1), ("zephon", 0.0))
        for ranks in (1, 2)
    }
    scratch = {
        (loader, seed, ranks): run([5.0], 4.0 + seed + apart * ranks, "any")
        for loader, apart in (("standard", 0.5), ("zephon", 0.0))
        for seed in (1, 2)
        for ranks in (1, 2)
    }
    said = experiment.draw(tmp_path / "elastic.png", resumed, scratch)
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG")
    assert said == [
        "TorchTitan's loader: losses of a step at most 0.1 apart between numbers of ranks",
        "Zephon: losses of a step at most 0 apart between numbers of ranks",
        "TorchTitan's loader: held-out loss moves 0.5 with ranks, 0.71 with seeds",
        "Zephon: held-out loss moves 0 with ranks, 0.71 with seeds",
    ]


@pytest.mark.deep
@pytest.mark.frameworks
@pytest.mark.timeout(1800)
def test_with_zephon_the_curves_of_two_numbers_of_ranks_lie_on_each_other(tmp_path):
    runs = experiment.Experiment(tmp_path, steps=14)
    found = {}
    for loader in experiment.LOADERS:
        runs.run(f"{loader}-saved", loader, 1, until=experiment.SAVED)
        for ranks in (1, 2):
            found[loader, ranks] = runs.run(f"{loader}-{ranks}", loader, ranks, start=f"{loader}-saved")
    assert found["zephon", 1]["digests"] == found["zephon", 2]["digests"]
    assert found["zephon", 1]["losses"] == pytest.approx(found["zephon", 2]["losses"], abs=2e-4)
    assert found["standard", 1]["digests"] != found["standard", 2]["digests"]
