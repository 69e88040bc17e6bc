"""The example of DeepSpeed on the CPU over gloo, in an environment of its own."""

import json
import re
import subprocess
import sys

import pytest

from support.interpreters import ROOT, alone, find_uv
from support.pages import text_of
from zephon.run.ledger import compare, read_ledger

LOSS = re.compile(r"step (\d+): loss (\S+)")


BEFORE = """
import sys

import deepspeed
import torch

from examples.tiny import Tiny
from zephon.loader import JobLoader

recipe, tokenizer, folder = sys.argv[1:]
tag, step = "step-1", 1
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
loader, other = (
    JobLoader(recipe, tokenizer=tokenizer, seq_len=64, microbatch_size=2, global_batch=8) for _ in range(2)
)
model = Tiny(tokenizer)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": loader.batches_per_step,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
batches, others = iter(loader), iter(other)
for _ in range(loader.batches_per_step):
    next(others)
    engine.backward(engine(**next(batches)))
    engine.step()
"""
"""A step; then the block of the page."""
AFTER = """
assert client["step"] == 1
assert next(iter(loader))["input_ids"].tolist() == next(others)["input_ids"].tolist()
loader.close()
other.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_deepspeed_goes_on_from_its_checkpoint(tmp_path, tiny_tokenizer):
    uv, python = find_uv(), tmp_path / "venv/bin/python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True)
    install = [uv, "pip", "install", "-q", "--python", python]
    # DeepSpeed has no wheels, and its build imports torch.
    subprocess.run([*install, "torch", "setuptools", "wheel", f"{ROOT / 'zephon-core'}[fast]"], check=True)
    builds = alone() | {"DS_BUILD_OPS": "0"}
    subprocess.run([*install, "--no-build-isolation", "deepspeed==0.19.8"], env=builds, check=True)

    lines = (json.dumps({"text": f"Page {n}. " + "some words go on " * (1 + n % 9)}) for n in range(400))
    (tmp_path / "pages.jsonl").write_text("\n".join(lines))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('seed = 1\ncanonical_replicas = 8\n[[sources]]\nname = "pages"\npath = "pages.jsonl"\n')

    def run(name, *more):
        options = {"recipe": recipe, "tokenizer": tiny_tokenizer, "out": tmp_path / name, "seq-len": 64}
        options |= {"global-batch": 8, "microbatch-size": 2}
        words = [f"--{key}={value}" for key, value in options.items()]
        command = [python, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "examples.train_deepspeed"]
        environment = alone() | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            [*command, *words, *more], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        return ran, {int(step): float(loss) for step, loss in LOSS.findall(ran.stdout)}

    ran, losses = run("base")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    resume = f"--resume={tmp_path / 'base/step-3'}"
    ran, after = run("again", resume)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert after == pytest.approx({step: losses[step] for step in (4, 5, 6)}, rel=1e-4)
    assert compare(read_ledger(tmp_path / "base/ledger"), read_ledger(tmp_path / "again/ledger")) is None

    program = tmp_path / "program.py"
    program.write_text(BEFORE + text_of("docs/pytorch.md", "engine.save_checkpoint") + AFTER)
    command = [python, "-m", "torch.distributed.run", "--nproc_per_node=2", program, recipe, tiny_tokenizer, tmp_path]
    environment = alone() | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]

    recipe.write_text(recipe.read_text().replace("seed = 1", "seed = 2"))
    ran, _ = run("changed", resume)
    assert ran.returncode and "CheckpointError" in ran.stderr and "seed" in ran.stderr
