"""Runs of one recipe on many topologies: each rank is a process of `zephon stream`, resumed and killed on purpose.

leg
    Consecutive steps on one number of ranks, from the start or from states, to a checkpoint or the end.
run
    Legs one after the other, with one ledger.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zephon.config.options import default_workers
from zephon.config.topology import divisors
from zephon.errors import WorkerError
from zephon.run.ledger import read_ledger

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs of a matrix have in common.

    Attributes:
        microbatch_size: records per batch, at most.
        steps: steps of each run; None for all steps of finite data.
        finite: whether the data end, so that ranks have to agree on their last step.
    """

    recipe: Path
    tokenizer: str
    seq_len: int
    global_batch: int
    lanes: int
    microbatch_size: int
    runner: str | None
    steps: int | None
    finite: bool
    vision: str | None = None
    pixels: bool = False

    def microbatch(self, dp_degree: int) -> int:
        """The largest microbatch that divides the share of one of `dp_degree` groups."""
        return max(d for d in divisors(self.global_batch // dp_degree) if d <= self.microbatch_size)


@dataclass(frozen=True, slots=True)
class Leg:
    """Attributes:
    dp: ranks.
    last: the step to stop before, with a checkpoint where another leg follows; None is the end of the run.
    doomed: by rank, the microbatches that it consumes after the checkpoint before it kills itself.
    """

    dp: int
    last: int | None
    doomed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A title, a folder for ledger, states and output, and the legs in order."""

    title: str
    folder: Path
    legs: Sequence[Leg]

    @property
    def ledger(self) -> Path:
        """Folder of its ledger."""
        return self.folder / "ledger"

    def output(self, number: int, rank: int) -> Path:
        """What a rank of a leg has printed."""
        return self.folder / "output" / f"leg-{number}-rank-{rank}.txt"

    def states(self, leg: Leg) -> Path:
        """Folder in which the ranks of a leg leave their states."""
        return self.folder / "states" / f"step-{leg.last}"


def plan_runs(setup: Setup, degrees: Sequence[int], resumes: Sequence[int], folder: Path) -> list[Run]:
    """The runs of a matrix: every number of ranks uninterrupted, then, from each, a chain through the others.

    In every other leg that ends in a checkpoint some ranks are killed after it, so that the next leg repeats data that
    they consumed. Which ranks are killed, and when, is random: the data must not depend on it.
    """
    runs = [Run(f"dp {degree}", folder / f"dp-{degree}", [Leg(degree, setup.steps)]) for degree in degrees]
    chance = random.Random()
    for chain in range(len(degrees) if resumes else 0):
        path = [degrees[(chain + i) % len(degrees)] for i in range(len(resumes) + 1)]
        legs = []
        for i, (degree, last) in enumerate(zip(path, [*resumes, setup.steps], strict=True)):
            doomed = {}
            if i < len(resumes) and (chain + i) % 2 == 0:
                per_step = setup.global_batch // degree // setup.microbatch(degree)
                reach = per_step * ((setup.steps or resumes[i] + 1) - resumes[i])
                ranks = chance.sample(range(degree), chance.randint(1, max(1, degree // 2)))
                doomed = {rank: chance.randint(1, reach) for rank in ranks}
            legs.append(Leg(degree, last, doomed))
        name = "-".join(str(degree) for degree in path)
        title = "dp " + " > ".join(str(degree) for degree in path)
        runs.append(Run(title, folder / f"chain-{chain}-dp-{name}", legs))
    return runs


class Matrix:
    """Carries out runs in parallel, with as many processes at a time as there are cores.

    Attributes:
        done, total: rank processes that have ended, and all.
    """

    def __init__(self, setup: Setup) -> None:
        self.done = self.total = 0
        self._setup = setup
        self._at_once = default_workers()
        self._fill = 0

    def run(self, runs: Sequence[Run], tick: Callable[[], None] = lambda: None) -> None:
        """Carry out `runs`, and call `tick` now and then.

        Raises:
            WorkerError: a rank failed; all others are stopped.
        """
        self.total += sum(leg.dp for run in runs for leg in run.legs)
        if self._setup.finite:
            # A run on one rank finds the last step of the data; in the others, each rank fills up to that step.
            length = Run("the length of the data", runs[0].folder.parent / "length", [Leg(1, self._setup.steps)])
            self.total += 1
            self._carry_out([length], tick)
            self._fill = max(read_ledger(length.ledger).step_digests(self._setup.global_batch), default=0)
        self._carry_out(runs, tick)

    def _carry_out(self, runs: Sequence[Run], tick: Callable[[], None]) -> None:
        waiting = [(run, 0, rank) for run in runs for rank in range(run.legs[0].dp)]
        under_way: dict[subprocess.Popen[bytes], tuple[Run, int, int]] = {}
        try:
            while waiting or under_way:
                while waiting and len(under_way) < self._at_once:
                    each = waiting.pop(0)
                    under_way[self._start(*each)] = each
                for process in [process for process in under_way if process.poll() is not None]:
                    run, number, rank = under_way.pop(process)
                    self.done += 1
                    self._check(run, number, rank, process.returncode)
                    of_leg = [each for each in (*waiting, *under_way.values()) if each[:2] == (run, number)]
                    if not of_leg and number + 1 < len(run.legs):
                        waiting += [(run, number + 1, rank) for rank in range(run.legs[number + 1].dp)]
                tick()
                time.sleep(_POLL_SECONDS)
        finally:
            for process in under_way:
                process.kill()
                process.wait()

    def _start(self, run: Run, number: int, rank: int) -> subprocess.Popen[bytes]:
        """One process of `zephon stream`."""
        setup, leg, before = self._setup, run.legs[number], run.legs[number - 1] if number else None
        first = (before.last or 0) if before else 0
        values = {
            "--tokenizer": setup.tokenizer,
            "--seq-len": setup.seq_len,
            "--microbatch-size": setup.microbatch(leg.dp),
            "--global-batch": setup.global_batch,
            "--canonical-replicas": setup.lanes,
            "--dp-degree": leg.dp,
            "--dp-rank": rank,
            "--runner": setup.runner,
            "--vision": setup.vision,
            "--ledger": run.ledger,
            "--steps": None if leg.last is None else leg.last - first,
            "--fill-steps": self._fill - first if setup.finite else None,
            "--restore": run.states(before) if before else None,
            "--checkpoint": run.states(leg) if number + 1 < len(run.legs) else None,
            "--kill-after": leg.doomed.get(rank),
        }
        flags = ["--pixels"] if setup.pixels else []
        options = [text for name, value in values.items() if value is not None for text in (name, str(value))]
        # -P: no imports from the working directory.
        command = [sys.executable, "-P", "-m", "zephon.cli", "stream", str(setup.recipe), *options, *flags]
        environment = {**os.environ, "LOCAL_WORLD_SIZE": str(self._at_once)}
        output = run.output(number, rank)
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "wb") as stream:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment)

    def _check(self, run: Run, number: int, rank: int, code: int) -> None:
        """Refuse a process that has not ended as it should."""
        leg = run.legs[number]
        if code != (-signal.SIGKILL if rank in leg.doomed else 0):
            lines = run.output(number, rank).read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
            raise WorkerError(f"{run.title}, rank {rank} of {leg.dp} ended with exit code {code}: {last}")
