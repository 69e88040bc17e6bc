"""A pipeline inside PyTorch's own data loaders; the one part of this package that needs torch to be imported.

from torchdata.stateful_dataloader import StatefulDataLoader

loader = StatefulDataLoader(pipeline.torch_dataset(), batch_size=None, num_workers=1)
for fields in loader:
    train_step(fields["input_ids"], fields["labels"])
state = loader.state_dict()
"""

from __future__ import annotations

import copy
import mmap
import multiprocessing.context
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from zephon.errors import PipelineError

__all__ = ["PipelineDataset"]


class PipelineDataset(IterableDataset[dict[str, Any]]):
    """The batches of a pipeline as fields of tensors, for `DataLoader` and `StatefulDataLoader`.

    Pass batch_size=None to the loader: the pipeline has made batches already, and a loader that is told nothing puts
    each into another batch of one. num_workers is 0 or 1. With 1 the pipeline lives in the worker, so its place does
    too: take the state from a `StatefulDataLoader`. (`options(isolate=True)` and num_workers=0 keep the training
    process as free, and the state here.)

    Args:
        pipeline: a `zephon.Pipeline`; iterating moves it on.
        to_training: as for `SampleBatch.to_training`.
    """

    def __init__(self, pipeline: Any, **to_training: Any) -> None:
        self._pipeline = pipeline
        self._to_training = to_training
        # Seen by a worker that is a fork: 1 where it is a worker that moves on.
        self._elsewhere = mmap.mmap(-1, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches from the pipeline's place on.

        Raises:
            PipelineError: the loader has several workers.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise PipelineError(
                f"num_workers is {worker.num_workers}; 0 or 1 is needed, since every worker would give all batches of "
                'this rank once more. The pipeline has workers of its own: options(runner="process").'
            )
        if worker is not None:
            # Without what the parent had opened and may have been at when this process was made.
            self._pipeline = copy.copy(self._pipeline)
        self._elsewhere[0] = worker is not None
        return self._batches()

    def state_dict(self) -> dict[str, Any]:
        """`Pipeline.checkpoint` after the last batch given out.

        Raises:
            PipelineError: a loader's worker gives out the batches, and its place is not known here.
        """
        if get_worker_info() is None and self._elsewhere[0]:
            raise PipelineError(
                "the pipeline runs in the worker process of a DataLoader, so its state is there; use torchdata's "
                "StatefulDataLoader and its state_dict(), or num_workers=0."
            )
        state: dict[str, Any] = self._pipeline.checkpoint()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Pipeline.restore`; call before iterating."""
        self._pipeline.restore(state)

    def _batches(self) -> Iterator[dict[str, Any]]:
        for batch in self._pipeline:
            yield batch.to_training(**self._to_training)

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is not None:
            self._elsewhere[0] = 1
        return {key: value for key, value in self.__dict__.items() if key != "_elsewhere"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _elsewhere=mmap.mmap(-1, 1))
