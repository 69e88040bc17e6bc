"""Batches of TorchTitan's main branch: `({"input": int64[T], "positions": int64[T]}, labels int64[T])`.

T is a whole number of records of max_context_length tokens. Builds of the main branch that speak of
num_tokens_per_microbatch get the padding mask and the number of valid tokens as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zephon import SampleBatch

__all__ = ["shape"]


def shape(ignore_index: int, *, counts: bool) -> Callable[[SampleBatch], tuple[dict[str, Any], Any]]:
    """How a batch is given out; labels that do not count are `ignore_index`.

    Args:
        counts: with "padding_mask" (bool[T], True where the input is padding) and "num_valid_tokens" (int).
    """

    def shaped(batch: SampleBatch) -> tuple[dict[str, Any], Any]:
        fields = batch.to_training(
            ignore_index=ignore_index,
            rename_fields={"input_ids": "input", "position_ids": "positions"},
            return_padding_mask=counts,
            return_num_valid_tokens=counts,
            flatten=True,
        )
        labels = fields.pop("labels")
        return fields, labels

    return shaped
