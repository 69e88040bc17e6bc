"""`zephon verify`: compare runs by their ledgers, or make the runs of a recipe on many topologies and compare those."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from zephon.cli.barcode import BarcodeRow, check_plot, draw_barcode
from zephon.cli.console import LiveLine, make_console, print_table
from zephon.cli.matrix import Leg, Matrix, Run, Setup, microbatch_for
from zephon.cli.source import open_pipeline, plural
from zephon.config.recipe import DataRecipe
from zephon.config.topology import Topology, resolve_lanes
from zephon.errors import DataError, PipelineError, RecipeError
from zephon.run.build import source_of
from zephon.run.ledger import Ledger, compare, read_ledger

__all__ = ["Verdict", "judge", "parse_numbers", "verify", "verify_ledgers", "verify_recipe"]

_DEFAULT_STEPS = 10
_STEPS_AFTER_RESUME = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run compares with the first.

    Attributes:
        digests: SHA-256 of every step it has whole, by step.
        difference: the first difference, for people; None where there is none.
    """

    digests: dict[int, bytes]
    difference: str | None


def verify(
    targets: Sequence[Path],
    *,
    tokenizer: str | None,
    seq_len: int | None,
    global_batch: int | None,
    dp: str | None,
    resume_at: str | None,
    steps: int | None,
    microbatch_size: int | None,
    canonical_replicas: int | None,
    runner: str | None,
    plot: Path | None,
    keep: Path | None,
) -> bool:
    """Compare what `targets` name: one recipe, or folders with ledgers. True where all is identical."""
    for path in targets:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder; pass a recipe (TOML), or folders with ledgers.")
    folders = [path for path in targets if path.is_dir()]
    if folders and len(folders) < len(targets):
        file = next(path for path in targets if not path.is_dir())
        raise DataError(f"{file} is a file and {folders[0]} a folder; pass one recipe, or folders with ledgers only.")
    if folders:
        if len(folders) == 1:
            raise DataError(f"only one folder is given, {folders[0]}; pass those of two runs or more to compare them.")
        of_recipe = {
            "--tokenizer": tokenizer,
            "--seq-len": seq_len,
            "--dp": dp,
            "--resume-at": resume_at,
            "--steps": steps,
            "--microbatch-size": microbatch_size,
            "--canonical-replicas": canonical_replicas,
            "--runner": runner,
            "--keep": keep,
        }
        for name, value in of_recipe.items():
            if value is not None:
                raise PipelineError(f"{name} goes with a recipe, not with folders of ledgers; leave it out.")
        return verify_ledgers(folders, global_batch=global_batch, plot=plot)
    if len(targets) > 1:
        raise RecipeError(f"{len(targets)} files are given; pass one recipe, or two or more folders with ledgers.")
    if tokenizer is None or seq_len is None or global_batch is None or dp is None:
        needed = {"--tokenizer": tokenizer, "--seq-len": seq_len, "--global-batch": global_batch, "--dp": dp}
        missing = ", ".join(name for name, value in needed.items() if value is None)
        raise PipelineError(f"a recipe does not say all that a run needs; add {missing}.")
    return verify_recipe(
        targets[0],
        tokenizer=tokenizer,
        seq_len=seq_len,
        global_batch=global_batch,
        dp=dp,
        resume_at=resume_at,
        steps=steps,
        microbatch_size=microbatch_size,
        canonical_replicas=canonical_replicas,
        runner=runner,
        plot=plot,
        keep=keep,
    )


def verify_ledgers(folders: Sequence[Path], *, global_batch: int | None, plot: Path | None) -> bool:
    """Compare the runs behind ledgers with the first of them."""
    if plot:
        check_plot(plot)
    ledgers = [read_ledger(folder) for folder in folders]
    unit = global_batch or next((ledger.global_batch for ledger in ledgers if ledger.global_batch), None)
    word = "step" if unit else "round"
    verdicts = judge(ledgers, unit or ledgers[0].lanes)
    console = make_console()
    rows = []
    for folder, ledger, verdict in zip(folders, ledgers, verdicts, strict=True):
        same = "first" if ledger is ledgers[0] else "no" if verdict.difference else "yes"
        rows.append([str(folder), str(ledger.lanes), f"{len(ledger.sequence):,}", steps_text(verdict.digests), same])
    print_table(console, ["run", "lanes", "records", f"whole {word}s", "identical"], rows, right="lrr")
    if plot:
        draw_barcode(
            plot, [BarcodeRow(str(folder), verdict.digests) for folder, verdict in zip(folders, verdicts, strict=True)]
        )
        console.print(f"barcode: {plot}")
    differences = [verdict.difference for verdict in verdicts if verdict.difference]
    for difference in differences:
        console.print(f"different: {difference}")
    if differences:
        return False
    shared = set.intersection(*(set(verdict.digests) for verdict in verdicts))
    if not shared:
        console.print(f"the runs share no whole {word}, so nothing could be compared")
        return False
    console.print(f"all {len(ledgers)} runs are identical over the {len(shared):,} {word}s that they share")
    return True


