"""`ZephonDataLoader`: TorchTitan's data loader on a Zephon pipeline."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from torchtitan_zephon.checkpointing import (
    begins,
    blank_keys,
    from_keys,
    look_ahead,
    saved_lanes,
    state_left_out,
    to_keys,
)
from torchtitan_zephon.checks import check_ahead, check_topology, tokenizer_folder
from torchtitan_zephon.config import ZephonConfig
from torchtitan_zephon.forms import BaseDataLoader, choose_form, device_type
from torchtitan_zephon.trainer_view import GlobalBatch, TrainerView
from torchtitan_zephon.vision import VisionForm, check_images, vision_settings
from zephon import CheckpointError, DataRecipe, Pipeline, PipelineError
from zephon.loader import (
    Mixture,
    Progress,
    RunState,
    Topology,
    any_rank,
    check_allowed,
    check_ledger,
    check_same_data,
    check_tokenizer,
    check_writable,
    compact_index,
    evaluation_recipe,
    gather,
    is_distributed,
    on_all_ranks,
    on_first_rank,
)

_log = logging.getLogger("zephon")
_training: weakref.ref[ZephonDataLoader] | None = None


class ZephonDataLoader(BaseDataLoader):
    """Batches of a data recipe, the same global batches on any number of ranks. TorchTitan builds it.

    Args:
        config: the data.
        dp_world_size, dp_rank: size of the batch mesh, and this rank's index in it. Ranks with the same index (tensor-,
            context- and pipeline-parallel peers) yield the same batches.
        tokenizer: the trainer's; its folder is used.
        global_batch_size: records per optimizer step; by default taken from the trainer that builds this loader.
        sizes: of batches, as versions of TorchTitan pass them; see `torchtitan_zephon.forms`.

    Raises:
        ZephonError: the run is misconfigured.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ZephonConfig):
        """Made by `Config.from_toml("recipe.toml")`; every field can be overridden on the command line."""

        def to_dict(self) -> dict[str, Any]:
            """The fields as plain data. A trainer asks for them before it builds its model: wrong data, and lanes that
            do not divide, are refused here.

            Raises:
                ZephonError: a trainer calls, and the data cannot be read as configured.
            """
            check_ahead(TrainerView.of_callers())
            return BaseDataLoader.Config.to_dict(self)

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
        view = self._view = TrainerView.of_callers()
        self._config = config
        self._validating = config.infinite is not None or view.validating
        vision = VisionForm.of(config.vision, tokenizer)
        if vision is not None:
            required = dp_world_size > 1 and config.to_recipe().shows_images
            vision = replace(vision, validating=self._validating, required=required)
        self._form = replace(choose_form(sizes), vision=vision)
        self._vision = vision_settings(config.vision, tokenizer, view.model)
        self.progress = Progress()
        self._started = False
        self._to_skip = [] if self._validating else config.ranges_to_skip()
        for name in () if self._validating else ("ledger", "flush_index"):
            if path := getattr(config, name):
                on_all_ranks(partial(check_writable, f"dataloader.{name}", path))
        check_allowed(config.allow_changes, None, "dataloader.allow_changes")
        batch = view.global_batch(dp_world_size)
        if global_batch_size is not None:
            batch = GlobalBatch(global_batch_size, True, "global_batch_size", global_batch_size)
        folder = tokenizer_folder(tokenizer)
        if self._validating:
            self._topology, self._pipeline = self._evaluation(config, dp_world_size, dp_rank, folder)
            check_same_data([self._pipeline.fingerprint()])
            return
        recipe = config.to_recipe()
        if (folder_left_out := state_left_out(view)) is not None:
            _log.warning(
                "--checkpoint.exclude_from_loading leaves out the state of the data in %s: they begin at their start.",
                folder_left_out,
            )
        if recipe.canonical_replicas == "auto" and (lanes := saved_lanes(view)):
            recipe = recipe.replace(canonical_replicas=lanes)
        self._topology = check_topology(recipe, batch, dp_world_size=dp_world_size, dp_rank=dp_rank)
        check_tokenizer(
            folder,
            model_vocab_size=view.model_vocab_size,
            special={name: getattr(tokenizer, name, None) for name in ("bos_id", "eos_id")},
            remedy="Use the tokenizer that belongs to the model.",
        )
        if batch is not None and not batch.fixed:
            _log.warning(
                "%s is not set, so the global batch (%d sequences here) changes with the number of ranks; the order of "
                "the data does not.",
                batch.key,
                batch.records,
            )
        # Over all ranks: peers of a data-parallel rank call it equally often.
        agreed = partial(any_rank, device=device_type) if is_distributed() else bool
        folders = {"ledger": config.ledger, "flush_index": config.flush_index}
        self._pipeline = self._pipeline_of(recipe, self._topology, folder, combine_flag=agreed, **folders)
        # Open training and validation data now, so that errors show before the first step.
        pipelines = [self._pipeline]
        validator = getattr(view.config, "validator", None)
        validation = getattr(validator, "dataloader", None)
        if getattr(validator, "enable", False) and isinstance(validation, ZephonConfig):
            pipelines.append(self._evaluation(validation, dp_world_size, dp_rank, folder)[1])
        check_same_data([pipeline.fingerprint() for pipeline in pipelines])
        on_first_rank(lambda: compact_index(config.flush_index, self._pipeline.compiled))
        if begins(view):
            self._check_ledger()
        global _training
        _training = weakref.ref(self)

    def _pipeline_of(self, recipe: DataRecipe, topology: Topology, tokenizer: str, **options: Any) -> Pipeline:
        sizes = {"records": self._form.microbatch_size, "seq_len": self._form.seq_len, "ranks": topology.dp_degree}
        check_images(self._config.vision, self._vision, recipe, **sizes)
        return Pipeline.from_recipe(
            recipe,
            tokenizer=tokenizer,
            seq_len=self._form.seq_len,
            microbatch_size=self._form.microbatch_size,
            dp_degree=topology.dp_degree,
            dp_group_id=topology.dp_group_id,
            global_batch=topology.global_batch,
            canonical_replicas=topology.lanes,
            vision=self._vision,
            **options,
        )

    def _evaluation(
        self, config: ZephonConfig, dp_world_size: int, dp_rank: int, tokenizer: str
    ) -> tuple[Topology, Pipeline]:
        """The data of a validator, whose steps are the records that all ranks take at once."""
        records = self._form.microbatch_size * self._view.pipeline_microbatches * dp_world_size
        bounded = self._view.bounded_validation if config.infinite is None else config.infinite
        recipe = evaluation_recipe(config.to_recipe(), repeat=bounded)
        topology = Topology(records, dp_world_size, dp_rank, records)
        return topology, self._pipeline_of(recipe, topology, tokenizer, drop_last=False)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        if not self._started:
            self._skip()
        self._started = True
        batches, progress, began = iter(self._pipeline), self.progress, time.perf_counter()
        try:
            for batch in batches:
                shaped = self._form.shape(batch)
                progress.add(batch, time.perf_counter() - began)
                yield shaped
                began = time.perf_counter()
        finally:
            # A validator drops the iterator after its steps; this ends the threads of the pipeline.
            self._pipeline.close()

    def _skip(self) -> None:
        """Leave out the steps of skip_steps, unless the checkpoint has left them out already."""
        skipped, batch = self._pipeline.skipped, self._topology.global_batch
        for begin, end in skipped:
            named = batch and any(first * batch <= begin and end <= last * batch for first, last in self._to_skip)
            if end > self.cursor and not named:
                _log.warning(
                    "the checkpoint leaves out the records %d to %d of the run, which skip_steps does not name.",
                    begin,
                    end - 1,
                )
        for first, last in self._to_skip:
            if batch is None:
                raise PipelineError("dataloader.skip_steps needs the global batch; pass global_batch_size to build().")
            if any(begin <= first * batch and last * batch <= end for begin, end in skipped):
                continue
            if first * batch < self.cursor:
                raise PipelineError(
                    f"dataloader.skip_steps holds {first + 1}-{last}; expected steps after {self.cursor // batch}, "
                    "whose data are used already. Load an earlier checkpoint (--checkpoint.load_step), or "
                    "name later steps."
                )
            _log.warning("the data of the steps %d to %d are left out (skip_steps)", first + 1, last)
            self._pipeline.skip(first, last)

    def state_dict(self) -> dict[str, Any]:
        """One key per owned lane and one for the run; see `torchtitan_zephon.checkpointing`.

        Raises:
            CheckpointError: before a load, the checkpoint has no state that can be loaded.
        """
        ahead = None if self._started else look_ahead(self._view, self._topology.lanes)
        if ahead is None:
            if self._pipeline.awaits_state:
                return blank_keys(self._topology, 7)
            return to_keys(self._pipeline.checkpoint(), self._topology.global_batch, self._tokens_of_job())
        if ahead.absent and self._config.start_afresh:
            _log.warning("the checkpoint has no state of this loader; start_afresh begins the data at their start.")
            return {}
        if ahead.refusal:
            raise CheckpointError(ahead.refusal)
        # Before a load, only names and shapes matter, and the shapes are those of the run that saved.
        return blank_keys(self._topology, ahead.numbers)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the checkpoint, on any number of ranks.

        Raises:
            CheckpointError: the data would differ; one line per difference.
        """
        if not state_dict:
            self._check_ledger()
            return
        state, before, tokens = from_keys(state_dict)
        self._pipeline.restore(state, allow_changes=self._config.allow_changes, remedy="--dataloader.allow_changes")
        self._check_ledger(RunState.from_dict(state).data)
        if self._topology.dp_group_id == 0:  # metrics sum over ranks
            self.progress.tokens = np.array([int(tokens.get(name, 0)) for name in self.mixture()], dtype=np.int64)
        now = self._topology.global_batch
        if before and now and before != now:
            _log.warning(
                "the checkpoint is of a run with %d sequences per step, this one has %d; the data go on at record %d.",
                before,
                now,
                self.cursor,
            )

    def _check_ledger(self, after: str = "") -> None:
        """Refuse the ledger of a run with other data, before the first step; `after` is the data of a loaded state."""
        folder = None if self._validating else self._config.ledger
        if folder:
            on_all_ranks(lambda: check_ledger("dataloader.ledger", folder, self._pipeline.compiled, after))

    def _tokens_of_job(self) -> dict[str, int]:
        """Tokens used since the start of the run, by source, over all ranks. Collective once batches are taken."""
        names = list(self.mixture())
        mine = self._topology.dp_group_id, np.broadcast_to(self.progress.tokens, len(names)).tolist()
        groups = dict(gather(mine) if self._started else [mine])  # peers count the same tokens
        return dict(zip(names, map(sum, zip(*groups.values(), strict=True)), strict=True))

    def close(self) -> None:
        """End the threads of the pipeline."""
        self._pipeline.close()

    def mixture(self) -> dict[str, Mixture]:
        """Target and achieved token shares by source, of this rank since it started."""
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
        """Records that all ranks have used since the start of the run."""
        return self._pipeline.cursor


def training_loader() -> ZephonDataLoader | None:
    """The training loader of this process, or None."""
    return _training() if _training is not None else None
