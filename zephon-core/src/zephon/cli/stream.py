"""`zephon stream`: the batches of one rank, counted, with optional ledger, digests and states."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from zephon.batch import SampleBatch
from zephon.cli.options import (
    GLOBAL_BATCH,
    MICROBATCH,
    FlushIndex,
    Lanes,
    Recipe,
    Runner,
    SeqLen,
    Tokenizer,
    Vision,
    open_pipeline,
)
from zephon.cli.output import LiveLine, count, plural, print_table, writing
from zephon.config.recipe import DataRecipe
from zephon.config.topology import divisors
from zephon.errors import CheckpointError, DataError, TopologyError
from zephon.pipeline import Pipeline
from zephon.run.build import source_of


def stream(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    microbatch_size: Annotated[int, MICROBATCH],
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=0, help="Stop after K steps; else at the data's end.")
    ] = None,
    dp_degree: Annotated[int, typer.Option("--dp-degree", metavar="G", min=1, help="Data-parallel groups.")] = 1,
    dp_rank: Annotated[int, typer.Option("--dp-rank", metavar="R", min=0, help="Group of this process, from 0.")] = 0,
    global_batch: Annotated[int | None, GLOBAL_BATCH] = None,
    canonical_replicas: Lanes = None,
    runner: Runner = None,
    vision: Vision = None,
    digests: Annotated[
        Path | None, typer.Option("--digests", metavar="FILE", help="Write sequence number and SHA-256 of each record.")
    ] = None,
    pixels: Annotated[bool, typer.Option("--pixels", help="Digests over the pixels of images too.")] = False,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="DIR", help="Keep a ledger, for zephon verify and zephon show.")
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
    """Stream training batches; print speed, mixture and rows left out."""
    config = DataRecipe.from_toml(recipe)
    if global_batch is not None and global_batch % dp_degree:
        raise TopologyError(
            f"--global-batch is {global_batch}; expected a multiple of the {dp_degree} groups of --dp-degree."
        )
    # Without a global batch, a step is a batch.
    share = microbatch_size if global_batch is None else global_batch // dp_degree
    per_step, rest = divmod(share, microbatch_size)
    if rest:
        raise TopologyError(
            f"--microbatch-size is {microbatch_size}; expected a divisor of the {share} records per step of each of "
            f"{plural(dp_degree, 'group')}: {', '.join(map(str, divisors(share)[-8:]))}."
        )
    started = time.perf_counter()
    pipeline = open_pipeline(
        config,
        tokenizer,
        seq_len,
        microbatch_size,
        vision,
        dp_degree=dp_degree,
        dp_group_id=dp_rank,
        global_batch=global_batch,
        canonical_replicas=canonical_replicas,
        runner=runner,
        digest_pixels=pixels,
        ledger=ledger,
        flush_index=flush_index,
        combine_flag=_combine(fill_steps) if dp_degree > 1 and source_of(config).finite else None,
    )
    run = _Run(pipeline, started, per_step)  # opens the data, so that errors show before files are created
    if restore is not None:
        pipeline.restore(read_states(restore))
    if seek_step is not None:
        if global_batch is None:
            raise TopologyError("--seek-step counts global batches; pass --global-batch.")
        pipeline.seek(step=seek_step - 1)
    try:
        run.consume(steps, digests)
        if checkpoint is not None:
            if steps is not None and run.batches < steps * per_step:
                raise DataError(
                    f"the data ended after {plural(run.batches // per_step, 'step')}, before the checkpoint after "
                    f"step {steps}; lower --steps (of zephon verify: --resume-at)."
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


def _combine(fill_steps: int | None) -> Callable[[bool], bool]:
    """A `combine_flag` for one rank without its peers: True while its lanes have data, or up to `fill_steps`."""
    calls = itertools.count()
    return lambda flag: next(calls) < (fill_steps or 0) or flag


def read_states(path: Path) -> list[Any]:
    """The states of all ranks in a folder, as `write_state` left them, or in a trainer's checkpoint, or that in a file.

    Raises:
        CheckpointError: states are missing, or one cannot be read.
    """
    for package, pattern in (("torchtitan_zephon", ".metadata"), ("megatron_zephon", "**/train_dataloader_*.pt")):
        if path.suffix == Path(pattern).suffix == ".pt" or any(path.glob(pattern)):
            try:
                return list(import_module(package).read_state(path))
            except ImportError as error:
                raise CheckpointError(
                    f"{path} is a checkpoint of a trainer; expected {package} and what it needs to be installed here "
                    f"({error}). Install them, or run the command where the trainer runs."
                ) from None
    states = []
    of_trainer = [*path.glob("zephon_state.json")]  # beside other files of a checkpoint
    for file in [path] if path.is_file() else of_trainer or sorted(path.glob("*.json")):
        try:
            states.append(json.loads(file.read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise CheckpointError(f"{file}: the state cannot be read: {reason}.") from None
    if not states:
        raise CheckpointError(
            f"{path} holds no states; expected a folder with those (*.json) of --checkpoint, "
            "TorchTitan's checkpoint of a step, or a folder iter_* of Megatron's --dataloader-save."
        )
    return states


def write_state(folder: Path, rank: int, dp_degree: int, state: Any) -> None:
    """Write the state of one rank, whole or not at all."""
    file = folder / f"rank-{rank}-of-{dp_degree}.json"
    with writing(file, "state"):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(state), encoding="utf-8")
        scratch.replace(file)


class _Run:
    """Consumes the batches of a pipeline and counts them, without padding."""

    def __init__(self, pipeline: Pipeline, started: float, per_step: int) -> None:
        self.batches = 0
        self._pipeline, self._started, self._per_step = pipeline, started, per_step
        compiled = pipeline.compiled
        self._length = compiled.operators.pack.record_length
        # With the first batch so many records are ready; the speed counts from behind them.
        shuffle = compiled.operators.shuffle
        self._filling = compiled.ready_records + (shuffle.buffer_size if shuffle else 0)
        self._records = self._tokens = 0
        self._first_after = self._opening = 0.0
        self._steady: tuple[float, int] | None = None  # time and tokens once the filling is consumed
        self._begun = time.perf_counter()

    def consume(self, steps: int | None, digests: Path | None) -> None:
        """Take up to `steps` steps."""
        goal = "" if steps is None else f"/{steps:,}"
        limit = None if steps is None else steps * self._per_step
        with writing(digests, "digests") if digests else nullcontext(), open(digests or os.devnull, "w") as file:
            self._begun = time.perf_counter()
            with LiveLine(lambda: f"step {self.batches // self._per_step:,}{goal}, {self._line()}") as live:
                for batch in itertools.islice(self._pipeline, limit):
                    self._add(batch)
                    if digests:
                        for number, digest in zip(batch.sequence_numbers.tolist(), batch.digests, strict=True):
                            file.write(f"{number} {digest.hex()}\n")
                    live.tick()

    def _add(self, batch: SampleBatch) -> None:
        now = time.perf_counter()
        self._first_after, self._opening = self._first_after or now - self._started, self._begun - self._started
        self.batches += 1
        self._records += len(batch)
        self._tokens += int(batch.lengths.sum())
        if self._steady is None and self._records >= self._filling:
            self._steady = time.perf_counter(), self._tokens

    def _speed(self) -> str:
        now = time.perf_counter()
        if self._steady is None or self._tokens == self._steady[1]:
            return f"{count(self._tokens / (now - self._begun))} tokens/s, filling included"
        return f"{count((self._tokens - self._steady[1]) / (now - self._steady[0]))} tokens/s"

    def _line(self) -> str:
        shares = (f"{name} {each.achieved:.1%} of {each.target:.0%}" for name, each in self._pipeline.mixture().items())
        return f"{count(self._tokens)} tokens, {self._speed()}, {', '.join(shares)}"

    def report(self) -> None:
        """Print the totals."""
        seconds = time.perf_counter() - self._begun
        steps, extra = divmod(self.batches, self._per_step)
        part = f" and {extra} of {self._per_step} microbatches" if extra else ""
        print(
            f"{steps:,} steps{part}: {self._records:,} records of {self._length - 1:,} + 1 tokens, {self._tokens:,} "
            f"tokens in {seconds:.2f} s ({self._speed()})"
        )
        if self._first_after:
            print(f"first batch after {self._first_after:.2f} s, of which opening the data took {self._opening:.2f} s")
        rows = []
        for name, each in self._pipeline.mixture().items():
            counts = f"{each.given:,}", f"{each.rows:,}", f"{each.skipped:,}", f"{each.passes:.2f}"
            rows.append([name, f"{each.target:.1%}", f"{each.achieved:.1%}", *counts])
        columns = ["source", "target", "achieved", "tokens", "rows read", "rows skipped", "passes"]
        print_table(columns, rows, right="lrrrrrr")
        print("(rows are counted when read, ahead of the batches; skipped rows have no text)")
        packing = self._pipeline.packing()
        parts = [f"packing: {packing.efficiency:.2%} of places hold tokens"]
        for number, what in ((packing.split, "split"), (packing.dropped, "left out as longer than a record")):
            if number:
                parts.append(f"{number:,} of {plural(packing.documents, 'document')} {what}")
        print(", ".join(parts))
        if left := self._pipeline.left_over:
            print(
                f"the data has ended; left over: {plural(left.tokens, 'token')}, less than a record per lane, and "
                f"{plural(left.records, 'record')}, less than a microbatch"
            )
