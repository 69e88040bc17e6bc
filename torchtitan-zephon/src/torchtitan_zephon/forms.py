"""The forms of batches that TorchTitan accepts.

rows
    TorchTitan 0.3: `({"input": int64[B, S], "positions": int64[B, S]}, labels int64[B, S])`.
flat
    TorchTitan's main branch: the same as int64[B * S]. Builds that pass num_tokens_per_microbatch also get
    "padding_mask" (bool[B * S], True at padding) and "num_valid_tokens" (int).

Models that see images also get "grid_thw" int64[images, 3] and "pixel_values" float32, as rows [images, most patches,
values] filled up with zeros, flat [patches, values]; both are None where a batch has no image. "special_tokens" are
their ids by name, and "mrope_positions", for models that take them, int64[B, S, 3] or [B * S, 3].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtitan_zephon.vision import VisionForm
from zephon import DataError, PipelineError, SampleBatch

try:
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.tools import filesystem
    from torchtitan.tools.utils import device_type

    try:
        from torchtitan.components.data.loader import BaseDataLoader
    except ImportError:
        from torchtitan.components.dataloader import BaseDataLoader
    supported = hasattr(BaseDataLoader, "Config")
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("torchtitan."):
        raise  # torchtitan itself, or what it needs, is not installed
    supported = False
except ImportError:
    supported = False

if not supported:
    from importlib.metadata import version

    raise ImportError(
        f"torchtitan is {version('torchtitan')}, whose data loaders have no Config; expected 0.3 or its main branch "
        "since then. Install one: pip install 'torchtitan>=0.3'."
    )

__all__ = ["IGNORE_INDEX", "BaseDataLoader", "Form", "choose_form", "device_type", "filesystem"]


@dataclass(frozen=True)
class Form:
    """The form of batches.

    Attributes:
        seq_len: S, tokens of a record that the model sees.
        microbatch_size: B, records per batch.
        flat: one sequence per batch instead of rows.
        counts: whether inputs include the padding mask and the number of valid tokens.
        vision: what inputs include for models that see images; None for others.
    """

    seq_len: int
    microbatch_size: int
    flat: bool = False
    counts: bool = False
    vision: VisionForm | None = None

    def shape(self, batch: SampleBatch) -> tuple[dict[str, Any], Any]:
        """Inputs and labels; labels are IGNORE_INDEX where no loss is computed.

        A document does not predict the next one, as in TorchTitan's own loaders.
        """
        fields = batch.to_training(
            ignore_index=IGNORE_INDEX,
            boundary_mask_loss=True,
            rename_fields={"input_ids": "input", "position_ids": "positions"},
            return_padding_mask=self.counts or self.vision is not None,
            return_num_valid_tokens=self.counts,
            flatten=self.flat,
            vision="packed" if self.flat else "padded",
            return_mrope_positions=self.vision is not None and self.vision.mrope,
        )
        if batch.block.positions is not None:
            _restart(fields["positions"].view(len(batch), -1), batch.block)
        labels = fields.pop("labels")
        if self.vision is not None:
            mask = fields["padding_mask"] if self.counts else fields.pop("padding_mask")
            ids = self.vision.special_tokens
            shown = sum(fields["input"] == ids[f"{name}_id"] for name in ("image", "vision_start", "vision_end"))
            fields["input"][mask & (shown == 0)] = ids["pad_id"]  # the image of always_image is in the padding
            fields = _with_images(fields, self.vision)
        return fields, labels


def _restart(positions: Any, block: Any) -> None:
    """Count positions that come with the data from 0 at every part of a document: where they are not 0, TorchTitan's
    masks see no new document."""
    record, place = (torch.from_numpy(np.ascontiguousarray(each)).long() for each in block.starts())
    record, place = record[place < positions.shape[1]], place[place < positions.shape[1]]
    at = record * positions.shape[1] + place
    counts = torch.diff(at, append=torch.tensor([positions.numel()]))
    positions -= torch.repeat_interleave(positions[record, place], counts).view_as(positions)


class _Ids(dict[str, int]):
    """Ids by name. TorchTitan's validator asks everything of a batch to move to the device."""

    def to(self, *_: Any, **__: Any) -> _Ids:
        return self


def _with_images(fields: dict[str, Any], vision: VisionForm) -> dict[str, Any]:
    """Inputs as TorchTitan's multimodal collator names them."""
    mrope = fields.pop("mrope_positions", None)
    pixels, grids = fields.pop("pixel_values", None), fields.pop("grid_thw", None)
    shown = grids is not None and len(grids) > 0
    if vision.required and not shown:
        raise DataError(
            "a batch has no image, so its rank would not run the vision encoder, for which the other ranks would wait; "
            "expected an image in every batch. Set always_image = true in the recipe."
        )
    fields |= {"pixel_values": pixels if shown else None, "grid_thw": grids if shown else None}
    fields |= {"pixel_values_videos": None, "grid_thw_videos": None, "special_tokens": _Ids(vision.special_tokens)}
    if shown and mrope is not None:
        fields["mrope_positions"] = mrope.movedim(0, -1).contiguous()
    # What is absent is None to the models, and the validator cannot move None.
    return {name: value for name, value in fields.items() if value is not None or not vision.validating}


def choose_form(sizes: Mapping[str, Any]) -> Form:
    """The form for the sizes that the trainer passes to its data loader.

    Args:
        sizes: seq_len and local_batch_size (rows), or max_context_length and num_tokens_per_batch or
            num_tokens_per_microbatch (flat); other keys are ignored.

    Raises:
        PipelineError: the sizes fit neither form, or a flat batch is not a whole number of records.
    """
    if "seq_len" in sizes and "local_batch_size" in sizes:
        return Form(int(sizes["seq_len"]), int(sizes["local_batch_size"]))
    name = next((name for name in ("num_tokens_per_microbatch", "num_tokens_per_batch") if name in sizes), None)
    if "max_context_length" not in sizes or name is None:
        raise PipelineError(
            f"the trainer builds its data loader with {sorted(sizes)}; expected seq_len and local_batch_size, or "
            "max_context_length and num_tokens_per_batch. Use a supported version of TorchTitan."
        )
    length, tokens = int(sizes["max_context_length"]), int(sizes[name])
    if tokens < length or tokens % length:
        raise PipelineError(
            f"{name} is {tokens}; expected a multiple of max_context_length {length}. Set it to "
            f"{max(1, tokens // length) * length}."
        )
    return Form(length, tokens // length, flat=True, counts=name == "num_tokens_per_microbatch")
