"""The loaders that Megatron calls: one that trains, and ones that validate or test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zephon import DataError, Pipeline, SampleBatch
from zephon.loader import Mixture, Progress

from .batches import BatchForm

__all__ = ["EvalLoader", "TrainLoader"]


class TrainLoader:
    """Training batches; Megatron calls `next` on it, and `save_state` at every checkpoint.

    Args:
        pipeline: at its place in the stream.
        form: how batches are to look.
        describe: what else a saved state says: iteration, consumed samples and the like, as plain data; None where
            this rank is not to save (its peers do).
    """

    def __init__(
        self, pipeline: Pipeline, form: BatchForm, describe: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self._pipeline = pipeline
        self._form = form
        self._describe = describe
        self._batches: Iterator[SampleBatch] | None = None
        self.progress = Progress()
        """What was handed out since the loader was built."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        began = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self._pipeline)
        batch = next(self._batches, None)
        if batch is None:
            raise DataError(
                f"the training data have ended after {self.cursor} records, before --train-iters (or --train-samples) "
                "was reached; set repeat = true in the recipe, or train for less."
            )
        fields = self._form.shape(batch)
        self.progress.add(batch, time.perf_counter() - began)
        return fields

    def save_state(self) -> dict[str, Any] | None:
        """This rank's lanes and where the run is, as plain data; None where another rank saves the same."""
        if self._describe is None:
            return None
        return {**self._describe(), "cursor": self.cursor, "zephon": self._pipeline.checkpoint()}

    @property
    def saves(self) -> bool:
        """Whether this rank is the one of its peers that speaks for their lanes."""
        return self._describe is not None

    @property
    def cursor(self) -> int:
        """Records that all ranks together have used since the start of the run."""
        return self._pipeline.cursor

    def mixture(self) -> dict[str, Mixture]:
        """Target and achieved token shares by source, as made by this rank since it started."""
        return self._pipeline.mixture()

    def close(self) -> None:
        """End the threads behind the stream."""
        self._pipeline.close()


class EvalLoader:
    """Batches of a validation or test set: every document once per pass, pass after pass.

    Megatron calls `next` without end, or, for a full validation, `len` once and `iter` for each pass. All data-parallel
    ranks must do the same.

    Args:
        pipeline: finite; its passes end at a step on all ranks alike.
        form: how batches are to look.
        calls_per_step: microbatches of this rank per evaluation iteration.
        steps_before: evaluation iterations made before, in earlier processes.
    """

    def __init__(self, pipeline: Pipeline, form: BatchForm, *, calls_per_step: int, steps_before: int = 0) -> None:
        self.pipeline = pipeline
        """What the batches come from."""
        self._form = form
        self._calls = calls_per_step
        self._before = steps_before * calls_per_step
        self._batches: Iterator[SampleBatch] | None = None
        self._per_pass: int | None = None

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = self._enter(self._before)
        batch = next(self._batches, None)
        if batch is None:
            self._batches = self._enter(0)
            batch = next(self._batches, None)
            if batch is None:
                raise self._empty()
        return self._form.shape(batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass."""
        for batch in self._fresh():
            yield self._form.shape(batch)

    def __len__(self) -> int:
        """Evaluation iterations of a pass; makes one pass, the first time, to see."""
        if self._per_pass is None:
            self._per_pass = sum(1 for _ in self._fresh())
            if not self._per_pass:
                raise self._empty()
        return self._per_pass // self._calls

    def _fresh(self) -> Iterator[SampleBatch]:
        """A pass from its beginning."""
        self.pipeline.seek(sequence_number=0)
        return iter(self.pipeline)

    def _enter(self, place: int) -> Iterator[SampleBatch]:
        """The batches from batch `place` on, counted over all passes; it may take a pass to learn how long one is."""
        batches, passed = self._fresh(), 0
        while passed < place:
            if next(batches, None) is None:
                if not passed:
                    raise self._empty()
                place %= passed
                batches, passed = self._fresh(), 0
                continue
            passed += 1
        return batches

    def _empty(self) -> DataError:
        return DataError("the validation or test data make no record: their documents hold no token; name other data.")
