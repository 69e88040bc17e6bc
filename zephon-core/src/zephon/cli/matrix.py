"""Runs of one recipe on many topologies, each rank a process: started, fed, stopped, killed and resumed from here.

Words used here:

leg
    A stretch of steps at one dp_degree: so many processes, from a start or from states on disk to a checkpoint or the
    end.
run
    Legs one after the other, with one ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from zephon.cli.worker import Job
from zephon.config.options import default_workers
from zephon.config.topology import divisors
from zephon.errors import DataError, PipelineError

__all__ = ["Leg", "Matrix", "Run", "Setup", "microbatch_for"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs of a matrix have in common; see `Job`.

    Attributes:
        finite: the data ends, so that ranks must agree on their last step.
    """

    recipe: Path
    tokenizer: str
    seq_len: int
    global_batch: int
    lanes: int
    microbatch_size: int
    runner: str | None
    finite: bool


@dataclass(frozen=True, slots=True)
class Leg:
    """Attributes:
    dp: processes.
    last: the step to stop before, with a checkpoint where another leg follows; None is the end of the data.
    doomed: microbatches that a rank consumes after the checkpoint before it is killed, by rank.
    """

    dp: int
    last: int | None
    doomed: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """Attributes:
    title: for people.
    folder: gets the ledger, states and error output of the run.
    legs: what to do, in order.
    first: the first step.
    states: to begin from; none for the start of the data.
    keep_state: checkpoint at the end of the last leg too.
    until: steps of the whole matrix; doomed ranks go no further.
    steps: once the run is over, the number of the step after the last one.
    ended: whether the data had ended there.
    """

    title: str
    folder: Path
    legs: Sequence[Leg]
    first: int = 0
    states: Sequence[Path] = ()
    keep_state: bool = False
    until: int | None = None
    steps: int = 0
    ended: bool = False

    @property
    def ledger(self) -> Path:
        """Folder of its ledger."""
        return self.folder / "ledger"

    def state_files(self, leg: Leg) -> list[Path]:
        """Where the ranks of a leg leave their states."""
        return [self.folder / "states" / f"step-{leg.last}" / f"rank-{rank}-of-{leg.dp}.json" for rank in range(leg.dp)]


def microbatch_for(share: int, most: int) -> int:
    """The largest microbatch up to `most` of which `share` records are a whole number."""
    return max(d for d in divisors(share) if d <= most)


