"""Settings of TorchTitan's trainer that it does not pass to its data loader.

Why callers' frames are inspected: TorchTitan builds a loader with its share of the batch only. The global batch, the
model's vocabulary, the validator's data and the checkpoint to load are fields of the trainer's config, which no
argument, hook or global of TorchTitan provides while the loader is built. The trainer (or its validator) is one of the
callers, so its config is read from their frames, and users set `config.training.global_batch_size` as usual. Any other
caller passes `global_batch_size` to `config.build()`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from zephon import TopologyError
from zephon.loader import is_distributed


@dataclass(frozen=True)
class GlobalBatch:
    """Records per optimizer step.

    Attributes:
        records: how many.
        fixed: whether the number is the same on any number of ranks.
        key: the trainer's field that fixes it.
        value: the value of that field for `records`.
        at_once: records that a rank takes at once; those of all ranks divide the global batch.
    """

    records: int
    fixed: bool
    key: str
    value: int
    at_once: int = 1


@dataclass(frozen=True)
class TrainerView:
    """The trainer's config, seen from its data loader.

    Attributes:
        config: `Trainer.Config` or its equivalent; None without a trainer among the callers.
        validating: whether a validator builds the loader.
        starting: whether the trainer itself asks for its config as plain data, as it does before it builds its model.
        together: whether that is TorchTitan's own trainer, and so every rank calls at the same time.
    """

    config: Any = None
    validating: bool = False
    starting: bool = False
    together: bool = False

    @staticmethod
    def of_callers() -> TrainerView:
        """Search the callers for a trainer."""
        validating, called = False, ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            local = frame.f_locals
            # A validator builds its loaders from an attribute of this name.
            validating |= hasattr(local.get("self"), "dl_config")
            for candidate in (local.get("config"), getattr(local.get("self"), "config", None)):
                if hasattr(candidate, "training") and hasattr(candidate, "dataloader"):
                    starting = called == "to_dict"
                    own = frame.f_globals["__name__"].startswith("torchtitan.") and frame.f_code.co_name == "__init__"
                    return TrainerView(candidate, validating, starting, starting and own)
            called, frame = frame.f_code.co_name, frame.f_back
        return TrainerView(None, validating)

    def global_batch(self, dp_world_size: int) -> GlobalBatch | None:
        """Records per optimizer step, or None without a trainer.

        Raises:
            TopologyError: the trainer counts tokens, and they are not a whole number of records.
        """
        training: Any = getattr(self.config, "training", None)
        if hasattr(training, "num_tokens_per_train_step"):  # main branch
            key, length = "num_tokens_per_train_step", training.max_context_length
            value = training.num_tokens_per_train_step
            pipeline = self._parallelism("pipeline_parallel_degree") > 1
            microbatches = self._parallelism("num_pp_microbatches") if pipeline else 1
            at_once = training.num_tokens_per_microbatch_per_dp_rank * microbatches
        elif hasattr(training, "global_batch_size"):
            key, length, value = "global_batch_size", 1, training.global_batch_size
            at_once = training.local_batch_size
        else:
            return None
        fixed = value >= 0
        if not fixed:
            value = at_once * dp_world_size
        if value < length or value % length:
            raise TopologyError(
                f"training.{key} is {value}; expected a multiple of {length}, the length of a record. Set it to "
                f"{max(1, value // length) * length}."
            )
        return GlobalBatch(value // length, fixed, f"training.{key}", value, max(1, at_once // length))

    @property
    def dp_degree(self) -> int:
        """Data-parallel ranks, as TorchTitan counts them from its config."""
        replicate, shard = (self._parallelism(f"data_parallel_{name}_degree") for name in ("replicate", "shard"))
        if shard > 0:
            return replicate * shard
        others = [self._parallelism(f"{name}_parallel_degree") for name in ("context", "tensor", "pipeline")]
        return max(1, (dist.get_world_size() if is_distributed() else 1) // math.prod(others))

    @property
    def bounded_validation(self) -> bool:
        """Whether the trainer validates a number of steps, not all data."""
        return getattr(getattr(self.config, "validator", None), "steps", -1) != -1

    @property
    def pipeline_microbatches(self) -> int:
        """Microbatches that a step of a validator takes: several with pipeline parallelism, else one."""
        if self._parallelism("pipeline_parallel_degree") <= 1:
            return 1
        if hasattr(self.config.parallelism, "num_pp_microbatches"):  # main branch
            return self._parallelism("num_pp_microbatches")
        return max(
            1, int(self.config.training.local_batch_size) // self._parallelism("pipeline_parallel_microbatch_size")
        )

    @property
    def model(self) -> Any:
        """The model's config, or None if unknown."""
        return getattr(getattr(self.config, "model_spec", None), "model", None)

    @property
    def model_vocab_size(self) -> int | None:
        """Rows of the model's embedding, or None if unknown."""
        size = getattr(self.model, "vocab_size", None)
        return size if isinstance(size, int) else None

    def _parallelism(self, name: str) -> int:
        return int(getattr(getattr(self.config, "parallelism", None), name, 1))
