"""Batches of TorchTitan 0.3: `({"input": int64[B, S], "positions": int64[B, S]}, labels int64[B, S])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zephon import SampleBatch

__all__ = ["shape"]


def shape(ignore_index: int) -> Callable[[SampleBatch], tuple[dict[str, Any], Any]]:
    """How a batch is given out; labels that do not count are `ignore_index`."""

    def shaped(batch: SampleBatch) -> tuple[dict[str, Any], Any]:
        fields = batch.to_training(
            ignore_index=ignore_index, rename_fields={"input_ids": "input", "position_ids": "positions"}
        )
        labels = fields.pop("labels")
        return fields, labels

    return shaped