class Matrix:
    """Runs many runs at once, a few processes at a time.

    Args:
        setup: what they have in common.
        processes: how many may be at work at a time; those that wait for others do not count. By default one per core.
        on_progress: told of the ranks that are through and of all there are.
    """

    def __init__(
        self, setup: Setup, *, processes: int | None = None, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._setup = setup
        self._limit = processes or default_workers()
        self._on_progress = on_progress
        self._selector = selectors.DefaultSelector()

    def run(self, runs: Iterable[Run]) -> None:
        """Carry out `runs`.

        Raises:
            ZephonError: a rank failed; all others are stopped.
        """
        waiting = [_RunningLeg(self._setup, run, 0) for run in runs]
        total, through = sum(leg.dp for each in waiting for leg in each.run.legs), 0
        try:
            while waiting:
                for leg in waiting:
                    while leg.unstarted and self._at_work(waiting) < self._limit:
                        self._start(leg)
                for key, _ in self._selector.select(timeout=1.0):
                    rank: _Rank = key.data
                    if not self._read(rank):
                        through += 1
                for leg in list(waiting):
                    leg.answer()
                    if leg.over:
                        following = leg.following()
                        waiting[waiting.index(leg) : waiting.index(leg) + 1] = [following] if following else []
                if self._on_progress:
                    self._on_progress(through, total)
        finally:
            for leg in waiting:
                leg.kill()
            self._selector.close()
            self._selector = selectors.DefaultSelector()

    @staticmethod
    def _at_work(legs: Sequence[_RunningLeg]) -> int:
        return sum(rank.flag is None for leg in legs for rank in leg.live)

    def _start(self, leg: _RunningLeg) -> None:
        rank = leg.start(self._limit)
        self._selector.register(rank.messages, selectors.EVENT_READ, rank)

    def _read(self, rank: _Rank) -> bool:
        """Take in what a rank says; False once it has ended."""
        data = os.read(rank.messages.fileno(), 1 << 16)
        if data:
            *lines, rank.unread = (rank.unread + data).split(b"\n")
            for line in lines:
                rank.hear(json.loads(line))
            return True
        self._selector.unregister(rank.messages)
        rank.end()
        return False


class _Rank:
    """One process and what it has said."""

    def __init__(self, name: str, job: Job, errors: Path, at_once: int) -> None:
        self.name, self.job = name, job
        self.unread = b""
        self.flag: bool | None = None
        self.killed = False
        self.steps: int | None = None
        self.ended = False
        self.live = True
        self._errors = errors
        with open(errors, "wb") as stream:
            self._process = subprocess.Popen(
                # -P: modules of the working directory have no business in there.
                [sys.executable, "-P", "-m", "zephon.cli.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, "LOCAL_WORLD_SIZE": str(at_once)},
            )
        self._say(job.to_json())

    @property
    def messages(self) -> IO[bytes]:
        """The pipe of what it says."""
        assert self._process.stdout
        return self._process.stdout

    def hear(self, message: list[Any]) -> None:
        """Act on one message."""
        match message:
            case ["flag", bool(flag)]:
                self.flag = flag
            case ["reached"]:
                self.kill()
            case ["done", int(steps), bool(ended)]:
                self.steps, self.ended = steps, ended
            case ["error", str(text)]:
                raise DataError(f"{self.name}: {text}")

    def answer(self, flag: bool) -> None:
        """Tell it what all ranks together have."""
        self.flag = None
        self._say("1" if flag else "0")

    def kill(self) -> None:
        """SIGKILL, at once."""
        self.killed = True
        self._process.kill()

    def end(self) -> None:
        """Collect the process, whose output has ended.

        Raises:
            DataError: it did not end as it should have.
        """
        code = self._process.wait()
        self.live, self.flag = False, None
        self._close()
        if self.steps is None and not self.killed:
            lines = self._errors.read_text(encoding="utf-8", errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            raise DataError(f"{self.name} ended with exit code {code} before its work was done: {said}")

    def stop(self) -> None:
        """Kill and collect it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _say(self, line: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died, which its end tells

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


class _RunningLeg:
    """A leg of a run, with its processes."""

    def __init__(self, setup: Setup, run: Run, number: int) -> None:
        self.run = run
        self._setup, self._number = setup, number
        self._leg = run.legs[number]
        self.unstarted = deque(range(self._leg.dp))
        self._ranks: list[_Rank] = []

    @property
    def live(self) -> list[_Rank]:
        """Processes that have not ended."""
        return [rank for rank in self._ranks if rank.live]

    @property
    def over(self) -> bool:
        """All processes have ended."""
        return not self.unstarted and not self.live

    def start(self, at_once: int) -> _Rank:
        """Start the next process."""
        setup, run, leg = self._setup, self.run, self._leg
        number = self.unstarted.popleft()
        before = run.legs[self._number - 1] if self._number else None
        goes_on = self._number + 1 < len(run.legs) or run.keep_state
        checkpoint = run.state_files(leg)[number] if goes_on else None
        errors = run.folder / "stderr" / f"leg-{self._number}-rank-{number}.txt"
        for folder in (errors.parent, *([checkpoint.parent] if checkpoint else [])):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PipelineError(
                    f"{folder}: the folder cannot be made: {error.strerror or error}; name another."
                ) from None
        job = Job(
            recipe=str(setup.recipe),
            tokenizer=setup.tokenizer,
            seq_len=setup.seq_len,
            microbatch_size=microbatch_for(setup.global_batch // leg.dp, setup.microbatch_size),
            global_batch=setup.global_batch,
            canonical_replicas=setup.lanes,
            runner=setup.runner,
            dp_degree=leg.dp,
            dp_rank=number,
            ledger=str(run.ledger),
            states=[str(path) for path in (run.state_files(before) if before else run.states)],
            first=(before.last or 0) if before else run.first,
            last=leg.last,
            checkpoint=str(checkpoint) if checkpoint else None,
            doomed_after=leg.doomed.get(number),
            until=run.until,
            ask=setup.finite and leg.dp > 1,
        )
        self._ranks.append(_Rank(f"{run.title}, rank {number} of {leg.dp}", job, errors, at_once))
        return self._ranks[-1]

    def answer(self) -> None:
        """Where all processes wait for a flag, combine and answer."""
        live = self.live
        if live and not self.unstarted and all(rank.flag is not None for rank in live):
            combined = any(rank.flag for rank in live)
            for rank in live:
                rank.answer(combined)

    def following(self) -> _RunningLeg | None:
        """The next leg of the run; None after the last."""
        done = {rank.steps for rank in self._ranks if rank.steps is not None}
        if len(done) > 1:
            raise DataError(f"{self.run.title}: its ranks ended at different steps: {sorted(done)}.")
        self.run.steps = done.pop() if done else self._leg.last or 0
        self.run.ended = any(rank.ended for rank in self._ranks)
        if self._number + 1 < len(self.run.legs):
            return _RunningLeg(self._setup, self.run, self._number + 1)
        return None

    def kill(self) -> None:
        """End all processes."""
        for rank in self.live:
            rank.stop()
