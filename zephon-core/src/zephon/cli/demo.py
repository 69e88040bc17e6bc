"""`zephon demo`: the main job from nothing, then the same data on other numbers of ranks."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from zephon.batch import SampleBatch
from zephon.cli.barcode import BarcodeRow, check_plot, draw_barcode
from zephon.cli.console import LiveLine, make_console, print_table
from zephon.cli.corpus import DemoCorpus, build_demo
from zephon.cli.matrix import Leg, Matrix, Run, Setup
from zephon.cli.show import describe_records
from zephon.cli.source import Consumed, open_pipeline, percent
from zephon.cli.verify import Verdict, judge_runs
from zephon.errors import PipelineError
from zephon.tokenizer.tokenizer import load_tokenizer

__all__ = ["demo"]

_SEQ_LEN = 1024
_MICROBATCH = 8
_SAMPLE_CHARS = 600

# The elastic part: short sequences, so that many steps fit into a small corpus.
_ELASTIC_SEQ_LEN = 512
_GLOBAL_BATCH = 16
_ELASTIC_STEPS = 16
_CHECKPOINT = 6
_RESUME_AT_DP = (1, 4, 8)


def demo(folder: Path, steps: int) -> bool:
    """Run the demo in `folder`. True where every global batch was identical."""
    console = make_console()
    started = time.perf_counter()
    _headline(console, "1. A corpus, a tokenizer and a recipe")
    corpus = build_demo(folder)
    console.print(f"{corpus.recipe} after {time.perf_counter() - started:.1f} s; it says:")
    console.print()
    for line in corpus.recipe.read_text(encoding="utf-8").rstrip().split("\n"):
        console.print(f"    {line}".rstrip())
    _stream(console, corpus, steps)
    identical = _elastic(console, corpus, folder)
    console.print(f"the demo took {time.perf_counter() - started:.1f} s")
    return identical


def _headline(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")
    console.print()


def _stream(console: Console, corpus: DemoCorpus, steps: int) -> None:
    """Stream batches, with their mixture, and show one."""
    _headline(console, "2. Training batches from it")
    opened = time.perf_counter()
    pipeline = open_pipeline(
        corpus.recipe, tokenizer=str(corpus.tokenizer), seq_len=_SEQ_LEN, microbatch_size=_MICROBATCH
    )
    for line in pipeline.explain().split("\n"):
        console.print(f"    {line}")
    consumed = Consumed(pipeline)
    batch: SampleBatch | None = None
    done, first_after, begun = 0, 0.0, time.perf_counter()
    with LiveLine(lambda: f"batch {done:,}/{steps:,}, {consumed.line(time.perf_counter() - begun)}") as live:
        for batch in pipeline:
            first_after = first_after or time.perf_counter() - opened
            consumed.add(batch)
            done += 1
            live.tick()
            if done == steps:
                break
    seconds = time.perf_counter() - begun
    pipeline.close()
    assert batch is not None  # the recipe repeats
    console.print()
    console.print(
        f"{done:,} batches of {_MICROBATCH} x {_SEQ_LEN} tokens: {consumed.total:,} tokens in {seconds:.1f} s, "
        f"{consumed.total / seconds:,.0f} tokens/s; the first {first_after:.2f} s after opening the recipe"
    )
    console.print()
    print_table(
        console,
        ["source", "target", "achieved", "tokens"],
        [
            [name, percent(target), percent(made), f"{int(tokens):,}"]
            for (name, target, made), tokens in zip(consumed.shares(), consumed.tokens, strict=True)
        ],
        right="lrrr",
    )
    fields = ", ".join(
        f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.to_training(as_numpy=True).items()
    )
    console.print()
    console.print(f"A model gets {fields}. The first record of the last batch:")
    console.print()
    for line in describe_records(batch, [0], 1, load_tokenizer(corpus.tokenizer), _SAMPLE_CHARS):
        console.print(line)


def _elastic(console: Console, corpus: DemoCorpus, folder: Path) -> bool:
    """Stream at dp 2, lose the ranks, go on at other sizes, and compare with a run that was left in peace."""
    dps = ", ".join(map(str, _RESUME_AT_DP[:-1])) + f" and {_RESUME_AT_DP[-1]}"
    _headline(console, "3. The same global batches on any number of ranks")
    console.print(
        f"Each rank is a process. Two ranks stream global batches of {_GLOBAL_BATCH} records, checkpoint after step "
        f"{_CHECKPOINT - 1}, go on, and are killed. From that checkpoint, {dps} ranks go on, each to step "
        f"{_ELASTIC_STEPS - 1}."
    )
    console.print()
    setup = Setup(
        recipe=corpus.recipe,
        tokenizer=str(corpus.tokenizer),
        seq_len=_ELASTIC_SEQ_LEN,
        global_batch=_GLOBAL_BATCH,
        lanes=_GLOBAL_BATCH,
        microbatch_size=4,
        runner=None,
        finite=False,
    )
    with tempfile.TemporaryDirectory(prefix="zephon-demo-") as scratch:
        per_step = _GLOBAL_BATCH // 2 // setup.microbatch_size
        doomed = {rank: random.randint(1, per_step * (_ELASTIC_STEPS - _CHECKPOINT)) for rank in range(2)}
        reference = Run("dp 1", Path(scratch, "reference"), [Leg(1, _ELASTIC_STEPS)])
        broken = Run(
            "dp 2, killed",
            Path(scratch, "killed"),
            [Leg(2, _CHECKPOINT, doomed)],
            keep_state=True,
            until=_ELASTIC_STEPS,
        )
        states = broken.state_files(broken.legs[0])
        resumed = [
            Run(f"then dp {dp}", Path(scratch, f"then-{dp}"), [Leg(dp, _ELASTIC_STEPS)], _CHECKPOINT, states)
            for dp in _RESUME_AT_DP
        ]
        runs = [reference, broken, *resumed]
        through, total = 0, sum(leg.dp for run in runs for leg in run.legs)

        def on_progress(now: int, _: int) -> None:
            nonlocal through
            through = before + now
            line.tick()

        with LiveLine(lambda: f"{through} of {total} processes are through") as line:
            before = 0
            matrix = Matrix(setup, on_progress=on_progress)
            matrix.run([reference, broken])
            before = through
            matrix.run(resumed)
        verdicts = judge_runs(setup, runs)
    _print_steps(console, runs, verdicts)
    _picture(console, folder / "barcode.png", runs, verdicts)
    differences = [verdict.difference for verdict in verdicts if verdict.difference]
    for difference in differences:
        console.print(f"different: {difference}")
    if not differences:
        console.print(f"all {_ELASTIC_STEPS} global batches are identical in every run that reached them")
    return not differences


def _print_steps(console: Console, runs: Sequence[Run], verdicts: Sequence[Verdict]) -> None:
    first = verdicts[0].digests
    rows = []
    for step in range(_ELASTIC_STEPS):
        found = [verdict.digests.get(step) for verdict in verdicts]
        same = all(digest in (None, first.get(step)) for digest in found)
        rows.append([str(step), *(digest.hex()[:12] if digest else "" for digest in found), "yes" if same else "NO"])
    print_table(console, ["step", *(run.title for run in runs), "identical"], rows, right="r")
    console.print("(the first 12 digits of the SHA-256 of each global batch)")
    console.print()


def _picture(console: Console, path: Path, runs: Sequence[Run], verdicts: Sequence[Verdict]) -> None:
    try:
        check_plot(path)
    except PipelineError as error:
        console.print(f"no picture: {error}")
        return
    rows = [
        BarcodeRow(run.title, verdict.digests, [run.first] if run.first else [])
        for run, verdict in zip(runs, verdicts, strict=True)
    ]
    draw_barcode(path, rows)
    console.print(f"the same as a picture: {path}")
