"""The interface for integrations: what the data loader of a training framework needs besides `import zephon`.

An integration imports `zephon` and `zephon.loader` only. It takes sequence length, tokenizer, batch sizes and ranks
from its framework, gets batches from a `JobLoader` and an `EvaluationLoader`, or from `Pipeline.from_recipe`, and
stores the state in the framework's own checkpoints. Here are these loaders, keys of a recipe, lanes and ranks, the
tokenizer, states, comparisons with data of an earlier run or of other ranks, collective calls and metrics.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from zephon.batch import SampleBatch
from zephon.columns.lane_start import LaneStart
from zephon.config.keys import Key, keys_of
from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.config.topology import Topology, check_division, resolve_lanes
from zephon.errors import Change, PipelineError, TopologyError
from zephon.pipeline import Pipeline
from zephon.run.fingerprint import FINGERPRINT_NAMES, check_allowed, check_fingerprint
from zephon.run.index import compact_index
from zephon.run.job import (
    Progress,
    any_rank,
    check_same_data,
    check_tokenizer,
    check_writable,
    data_parallel,
    evaluation_recipe,
    gather,
    is_distributed,
    job_metrics,
    on_all_ranks,
    on_first_rank,
)
from zephon.run.ledger import check_ledger
from zephon.run.report import Mixture
from zephon.run.state import RunState, merge_checkpoints
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings

__all__ = [
    "FINGERPRINT_NAMES",
    "Change",
    "EvaluationLoader",
    "JobLoader",
    "Key",
    "LaneStart",
    "Mixture",
    "Progress",
    "RunState",
    "SourceRecipe",
    "Tokenizer",
    "Topology",
    "VisionSettings",
    "any_rank",
    "check_allowed",
    "check_division",
    "check_fingerprint",
    "check_ledger",
    "check_same_data",
    "check_tokenizer",
    "check_writable",
    "compact_index",
    "data_parallel",
    "evaluation_recipe",
    "gather",
    "is_distributed",
    "job_metrics",
    "keys_of",
    "merge_checkpoints",
    "on_all_ranks",
    "on_first_rank",
    "open_once",
    "resolve_lanes",
]


def open_once(recipe: DataRecipe, *, tokenizer: str, seq_len: int, vision: VisionSettings | None = None) -> None:
    """Open the data of a recipe and close them, before the framework builds its model; lanes and batch are not checked.

    Raises:
        ZephonError: a path, column, filter or the tokenizer is wrong.
    """
    alone = recipe.replace(canonical_replicas=1, feeds="auto")
    pipeline = Pipeline.from_recipe(
        alone, tokenizer=tokenizer, seq_len=seq_len, microbatch_size=1, global_batch=1, vision=vision
    )
    pipeline.fingerprint()


class JobLoader:
    """The training batches of this rank, and the state of the whole job, from a data recipe.

    Iterating goes on where it stopped; after the end of the data it gives nothing more, since a recipe says how many
    passes there are. Building, `state_dict` and `load_state_dict` are collective: every rank calls them.

    Args:
        recipe: a `DataRecipe`, or the path of its TOML file.
        tokenizer, seq_len, vision: see `Pipeline.from_recipe`.
        microbatch_size: records of a batch of this rank.
        global_batch: records per optimizer step over all ranks, on any number of ranks.
        ranks: see `data_parallel`.
        shape: makes the training framework's batch of a `SampleBatch`.
        consumed: the batches that training has consumed, as the framework counts them, from any start on. For
            frameworks that fetch batches ahead: what was fetched and not consumed is given again by the next iteration,
            and after a resume. By default every batch given is consumed.
        gather: a collective call that gives the values of all ranks of the job.
        options: see `zephon.config.options.Options`, such as `ledger`; they take the place of what the recipe says.

    Attributes:
        pipeline: behind the batches.
        progress: counters since the loader was built.
        batches_per_step: batches of this rank per optimizer step.

    Raises:
        ZephonError: the data cannot be read, or the sizes do not divide; the same on every rank.
    """

    def __init__(
        self,
        recipe: DataRecipe | str | os.PathLike[str],
        *,
        tokenizer: Any,
        seq_len: int,
        microbatch_size: int,
        global_batch: int,
        ranks: Any = None,
        shape: Callable[[SampleBatch], Any] = SampleBatch.to_training,
        consumed: Callable[[], int] | None = None,
        gather: Callable[[Any], Sequence[Any]] = gather,
        vision: VisionSettings | None = None,
        **options: Any,
    ) -> None:
        rank, size = data_parallel(ranks)

        def build() -> Pipeline:
            for name in ("ledger", "flush_index"):
                if options.get(name):
                    check_writable(name, options[name])
            pipeline = _pipeline(
                recipe, tokenizer, seq_len, microbatch_size, (rank, size), global_batch, vision, **options
            )
            lanes = pipeline.compiled.topology.lanes
            check_division(lanes, size, [global_batch], at_once=microbatch_size)
            return pipeline

        if size > 1:
            options.setdefault("combine_flag", lambda flag: any(gather(flag)))
        self.pipeline = on_all_ranks(build, gather)
        check_same_data([self.pipeline.fingerprint()], gather)
        on_first_rank(lambda: None if rank else compact_index(options.get("flush_index"), self.pipeline.compiled))
        self.progress = Progress()
        self.batches_per_step = global_batch // (size * microbatch_size)
        self._shape, self._count, self._gather, self._ledger = shape, consumed, gather, options.get("ledger")
        self._first: int | None = None  # what `consumed` gave when the first batch was asked for
        self._given, self._ended = 0, False
        self._states = deque[tuple[int, dict[str, Any]]]()  # steps given, and the state of this rank after them

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        began = time.perf_counter()
        for batch in () if self._ended else self.pipeline:
            self._given += 1
            if self._given % self.batches_per_step == 0:
                self._remember()
            shaped = self._shape(batch)
            self.progress.add(batch, time.perf_counter() - began)
            yield shaped
            began = time.perf_counter()
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """The state of all lanes after the last step whose batches are all consumed, as JSON types.

        Every rank gets the same one, and one of them restores any number of ranks.

        Raises:
            CheckpointError: the ranks are not at the same step.
        """
        if self._first is None:
            self._states.clear()
            self._remember()
        return merge_checkpoints(self._gather(on_all_ranks(self._state, self._gather)))

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changes: Collection[str] = (), remedy: str = "allow_changes"
    ) -> None:
        """Go on from a state of `state_dict`, of any number of ranks; see `Pipeline.restore`.

        Raises:
            CheckpointError: the state is damaged, or the data would differ; a line per difference, on every rank.
        """

        def restore() -> None:
            self.pipeline.restore(state, allow_changes=allow_changes, remedy=remedy)
            if self._ledger:
                check_ledger("ledger", self._ledger, self.pipeline.compiled, RunState.from_dict(state).data)

        on_all_ranks(restore, self._gather)
        self._first, self._given, self._ended = None, 0, False

    def close(self) -> None:
        """End the threads of the pipeline; iterating again goes on."""
        self.pipeline.close()

    def _begin(self) -> None:
        """Go to the first batch that is not consumed."""
        if self._first is None:
            self._states.clear()
            self._remember()
            self._first = self._count() if self._count else 0
        elif (consumed := self._consumed()) < self._given:
            state, steps = self._state(), consumed // self.batches_per_step
            self.pipeline.restore(state)
            self._given = steps * self.batches_per_step
            self._states = deque([(steps, state)])
            batches = iter(self.pipeline)
            while self._given < consumed:
                next(batches)
                self._given += 1
            self._ended = False

    def _consumed(self) -> int:
        """Batches consumed of those given."""
        if self._count is None or self._first is None:
            return self._given
        return self._count() - self._first

    def _remember(self) -> None:
        """Keep the state after a step, and drop those before the last step consumed."""
        self._states.append((self._given // self.batches_per_step, self.pipeline.checkpoint()))
        steps = self._consumed() // self.batches_per_step
        while self._states[0][0] < min(steps, self._states[-1][0]):
            self._states.popleft()

    def _state(self) -> dict[str, Any]:
        """The state of this rank after the last step consumed."""
        consumed = self._consumed()
        for steps, state in self._states:
            if steps == consumed // self.batches_per_step:
                return state
        raise PipelineError(
            f"consumed is {consumed} batches since the start; expected at least {self._states[0][0]} steps of "
            f"{self.batches_per_step}, and at most the {self._given} batches given. Let it count the batches of this "
            "loader that training has consumed."
        )


class EvaluationLoader:
    """The batches of this rank in an evaluation; every iteration gives the same ones.

    Args:
        recipe, tokenizer, seq_len, microbatch_size, ranks, shape, gather, vision, options: see `JobLoader`.
        records: of an evaluation over all ranks, the same on any number of ranks; by default one pass over the data,
            whose last batches may have records that only fill their places, without a label.

    Attributes:
        pipeline: behind the batches.

    Raises:
        ZephonError: the data cannot be read, or the sizes do not divide; the same on every rank.
    """

    def __init__(
        self,
        recipe: DataRecipe | str | os.PathLike[str],
        *,
        tokenizer: Any,
        seq_len: int,
        microbatch_size: int,
        records: int | None = None,
        ranks: Any = None,
        shape: Callable[[SampleBatch], Any] = SampleBatch.to_training,
        gather: Callable[[Any], Sequence[Any]] = gather,
        vision: VisionSettings | None = None,
        **options: Any,
    ) -> None:
        rank, size = data_parallel(ranks)
        at_once = microbatch_size * size
        self._shape, self._batches = shape, records and records // at_once

        def build() -> Pipeline:
            if records is not None and (records < 1 or records % at_once):
                below = max(records, at_once) // at_once * at_once
                raise TopologyError(
                    f"the records of an evaluation are {records}; expected a multiple of {at_once}, which {size} ranks "
                    f"take at once. Use {below} or {below + at_once}."
                )
            whole = recipe if isinstance(recipe, DataRecipe) else DataRecipe.from_toml(recipe)
            whole = evaluation_recipe(whole, repeat=records is not None)
            options.setdefault("drop_last", False)
            return _pipeline(whole, tokenizer, seq_len, microbatch_size, (rank, size), at_once, vision, **options)

        self.pipeline = on_all_ranks(build, gather)
        check_same_data([self.pipeline.fingerprint()], gather)

    def __iter__(self) -> Iterator[Any]:
        self.pipeline.seek(sequence_number=0)
        try:
            for n, batch in enumerate(self.pipeline, start=1):
                yield self._shape(batch)
                if n == self._batches:
                    break
        finally:
            self.pipeline.close()


def _pipeline(
    recipe: DataRecipe | str | os.PathLike[str],
    tokenizer: Any,
    seq_len: int,
    microbatch_size: int,
    ranks: tuple[int, int],
    global_batch: int,
    vision: VisionSettings | None,
    **options: Any,
) -> Pipeline:
    """The pipeline of a rank, opened, so that errors show before the first step."""
    pipeline = Pipeline.from_recipe(
        recipe,
        tokenizer=tokenizer,
        seq_len=seq_len,
        microbatch_size=microbatch_size,
        dp_degree=ranks[1],
        dp_group_id=ranks[0],
        global_batch=global_batch,
        vision=vision,
        **options,
    )
    pipeline.fingerprint()
    return pipeline
