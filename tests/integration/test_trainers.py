"""The examples of trainers, with the real libraries on the CPU over gloo."""

from pathlib import Path

import pytest

from support.forks import STEPS
from support.trainers import SAVED, Trainers
from zephon.run.ledger import compare

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]
CHECKPOINTS = {
    "train_pytorch": f"step-{SAVED}.pt",
    "train_accelerate": f"step-{SAVED}",
    "train_lightning": f"step={SAVED}.ckpt",
}


@pytest.fixture(
    scope="module",
    params=[
        "train_lightning",
        *(pytest.param(f"train_{name}", marks=pytest.mark.deep) for name in ("pytorch", "accelerate")),
    ],
)
def trainer(request, tmp_path_factory):
    """One of the trainers, and a run of two ranks that was not disturbed."""
    trainer = Trainers(tmp_path_factory.mktemp(request.param), request.param)
    trainer.base = trainer.run("base", 2)
    assert trainer.base.ok, trainer.base.log
    assert sorted(trainer.base.losses) == list(range(1, STEPS + 1))
    assert sorted(trainer.digests("base")) == list(range(STEPS))
    yield trainer
    trainer.close()


def checkpoint(trainer: Trainers, name: str) -> Path:
    return trainer.folder / name / CHECKPOINTS[trainer.example]


def assert_goes_on(trainer: Trainers, name: str, run) -> None:
    """`run` made the steps after the saved one as the undisturbed run did: records and losses."""
    assert run.ok, run.log
    expected = trainer.digests("base")
    assert trainer.digests(name) == {step: expected[step] for step in range(SAVED, STEPS)}
    assert compare(trainer.ledger("base"), trainer.ledger(name)) is None
    after = {step: loss for step, loss in trainer.base.losses.items() if step > SAVED}
    assert run.losses == pytest.approx(after, rel=1e-4)


def test_a_run_goes_on_with_one_process(trainer):
    assert_goes_on(trainer, "one", trainer.run("one", 1, resume=checkpoint(trainer, "base")))


@pytest.mark.deep
def test_a_run_goes_on_with_one_process_and_then_with_four(trainer):
    half = trainer.run("half", 1, "--steps=5", "--save-every=4", resume=checkpoint(trainer, "base"))
    assert half.ok, half.log
    saved = checkpoint(trainer, "half")
    saved = saved.with_name(saved.name.replace(str(SAVED), "4"))
    run = trainer.run("four", 4, resume=saved)
    assert run.ok, run.log
    expected = trainer.digests("base")
    assert trainer.digests("four") == {step: expected[step] for step in (4, 5)}
    assert run.losses == pytest.approx({step: trainer.base.losses[step] for step in (5, 6)}, rel=1e-4)


@pytest.mark.deep
def test_a_run_that_was_killed_goes_on_from_its_checkpoint(trainer):
    killed = trainer.run("killed", 2, "--steps=1000", kill_at=STEPS - 1)
    assert killed.codes == [-9, -9]
    again = trainer.run("killed", 2, resume=checkpoint(trainer, "killed"))
    assert again.ok, again.log
    # The ledger of both: records used twice were the same, or reading it would raise.
    expected = trainer.digests("base")
    assert {step: digest for step, digest in trainer.digests("killed").items() if step < STEPS} == expected
    assert again.losses[STEPS] == pytest.approx(trainer.base.losses[STEPS], rel=1e-4)


@pytest.mark.deep
def test_a_changed_recipe_is_refused_by_name(trainer):
    changed = trainer.folder / "changed.toml"
    changed.write_text(trainer.recipe.read_text().replace("weight = 2.0", "weight = 3.0"))
    refused = trainer.run("changed", 2, resume=checkpoint(trainer, "base"), recipe=changed)
    assert all(refused.codes)
    for log in refused.logs:
        assert "weight" in log and "was" in log and "CheckpointError" in log
    assert not refused.losses
