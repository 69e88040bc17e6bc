"""The loaders that Megatron calls: for training, and for validation or test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
        return {**self._describe(), "cursor": self.pipeline.cursor, "zephon": self.pipeline.checkpoint()}

    def close(self) -> None:
        """End the threads of the pipeline."""
        self.pipeline.close()


class EvalLoader:
    """Batches of a validation or test set: every document once per pass, pass after pass.

    Megatron calls `next` without end, or, for a full validation, `len` once and `iter` for each pass. All data-parallel
    ranks must do the same.

    Args:
        pipeline: finite; its passes end at the same step on all ranks.
        form: the form of batches.
        calls_per_step: microbatches of this rank per evaluation iteration.
        steps_before: evaluation iterations of earlier processes.
    """

    def __init__(self, pipeline: Pipeline, form: BatchForm, *, calls_per_step: int, steps_before: int = 0) -> None:
        self.pipeline = pipeline
        self._form = form
        self._calls = calls_per_step
        self._before = steps_before * calls_per_step
        self._batches: Iterator[SampleBatch] | None = None
        self._per_pass: int | None = None

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = self._from(self._before)
        batch = next(self._batches, None)
        if batch is None:
            self._batches = self._new_pass()
            batch = next(self._batches, None)
            if batch is None:
                raise self._empty()
        return self._form.shape(batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass."""
        for batch in self._new_pass():
            yield self._form.shape(batch)

    def __len__(self) -> int:
        """Evaluation iterations of a pass; the first call reads a pass to count them."""
        if self._per_pass is None:
            self._per_pass = sum(1 for _ in self._new_pass())
            if not self._per_pass:
                raise self._empty()
        return self._per_pass // self._calls

    def _new_pass(self) -> Iterator[SampleBatch]:
        self.pipeline.seek(sequence_number=0)
        return iter(self.pipeline)

    def _from(self, place: int) -> Iterator[SampleBatch]:
        """The batches from batch `place` on, counted over all passes; the first pass may be read for its length."""
        batches, passed = self._new_pass(), 0
        while passed < place:
            if next(batches, None) is not None:
                passed += 1
            elif passed:
                place %= passed
                batches, passed = self._new_pass(), 0
            else:
                raise self._empty()
        return batches

    def _empty(self) -> DataError:
        return DataError("the validation or test data have no tokens, so no record can be packed. Name other data.")
