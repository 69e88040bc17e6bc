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
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from zephon.config.options import default_workers
from zephon.config.topology import divisors
from zephon.errors import WorkerError
from zephon.run.ledger import read_ledger

__all__ = ["Leg", "Matrix", "Run", "Setup", "plan_runs"]


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


@dataclass(frozen=True, slots=True)
class Run:
    """A title, a folder for ledger, states and output, and the legs in order."""

    title: str
    folder: Path
    legs: Sequence[Leg]

    @property
    def ledger(self) -> Path:
        """Folder of its ledger."""
        return self.folder / "ledger"

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

    Args:
        setup: what the runs have in common.

    Attributes:
        done, total: rank processes that have ended, and all.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._at_once = default_workers()
        self._slots = threading.Semaphore(self._at_once)
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()
        self.done = self.total = 0
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
        """Each run in a thread, which waits for its ranks."""
        with ThreadPoolExecutor(len(runs)) as pool:
            futures = [pool.submit(self._run, run) for run in runs]
            try:
                while (state := wait(futures, timeout=0.5, return_when=FIRST_EXCEPTION)).not_done:
                    tick()
                    if any(future.exception() for future in state.done):
                        break
            finally:
                self._stop()
            for future in futures:
                if error := future.exception():
                    raise error
        self._stopped.clear()

    def _stop(self) -> None:
        """Kill processes that still run; none after success."""
        with self._lock:
            self._stopped.set()
            for process in self._processes:
                process.kill()

    def _run(self, run: Run) -> None:
        before: Leg | None = None
        for number, leg in enumerate(run.legs):
            goes_on = number + 1 < len(run.legs)
            with ThreadPoolExecutor(leg.dp) as pool:
                for future in [pool.submit(self._rank, run, number, rank, before, goes_on) for rank in range(leg.dp)]:
                    future.result()
            before = leg

    def _rank(self, run: Run, number: int, rank: int, before: Leg | None, goes_on: bool) -> None:
        """One process of `zephon stream`."""
        setup, leg = self._setup, run.legs[number]
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
            "--ledger": run.ledger,
            "--steps": None if leg.last is None else leg.last - first,
            "--fill-steps": self._fill - first if setup.finite else None,
            "--restore": run.states(before) if before else None,
            "--checkpoint": run.states(leg) if goes_on else None,
            "--kill-after": leg.doomed.get(rank),
        }
        options = [text for name, value in values.items() if value is not None for text in (name, str(value))]
        output = run.folder / "output" / f"leg-{number}-rank-{rank}.txt"
        output.parent.mkdir(parents=True, exist_ok=True)
        # -P: no imports from the working directory.
        command = [sys.executable, "-P", "-m", "zephon.cli", "stream", str(setup.recipe), *options]
        with self._slots, open(output, "wb") as stream:
            with self._lock:
                if self._stopped.is_set():
                    return
                environment = {**os.environ, "LOCAL_WORLD_SIZE": str(self._at_once)}
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment
                )
                self._processes.add(process)
            code = process.wait()
            with self._lock:
                self._processes.discard(process)
                self.done += 1
        # Once another rank has failed, all that ends does so because it was stopped: that is not an error of its own.
        if code != (-signal.SIGKILL if rank in leg.doomed else 0) and not self._stopped.is_set():
            lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
            raise WorkerError(f"{run.title}, rank {rank} of {leg.dp} ended with exit code {code}: {last}")
