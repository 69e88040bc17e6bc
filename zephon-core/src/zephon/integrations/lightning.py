"""Lightning with the data of a recipe.

data = ZephonDataModule("recipe.toml", tokenizer="gpt2", seq_len=1024, microbatch_size=4, global_batch=64)
Trainer(max_steps=1000).fit(model, data, ckpt_path="last")

The state is that of the data module, which every strategy saves, and of all ranks, since rank 0 alone writes. Lightning
fetches a batch ahead; the state is of the batches that it has processed, which a callback counts.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from zephon import CheckpointError, DataRecipe, SampleBatch, TopologyError
from zephon.loader import EvaluationLoader, JobLoader, data_parallel

__all__ = ["ZephonDataModule"]

_Recipe = DataRecipe | str | os.PathLike[str]


class ZephonDataModule(LightningDataModule):
    """The data of a recipe for a `lightning.Trainer`, the same global batches on any number of processes.

    `Trainer.accumulate_grad_batches` follows from `global_batch`. The trainer needs `max_steps`, since a recipe has no
    length; validation takes `val_check_interval` in batches and `check_val_every_n_epoch=None`.

    Args:
        recipe: of the training data: a `DataRecipe`, or the path of its TOML file.
        tokenizer, seq_len: see `Pipeline.from_recipe`.
        microbatch_size: records of a batch of one process.
        global_batch: records per optimizer step over all processes.
        eval_recipe: of the validation, which is of the same records each time.
        eval_records: records of a validation over all processes; by default one pass over the data.
        shape: makes a batch of the model of a `SampleBatch`: tensors in a dict, labels shifted. Models that shift
            labels themselves take `lambda batch: batch.to_training(shift_labels=False)`.
        allow_changes: see `Pipeline.restore`.
        ranks: see `data_parallel`; by default as the trainer's strategy says.
        options: further options of the training pipeline, such as `ledger`.

    Attributes:
        job_loader: of the training data; None before the trainer asks for it.
    """

    def __init__(
        self,
        recipe: _Recipe,
        *,
        tokenizer: Any,
        seq_len: int,
        microbatch_size: int,
        global_batch: int,
        eval_recipe: _Recipe | None = None,
        eval_records: int | None = None,
        shape: Callable[[SampleBatch], Any] = SampleBatch.to_training,
        allow_changes: Collection[str] = (),
        ranks: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.job_loader: JobLoader | None = None
        self._recipe, self._eval_recipe, self._eval_records = recipe, eval_recipe, eval_records
        self._shared = {"tokenizer": tokenizer, "seq_len": seq_len, "microbatch_size": microbatch_size, "shape": shape}
        self._global_batch, self._options = global_batch, options
        self._allow_changes, self._ranks = allow_changes, ranks
        self._state: dict[str, Any] | None = None  # to restore once there is a loader
        self._batches: _Batches | None = None
        self._count: _Count | None = None

    def setup(self, stage: str) -> None:
        """Fit the trainer to the global batch, and count the batches that it processes.

        Raises:
            TopologyError: the global batch does not divide, or `accumulate_grad_batches` is another one.
        """
        trainer: Any = self.trainer
        if stage != "fit" or self._count in trainer.callbacks:
            return
        _, size = self._data_parallel()
        at_once = size * self._shared["microbatch_size"]
        steps, rest = divmod(self._global_batch, at_once)
        if rest or not steps:
            raise TopologyError(
                f"global_batch is {self._global_batch}; expected a multiple of {at_once}, the records that all "
                "processes take at once. Change it, microbatch_size or the number of processes."
            )
        changes = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        if changes or trainer.accumulate_grad_batches not in (1, steps):
            given = "changed by GradientAccumulationScheduler" if changes else str(trainer.accumulate_grad_batches)
            raise TopologyError(
                f"accumulate_grad_batches is {given}; expected {steps}, so that a step has global_batch "
                f"{self._global_batch} records. Leave it out of the Trainer."
            )
        trainer.accumulate_grad_batches = steps
        if self.job_loader is not None:  # of another trainer
            self.job_loader.close()
            self.job_loader = self._state = None
        self._count = _Count()
        trainer.callbacks.insert(0, self._count)  # before those that save

    def train_dataloader(self) -> Any:
        """The batches of this process, where the checkpoint or the last call of `fit` ended.

        Raises:
            ZephonError: the data cannot be read as configured, or differ from those of the checkpoint.
        """
        if self.job_loader is None:
            count = self._count
            assert count is not None
            self.job_loader = JobLoader(
                self._recipe,
                global_batch=self._global_batch,
                ranks=self._data_parallel(),
                consumed=lambda: count.batches,
                **self._shared,
                **self._options,
            )
            self._batches = _Batches(self.job_loader, self._check_restored)
        self._restore()
        return self._batches

    def val_dataloader(self) -> Any:
        """The batches of `eval_recipe`, the same in every validation; none without it."""
        if self._eval_recipe is None:
            return []
        return EvaluationLoader(
            self._eval_recipe, records=self._eval_records, ranks=self._data_parallel(), **self._shared
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the training data after the last step, of all ranks; collective, as a save of Lightning is."""
        return {} if self.job_loader is None else self.job_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader, now or once there is one; strategies that restore late have one by now."""
        self._state = state_dict
        self._restore()

    def teardown(self, stage: str) -> None:
        """End the threads of the pipeline; another `fit` of the same trainer goes on."""
        if self.job_loader is not None:
            self.job_loader.close()

    def _restore(self) -> None:
        if self._state is None or self.job_loader is None or self._batches is None:
            return
        self.job_loader.load_state_dict(self._state, allow_changes=self._allow_changes)
        self._state, self._batches.moved, self._batches.restored = None, True, True
        # A batch that was fetched before belongs to another place.
        trainer: Any = self.trainer
        if fetched := getattr(trainer.fit_loop._data_fetcher, "batches", None):
            fetched.clear()

    def _check_restored(self) -> None:
        """Refuse a checkpoint without a state of the data, which Lightning passes over."""
        trainer: Any = self.trainer
        path = trainer.ckpt_path
        if path and self._batches is not None and not self._batches.restored:
            raise CheckpointError(
                f"{path} has no state of {type(self).__qualname__}, so the data cannot go on from it; expected a "
                "checkpoint of a run with the same data module. Name another one, or begin a new run from its model "
                "(load_from_checkpoint)."
            )

    def _data_parallel(self) -> tuple[int, int]:
        """The data-parallel rank of this process, and how many there are, as the strategy shards data."""
        trainer: Any = self.trainer
        if self._ranks is not None:
            return data_parallel(self._ranks)
        sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return data_parallel(
            (sampling.get("rank", trainer.global_rank), sampling.get("num_replicas", trainer.world_size))
        )


class _Count(Callback):
    """Counts the batches that a trainer has processed."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """A restored state is of a step's end, and Lightning steps where its count of batches divides: round it up, for
        it is of another number of processes, or of a save within a step."""
        count = trainer.fit_loop.epoch_loop.batch_progress.current
        missing = -count.processed % trainer.accumulate_grad_batches
        for name in ("ready", "started", "processed", "completed"):
            setattr(count, name, getattr(count, name) + missing)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


class _Batches:
    """The batches of a loader. Its state is saved by the data module, so that of this object is empty.

    Attributes:
        moved: whether the loader was restored since the last batch, so that it has to be iterated anew.
        restored: whether it was restored at all.
    """

    def __init__(self, loader: JobLoader, check: Callable[[], None]) -> None:
        self._loader, self._check, self.moved, self.restored = loader, check, False, False

    def __iter__(self) -> Iterator[Any]:
        self.moved = True
        for given in itertools.count():
            if given:  # the first one may be fetched before a checkpoint is restored
                self._check()
            if self.moved:
                batches, self.moved = iter(self._loader), False
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing to do."""
