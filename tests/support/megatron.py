"""Runs of Megatron's real pretrain(); see `support.forks`."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.forks import BATCH, SEQ, STEPS, Outcome, Runs

SAVED = 2
_STEP = re.compile(r"^loss of step (\d+): (\S+)$", re.MULTILINE)
_VALIDATION = re.compile(r"validation(\S*) loss at iteration (\d+)( on \w+ set)? \| lm loss value: (\S+)")


@dataclass
class MegatronOutcome(Outcome):
    """With losses, of training by step and of validation by iteration and set."""

    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step, loss in _STEP.findall(self.log):
            assert self.losses.setdefault(int(step), float(loss)) == float(loss)  # one on all ranks
        for suffix, iteration, on, loss in _VALIDATION.findall(self.log):
            self.validation[f"{iteration}{suffix}{on}"] = float(loss)


class Megatron(Runs):
    """A corpus, and Megatron's runs on it."""

    framework, held_out, outcome = "megatron", {"held-out": 20, "other": 14}, MegatronOutcome

    def run(
        self,
        name: str,
        ranks: int,
        *more: str,
        micro: int = 2,
        steps: int = STEPS,
        save: int | None = SAVED,
        ckpt: str = "torch_dist",
        kill_at: int | None = None,
        batches: int | None = None,
        sizes: tuple[str, ...] = (f"--global-batch-size={BATCH}", f"--train-iters={STEPS}", "--lr-decay-iters=100"),
    ) -> MegatronOutcome:
        """Train in the folder `name`, going on from what is saved there; options of `more` override."""
        out = self.folder / name
        args = [
            f"--zephon-data-config={self.recipe}",
            f"--zephon-ledger={out / 'ledger'}",
            f"--tokenizer-model={self.tokenizer}",
            "--make-vocab-size-divisible-by=8",
            "--num-layers=4",
            "--hidden-size=32",
            "--num-attention-heads=2",
            f"--seq-length={SEQ}",
            f"--max-position-embeddings={SEQ}",
            f"--micro-batch-size={micro}",
            *sizes,
            "--lr=1e-3",
            "--attention-dropout=0",
            "--hidden-dropout=0",
            "--log-interval=1",
            f"--exit-interval={steps}",
            f"--ckpt-format={ckpt}",
            "--distributed-timeout-minutes=2",
            f"--load={out / 'model'}",
        ]
        if save is not None:
            args += [f"--save={out / 'model'}", f"--save-interval={save}"]
        kill = None if kill_at is None else f"loss of step {kill_at}:"
        return self.order(ranks, [*args, *more], kill_at=kill, batches=batches, out=str(out))

    def batches(self, name: str, ranks: int, *more: str, micro: int = 2, count: int = 2) -> list[list[dict]]:
        """The results of `get_batch` on every rank, without a model: `count` batches each."""
        import torch

        out = self.folder / name
        out.mkdir()
        run = self.run(name, ranks, *more, micro=micro, save=None, batches=count)
        assert run.ok, run.log
        return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(ranks)]

    def copy_checkpoint(self, source: str, target: str, iteration: int) -> Path:
        """Begin the folder `target` with one iteration of `source`; returns the folder of its states."""
        origin, models, copied = self.folder / source / "model", self.folder / target / "model", f"iter_{iteration:07d}"
        for part in (copied, f"dataloader/{copied}"):
            if (origin / part).is_dir():
                shutil.copytree(origin / part, models / part)
        history = Path("dataloader", "zephon-data.json")
        if (origin / history).is_file():
            (models / "dataloader").mkdir(exist_ok=True)
            shutil.copy(origin / history, models / history)
        (models / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return models / "dataloader" / copied / "mp_rank_00"


# In the server

_program: Any = None


def prepare() -> None:
    global _program
    from megatron_zephon import cpu_train

    _program = cpu_train.prepare()
    import torch.utils.tensorboard  # noqa: F401
    from megatron.training import training
    from transformers import AutoTokenizer  # noqa: F401

    stock = training.train_step

    def train_step(*args, **kwargs):
        # The printed loss of a second iteration is a mean of two.
        result = stock(*args, **kwargs)
        if "lm loss" in result[0]:
            print(f"\nloss of step {kwargs['iteration'] + 1}: {result[0]['lm loss'].item()!r}", flush=True)
        return result

    training.train_step = train_step


def train(order: dict[str, Any], rank: int) -> None:
    if "--ckpt-format=torch_dist" in order["args"]:
        # Its first save would spawn a process, which imports everything again.
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    from megatron_zephon.cpu_train import FLAGS

    sys.argv = ["pretrain_gpt_zephon.py", *FLAGS, *order["args"]]
    if order["batches"]:
        _save_batches(order, rank)
    else:
        _program.main()


def _save_batches(order: dict[str, Any], rank: int) -> None:
    """As far as pretrain() goes without a model; then batches."""
    import torch
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args
    from megatron.training.initialize import initialize_megatron

    from megatron_zephon import zephon_train_valid_test_datasets_provider as provider
    from megatron_zephon.training import get_batch

    _program.parse()
    initialize_megatron(allow_no_cuda=True)
    get_args().iteration = 0
    loader, _, _ = provider((1, 1, 1))
    iterator = None if loader is None else RerunDataIterator(loader)
    batches = [get_batch(iterator) for _ in range(order["batches"])]
    batches[-1]["saves"] = loader is not None and loader.save_state() is not None
    torch.save(batches, f"{order['out']}/{rank}.pt")
