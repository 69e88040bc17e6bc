"""`ZephonDataLoader`: TorchTitan's data loader, made of a Zephon pipeline."""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zephon import CheckpointError, DataRecipe, Pipeline, PipelineError
from zephon.loader import Mixture, Progress, Topology, check_allowed, check_ranks_agree

from .checkpointing import blank_keys, from_keys, look_ahead, to_keys
from .checks import check_tokenizer, check_topology, tokenizer_folder
from .config import ZephonConfig
from .forms import BaseDataLoader, choose_form
from .ranks import any_rank, gathered, is_distributed
from .trainer_view import GlobalBatch, TrainerView

__all__ = ["ZephonDataLoader", "training_loader"]

_log = logging.getLogger("zephon")
_training: weakref.ref[ZephonDataLoader] | None = None


class ZephonDataLoader(BaseDataLoader):
    """Batches of a data recipe, the same global batches on any number of ranks.

    TorchTitan builds it; see `Config` for what is set by people.

    Args:
        config: what data.
        dp_world_size, dp_rank: size of the batch mesh, and this rank's place in it. Ranks with the same place (tensor-,
            context- and pipeline-parallel peers) make the same batches.
        tokenizer: the trainer's, of which the folder is used.
        global_batch_size: records per optimizer step; by default what the trainer that builds this loader says.
        sizes: of batches, as versions of TorchTitan give them; see `torchtitan_zephon.forms`.

    Raises:
        ZephonError: the run is misconfigured; one sentence says how.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ZephonConfig):
        """Made by `Config.from_toml("recipe.toml")`; every field can be overridden on the command line."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        global_batch_size: int | None = None,
        **sizes: Any,
    ) -> None:
        view = TrainerView.of_callers()
        self._view = view
        self._config = config
        self._form = choose_form(sizes)
        self._validating = config.infinite is not None or view.validating
        check_allowed(config.allow_changes, None, "dataloader.allow_changes")
        recipe = config.to_recipe()
        if self._validating:
            # A document counts once, and a bounded validation takes the first of them.
            recipe = recipe.replace(
                repeat=False, exhausted_policy=None, stop_after_passes=None, max_repeats=None, continue_from=None
            )
        batch = (
            GlobalBatch(global_batch_size, True, "global_batch_size", global_batch_size)
            if global_batch_size is not None
            else view.global_batch(dp_world_size)
        )
        self._topology = check_topology(
            recipe, batch, dp_world_size=dp_world_size, dp_rank=dp_rank, steps=not self._validating
        )
        if not self._validating:
            check_tokenizer(tokenizer, view.model_vocab_size)
            if batch is not None and not batch.fixed:
                _log.warning(
                    "%s is not set, so the global batch (%d sequences here) changes with the number of ranks; the "
                    "order of the data does not.",
                    batch.key,
                    batch.records,
                )
        self._pipeline = self._pipeline_of(
            recipe, self._topology, tokenizer_folder(tokenizer), validating=self._validating
        )
        self.progress = Progress()
        self._started = False
        self._to_skip = [] if self._validating else config.ranges_to_skip()
        # What is wrong with the data shows now; those of a validation to come, too, and not after the first steps.
        fingerprints = [self._pipeline.fingerprint()]
        if not self._validating:
            fingerprints += self._fingerprint_of_validation(batch, dp_world_size, dp_rank, tokenizer)
        told = [json.loads(text) for text in gathered(json.dumps(fingerprints).encode())]
        for same in zip(*told, strict=True):
            check_ranks_agree(dict(enumerate(same)))
        if not self._validating:
            global _training
            _training = weakref.ref(self)

    def _pipeline_of(self, recipe: DataRecipe, topology: Topology, tokenizer: str, *, validating: bool) -> Pipeline:
        return Pipeline.from_recipe(
            recipe,
            tokenizer=tokenizer,
            seq_len=self._form.seq_len,
            microbatch_size=self._form.microbatch_size,
            dp_degree=topology.dp_degree,
            dp_group_id=topology.dp_group_id,
            global_batch=topology.global_batch,
            drop_last=not validating,
            canonical_replicas=topology.lanes,
            combine_flag=any_rank if is_distributed() else bool,
            ledger=None if validating else self._config.ledger,
            flush_index=None if validating else self._config.flush_index,
        )

    def _fingerprint_of_validation(
        self, batch: GlobalBatch | None, dp_world_size: int, dp_rank: int, tokenizer: Any
    ) -> list[dict[str, Any]]:
        """Of the data that the trainer's validator is going to read with this kind of loader, if it does."""
        validator = getattr(self._view.config, "validator", None)
        config = getattr(validator, "dataloader", None)
        if not getattr(validator, "enable", False) or not isinstance(config, ZephonConfig):
            return []
        recipe = config.to_recipe().replace(repeat=False)
        topology = check_topology(recipe, batch, dp_world_size=dp_world_size, dp_rank=dp_rank, steps=False)
        return [self._pipeline_of(recipe, topology, tokenizer_folder(tokenizer), validating=True).fingerprint()]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        if not self._started:
            self._skip()
        self._started = True
        batches, progress, last = iter(self._pipeline), self.progress, None
        # A validator that ends inside a step would leave out all of it.
        whole = self._view.pipeline_microbatches if self._validating else 1
        try:
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    if last is None or progress.batches % whole == 0:
                        return
                    batch = last.blank()
                last = batch
                shaped = self._form.shape(batch)
                progress.add(batch, time.perf_counter() - began)
                yield shaped
        finally:
            # Whoever drops the iterator, as a validator does after its steps, has no more use for its threads.
            self._pipeline.close()

    def _skip(self) -> None:
        """Leave out the steps that the config names, unless the checkpoint says that they are left out already."""
        known = self._pipeline.skipped
        batch = self._topology.global_batch
        for begin, end in known:
            named = batch and any(first * batch <= begin and end <= last * batch for first, last in self._to_skip)
            if end > self.cursor and not named:
                _log.warning(
                    "the checkpoint says that the records %d to %d of the run are to be left out, and skip_steps does "
                    "not name them; they are left out.",
                    begin,
                    end - 1,
                )
        for first, last in self._to_skip:
            if batch is None:
                raise PipelineError(
                    "dataloader.skip_steps needs a trainer's global batch, and none is known here; pass "
                    "global_batch_size to build()."
                )
            if any(begin <= first * batch and last * batch <= end for begin, end in known):
                continue
            if first * batch < self.cursor:
                raise PipelineError(
                    f"dataloader.skip_steps names the steps {first + 1}-{last}, and the data of the first "
                    f"{self.cursor // batch} are used already; load an earlier checkpoint (--checkpoint.load_step), or "
                    "name later steps."
                )
            _log.warning("the data of the steps %d to %d are left out (skip_steps)", first + 1, last)
            self._pipeline.skip(first, last)

    def state_dict(self) -> dict[str, Any]:
        """One key per owned lane and one for the run; see `torchtitan_zephon.checkpointing`.

        Raises:
            CheckpointError: before a load, the checkpoint has no state that fits.
        """
        ahead = None if self._started else look_ahead(self._view, self._topology.lanes)
        if ahead is not None:
            if ahead.refusal and self._config.start_afresh and ahead.refusal.absent:
                _log.warning("%s: start_afresh begins the data at their start.", ahead.refusal.text.partition(",")[0])
                return {}
            if ahead.refusal:
                raise CheckpointError(ahead.refusal.text)
            # Before a load, only names and shapes matter, and the shapes are those of the run that saved.
            return blank_keys(self._topology, ahead.numbers)
        if self._pipeline.awaits_state:
            return blank_keys(self._topology, 7)
        return to_keys(self._pipeline.checkpoint(), self._topology.global_batch)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was taken, on whatever number of ranks.

        Raises:
            CheckpointError: the data would differ; one line per difference.
        """
        if not state_dict:
            return
        state, global_batch = from_keys(state_dict)
        self._pipeline.restore(state, allow_changes=self._config.allow_changes, remedy="--dataloader.allow_changes")
        mine = self._topology.global_batch
        if global_batch and mine and global_batch != mine:
            _log.warning(
                "the checkpoint is of a run with %d sequences per step, this one has %d; the data go on at record %d.",
                global_batch,
                mine,
                self.cursor,
            )

    def close(self) -> None:
        """End the threads behind the stream."""
        self._pipeline.close()

    def mixture(self) -> dict[str, Mixture]:
        """Target and achieved token shares by source, as made by this rank since it started."""
        return self._pipeline.mixture()

    @property
    def dp_degree(self) -> int:
        """Data-parallel ranks."""
        return self._topology.dp_degree

    @property
    def batches_per_step(self) -> float:
        """Microbatches per step on this rank; 1 where the global batch is not known."""
        batch = self._topology.global_batch
        return batch / self.dp_degree / self._form.microbatch_size if batch else 1.0

    @property
    def cursor(self) -> int:
        """Records that all ranks together have used since the start of the run."""
        return self._pipeline.cursor


def training_loader() -> ZephonDataLoader | None:
    """The loader of this process that trains, if there is one."""
    return _training() if _training is not None else None
