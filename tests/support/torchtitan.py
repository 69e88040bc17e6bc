"""Runs of TorchTitan's real Trainer; see `support.forks`."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.forks import BATCH, SEQ, STEPS, Outcome, Runs

SAVED = 3
_ROW_SIZES = (f"--training.seq_len={SEQ}", "--training.local_batch_size=1", f"--training.global_batch_size={BATCH}")
_FLAT_SIZES = (
    f"--training.max_context_length={SEQ}",
    f"--training.num_tokens_per_microbatch_per_dp_rank={SEQ}",
    f"--training.num_tokens_per_train_step={BATCH * SEQ}",
)
_LOSS = re.compile(r"(validate )?step: +(\d+) +loss: +(\S+)")


@dataclass
class TitanOutcome(Outcome):
    """With losses by step, of training and validation."""

    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Of the last rank: with pipeline parallelism, the first does not know the loss.
        for validated, step, loss in _LOSS.findall(self.logs[-1]):
            (self.validation if validated else self.losses)[int(step)] = float(loss)


class Titan(Runs):
    """A corpus, and TorchTitan's runs on it."""

    framework, held_out, outcome = "torchtitan", {"held-out": 16}, TitanOutcome

    def __init__(self, folder: Path, *, pythonpath: str = "", flat: bool = False) -> None:
        super().__init__(folder, pythonpath)
        self._sizes = _FLAT_SIZES if flat else _ROW_SIZES

    def run(
        self,
        name: str,
        ranks: int,
        *more: str,
        kill_at: int | None = None,
        validate: bool = False,
        recipe: Path | None = None,
        env: dict[str, str] | None = None,
        last_env: dict[str, str] | None = None,
        config: str = "llama3_debugmodel_zephon",
    ) -> TitanOutcome:
        """Train in the dump folder `name`."""
        dump = self.folder / name
        args = [
            "--module=torchtitan_zephon",
            f"--config={config}",
            f"--hf_assets_path={self.tokenizer}",
            f"--dump_folder={dump}",
            "--metrics.disable_color_printing",
            f"--training.steps={STEPS}",
            *self._sizes,
            "--training.mixed_precision_param=float32",
            "--debug.seed=3",
            "--checkpoint.enable",
            f"--checkpoint.interval={SAVED}",
            f"--dataloader.ledger={dump / 'ledger'}",
            *more,
        ]
        env = {**(env or {}), "ZEPHON_RECIPE": str(recipe or self.recipe)}
        if validate:
            env["ZEPHON_VALIDATION_RECIPE"] = str(self.validation[0])
        kill = None if kill_at is None else f"step: {kill_at:2}  "
        return self.order(ranks, args, env=env, last_env=last_env or {}, kill_at=kill)

    def copy_checkpoint(self, source: str, step: int, target: str) -> None:
        checkpoint = Path("checkpoint", f"step-{step}")
        shutil.copytree(self.folder / source / checkpoint, self.folder / target / checkpoint)


# In the server

_program: Any = None


def prepare() -> None:
    global _program
    from torchtitan_zephon import cpu_train

    _program = cpu_train.prepare()
    import torchtitan.trainer

    import torchtitan_zephon.config_registry  # noqa: F401

    with contextlib.suppress(ImportError):  # torchvision
        import torchtitan.hf_datasets.multimodal.mm_datasets

    # At the end, rank 0 waits two seconds for the others.
    torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)


def train(order: dict[str, Any], rank: int) -> None:
    sys.argv = ["train", *order["args"]]
    _program.main()
