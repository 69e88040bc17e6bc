"""`ZephonDataLoader`: TorchTitan's data loader, made of a Zephon pipeline."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zephon import CheckpointError, Pipeline, SampleBatch
from zephon.pipeline import Mixture
from zephon.sources import source_of

from .checkpointing import from_keys, refusal, to_keys
from .checks import check_tokenizer, check_topology, tokenizer_folder
from .config import ZephonConfig
from .forms import BaseDataLoader, choose_form
from .trainer_view import GlobalBatch, TrainerView

__all__ = ["Progress", "ZephonDataLoader", "training_loader"]

_training: weakref.ref[ZephonDataLoader] | None = None


@dataclass(slots=True)
class Progress:
    """What this rank's loader has done, since it was built.

    Attributes:
        batches: microbatches handed out.
        wait: seconds that the trainer waited for them, the making of tensors included.
        places: tokens that fit into them.
        padding: those of them that are no real tokens.
    """

    batches: int = 0
    wait: float = 0.0
    places: int = 0
    padding: int = 0


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
            _check_validation(view, batch, dp_world_size, dp_rank)
        self._pipeline = Pipeline.from_recipe(
            recipe,
            tokenizer=tokenizer_folder(tokenizer),
            seq_len=self._form.seq_len,
            microbatch_size=self._form.microbatch_size,
            dp_degree=dp_world_size,
            dp_group_id=dp_rank,
            global_batch=self._topology.global_batch,
            drop_last=not self._validating,
            canonical_replicas=self._topology.lanes,
            combine_flag=_any_rank() if source_of(recipe).finite else None,
            ledger=None if self._validating else config.ledger,
            flush_index=None if self._validating else config.flush_index,
        )
        self.progress = Progress()
        self._started = False
        self._pipeline.explain()  # opens the data, so that what is wrong with it shows now
        if not self._validating:
            global _training
            _training = weakref.ref(self)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        self._started = True
        batches, progress = iter(self._pipeline), self.progress
        try:
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    return
                shaped = self._form.shape(batch)
                progress.wait += time.perf_counter() - began
                self._count(batch)
                yield shaped
        finally:
            # Whoever drops the iterator, as a validator does after its steps, has no more use for its threads.
            self._pipeline.close()

    def _count(self, batch: SampleBatch) -> None:
        progress = self.progress
        places = len(batch) * (self._form.seq_len + 1)
        progress.batches += 1
        progress.places += places
        progress.padding += places - int(batch.lengths.sum())

    def state_dict(self) -> dict[str, Any]:
        """One key per owned lane and one for the run; see `torchtitan_zephon.checkpointing`.

        Raises:
            CheckpointError: before a load, the checkpoint has no state that fits.
        """
        keys = to_keys(self._pipeline.checkpoint())
        if not self._started:
            refused = refusal(self._view, self._topology.lanes)
            if refused is not None:
                if self._config.start_afresh and refused.absent:
                    return {}
                raise CheckpointError(refused.text)
        return keys

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was taken, on whatever number of ranks.

        Raises:
            CheckpointError: the data would differ; one line per difference.
        """
        if not state_dict:
            return
        try:
            self._pipeline.restore(from_keys(state_dict), allow_changes=self._config.allow_changes)
        except CheckpointError as error:
            how = "\n(The command line takes names with commas: --dataloader.allow_changes seed,shuffle.)"
            raise CheckpointError(f"{error}{how * ('allow_changes' in str(error))}") from None

    def close(self) -> None:
        """End the threads behind the stream."""
        self._pipeline.close()

    def mixture(self) -> dict[str, Mixture]:
        """Target and achieved token shares by source, as made by this rank since it started."""
        return self._pipeline.mixture()

    @property
    def cursor(self) -> int:
        """Records that all ranks together have used since the start of the run."""
        state = self._pipeline.checkpoint()
        return int(state["rounds"]) * self._topology.lanes


def training_loader() -> ZephonDataLoader | None:
    """The loader of this process that trains, if there is one."""
    return _training() if _training is not None else None


def _check_validation(view: TrainerView, batch: GlobalBatch | None, dp_world_size: int, dp_rank: int) -> None:
    """Have the checks of a validation that is to come fail now, and not after the first steps."""
    validator = getattr(view.config, "validator", None)
    config = getattr(validator, "dataloader", None)
    if getattr(validator, "enable", False) and isinstance(config, ZephonConfig):
        check_topology(config.to_recipe(), batch, dp_world_size=dp_world_size, dp_rank=dp_rank, steps=False)


def _any_rank() -> Callable[[bool], bool]:
    """A function that says whether any rank calls it with True."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return bool
    from torchtitan.tools.utils import device_type

    def combine(flag: bool) -> bool:
        # Of all ranks: peers of a data-parallel rank ask as often as it does.
        value = torch.tensor(int(flag), device=device_type)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    return combine
