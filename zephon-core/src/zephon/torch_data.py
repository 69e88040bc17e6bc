"""A pipeline inside PyTorch's own data loaders; the only module of this package that imports torch.

from torchdata.stateful_dataloader import StatefulDataLoader

loader = StatefulDataLoader(pipeline.torch_dataset(), batch_size=None, num_workers=1)
for fields in loader:
    train_step(fields["input_ids"], fields["labels"])
state = loader.state_dict()
"""

from __future__ import annotations

import copy
import inspect
import mmap
import multiprocessing.context
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from zephon.batch import SampleBatch
from zephon.config.keys import refuse_unknown
from zephon.errors import PipelineError

__all__ = ["PipelineDataset"]


class _Fields(dict[str, Any]):
    """The fields of a batch, which a loader must not put into batches of its own."""


def _refuse(batches: Sequence[_Fields], **_: Any) -> Any:
    raise PipelineError(
        f"batch_size is {len(batches)} or more; expected batch_size=None in the DataLoader, since the pipeline yields "
        "batches already. Their size is microbatch_size, in Pipeline.batch()."
    )


default_collate_fn_map[_Fields] = _refuse


class PipelineDataset(IterableDataset[dict[str, Any]]):
    """The batches of a pipeline as fields of tensors, for `DataLoader` and `StatefulDataLoader`.

    Pass batch_size=None to the loader, since the pipeline yields batches, and num_workers=0 or 1. With 1 the pipeline
    runs in the worker process and so does its state: take the state from a `StatefulDataLoader`.
    (`options(isolate=True)` with num_workers=0 takes as much work off the training process, and the state stays in it.)

    Args:
        pipeline: a `zephon.Pipeline`; iterating advances it.
        to_training: as for `SampleBatch.to_training`.
    """

    def __init__(self, pipeline: Any, **to_training: Any) -> None:
        known = inspect.signature(SampleBatch.to_training).parameters
        refuse_unknown(to_training, [*known][1:], "option of torch_dataset", PipelineError)
        self._pipeline = pipeline
        self._to_training = to_training
        # Shared with forked workers: 1 once a worker process iterates the pipeline.
        self._in_worker = mmap.mmap(-1, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches from the current state of the pipeline on.

        Raises:
            PipelineError: the loader has several workers.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise PipelineError(
                f"num_workers is {worker.num_workers}; expected 0 or 1, since every worker would yield all batches of "
                'this rank. Use the worker processes of the pipeline: options(runner="process").'
            )
        if worker is not None:
            # A copy without the open stream: a fork must not use threads and files of its parent.
            self._pipeline = copy.copy(self._pipeline)
        self._in_worker[0] = worker is not None
        return (_Fields(batch.to_training(**self._to_training)) for batch in self._pipeline)

    def state_dict(self) -> dict[str, Any]:
        """`Pipeline.checkpoint` after the last batch yielded.

        Raises:
            PipelineError: the pipeline runs in a worker process of the loader, and so does its state.
        """
        if get_worker_info() is None and self._in_worker[0]:
            raise PipelineError(
                "the pipeline runs in a worker process of the DataLoader, so its state is not in this process. Use "
                "state_dict() of torchdata's StatefulDataLoader, or num_workers=0."
            )
        state: dict[str, Any] = self._pipeline.checkpoint()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Pipeline.restore`; call before iterating."""
        self._pipeline.restore(state)

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is not None:
            self._in_worker[0] = 1
        return {key: value for key, value in self.__dict__.items() if key != "_in_worker"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _in_worker=mmap.mmap(-1, 1))
