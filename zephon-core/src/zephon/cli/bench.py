"""`zephon bench`: what a recipe will feed on this machine, stage by stage, and whether that feeds a model."""

from __future__ import annotations

import cProfile
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from typing import Annotated, Any

import typer

from zephon.batch import SampleBatch
from zephon.cli.options import MICROBATCH, Recipe, Runner, SeqLen, Tokenizer, Vision, open_pipeline
from zephon.cli.output import LiveLine, count, print_table
from zephon.config.keys import Count, check
from zephon.config.options import default_workers
from zephon.config.recipe import DataRecipe
from zephon.engine.lane import LaneStream
from zephon.engine.pixels import PixelStage
from zephon.engine.plan import Fetcher
from zephon.engine.runners import InlineRunner
from zephon.errors import PipelineError
from zephon.ops.documents import DocumentWorker
from zephon.ops.stateful import StatefulStage
from zephon.pipeline import Pipeline

_SLICES = 5
_STAGES_SHARE = 0.5  # of --seconds, for the stages


def bench(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    microbatch_size: Annotated[int, MICROBATCH] = 8,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.5, max=3600, help="Seconds to measure, after the start.")
    ] = 10.0,
    needed: Annotated[
        str | None,
        typer.Option("--tokens-per-second-needed", metavar="N", help="What the model takes, as in 400k or 1.5m."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="G", min=1, help="GPUs that this machine feeds.")
    ] = None,
    per_gpu: Annotated[
        str | None, typer.Option("--tokens-per-second-per-gpu", metavar="R", help="What the model takes on each.")
    ] = None,
    runner: Runner = None,
    vision: Vision = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure tokens per second, first batch, memory and stages.

    Exits with 1 if the model takes more tokens than this machine makes.
    """
    wanted = _needed(needed, gpus, per_gpu)
    config = DataRecipe.from_toml(recipe)
    if config.continue_from is not None:
        config = config.replace(continue_from=None)
    with suppress(ImportError):
        import torch  # noqa: F401  # as a trainer has done before it opens its data
    base, began = _peak_bytes(), time.perf_counter()
    pipeline = open_pipeline(config, tokenizer, seq_len, microbatch_size, vision, runner=runner)
    told: dict[str, Any] = {"cores": default_workers()}
    with LiveLine(lambda: f"measuring for {seconds:g} s") as live:
        told |= _throughput(pipeline, began, seconds, live)
        told["peak_bytes"], told["bytes_before"] = _peak_bytes(), base
        inline = open_pipeline(config, tokenizer, seq_len, microbatch_size, vision, runner="inline", isolate=False)
        told["stages"] = _stages(inline, seconds * _STAGES_SHARE, live)
    feeds = None if wanted is None else told["tokens_per_second"] >= wanted
    if wanted is not None:
        told |= {"needed": wanted, "feeds": feeds}
    print(json.dumps(told)) if as_json else _print(told)
    if feeds is False:
        raise typer.Exit(1)


def _needed(needed: str | None, gpus: int | None, per_gpu: str | None) -> int | None:
    """Tokens per second that the model takes; None where nothing is said."""
    if (gpus is None) != (per_gpu is None) or (needed is not None and gpus is not None):
        raise PipelineError(
            "what the model takes is unclear; expected --tokens-per-second-needed, or --gpus and "
            "--tokens-per-second-per-gpu."
        )
    if needed is not None:
        return int(check(Count, needed, "--tokens-per-second-needed", PipelineError))
    rate = check(Count, per_gpu, "--tokens-per-second-per-gpu", PipelineError) if per_gpu is not None else None
    return None if rate is None else int(rate) * (gpus or 1)


def _throughput(pipeline: Pipeline, began: float, seconds: float, live: LiveLine) -> dict[str, Any]:
    """Time of the first batch, and tokens per second in the middle of several stretches of a run.

    What was ready when the first batch came is used up before the first stretch.
    """
    compiled = pipeline.compiled
    opened = time.perf_counter() - began
    shuffle = compiled.operators.shuffle
    batches = iter(_trained(pipeline))
    next(batches, None)
    told = {"opening_seconds": opened, "first_batch_seconds": time.perf_counter() - began}
    ready = compiled.ready_records + (shuffle.buffer_size if shuffle else 0)
    limit = time.perf_counter() + seconds
    for _ in islice(batches, ready // compiled.operators.batch.microbatch_size):
        live.tick()
        if time.perf_counter() > limit:
            break
    rates = []
    for _ in range(_SLICES):
        tokens, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds / _SLICES and (more := next(batches, None)) is not None:
            tokens += more
            live.tick()
        if now >= start + seconds / _SLICES:
            rates.append(tokens / (now - start))
    pipeline.close()
    if not rates:
        raise PipelineError(
            f"--seconds is {seconds:g}, and the data end before; expected data for a fifth of it at least. Lower "
            "--seconds, or let the recipe repeat them."
        )
    return told | {
        "tokens_per_second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "seconds": seconds,
    }


def _trained(pipeline: Pipeline) -> Iterator[int]:
    """Tokens of each batch, made ready for training."""
    as_numpy = find_spec("torch") is None
    for batch in pipeline:
        batch.to_training(as_numpy=as_numpy)
        yield int(batch.lengths.sum())


def _stages(pipeline: Pipeline, seconds: float, live: LiveLine) -> list[dict[str, Any]]:
    """CPU time of each stage per million tokens, measured in a run in one thread."""
    batches = iter(_trained(pipeline))
    next(batches, None)
    tokens, start, cpu = 0, time.perf_counter(), time.process_time()
    profile = cProfile.Profile(time.process_time, builtins=False)
    profile.enable()
    try:
        while time.perf_counter() < start + seconds and (more := next(batches, None)) is not None:
            tokens += more
            live.tick()
    finally:
        profile.disable()
        whole = time.process_time() - cpu
    pipeline.close()
    entries = {entry.code: entry for entry in profile.getstats() if not isinstance(entry.code, str)}

    def spent(*functions: Any) -> float:
        return sum(entries[f.__code__].totaltime for f in functions if f.__code__ in entries)

    def waited(function: Any) -> float:
        """For results, which are made when asked for."""
        calls = entries[function.__code__].calls if function.__code__ in entries else None
        return sum(call.totaltime for call in calls or () if call.code is _RESULT)

    took = {
        "read": spent(Fetcher.__call__),
        "tokenize": spent(DocumentWorker.__call__, StatefulStage.prepare, StatefulStage.push),
        "pack": spent(LaneStream._pack) - waited(LaneStream._pack) + waited(LaneStream._order),
        "shuffle": spent(LaneStream._order) - waited(LaneStream._order) + spent(LaneStream._give_out),
        "decode images": spent(PixelStage.decoded),
        "to_training": spent(SampleBatch.to_training),
    }
    took["other"] = max(0.0, whole - sum(took.values()))
    per_million = 1e6 / max(1, tokens)
    return [
        {"stage": name, "cpu_ms_per_million_tokens": 1000 * each * per_million, "share": each / max(whole, 1e-9)}
        for name, each in took.items()
        if each or name != "decode images"
    ]


_RESULT = type(InlineRunner().submit("", int)).result.__code__


def _peak_bytes() -> int:
    """Most resident memory that this process has had, and with it the largest of its processes that has ended."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _print(told: dict[str, Any]) -> None:
    speed = told["tokens_per_second"]
    print(
        f"{count(speed)} tokens/s on {told['cores']} cores ({count(told['slowest'])} to {count(told['fastest'])} in "
        f"{_SLICES} stretches of {told['seconds'] / _SLICES:.1f} s)"
    )
    print(
        f"first batch after {told['first_batch_seconds']:.2f} s, of which opening the data took "
        f"{told['opening_seconds']:.2f} s; {count(told['peak_bytes'])}B of memory at most, "
        f"{count(told['bytes_before'])}B of them before the run"
    )
    rows = []
    for each in told["stages"]:
        cost = each["cpu_ms_per_million_tokens"]
        rows.append(
            [each["stage"], f"{cost:,.1f} ms", f"{each['share']:.0%}", f"{count(1e9 / cost)}/s" if cost else ""]
        )
    print_table(["stage", "CPU per million tokens", "share", "one core alone"], rows, right=" rrr")
    if "needed" in told:
        times = speed / max(1, told["needed"])
        word, factor = "feeds" if told["feeds"] else "does NOT feed", f"{times:,.{0 if times >= 10 else 2}f}"
        print(f"this machine {word} the model: it takes {count(told['needed'])} tokens/s, {factor} times as many come")
