"""`zephon verify`: compare runs by their ledgers, or run a recipe on many topologies and compare those runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from zephon.cli.barcode import check_plot, draw_barcode
from zephon.cli.matrix import Matrix, Run, Setup, plan_runs
from zephon.cli.options import GLOBAL_BATCH, MICROBATCH, SEQ_LEN, TOKENIZER, Lanes, Runner, Vision, open_pipeline
from zephon.cli.output import LiveLine, plural, print_table
from zephon.config.recipe import DataRecipe
from zephon.config.topology import Topology, resolve_lanes
from zephon.errors import DataError, PipelineError, RecipeError
from zephon.run.build import source_of
from zephon.run.ledger import compare, read_ledger

_DEFAULT_STEPS = 10
_STEPS_AFTER_RESUME = 3


def verify(
    targets: Annotated[list[Path], typer.Argument(metavar="RECIPE | LEDGER...", help="A recipe, or ledger folders.")],
    tokenizer: Annotated[str | None, TOKENIZER] = None,
    seq_len: Annotated[int | None, SEQ_LEN] = None,
    global_batch: Annotated[int | None, GLOBAL_BATCH] = None,
    dp: Annotated[
        str | None, typer.Option("--dp", metavar="G,G", help="Data-parallel degrees, the reference first.")
    ] = None,
    resume_at: Annotated[
        str | None, typer.Option("--resume-at", metavar="S,S", help="Steps after which to resume on other ranks.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Steps of each run; by default 10 or more.")
    ] = None,
    microbatch_size: Annotated[int | None, MICROBATCH] = None,
    canonical_replicas: Lanes = None,
    runner: Runner = None,
    vision: Vision = None,
    pixels: Annotated[bool | None, typer.Option("--pixels", help="Compare the pixels of images too.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw the barcode: a row per run, a cell per step."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Keep the ledgers and states of the runs here.")
    ] = None,
) -> None:
    """Compare runs step by step. With a recipe, start the runs first: on every topology, and with resumes.

    Exits with 1 if runs differ, and names the first difference. Steps count from 1.
    """
    options = {f"--{name.replace('_', '-')}": value for name, value in locals().items()}
    for path in targets:
        if not path.exists():
            raise DataError(f"{path} does not exist; expected a recipe (TOML), or ledger folders.")
    if plot:
        check_plot(plot)
    if all(path.is_dir() for path in targets):
        if len(targets) == 1:
            raise DataError(f"1 ledger folder is given, {targets[0]}; expected those of two runs or more.")
        for name, value in options.items():
            if value is not None and name not in ("--targets", "--global-batch", "--plot"):
                raise PipelineError(f"{name} applies to a recipe, not to ledger folders; leave it out.")
        identical = _verify_ledgers(targets, global_batch, plot)
    else:
        if len(targets) > 1:
            raise RecipeError(
                f"{len(targets)} paths are given, some of them files; expected one recipe, or ledger folders only."
            )
        if tokenizer is None or seq_len is None or global_batch is None or dp is None:
            needed = ("--tokenizer", "--seq-len", "--global-batch", "--dp")
            missing = ", ".join(name for name in needed if options[name] is None)
            raise PipelineError(f"{missing} must be set to verify a recipe.")
        recipe, degrees = DataRecipe.from_toml(targets[0]), parse_numbers(dp, "--dp")
        resumes = sorted(parse_numbers(resume_at, "--resume-at")) if resume_at else []
        lanes = resolve_lanes(
            canonical_replicas or recipe.canonical_replicas, global_batch=global_batch, dp_degree=max(degrees)
        )
        for degree in degrees:
            Topology(lanes, degree, 0, global_batch)
        finite = source_of(recipe).finite
        if steps is None and not finite:
            steps = max([_DEFAULT_STEPS, *(step + _STEPS_AFTER_RESUME for step in resumes)])
        if steps is not None and resumes and resumes[-1] >= steps:
            raise PipelineError(f"--resume-at is {resumes[-1]}; expected less than --steps {steps}. Raise --steps.")
        setup = Setup(
            targets[0].absolute(),
            tokenizer,
            seq_len,
            global_batch,
            lanes,
            microbatch_size or 8,
            runner,
            steps,
            finite,
            vision,
            pixels or False,
        )
        # Errors of the recipe show here, and its indexes are built, before any process starts.
        pipeline = open_pipeline(
            recipe,
            tokenizer,
            seq_len,
            setup.microbatch_size,
            vision,
            global_batch=global_batch,
            canonical_replicas=lanes,
            runner=runner,
        )
        if pipeline.awaits_state:
            raise PipelineError(
                f"{targets[0]} takes over from another run (continue_from); expected a recipe that begins at record 0. "
                "Compare the ledgers of two such runs."
            )
        pipeline.explain()
        identical = _verify_recipe(setup, degrees, resumes, plot, keep)
    if not identical:
        raise typer.Exit(1)


def parse_numbers(text: str, option: str) -> list[int]:
    """ "1,2,4" as numbers, each once.

    Raises:
        PipelineError: the text is not a list of numbers above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) > 0 for part in parts):
        raise PipelineError(f"{option} is {text[:60]!r}; expected whole numbers above 0 with commas, as in 1,2,4.")
    return list(dict.fromkeys(map(int, parts)))


