"""Batches with images for Megatron-Bridge's vlm step.

A microbatch becomes one packed sequence ("thd"): `input_ids`, `labels`, `position_ids` int64[1, T] and `loss_mask`
float32[1, T], T being records times sequence length; `cu_seqlens_q` and `cu_seqlens_kv` int32[documents + 1] with
`max_seqlen_q` and `max_seqlen_kv` int32; and `visual_inputs`, or None where it has no image. It imports nothing of
Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zephon import SampleBatch


@dataclass
class VisualInputs:
    """Images as the processors of transformers give them.

    Attributes:
        pixel_values: float32[patches, values].
        image_grid_thw: int64[images, 3].
    """

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """Arguments of the model's forward."""
        return dict(vars(self))


def vlm_batch(batch: SampleBatch, *, mrope: bool = False, fill: int = 0) -> dict[str, Any]:
    """A batch as Megatron-Bridge's vlm step takes it; no document predicts the next one.

    Args:
        mrope: positions in three dimensions, int64[3, 1, T], for models that do not make them of the grids.
        fill: the label where no loss is computed.
    """
    fields = batch.to_training(
        ignore_index=fill,
        boundary_mask_loss=True,
        return_loss_mask=True,
        return_cu_seqlens=True,
        return_mrope_positions=mrope,
        flatten=True,
    )
    if mrope:
        fields["position_ids"] = fields.pop("mrope_positions")
    pixels, grids = fields.pop("pixel_values", None), fields.pop("grid_thw", None)
    bounds, longest = fields.pop("cu_seqlens"), torch.tensor(fields.pop("max_seqlen"), dtype=torch.int32)
    out = {name: value.unsqueeze(-2) for name, value in fields.items()}
    for side in ("q", "kv"):
        out |= {f"cu_seqlens_{side}": bounds, f"max_seqlen_{side}": longest}
    shown = grids is not None and len(grids) > 0
    return {**out, "attention_mask": None, "visual_inputs": VisualInputs(pixels, grids) if shown else None}
