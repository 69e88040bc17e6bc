"""Images: what TorchTitan's configs say of them, in terms of Zephon.

`dataloader.vision` is the config of TorchTitan's own multimodal loader, whose place `ZephonDataLoader` takes
(`MMDataLoader.Config`, on the main branch `GrainDataLoader.Config`), or the `VisionSettings` of Zephon. The tokens are
those of the trainer's tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Literal

from zephon import DataRecipe, PipelineError
from zephon.loader import VisionSettings

_TOKENS = ("image", "video", "vision_start", "vision_end", "pad")
_BUDGETS: dict[str, Literal["pixels", "patches"]] = {
    "resize_to_pixel_budget": "pixels",
    "resize_to_patch_budget": "patches",
}
_OF_ENCODER = {
    "patch_size": ("patch_size",),
    "temporal_patch_size": ("temporal_patch_size", "patch_temporal"),
    "merge_size": ("spatial_merge_size", "downsample_factor", "merge_kernel_size"),
}
"""Settings, and how the vision encoders of TorchTitan's models call them."""


@dataclass(frozen=True)
class VisionForm:
    """What a batch with images has besides text.

    Attributes:
        special_tokens: `image_id`, `video_id`, `vision_start_id`, `vision_end_id`, `pad_id`.
        mrope: whether the model takes positions in three dimensions.
        validating: whether a validator takes the batches.
        required: whether every batch must have an image, as ranks that run no vision encoder leave the others waiting.
    """

    special_tokens: dict[str, int]
    mrope: bool = False
    validating: bool = False
    required: bool = False

    @staticmethod
    def of(vision: Any, tokenizer: Any) -> VisionForm | None:
        """The form for a config; None where it has no images."""
        if vision is None:
            return None
        stock = _stock(vision)
        return VisionForm(
            {f"{name}_id": int(_of_tokenizer(tokenizer, f"{name}_id")) for name in _TOKENS},
            bool(getattr(stock, "build_mrope_positions", False)),
        )


def check_images(
    vision: Any, settings: VisionSettings | None, recipe: DataRecipe, *, records: int, seq_len: int, ranks: int
) -> None:
    """Refuse a recipe whose batches may not have the images that the trainer takes.

    TorchTitan's own loader drops samples beyond `max_images_per_batch`, by what else is in the batch of a rank.

    Args:
        vision: `dataloader.vision`.
        records: of a batch.
        ranks: data-parallel ranks.

    Raises:
        PipelineError: a batch may have more images than the trainer's limit, or none while those of other ranks have.
    """
    if settings is None or not recipe.shows_images:
        return
    if ranks > 1 and not recipe.always_image and (texts := recipe.sources_of_text):
        raise PipelineError(
            f"always_image is false; expected true on {ranks} ranks, as {', '.join(texts)} has no images: a rank whose "
            "batch is of text alone runs no vision encoder, and the others wait for it. Set always_image = true in the "
            "recipe."
        )
    most = getattr(_stock(vision), "max_images_per_batch", None)
    tokens = settings.fewest_patches // settings.merge_size**2
    tokens += sum(map(bool, (settings.vision_start_token, settings.vision_end_token)))
    if most is not None and records * min(recipe.max_images or seq_len, seq_len // tokens + 1) > most:
        raise PipelineError(
            f"max_images is {recipe.max_images}; expected at most {max(1, most // records)}, as a batch has {records} "
            f"records and dataloader.vision.max_images_per_batch is {most}. Set max_images in the recipe, the most "
            "images of a record, or raise max_images_per_batch."
        )


def vision_settings(vision: Any, tokenizer: Any, model: Any = None) -> VisionSettings | None:
    """How the model sees images; None where the config has none.

    Args:
        vision: `dataloader.vision`.
        tokenizer: the trainer's tokenizer or its config.
        model: the config of the model, as far as is known, whose vision encoder must agree.

    Raises:
        PipelineError: a setting is invalid or not that of the model, or the tokenizer is not multimodal.
    """
    if vision is None:
        return None
    tokens = {f"{name}_token": _of_tokenizer(tokenizer, f"{name}_token") for name in _TOKENS}
    tokens = {name: tokens[name] for name in ("image_token", "vision_start_token", "vision_end_token")}
    settings = replace(vision, **tokens) if isinstance(vision, VisionSettings) else _settings_of(_stock(vision), tokens)
    encoder = getattr(model, "vision_encoder", None)
    for name, names in _OF_ENCODER.items():
        value = next((getattr(encoder, each) for each in names if hasattr(encoder, each)), None)
        value = value[0] if isinstance(value, list | tuple) else value
        if value is not None and value != getattr(settings, name):
            raise PipelineError(
                f"dataloader.vision {name} is {getattr(settings, name)}; expected {value}, that of the model's vision "
                "encoder."
            )
    return settings


def _stock(vision: Any) -> Any:
    """The settings of TorchTitan's own loader, which its main branch has in two places: processor and collator."""
    collator, dataset = getattr(vision, "collator", None), getattr(vision, "dataset", None)
    while dataset is not None and not hasattr(dataset, "processor"):
        dataset = getattr(dataset, "dataset", None)  # of a config that packs
    if collator is None or dataset is None:
        return vision
    return SimpleNamespace(
        **{each.name: getattr(part, each.name) for part in (dataset.processor, collator) for each in fields(part)}
    )


def _settings_of(stock: Any, tokens: dict[str, Any]) -> VisionSettings:
    resize = getattr(stock.resize_fn, "__name__", repr(stock.resize_fn))
    if resize not in _BUDGETS:
        raise PipelineError(
            f"dataloader.vision resize_fn is {resize}; expected {' or '.join(_BUDGETS)}. Pass VisionSettings in place "
            "of the config of TorchTitan's loader."
        )
    return VisionSettings(
        patch_size=stock.patch_size,
        merge_size=stock.spatial_merge_size,
        temporal_patch_size=stock.temporal_patch_size,
        patch_order=stock.patch_order,
        budget=_BUDGETS[resize],
        min_pixels=stock.min_pixels,
        max_pixels=stock.max_pixels,
        max_patches=stock.max_patches,
        max_patches_per_side=stock.max_patches_per_side,
        mean=tuple(stock.image_mean),
        std=tuple(stock.image_std),
        **tokens,
    )


def _of_tokenizer(tokenizer: Any, name: str) -> Any:
    if not hasattr(tokenizer, name):
        raise PipelineError(
            f"the trainer's tokenizer is a {type(tokenizer).__qualname__} without {name}; expected a "
            "MultiModalTokenizer, as the model's own config has it."
        )
    return getattr(tokenizer, name)
