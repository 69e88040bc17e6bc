"""What TorchTitan's trainer knows and does not pass on to its data loader.

A data loader is built with its share of the batch (`seq_len`, `local_batch_size`, ...). The global batch, the model's
vocabulary and the checkpoint that is about to be loaded stand beside it in the trainer's config, which nothing that is
passed leads to. It is found where it is in use: the trainer (or its validator) that builds the loader is a caller of
this code. A caller of another kind may pass `global_batch_size` when it builds the loader.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from zephon import TopologyError

__all__ = ["GlobalBatch", "TrainerView"]


@dataclass(frozen=True)
class GlobalBatch:
    """Records per optimizer step.

    Attributes:
        records: how many.
        fixed: whether they are the same on any number of ranks.
        key: the trainer's field that fixes them.
        value: what that field would have to say to stay at `records`.
    """

    records: int
    fixed: bool
    key: str
    value: int


@dataclass(frozen=True)
class TrainerView:
    """The trainer's config as seen from its data loader.

    Attributes:
        config: `Trainer.Config` or what takes its place; None where no trainer is among the callers.
        validating: whether a validator builds the loader.
    """

    config: Any = None
    validating: bool = False

    @staticmethod
    def of_callers() -> TrainerView:
        """Look for the trainer among the callers."""
        validating = False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            local = frame.f_locals
            # A validator keeps the config that it builds loaders from under this name.
            validating |= hasattr(local.get("self"), "dl_config")
            for candidate in (local.get("config"), getattr(local.get("self"), "config", None)):
                if hasattr(candidate, "training") and hasattr(candidate, "dataloader"):
                    return TrainerView(candidate, validating)
            frame = frame.f_back
        return TrainerView(None, validating)

    def global_batch(self, dp_world_size: int) -> GlobalBatch | None:
        """Records per optimizer step, or None without a trainer.

        Raises:
            TopologyError: the trainer counts tokens, and they are no whole number of records.
        """
        training = getattr(self.config, "training", None)
        if training is None:
            return None
        if hasattr(training, "num_tokens_per_train_step"):
            length, tokens = training.max_context_length, training.num_tokens_per_train_step
            fixed = tokens >= 0
            if not fixed:
                parallel = getattr(self.config, "parallelism", None)
                pipeline = getattr(parallel, "pipeline_parallel_degree", 1) > 1
                microbatches = getattr(parallel, "num_pp_microbatches", 1) if pipeline else 1
                tokens = training.num_tokens_per_microbatch_per_dp_rank * microbatches * dp_world_size
            if tokens < length or tokens % length:
                raise TopologyError(
                    f"training.num_tokens_per_train_step is {tokens}, which is no multiple of max_context_length "
                    f"{length}, the length of a record; set it to {max(1, tokens // length) * length}."
                )
            return GlobalBatch(tokens // length, fixed, "training.num_tokens_per_train_step", tokens)
        if not hasattr(training, "global_batch_size"):
            return None
        records = training.global_batch_size
        fixed = records >= 0
        if not fixed:
            records = training.local_batch_size * dp_world_size
        return GlobalBatch(records, fixed, "training.global_batch_size", records)

    @property
    def pipeline_microbatches(self) -> int:
        """Microbatches that a step of a validator takes at once: several with pipeline parallelism, else one."""
        parallelism: Any = getattr(self.config, "parallelism", None)
        training = getattr(self.config, "training", None)
        if getattr(parallelism, "pipeline_parallel_degree", 1) <= 1:
            return 1
        if hasattr(parallelism, "num_pp_microbatches"):
            return int(parallelism.num_pp_microbatches)
        size = getattr(parallelism, "pipeline_parallel_microbatch_size", 0)
        return max(1, training.local_batch_size // size) if training is not None and size else 1

    @property
    def model_vocab_size(self) -> int | None:
        """Rows of the model's embedding, or None where the model does not say."""
        model = getattr(getattr(self.config, "model_spec", None), "model", None)
        size = getattr(model, "vocab_size", None)
        return size if isinstance(size, int) else None
