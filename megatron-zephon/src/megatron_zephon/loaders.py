"""The loaders that Megatron calls: for training, and for validation or test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from megatron_zephon.batches import BatchForm
from zephon import DataError, Pipeline, SampleBatch
from zephon.loader import Progress


class TrainLoader:
    """Training batches; Megatron calls `next` on it, and `save_state` at every checkpoint.

    Args:
        pipeline: positioned at its place in the stream.
        form: the form of batches.
        describe: further content of a saved state (iteration, consumed samples and so on), as plain data; None if
            a peer of this rank saves the same lanes.
    """

    def __init__(
        self, pipeline: Pipeline, form: BatchForm, describe: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self.pipeline = pipeline
        self.progress = Progress()
        """Counters since the loader was built."""
        self.saves = describe is not None
        """Whether this rank is the one of its peers that saves their lanes."""
        self._form = form
        self._describe = describe
        self._batches: Iterator[SampleBatch] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        began = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self.pipeline)
        batch = next(self._batches, None)
        if batch is None:
            raise DataError(
                f"the training data have ended after {self.pipeline.cursor} records, before --train-iters (or "
                "--train-samples) was reached. Set repeat = true in the recipe, or train for less."
            )
        fields = self._form.shape(batch)
        self.progress.add(batch, time.perf_counter() - began)
        return fields

    def save_state(self) -> dict[str, Any] | None:
        """This rank's lanes and the place of the run, as plain data; None if another rank saves the same."""
        if self._describe is None:
            return None
        names = list(self.pipeline.mixture())
        tokens = dict(zip(names, np.broadcast_to(self.progress.tokens, len(names)).tolist(), strict=True))
        state = {"cursor": self.pipeline.cursor, "tokens": tokens, "zephon": self.pipeline.checkpoint()}
        return {**self._describe(), **state}

    def count_from(self, tokens: Mapping[str, int]) -> None:
        """Count on from the tokens of earlier processes, by source."""
        counted = [int(tokens.get(name, 0)) for name in self.pipeline.mixture()]
        self.progress.tokens = np.array(counted, dtype=np.int64)

    def close(self) -> None:
        """End the threads of the pipeline."""
        self.pipeline.close()


class EvalLoader:
    """Batches of a validation or test set, the same ones in every evaluation.

    Megatron calls `next` for every microbatch of an evaluation, or, for a full validation, `len` once and `iter` for
    each evaluation.

    Args:
        pipeline: without end, or, for a full validation, of one pass; all ranks see its end at the same step.
        form: the form of batches.
        calls_per_step: microbatches of this rank per evaluation iteration.
        steps: evaluation iterations of an evaluation; not needed for a full validation.
    """

    def __init__(self, pipeline: Pipeline, form: BatchForm, *, calls_per_step: int, steps: int | None = None) -> None:
        self.pipeline = pipeline
        self._form = form
        self._calls_per_step = calls_per_step
        self._calls = calls_per_step * (steps or 0)
        self._given = 0
        self._batches: Iterator[SampleBatch] | None = None
        self._per_pass: int | None = None

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches, self._given = self._from_start(), 0
        fields = self._form.shape(next(self._batches))
        self._given += 1
        if self._given == self._calls:
            self._batches = None
            self.pipeline.close()
        return fields

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass."""
        for batch in self._from_start():
            yield self._form.shape(batch)

    def __len__(self) -> int:
        """Evaluation iterations of a pass; the first call reads a pass to count them."""
        if self._per_pass is None:
            self._per_pass = sum(1 for _ in self._from_start())
            if not self._per_pass:
                raise DataError("the validation data have no tokens, so no record can be packed. Name other data.")
        return self._per_pass // self._calls_per_step

    def _from_start(self) -> Iterator[SampleBatch]:
        self.pipeline.seek(sequence_number=0)
        return iter(self.pipeline)
