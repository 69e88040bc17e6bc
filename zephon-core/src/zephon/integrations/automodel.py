"""NeMo AutoModel with the data of a recipe; names for `_target_` in its YAML files.

dataset:
  _target_: zephon.integrations.automodel.ZephonDataset
  recipe: recipe.toml
dataloader:
  batch_size: null

AutoModel gives the data-parallel rank by `shard`, and keeps a file of the state per data-parallel rank. One process of
each rank writes its file, so the state is gathered among processes at the same place of the model, and each file holds
the state of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from zephon import DataRecipe, PipelineError, SampleBatch
from zephon.loader import EvaluationLoader, JobLoader, gather, is_distributed

__all__ = ["ZephonDataset", "ZephonEvaluationDataset"]

_Recipe = DataRecipe | str | os.PathLike[str]


class _Sharded(IterableDataset[Any]):
    """Batches of a loader that is built once the data-parallel rank is known.

    Attributes:
        loader: of the batches; None before `shard`.
    """

    loader: Any = None

    def __init__(self, build: Callable[..., Any], tokenizer: Any) -> None:
        self._build, self._tokenizer = build, tokenizer

    def shard(self, num_shards: int, index: int) -> _Sharded:
        """Open the data as data-parallel rank `index` of `num_shards`; collective.

        Raises:
            ZephonError: there is no tokenizer, or the data cannot be read as configured.
        """
        if self._tokenizer is None:
            raise PipelineError(
                "the dataset's tokenizer is None; expected a tokenizer. Name its folder in the YAML file as "
                "dataset.tokenizer.pretrained_model_name_or_path."
            )
        ranks = {"ranks": (index, num_shards), "gather": _gather_among(index)}
        self.loader = self._build(tokenizer=self._tokenizer, shape=_shape, **ranks)
        return self

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            self.__reduce__()
        if self.loader is None:
            raise PipelineError("the dataset has no data-parallel rank; expected a call of shard before the first one.")
        return iter(self.loader)

    def __reduce__(self) -> Any:
        raise PipelineError(
            "dataloader.num_workers is above 0; expected 0. Leave it out: Zephon reads and tokenizes in threads of its "
            "own (runner, workers)."
        )


class ZephonDataset(_Sharded):
    """The training batches of a recipe, the same global batches on any number of processes; labels are shifted.

    Args:
        recipe: the path of a TOML file, or a `DataRecipe`.
        tokenizer: given by AutoModel: the one of the dataset's section, or of the model.
        seq_len: see `Pipeline.from_recipe`.
        microbatch_size, global_batch: local_batch_size and global_batch_size of the section step_scheduler.
        allow_changes: see `Pipeline.restore`.
        options: further options of the pipeline, such as `ledger`.
    """

    def __init__(
        self,
        recipe: _Recipe,
        *,
        tokenizer: Any = None,
        seq_len: int,
        microbatch_size: int,
        global_batch: int,
        allow_changes: Collection[str] = (),
        **options: Any,
    ) -> None:
        sizes: dict[str, Any] = {"seq_len": seq_len, "microbatch_size": microbatch_size, "global_batch": global_batch}
        super().__init__(lambda **more: JobLoader(recipe, **sizes, **options, **more), tokenizer)
        self._allow_changes = allow_changes

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks after the last step; collective among processes at the same place of the model."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of any number of ranks.

        Raises:
            CheckpointError: it is damaged, or the data would differ; a line per difference.
        """
        self.loader.load_state_dict(state, allow_changes=self._allow_changes, remedy="dataset.allow_changes")


class ZephonEvaluationDataset(_Sharded):
    """The batches of a recipe in a validation, which is of the same records each time.

    Args:
        recipe, tokenizer, seq_len: see `ZephonDataset`.
        microbatch_size: records of a batch of one process.
        records: of a validation over all processes; by default one pass over the data.
        options: further options of the pipeline.
    """

    def __init__(
        self,
        recipe: _Recipe,
        *,
        tokenizer: Any = None,
        seq_len: int,
        microbatch_size: int,
        records: int | None = None,
        **options: Any,
    ) -> None:
        sizes: dict[str, Any] = {"seq_len": seq_len, "microbatch_size": microbatch_size, "records": records}
        super().__init__(lambda **more: EvaluationLoader(recipe, **sizes, **options, **more), tokenizer)


def _shape(batch: SampleBatch) -> Any:
    return batch.to_training(shift_labels=True)  # AutoModel's losses do not shift


def _gather_among(rank: int) -> Callable[[Any], Sequence[Any]]:
    """A collective call among one process of each data-parallel rank, those at this one's place of the model.

    The n-th process of one rank goes with the n-th of the others, as processes of a mesh are numbered. No others may
    take part, since AutoModel asks the first process of a rank alone for the state.
    """
    if not is_distributed():
        return gather
    processes: dict[int, list[int]] = {}
    for process, other in enumerate(gather(rank)):
        processes.setdefault(other, []).append(process)
    places = [list(place) for place in zip(*(processes[n] for n in sorted(processes)), strict=True)]
    group: Any = dist.new_subgroups_by_enumeration(places, backend="gloo")[0]

    def collect(value: Any) -> Sequence[Any]:
        values: list[Any] = [None] * len(processes)
        dist.all_gather_object(values, value, group=group)
        return values

    return collect
