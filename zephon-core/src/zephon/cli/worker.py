"""One rank of a run, as a process of its own: `python -m zephon.cli.worker`.

The first line on stdin is the job (`Job`, as JSON); on stdout come messages, one JSON list a line:

["flag", true or false]
    A finite run asks whether any rank has more records; the answer is a line on stdin, "1" or "0".
["reached"]
    A rank that is to be killed has consumed as many microbatches after its checkpoint as it was told to. It goes on,
    and at the end of its run waits for its end.
["done", steps, ended]
    The number of the step after the last one consumed, and whether the data has ended.
["error", text]
    What went wrong, for people.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from zephon.cli.source import check_step_share, open_pipeline
from zephon.config.options import CacheOptions
from zephon.config.recipe import DataRecipe
from zephon.errors import CheckpointError, DataError, ZephonError

__all__ = ["Job", "write_state"]

# Ranks of a large run share one machine here, so each holds less than it would alone.
_MEMORY_BYTES = 128 << 20
_LOOKAHEAD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank is to do.

    Attributes:
        recipe: path of the recipe.
        tokenizer, seq_len, microbatch_size, global_batch, canonical_replicas, runner: as for `zephon stream`.
        dp_degree, dp_rank: which rank of how many.
        ledger: folder of the run's ledger.
        states: paths of the states to go on from; none to begin at the start.
        first, last: steps to consume, up to but not including `last`; None is the end of the data.
        checkpoint: where to write the state after the last step, if anywhere.
        doomed_after: microbatches to consume after the checkpoint before the parent is told to kill this process.
        until: the step before which a doomed process stops consuming.
        ask: whether the parent combines flags, see `options(combine_flag=...)`.
    """

    recipe: str
    tokenizer: str
    seq_len: int
    microbatch_size: int
    global_batch: int
    canonical_replicas: int
    runner: str | None
    dp_degree: int
    dp_rank: int
    ledger: str
    states: list[str]
    first: int
    last: int | None
    checkpoint: str | None
    doomed_after: int | None
    until: int | None
    ask: bool

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def write_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state whole or not at all.

    Raises:
        DataError: it cannot be written.
    """
    scratch = Path(f"{os.fspath(path)}.{os.getpid()}")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise DataError(f"{os.fspath(path)}: the state cannot be written here: {error.strerror or error}.") from None


def read_state(path: str) -> Any:
    """The JSON in a file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise CheckpointError(f"{path}: the state cannot be read: {reason}.") from None


class _Parent:
    """The other end of the pipes."""

    def __init__(self, answers: IO[str], messages: IO[str]) -> None:
        self._answers, self._messages = answers, messages

    def tell(self, *message: Any) -> None:
        self._messages.write(json.dumps(message) + "\n")
        self._messages.flush()

    def combine(self, flag: bool) -> bool:
        self.tell("flag", bool(flag))
        answer = self._answers.readline()
        if not answer:
            raise SystemExit(1)  # nobody is there any more
        return answer.strip() == "1"

    def wait_for_the_end(self) -> None:
        self._answers.read()


def run(job: Job, parent: _Parent) -> None:
    """Consume, checkpoint, and, where that is the job, consume more until killed."""
    per_step = check_step_share(job.global_batch, job.dp_degree, job.microbatch_size)
    recipe = DataRecipe.from_toml(job.recipe)
    cache = CacheOptions(dir=recipe.cache_dir, memory_bytes=_MEMORY_BYTES)
    pipeline = open_pipeline(
        recipe,
        tokenizer=job.tokenizer,
        seq_len=job.seq_len,
        microbatch_size=job.microbatch_size,
        global_batch=job.global_batch,
        canonical_replicas=job.canonical_replicas,
        dp_degree=job.dp_degree,
        dp_group_id=job.dp_rank,
        runner=job.runner,
        ledger=job.ledger,
        combine_flag=parent.combine if job.ask else None,
        prefetch_buffer_size=_LOOKAHEAD_BYTES,
        prefetch_batches=2 * per_step,
        io_options={"cache": {"dir": cache.dir, "memory_bytes": cache.memory_bytes}},
    )
    if job.states:
        pipeline.restore([read_state(path) for path in job.states])
    stream = iter(pipeline)
    step, ended = job.first, False
    while not ended and (job.last is None or step < job.last):
        taken = sum(next(stream, None) is not None for _ in range(per_step))
        ended = taken == 0
        step += taken // per_step
    if job.checkpoint is not None:
        if ended:
            raise DataError(
                f"the data ended after {step} steps, before the checkpoint at step {job.last}; checkpoint earlier."
            )
        write_state(job.checkpoint, pipeline.checkpoint())
    if job.doomed_after is not None:
        assert job.last is not None
        left = None if job.until is None else (job.until - job.last) * per_step
        taken = 0
        while (left is None or taken < left) and next(stream, None) is not None:
            taken += 1
            if taken == job.doomed_after:
                parent.tell("reached")
        if taken < job.doomed_after:
            parent.tell("reached")
        parent.wait_for_the_end()
    pipeline.close()
    parent.tell("done", step, ended)


def main() -> int:
    """Do the job on stdin; gives the exit code."""
    # Whatever a library prints must not get between the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    parent = _Parent(sys.stdin, messages)
    try:
        run(Job(**json.loads(sys.stdin.readline())), parent)
    except ZephonError as error:
        parent.tell("error", str(error))
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
