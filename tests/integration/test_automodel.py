"""NeMo AutoModel's recipe on the CPU, in an environment of its own, and its processes with tensor parallelism."""

import json
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from support.interpreters import ROOT, alone, find_uv
from support.pages import Place, text_of
from support.process_data import wait_until
from support.snippets import project
from zephon.run.ledger import compare, read_ledger

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(1800)]

# Processes 0 and 1 share a model, and so do 2 and 3. The first of each is asked for the state, and no other.
PLACES = """
import sys
import torch.distributed as dist
from zephon.integrations.automodel import ZephonDataset

folder, tokenizer, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
sizes = {"seq_len": 32, "microbatch_size": 2, "global_batch": 8}
dataset = ZephonDataset(f"{folder}/recipe.toml", tokenizer=tokenizer, **sizes)
batches = iter(dataset.shard(2, rank // 2))
for _ in range(2):
    next(batches)
states = [dataset.state_dict() if rank % 2 == 0 else None]
dist.broadcast_object_list(states, src=0)
assert rank % 2 or states[0] == dataset.state_dict()
expected = next(batches)["input_ids"].tolist()
dataset.load_state_dict(states[0])
assert next(iter(dataset))["input_ids"].tolist() == expected
every = [None] * 4
dist.all_gather_object(every, expected)
assert every[0] == every[1] and every[2] == every[3] and every[0] != every[2]
dataset.loader.close()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = (json.dumps({"text": f"Page {n}. " + "some words go on " * (1 + n % 9)}) for n in range(400))
    (folder / "pages.jsonl").write_text("\n".join(lines))
    path = folder / "recipe.toml"
    path.write_text('seed = 1\ncanonical_replicas = 8\n[[sources]]\nname = "pages"\npath = "pages.jsonl"\n')
    return path


@pytest.mark.frameworks
def test_processes_that_share_a_model_are_not_waited_for(recipe, tiny_tokenizer):
    command = [sys.executable, "-c", PLACES, str(recipe.parent), str(tiny_tokenizer)]
    processes = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(4)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors


@pytest.fixture(scope="module")
def train(tmp_path_factory, recipe, tiny_tokenizer):
    """Runs AutoModel on a number of processes."""
    folder = tmp_path_factory.mktemp("automodel")
    packages = [f"{ROOT / 'zephon-core'}[fast]", "nemo-automodel==0.7.0"]
    (folder / "override.txt").write_text("triton<3.9\n")  # with later ones AutoModel 0.7.0 cannot be imported
    uv, python = find_uv(), folder / "venv/bin/python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder / "venv"], check=True)
    options = ["--python", python, "--override", folder / "override.txt"]
    subprocess.run([uv, "pip", "install", "-q", *options, *packages], check=True)

    def run(name, ranks, resume=None, kill_at=None, **more):
        options = {
            "config": ROOT / "examples/automodel.yaml",
            "step_scheduler.global_batch_size": 8,
            "step_scheduler.local_batch_size": 1,
            "dataset.recipe": recipe,
            "dataset.seq_len": 64,
            "dataset.global_batch": 8,
            "dataset.microbatch_size": 1,
            "dataset.ledger": folder / name / "ledger",
            "dataset.tokenizer.pretrained_model_name_or_path": tiny_tokenizer,
            "checkpoint.checkpoint_dir": folder / name,
            **({"checkpoint.restore_from": resume} if resume else {}),
            **more,
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        command = [python, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "-m", "examples.train_automodel"]
        environment = alone() | {"NEMO_ENABLE_USER_MODULES": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if kill_at is None:
            ran = subprocess.run(
                [*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
            )
            return ran, folder / name
        with (folder / f"{name}.log").open("w") as log:
            launcher = psutil.Popen([*command, *words], cwd=ROOT, env=environment, stdout=log, stderr=log)
            wait_until(lambda: kill_at in losses(folder / name), 300)
            for process in [*launcher.children(recursive=True), launcher]:
                process.kill()
        return launcher.wait(), folder / name

    return run


def losses(folder):
    path = folder / "training.jsonl"
    written = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [json.loads(line) for line in written if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines}


def test_a_run_goes_on_with_one_process_and_with_four(train, recipe):
    ran, base = train("base", 2)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert sorted(losses(base)) == list(range(6))
    saved = base / "epoch_0_step_2"
    ran, one = train("one", 1, resume=saved)
    assert ran.returncode == 0, ran.stderr[-4000:]

    recipe.write_text(recipe.read_text().replace("seed = 1", "seed = 2"))
    ran, _ = train("changed", 1, resume=saved)
    recipe.write_text(recipe.read_text().replace("seed = 2", "seed = 1"))
    assert ran.returncode and "CheckpointError" in ran.stderr and "seed" in ran.stderr

    # The files that AutoModel looks for on more processes than saved are copies of those that are there.
    for other in (2, 3):
        for kind in ("dataloader/dataloader_dp", "rng/rng_global"):
            shutil.copy(saved / f"{kind}_rank_0.pt", saved / f"{kind}_rank_{other}.pt")
    ran, four = train("four", 4, resume=saved)
    assert ran.returncode == 0, ran.stderr[-4000:]
    for name in (one, four):
        assert compare(read_ledger(base / "ledger"), read_ledger(name / "ledger")) is None
        after = {step: loss for step, loss in losses(base).items() if step > 2}
        assert losses(name) == pytest.approx(after, rel=1e-4)


def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(train):
    code, killed = train("killed", 2, kill_at=4, **{"step_scheduler.max_steps": 100_000})
    assert code == -signal.SIGKILL
    last = max(int(path.name.rpartition("_")[2]) for path in killed.glob("epoch_0_step_*"))
    more = {"step_scheduler.max_steps": last + 4}
    ran, later = train("later", 1, resume=killed / f"epoch_0_step_{last}", **more)
    assert ran.returncode == 0, ran.stderr[-4000:]
    ran, base = train("undisturbed", 2, **more)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert sorted(losses(later)) == [last + 1, last + 2, last + 3]
    for name in (killed, later):
        assert compare(read_ledger(base / "ledger"), read_ledger(name / "ledger")) is None
        shared = losses(name).keys() & losses(base).keys()
        assert {step: losses(name)[step] for step in shared} == pytest.approx(
            {step: losses(base)[step] for step in shared}, rel=1e-4
        )


def test_the_documentation_runs_as_written(tmp_path, monkeypatch, request):
    """Its commands, then on four processes, then its YAML file on the example's model."""
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path, request.getfixturevalue, {})
    project(place)
    place.setenv("UV_LINK_MODE", "symlink")
    place.shell(text_of("docs/automodel.md", "make demo"))
    assert "all 2 runs are identical over the 3 steps that they share" in place.output

    place.shell(text_of("docs/automodel.md", "cd out/two/epoch_0_step_2"))
    train = "NEMO_ENABLE_USER_MODULES=1 out/automodel/bin/torchrun --nproc_per_node={} -m examples.train_automodel "
    more = "--checkpoint.restore_from=out/two/epoch_0_step_2 --checkpoint.checkpoint_dir=out/four"
    more += " --dataset.ledger=out/four/ledger"
    place.shell(train.format(4) + f"--config examples/automodel.yaml {more}")
    assert compare(read_ledger(tmp_path / "out/two/ledger"), read_ledger(tmp_path / "out/four/ledger")) is None

    shutil.copytree(tmp_path / ".zephon/demo/tokenizer", tmp_path / "gpt2")
    recipe = (ROOT / "recipes/pretrain.toml").read_text(encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(recipe.replace("../.zephon", ".zephon"), encoding="utf-8")
    settings = yaml.safe_load((ROOT / "examples/automodel.yaml").read_text(encoding="utf-8"))
    settings |= yaml.safe_load(text_of("docs/automodel.md", "step_scheduler:"))
    settings["dataset"]["ledger"] = settings["checkpoint"]["checkpoint_dir"] = "out/page"
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    place.shell(train.format(2) + "--config page.yaml")
    assert set(read_ledger(tmp_path / "out/page").step_digests(64)) == {1}