def judge(ledgers: Sequence[Ledger], unit: int) -> list[Verdict]:
    """Compare each run with the first; steps have `unit` records."""
    verdicts = []
    for ledger in ledgers:
        difference = None if ledger is ledgers[0] else compare(ledgers[0], ledger)
        verdicts.append(Verdict(ledger.step_digests(unit), difference.text if difference else None))
    return verdicts


def steps_text(steps: dict[int, bytes]) -> str:
    """ "0-9" for ten steps from the start."""
    if not steps:
        return "none"
    low, high = min(steps), max(steps)
    gaps = "" if len(steps) == high - low + 1 else f" without {high - low + 1 - len(steps)}"
    return (f"{low}-{high}" if high > low else f"{low}") + gaps


def parse_numbers(text: str, option: str, *, least: int) -> list[int]:
    """ "1,2,4" as numbers.

    Raises:
        PipelineError: it is something else.
    """
    numbers = []
    for part in text.split(","):
        if not (part.strip().isascii() and part.strip().isdigit() and len(part) < 10 and int(part) >= least):
            raise PipelineError(
                f"{option} is {text[:60]!r}; whole numbers of at least {least}, with commas between them, are needed, "
                "as in 1,2,4."
            )
        numbers.append(int(part))
    return list(dict.fromkeys(numbers))


def verify_recipe(
    recipe: Path,
    *,
    tokenizer: str,
    seq_len: int,
    global_batch: int,
    dp: str,
    resume_at: str | None,
    steps: int | None,
    microbatch_size: int | None,
    canonical_replicas: int | None,
    runner: str | None,
    plot: Path | None,
    keep: Path | None,
) -> bool:
    """Make the runs of the matrix and compare them with the first."""
    if plot:
        check_plot(plot)
    read = DataRecipe.from_toml(recipe)
    degrees = parse_numbers(dp, "--dp", least=1)
    resumes = sorted(parse_numbers(resume_at, "--resume-at", least=1)) if resume_at else []
    lanes = resolve_lanes(
        canonical_replicas or read.canonical_replicas, global_batch=global_batch, dp_degree=max(degrees)
    )
    for degree in degrees:
        Topology(lanes, degree, 0, global_batch)
    if steps is None and not source_of(read).finite:
        steps = max([_DEFAULT_STEPS, *(step + _STEPS_AFTER_RESUME for step in resumes)])
    if steps is not None and resumes and resumes[-1] >= steps:
        raise PipelineError(f"--resume-at {resumes[-1]} is not before the last of {steps} steps; raise --steps.")
    setup = Setup(
        recipe=recipe.absolute(),
        tokenizer=tokenizer,
        seq_len=seq_len,
        global_batch=global_batch,
        lanes=lanes,
        microbatch_size=microbatch_size or 8,
        runner=runner,
        finite=source_of(read).finite,
    )
    # Whatever is wrong with the recipe is found here, and its indexes are made, before any process starts.
    open_pipeline(
        read,
        tokenizer=tokenizer,
        seq_len=seq_len,
        microbatch_size=setup.microbatch_size,
        global_batch=global_batch,
        canonical_replicas=lanes,
        runner=runner,
    ).explain()
    with nullcontext(_fresh_folder(keep)) if keep else tempfile.TemporaryDirectory(prefix="zephon-verify-") as folder:
        runs = plan_runs(setup, degrees, resumes, steps, Path(folder))
        return _carry_out(setup, runs, degrees[0], plot, keep)


def _fresh_folder(keep: Path) -> str:
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise DataError(f"{keep}: this is not an empty folder; name a new one to keep the runs in.")
    return str(keep)