def steps_text(steps: Mapping[int, bytes]) -> str:
    """ "1-10" for ten steps from the start."""
    if not steps:
        return "none"
    low, high = min(steps), max(steps)
    gaps = "" if len(steps) == high - low + 1 else f", {high - low + 1 - len(steps)} missing"
    return (f"{low}-{high}" if high > low else f"{low}") + gaps


def _verify_ledgers(folders: Sequence[Path], global_batch: int | None, plot: Path | None) -> bool:
    """Compare the runs behind ledgers with the first of them."""
    ledgers = [read_ledger(folder) for folder in folders]
    unit = global_batch or next((ledger.global_batch for ledger in ledgers if ledger.global_batch), None)
    word = "step" if unit else "round"
    steps = [ledger.step_digests(unit or ledgers[0].lanes) for ledger in ledgers]
    differences = [None, *(compare(ledgers[0], ledger) for ledger in ledgers[1:])]
    shared = set.intersection(*map(set, steps))
    rows = []
    for folder, ledger, digests, difference in zip(folders, ledgers, steps, differences, strict=True):
        same = "first" if ledger is ledgers[0] else "no" if difference else "yes" if shared else "not compared"
        rows.append([str(folder), str(ledger.lanes), f"{len(ledger.sequence):,}", steps_text(digests), same])
    print_table(["run", "lanes", "records", f"whole {word}s", "identical"], rows, right="lrr")
    if plot:
        draw_barcode(plot, [(str(folder), each, []) for folder, each in zip(folders, steps, strict=True)])
        print(f"barcode: {plot}")
    for difference in filter(None, differences):
        print(f"different: {difference.text}")
    if any(differences):
        return False
    if not shared:
        print(f"the runs share no whole {word}, so nothing could be compared")
        return False
    print(f"all {len(ledgers)} runs are identical over the {len(shared):,} {word}s that they share")
    return True


def _verify_recipe(
    setup: Setup, degrees: Sequence[int], resumes: Sequence[int], plot: Path | None, keep: Path | None
) -> bool:
    """Carry out the runs of the matrix and compare them with the first."""
    if keep and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise DataError(f"--keep is {keep}; expected a new or empty folder.")
    matrix = Matrix(setup)
    with nullcontext(str(keep)) if keep else tempfile.TemporaryDirectory(prefix="zephon-verify-") as folder:
        runs = plan_runs(setup, degrees, resumes, Path(folder))
        with LiveLine(lambda: f"{matrix.done} of {matrix.total} processes have ended") as line:
            matrix.run(runs, line.tick)
        steps, differences = judge(runs, setup.global_batch)
    print(
        f"global batches of {setup.global_batch} records of {setup.seq_len} + 1 tokens in {setup.lanes} lanes, "
        f"uninterrupted at dp {degrees[0]}:"
    )
    rows = [[str(step), digest.hex()] for step, digest in steps[0].items()]
    print_table(["step", "SHA-256"], rows, right="r")
    print()
    rows = []
    for run, digests, difference in zip(runs, steps, differences, strict=True):
        resumed = ", ".join(str(leg.last) for leg in run.legs[:-1])
        killed = sum(len(leg.doomed) for leg in run.legs)
        same = "first" if run is runs[0] else "no" if difference else "yes"
        rows.append([run.title, steps_text(digests), resumed, plural(killed, "rank") if killed else "", same])
    print_table(["run", "steps", "resumed after step", "killed", "identical"], rows)
    if plot:
        bars = [[(leg.last or 0) + 1 for leg in run.legs[:-1]] for run in runs]
        draw_barcode(plot, list(zip([run.title for run in runs], steps, bars, strict=True)))
        print(f"barcode: {plot}")
    if keep:
        print(f"ledgers and states: {keep}")
    print()
    for run, difference in zip(runs, differences, strict=True):
        if difference:
            print(f"different: {run.title}: {difference}")
    if any(differences):
        return False
    ended = ", after which the data ended" if setup.finite and len(steps[0]) != setup.steps else ""
    print(f"all {len(runs)} runs gave the same {len(steps[0])} global batches{ended}")
    return True


def judge(runs: Sequence[Run], global_batch: int) -> tuple[list[dict[int, bytes]], list[str | None]]:
    """Digests of each run by step, and its first difference from the first run: a record, or a missing or extra step.

    A ledger that contradicts itself, because a rank consumed other data after a resume, is a difference.
    """
    first = read_ledger(runs[0].ledger)
    expected = first.step_digests(global_batch)
    steps: list[dict[int, bytes]] = []
    differences: list[str | None] = []
    for run in runs:
        digests, text = dict[int, bytes](), None
        try:
            ledger = read_ledger(run.ledger)
            digests, difference = ledger.step_digests(global_batch), compare(first, ledger)
            if difference:
                text = difference.text
            elif missing := expected.keys() - digests.keys():
                text = f"step {min(missing)} is missing."
            elif beyond := digests.keys() - expected.keys():
                text = f"step {min(beyond)} is after the end of {runs[0].title}."
        except DataError as error:
            text = str(error)
        steps.append(digests)
        differences.append(text)
    return steps, differences
