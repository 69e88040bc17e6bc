"""Runs of the examples of trainers, as the documentation has them; see `support.forks`."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from support.forks import BATCH, SEQ, STEPS, Outcome, Runs

SAVED = 3
# Lightning and accelerate look for these of torchrun.
_LAUNCHED = {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "ACCELERATE_USE_CPU": "true"}
_LOSS = re.compile(r"step (\d+): loss (\S+)")


@dataclass
class TrainerOutcome(Outcome):
    """With losses by step."""

    losses: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.losses = {int(step): float(loss) for step, loss in _LOSS.findall(self.logs[0])}


class Trainers(Runs):
    """A corpus, and the runs of one example, `examples.train_NAME`, on it."""

    framework, held_out, outcome = "trainers", {"held-out": 16}, TrainerOutcome

    def __init__(self, folder: Path, example: str) -> None:
        self.example = os.environ["EXAMPLE"] = example  # for the server
        super().__init__(folder)

    def run(
        self,
        name: str,
        ranks: int,
        *more: str,
        resume: Path | None = None,
        kill_at: int | None = None,
        recipe: Path | None = None,
    ) -> TrainerOutcome:
        """Train in the folder `name`."""
        sizes = {"--seq-len": SEQ, "--microbatch-size": 1, "--global-batch": BATCH, "--steps": STEPS}
        options = {"--recipe": recipe or self.recipe, "--tokenizer": self.tokenizer, "--out": self.folder / name}
        options |= sizes | {"--save-every": SAVED} | ({"--resume": resume} if resume else {})
        args = [str(word) for option in options.items() for word in option]
        kill = None if kill_at is None else f"step {kill_at}:"
        return self.order(ranks, [*args, *more], env=_LAUNCHED, kill_at=kill)


# In the server

_program: Any = None


def prepare() -> None:
    """Import the example, and what it imports."""
    global _program
    _program = import_module(f"examples.{os.environ['EXAMPLE']}")


def train(order: dict[str, Any], rank: int) -> None:
    """Run the example as a script does."""
    sys.argv = ["train", *order["args"]]
    _program.main()
