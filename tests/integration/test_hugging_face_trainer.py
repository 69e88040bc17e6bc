"""Hugging Face's Trainer and TRL's SFTTrainer on the CPU, over gloo."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.corpus import build_demo
from zephon.run.ledger import compare

pytest.importorskip("transformers")
from support.forks import BATCH, SEQ, STEPS
from support.hugging_face import SAVED, Trainers

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    trainers = Trainers(tmp_path_factory.mktemp("trainers"))
    yield trainers
    trainers.close()


@pytest.fixture(scope="module")
def base(trainers):
    """Six steps on two processes, saved at every second, evaluated at every third."""
    run = trainers.run("base", 2, eval_strategy="steps", eval_steps=3)
    assert run.ok, run.logs[0]
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    assert sorted(trainers.digests("base")) == list(range(STEPS))
    return run


def copy_checkpoint(trainers, step, target):
    path = trainers.folder / target / f"checkpoint-{step}"
    shutil.copytree(trainers.folder / "base" / f"checkpoint-{step}", path)
    return path


def assert_goes_on(trainers, base, name, losses, first):
    """The steps from `first` on are those of the undisturbed run: records and losses."""
    assert sorted(losses) == list(range(first, STEPS + 1))
    expected = trainers.digests("base")
    assert trainers.digests(name) == {step: expected[step] for step in range(first - 1, STEPS)}
    assert compare(trainers.ledger("base"), trainers.ledger(name)) is None
    for step, loss in losses.items():
        assert loss == pytest.approx(base.losses[step], rel=1e-4)


def test_a_run_of_two_processes_goes_on_in_one_and_evaluates_alike(trainers, base):
    copy_checkpoint(trainers, SAVED, "one")
    run = trainers.run("one", 1, resume=True, eval_strategy="steps", eval_steps=3)
    assert run.ok, run.logs[0]
    assert_goes_on(trainers, base, "one", run.losses, SAVED + 1)
    assert sorted(run.evaluations) == sorted(base.evaluations) == [3, 6]
    for step, losses in run.evaluations.items():
        assert losses == pytest.approx(base.evaluations[step], rel=1e-4)


def test_the_state_in_a_checkpoint_is_of_its_step_though_batches_were_fetched_ahead(trainers, base):
    for step in (2, 4, 6):
        state = json.loads((trainers.folder / "base" / f"checkpoint-{step}" / "zephon_state.json").read_text())
        assert state["rounds"] * state["lanes_total"] == step * BATCH
        assert len(state["lanes"]) == state["lanes_total"]
    folders = "--state", trainers.folder / "base" / "checkpoint-2", "--ledger", trainers.folder / "base" / "ledger"
    shown = trainers.show("1-2", "--seq-len", SEQ - 1, *folders)
    assert len(shown) == 2 * BATCH and all(record["trained"] for record in shown)


def test_a_changed_recipe_and_a_checkpoint_without_data_are_refused_by_name(trainers, base):
    path = copy_checkpoint(trainers, SAVED, "refused")
    other = trainers.recipe.with_name("other.toml")
    other.write_text(trainers.recipe.read_text().replace("seed = 5", "seed = 6"))
    run = trainers.run("refused", 1, resume=True, recipe=other)
    assert not run.ok and "seed: was 5, is 6" in run.logs[0] and not run.losses
    (path / "zephon_state.json").unlink()
    run = trainers.run("refused", 1, resume=str(path))
    assert not run.ok and "has no zephon_state.json, so the data cannot go on" in run.logs[0] and not run.losses


@pytest.mark.deep
@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
def test_a_run_killed_twice_goes_on_on_two_one_and_four_processes(trainers, base, trainer):
    """Of SFTTrainer the losses are the same too: the same model on the same batches."""
    name = f"chain-{trainer}"
    losses = {}
    for ranks, kill_at in ((2, SAVED + 1), (1, SAVED + 3), (4, None)):
        run = trainers.run(name, ranks, trainer=trainer, resume=bool(losses), kill_at=kill_at)
        assert run.ok is (kill_at is None), run.logs[0]
        if kill_at:  # the next checkpoint may have been begun
            assert set(run.codes) == {-9}
            unfinished = trainers.folder / name / f"checkpoint-{kill_at + 1}"
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / "model.safetensors").parent.mkdir()
        losses |= run.losses
    assert_goes_on(trainers, base, name, losses, 1)


@pytest.mark.deep
def test_a_finite_recipe_ends_the_training(trainers, base):
    finite = trainers.recipe.with_name("finite.toml")
    finite.write_text("repeat = false\n" + trainers.recipe.read_text())
    run = trainers.run("finite", 2, recipe=finite, max_steps=10_000, save_strategy="no", logging_steps=50)
    assert run.ok, run.logs[0]
    ledger = trainers.ledger("finite")
    assert len(ledger.sequence) % BATCH == 0 and len(ledger.sequence) < 10_000 * BATCH


@pytest.mark.deep
@pytest.mark.parametrize("more", ["", " --sft"])
def test_the_page_can_be_followed_word_for_word(tmp_path, more):
    """But for `make demo`, of which the corpus is made here; with --sft likewise."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "huggingface.md").read_text(encoding="utf-8")
    (script,) = (block for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) if "make demo\n" in block)
    script = script.replace("make demo\n", "").replace("examples/hugging_face.py", f"examples/hugging_face.py{more}")
    for name in ("examples", "recipes"):
        shutil.copytree(root / name, tmp_path / name)
    build_demo(tmp_path / ".zephon" / "demo", vocab_size=2048)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    result = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = re.findall(r"'loss': '?([\d.]+)", result.stdout)
    assert len(losses) == 9 and losses[3:6] == losses[6:]
    assert "all 2 runs are identical over the 3 steps that they share" in result.stdout
