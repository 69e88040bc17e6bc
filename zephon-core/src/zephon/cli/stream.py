"""`zephon stream`: the batches of one rank, counted, with optional ledger, digests and states."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from zephon.batch import SampleBatch
from zephon.cli.options import LIMIT, FlushIndex, Lanes, Recipe, Runner, SeqLen, Tokenizer, open_pipeline
from zephon.cli.output import LiveLine, count, make_console, percent, plural, print_table, writing
from zephon.config.recipe import DataRecipe
from zephon.config.topology import divisors, resolve_lanes
from zephon.errors import CheckpointError, DataError, TopologyError
from zephon.pipeline import Pipeline
from zephon.run.build import source_of

__all__ = ["microbatches_per_step", "stream"]


def stream(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    microbatch_size: Annotated[
        int, typer.Option("--microbatch-size", metavar="M", min=1, max=LIMIT, help="Records per batch.")
    ],
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=0, help="Stop after K steps; else at the data's end.")
    ] = None,
    dp_degree: Annotated[int, typer.Option("--dp-degree", metavar="G", min=1, help="Data-parallel groups.")] = 1,
    dp_rank: Annotated[int, typer.Option("--dp-rank", metavar="R", min=0, help="Group of this process, from 0.")] = 0,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            metavar="B",
            min=1,
            max=LIMIT,
            help="Records per step over all ranks; without it, a step is a batch.",
        ),
    ] = None,
    canonical_replicas: Lanes = None,
    runner: Runner = None,
    digests: Annotated[
        Path | None, typer.Option("--digests", metavar="FILE", help="Write sequence number and SHA-256 of each record.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="DIR", help="Keep a ledger, for zephon verify.")
    ] = None,
    flush_index: FlushIndex = None,
    seek_step: Annotated[
        int | None, typer.Option("--seek-step", metavar="S", min=1, help="Start at this step, counted from 1.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Write this rank's state after the last step.")
    ] = None,
    restore: Annotated[
        Path | None, typer.Option("--restore", metavar="DIR", help="Start from the states in DIR.")
    ] = None,
    fill_steps: Annotated[
        int | None,
        typer.Option("--fill-steps", metavar="K", min=0, help="Finite data: pad up to step K, as with other ranks."),
    ] = None,
    kill_after: Annotated[
        int | None, typer.Option("--kill-after", min=1, hidden=True, help="Batches until SIGKILL, after --checkpoint.")
    ] = None,
) -> None:
    """Stream training batches, and print speed, mixture and what was left out."""
    config = DataRecipe.from_toml(recipe)
    per_step = 1 if global_batch is None else microbatches_per_step(global_batch, dp_degree, microbatch_size)
    started = time.perf_counter()
    pipeline = open_pipeline(
        config,
        tokenizer,
        seq_len,
        microbatch_size,
        dp_degree=dp_degree,
        dp_group_id=dp_rank,
        global_batch=global_batch,
        canonical_replicas=canonical_replicas,
        runner=runner,
        ledger=ledger,
        flush_index=flush_index,
        combine_flag=_combine(fill_steps) if dp_degree > 1 and source_of(config).finite else None,
    )
    run = _Run(pipeline, started, per_step)  # opens the data, so that errors show before files are created
    if restore is not None:
        pipeline.restore(read_states(restore))
    if seek_step is not None:
        lanes = resolve_lanes(
            canonical_replicas or config.canonical_replicas, global_batch=global_batch, dp_degree=dp_degree
        )
        _seek(pipeline, seek_step, global_batch, microbatch_size * dp_degree, lanes)
    try:
        run.consume(steps, digests)
        if checkpoint is not None:
            if steps is not None and run.batches < steps * per_step:
                raise DataError(
                    f"the data ended after {plural(run.batches // per_step, 'step')}, before the checkpoint after "
                    f"step {steps}; lower --steps."
                )
            write_state(checkpoint, dp_rank, dp_degree, pipeline.checkpoint())
        if kill_after is not None:
            for _ in itertools.islice(pipeline, kill_after):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        run.report()
    except KeyboardInterrupt:
        run.report()
        raise
    finally:
        pipeline.close()


def microbatches_per_step(global_batch: int, dp_degree: int, microbatch_size: int) -> int:
    """Microbatches per step of one group.

    Raises:
        TopologyError: the group's share of a global batch is not made of whole microbatches.
    """
    share, rest = divmod(global_batch, dp_degree)
    if rest:
        raise TopologyError(
            f"--dp-degree is {dp_degree}; expected a divisor of --global-batch {global_batch}: "
            f"{', '.join(map(str, divisors(global_batch)[:8]))}."
        )
    if share % microbatch_size:
        raise TopologyError(
            f"--microbatch-size is {microbatch_size}; expected a divisor of the {share} records per step of each of "
            f"{plural(dp_degree, 'group')}: {', '.join(map(str, divisors(share)[-8:]))}."
        )
    return share // microbatch_size


def _combine(fill_steps: int | None) -> Callable[[bool], bool]:
    """A `combine_flag` for one rank without its peers: True while its lanes have data, or up to `fill_steps`."""
    calls = itertools.count()
    return lambda flag: next(calls) < (fill_steps or 0) or flag


def read_states(folder: Path) -> list[Any]:
    """The states of all ranks that `write_state` left in a folder.

    Raises:
        CheckpointError: states are missing, or one cannot be read.
    """
    states = []
    for file in sorted(folder.glob("*.json")):
        try:
            states.append(json.loads(file.read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise CheckpointError(f"{file}: the state cannot be read: {reason}.") from None
    if not states:
        raise CheckpointError(f"--restore is {folder}; expected a folder with states (*.json) of --checkpoint.")
    return states


def write_state(folder: Path, rank: int, dp_degree: int, state: Any) -> None:
    """Write the state of one rank, whole or not at all."""
    file = folder / f"rank-{rank}-of-{dp_degree}.json"
    with writing(file, "state"):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(state), encoding="utf-8")
        scratch.replace(file)


def _seek(pipeline: Pipeline, step: int, global_batch: int | None, microbatches: int, lanes: int) -> None:
    """Go to a step, counted from 1; without a global batch, a step is one microbatch of every group."""
    if global_batch is not None:
        pipeline.seek(step=step - 1)
    elif (step - 1) * microbatches % lanes == 0:
        pipeline.seek(sequence_number=(step - 1) * microbatches)
    else:
        raise TopologyError(
            f"--seek-step is {step}; expected a microbatch that starts at a round of the {lanes} lanes. Pass "
            "--global-batch, so that steps are whole rounds."
        )


class _Run:
    """Consumes the batches of a pipeline and counts them, without padding."""

    def __init__(self, pipeline: Pipeline, started: float, per_step: int) -> None:
        self.batches = 0
        self._pipeline, self._started, self._per_step = pipeline, started, per_step
        self._compiled = pipeline.compiled
        self._names = list(self._compiled.plan.dataset_names)
        self._tokens = np.zeros(len(self._names), dtype=np.int64)
        self._records = 0
        self._span: tuple[int, int] | None = None  # first and last sequence number
        self._first_after: float | None = None
        self._begun = time.perf_counter()

    def consume(self, steps: int | None, digests: Path | None) -> None:
        """Take up to `steps` steps."""
        goal = "" if steps is None else f"/{steps:,}"
        limit = None if steps is None else steps * self._per_step
        with contextlib.ExitStack() as stack:
            file = None
            if digests is not None:
                stack.enter_context(writing(digests, "digests"))
                file = stack.enter_context(open(digests, "w", encoding="utf-8"))
            self._begun = time.perf_counter()
            live = stack.enter_context(
                LiveLine(lambda: f"step {self.batches // self._per_step:,}{goal}, {self._line()}")
            )
            for batch in itertools.islice(self._pipeline, limit):
                self._add(batch)
                if file:
                    for number, digest in zip(batch.sequence_numbers.tolist(), batch.digests, strict=True):
                        file.write(f"{number} {digest.hex()}\n")
                live.tick()

    def _add(self, batch: SampleBatch) -> None:
        if self._first_after is None:
            self._first_after = time.perf_counter() - self._started
        self.batches += 1
        block = batch.block
        counts = np.bincount(block.span_dataset, weights=block.span_lengths(), minlength=len(self._names))
        self._tokens += counts.astype(np.int64)
        self._records += len(batch)
        numbers = batch.sequence_numbers
        self._span = (int(numbers[0]) if self._span is None else self._span[0]), int(numbers[-1])

    def _shares(self) -> list[tuple[str, float, float]]:
        """Name, planned and achieved share of tokens of each dataset, over the records consumed."""
        total, length = max(1, int(self._tokens.sum())), self._compiled.operators.pack.record_length
        first, last = self._span or (0, 0)
        planned = self._compiled.source.shares_between(
            first * length, (last + 1) * length, self._compiled.tokens_per_step
        )
        return [(n, planned[n], int(t) / total) for n, t in zip(self._names, self._tokens.tolist(), strict=True)]

    def _line(self) -> str:
        total, seconds = int(self._tokens.sum()), time.perf_counter() - self._begun
        mixture = ", ".join(f"{name} {share:.1%} of {planned:.0%}" for name, planned, share in self._shares())
        return f"{count(total)} tokens, {count(total / max(seconds, 1e-9))} tokens/s, {mixture}"

    def report(self) -> None:
        """Print the totals."""
        console, total, seconds = make_console(), int(self._tokens.sum()), time.perf_counter() - self._begun
        steps, extra = divmod(self.batches, self._per_step)
        part = f" and {extra} of {self._per_step} microbatches" if extra else ""
        console.print(
            f"{steps:,} steps{part}: {self._records:,} records, {total:,} tokens in {seconds:.2f} s "
            f"({total / seconds:,.0f} tokens/s)"
        )
        if self._first_after is not None:
            console.print(f"first batch after {self._first_after:.2f} s, opening the data included")
        mixture = self._pipeline.mixture()
        print_table(
            console,
            ["source", "target", "achieved", "tokens", "rows read", "rows skipped", "last window"],
            [
                [
                    name,
                    percent(planned),
                    percent(share),
                    f"{tokens:,}",
                    f"{mixture[name].rows:,}",
                    f"{mixture[name].skipped:,}",
                    percent(mixture[name].window),
                ]
                for (name, planned, share), tokens in zip(self._shares(), self._tokens.tolist(), strict=True)
            ],
            right="lrrrrrr",
        )
        console.print("(rows are counted when read, ahead of the batches; skipped rows have no text)")
        packing = self._pipeline.packing()
        parts = [f"packing: {packing.efficiency:.2%} of places hold tokens"]
        for number, what in ((packing.split, "split"), (packing.dropped, "left out as longer than a record")):
            if number:
                parts.append(f"{number:,} of {plural(packing.documents, 'document')} {what}")
        console.print(", ".join(parts))
        if left := self._pipeline.left_over:
            console.print(
                f"the data has ended; left over: {plural(left.tokens, 'token')}, less than a record per lane, and "
                f"{plural(left.records, 'record')}, less than a microbatch"
            )
