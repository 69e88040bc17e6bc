"""`zephon stream`: the batches of one rank, counted and, if wanted, their digests."""

from __future__ import annotations

import time
from pathlib import Path

from zephon.cli.console import LiveLine, ResultFile, make_console, print_table
from zephon.cli.source import Consumed, check_step_share, open_pipeline, percent, plural
from zephon.config.recipe import DataRecipe
from zephon.config.topology import resolve_lanes
from zephon.errors import TopologyError
from zephon.pipeline import Pipeline
from zephon.run.build import source_of

__all__ = ["stream"]


def stream(
    recipe: Path,
    *,
    tokenizer: str,
    seq_len: int,
    microbatch_size: int,
    steps: int | None,
    dp_degree: int,
    dp_rank: int,
    global_batch: int | None,
    canonical_replicas: int | None,
    runner: str | None,
    digests: Path | None,
    ledger: Path | None,
    flush_index: Path | None,
    seek_step: int | None,
) -> None:
    """Stream batches until `steps` are done or the data ends; print totals."""
    read = DataRecipe.from_toml(recipe)
    per_step = 1 if global_batch is None else check_step_share(global_batch, dp_degree, microbatch_size)
    started = time.perf_counter()
    pipeline = open_pipeline(
        read,
        tokenizer=tokenizer,
        seq_len=seq_len,
        microbatch_size=microbatch_size,
        dp_degree=dp_degree,
        dp_group_id=dp_rank,
        global_batch=global_batch,
        canonical_replicas=canonical_replicas,
        runner=runner,
        ledger=ledger,
        flush_index=flush_index,
        # One rank of a finite run by itself: it ends with its own lanes.
        combine_flag=bool if dp_degree > 1 and source_of(read).finite else None,
    )
    consumed = Consumed(pipeline)  # opens everything, so that errors come before files are made
    if seek_step:
        given = canonical_replicas or read.canonical_replicas
        lanes = resolve_lanes(given, global_batch=global_batch, dp_degree=dp_degree)
        _seek(pipeline, seek_step, global_batch, microbatch_size * dp_degree, lanes)
    file = ResultFile(digests, "digests") if digests else None
    run = _Run(pipeline, consumed, started)
    try:
        run.consume(None if steps is None else steps * per_step, per_step, file)
        run.report()
    except KeyboardInterrupt:
        run.report()
        raise
    finally:
        if file:
            file.close()
        pipeline.close()


def _seek(pipeline: Pipeline, step: int, global_batch: int | None, microbatches: int, lanes: int) -> None:
    """Go to a step; where steps are microbatches, to that of every group."""
    if global_batch is None and step * microbatches % lanes:
        raise TopologyError(
            f"microbatch {step} does not start at a round of the {lanes} lanes; pass --global-batch, so that steps "
            "are whole rounds."
        )
    if global_batch is None:
        pipeline.seek(sequence_number=step * microbatches)
    else:
        pipeline.seek(step=step, global_batch=global_batch)


class _Run:
    """Batches taken from a pipeline, and what they were."""

    def __init__(self, pipeline: Pipeline, consumed: Consumed, started: float) -> None:
        self._pipeline, self._consumed, self._started = pipeline, consumed, started
        self._batches = 0
        self._per_step = 1
        self._first_after: float | None = None
        self._begun = time.perf_counter()

    def consume(self, batches: int | None, per_step: int, digests: ResultFile | None) -> None:
        """Take up to `batches` batches."""
        self._per_step = per_step
        goal = "" if batches is None else f"/{batches // per_step:,}"
        self._begun = time.perf_counter()
        stream = iter(self._pipeline)
        with LiveLine(
            lambda: f"step {self._batches // per_step:,}{goal}, {self._consumed.line(self._seconds)}"
        ) as live:
            while batches is None or self._batches < batches:
                batch = next(stream, None)
                if batch is None:
                    break
                if self._first_after is None:
                    self._first_after = time.perf_counter() - self._started
                self._batches += 1
                self._consumed.add(batch)
                if digests:
                    for number, digest in zip(batch.sequence_numbers.tolist(), batch.digests, strict=True):
                        digests.write(f"{number} {digest.hex()}\n")
                live.tick()

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._begun

    def report(self) -> None:
        """Print the totals."""
        console, consumed, seconds = make_console(), self._consumed, self._seconds
        steps, extra = divmod(self._batches, self._per_step)
        part = f" and {extra} of {self._per_step} microbatches" if extra else ""
        console.print(
            f"{steps:,} steps{part}: {consumed.records:,} records, {consumed.total:,} tokens in {seconds:.2f} s "
            f"({consumed.total / seconds:,.0f} tokens/s)"
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
                    percent(target),
                    percent(made),
                    f"{int(tokens):,}",
                    f"{mixture[name].rows:,}",
                    f"{mixture[name].skipped:,}",
                    percent(mixture[name].window),
                ]
                for (name, target, made), tokens in zip(consumed.shares(), consumed.tokens, strict=True)
            ],
            right="lrrrrrr",
        )
        console.print("(rows are counted as they are read, ahead of the batches; skipped are those without text)")
        packing = self._pipeline.packing()
        told = [f"packing: {packing.efficiency:.2%} of places hold tokens"]
        for number, what in ((packing.split, "split"), (packing.dropped, "left out as longer than a record")):
            if number:
                told.append(f"{number:,} of {plural(packing.documents, 'document')} {what}")
        console.print(", ".join(told))
        left = self._pipeline.left_over
        if left:
            console.print(
                f"the data has ended; left out: {plural(left.tokens, 'token')} that fill no record, "
                f"{plural(left.records, 'record')} that fill no microbatch"
            )