def plan_runs(
    setup: Setup, degrees: Sequence[int], resumes: Sequence[int], steps: int | None, folder: Path
) -> list[Run]:
    """The runs of a matrix: every dp_degree uninterrupted, then, from each, a chain through the others.

    In every other leg that ends in a checkpoint some ranks are killed after it, so that the next leg consumes again
    what they had consumed. Which ranks, and when, is left to chance: the data must not depend on it.
    """
    runs = [Run(f"dp {degree}", folder / f"dp-{degree}", [Leg(degree, steps)]) for degree in degrees]
    chance = random.Random()
    for chain in range(len(degrees) if resumes else 0):
        path = [degrees[(chain + i) % len(degrees)] for i in range(len(resumes) + 1)]
        legs = []
        for i, degree in enumerate(path):
            last = resumes[i] if i < len(resumes) else steps
            doomed: dict[int, int] = {}
            if i < len(resumes) and (chain + i) % 2 == 0:
                share = setup.global_batch // degree
                per_step = share // microbatch_for(share, setup.microbatch_size)
                reach = per_step * ((steps or resumes[i] + 1) - resumes[i])
                ranks = chance.sample(range(degree), chance.randint(1, max(1, degree // 2)))
                doomed = {rank: chance.randint(1, reach) for rank in ranks}
            legs.append(Leg(degree, last, doomed))
        name = "-".join(str(degree) for degree in path)
        title = "dp " + " > ".join(str(degree) for degree in path)
        runs.append(Run(title, folder / f"chain-{chain}-dp-{name}", legs, until=steps))
    return runs


def _carry_out(setup: Setup, runs: Sequence[Run], reference: int, plot: Path | None, keep: Path | None) -> bool:
    progress = [0, 0]

    def on_progress(through: int, total: int) -> None:
        progress[:] = through, total
        line.tick()

    with LiveLine(lambda: f"{progress[0]} of {progress[1]} processes are through") as line:
        Matrix(setup, on_progress=on_progress).run(runs)
    verdicts = judge_runs(setup, runs)
    console = make_console()
    console.print(
        f"global batches of {setup.global_batch} records of {setup.seq_len} + 1 tokens in {setup.lanes} lanes, "
        f"uninterrupted at dp {reference}:"
    )
    steps = verdicts[0].digests
    print_table(console, ["step", "SHA-256"], [[str(step), digest.hex()] for step, digest in steps.items()], right="r")
    console.print()
    rows = []
    for run, verdict in zip(runs, verdicts, strict=True):
        same = "first" if run is runs[0] else "no" if verdict.difference else "yes"
        rows.append([run.title, steps_text(verdict.digests), *_events(run), same])
    print_table(console, ["run", "steps", "resumed at step", "killed", "identical"], rows)
    if plot:
        draw_barcode(plot, [barcode_row(run, verdict) for run, verdict in zip(runs, verdicts, strict=True)])
        console.print(f"barcode: {plot}")
    if keep:
        console.print(f"ledgers and states: {keep}")
    console.print()
    differences = [(run, verdict.difference) for run, verdict in zip(runs, verdicts, strict=True) if verdict.difference]
    for run, difference in differences:
        console.print(f"different: {run.title}: {difference}")
    if differences:
        return False
    ended = ", after which the data ended" if runs[0].ended else ""
    console.print(f"all {len(runs)} runs gave the same {len(steps)} global batches{ended}")
    return True


def judge_runs(setup: Setup, runs: Sequence[Run]) -> list[Verdict]:
    """Compare runs just made with the first: the records they share, and that they have all of its steps.

    A ledger that contradicts itself, because a rank consumed other data after a resume, is a difference.
    """
    ledgers: list[Ledger | DataError] = []
    for run in runs:
        try:
            ledgers.append(read_ledger(run.ledger))
        except DataError as error:
            ledgers.append(error)
    first = ledgers[0]
    if isinstance(first, DataError):
        raise first
    wanted = first.step_digests(setup.global_batch)
    verdicts = []
    for run, ledger in zip(runs, ledgers, strict=True):
        if isinstance(ledger, DataError):
            verdicts.append(Verdict({}, str(ledger)))
            continue
        verdict = judge([first, ledger], setup.global_batch)[1]
        # A run that ends by being killed owes the steps before its checkpoint only.
        owed = run.legs[-1].last if run.legs[-1].doomed else None
        missing = [
            step
            for step in wanted
            if run.first <= step and (owed is None or step < owed) and step not in verdict.digests
        ]
        beyond = [step for step in verdict.digests if step not in wanted]
        difference = verdict.difference
        if difference is None and missing:
            difference = f"step {missing[0]} is missing."
        if difference is None and beyond:
            difference = f"step {beyond[0]} follows, where {runs[0].title} had ended."
        verdicts.append(Verdict(verdict.digests, difference))
    return verdicts


def barcode_row(run: Run, verdict: Verdict) -> BarcodeRow:
    """A row of the picture."""
    return BarcodeRow(run.title, verdict.digests, [leg.last for leg in run.legs[:-1] if leg.last is not None])


def _events(run: Run) -> tuple[str, str]:
    """Where a run was resumed, and who was killed."""
    resumed = ", ".join(str(leg.last) for leg in run.legs[:-1])
    killed = sum(len(leg.doomed) for leg in run.legs)
    return resumed, (plural(killed, "rank") if killed else "")
