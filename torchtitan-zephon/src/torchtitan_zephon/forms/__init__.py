"""What the installed TorchTitan wants of a data loader, and the forms of batches known.

rows
    TorchTitan 0.3: microbatches of rows.
flat
    TorchTitan's main branch: one flat sequence of tokens per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.components.loss import IGNORE_INDEX

from zephon import PipelineError, SampleBatch

from . import flat, rows

try:
    from torchtitan.components.data.loader import BaseDataLoader
except ImportError:
    from torchtitan.components.dataloader import BaseDataLoader

__all__ = ["IGNORE_INDEX", "BaseDataLoader", "Form", "choose_form"]


@dataclass(frozen=True)
class Form:
    """How batches are to look.

    Attributes:
        seq_len: tokens of a record that the model sees.
        microbatch_size: records per batch.
        shape: a batch as the trainer takes it.
    """

    seq_len: int
    microbatch_size: int
    shape: Callable[[SampleBatch], tuple[dict[str, Any], Any]]


def choose_form(given: Mapping[str, Any]) -> Form:
    """The form that goes with the sizes that the trainer builds its data loader with.

    Args:
        given: seq_len and local_batch_size (rows), or max_context_length and num_tokens_per_batch or
            num_tokens_per_microbatch (flat); other keys are left alone.

    Raises:
        PipelineError: the sizes are of neither form, or a flat batch is no whole number of records.
    """
    if "seq_len" in given and "local_batch_size" in given:
        return Form(int(given["seq_len"]), int(given["local_batch_size"]), rows.shape(IGNORE_INDEX))
    name = next((name for name in ("num_tokens_per_microbatch", "num_tokens_per_batch") if name in given), None)
    if "max_context_length" in given and name is not None:
        length, tokens = int(given["max_context_length"]), int(given[name])
        if tokens < length or tokens % length:
            raise PipelineError(
                f"a microbatch of {tokens} tokens per data-parallel rank is no multiple of max_context_length "
                f"{length}, the length of a record; set it to {max(1, tokens // length) * length}."
            )
        return Form(length, tokens // length, flat.shape(IGNORE_INDEX, counts=name == "num_tokens_per_microbatch"))
    raise PipelineError(
        f"the trainer builds its data loader with {sorted(given)}; this version knows seq_len with local_batch_size, "
        "and max_context_length with num_tokens_per_batch or num_tokens_per_microbatch."
    )
