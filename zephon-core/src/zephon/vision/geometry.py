"""How a model cuts an image into patches and tokens: a pure function of the image's size and the model's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from zephon.config.keys import Limit, Positive, Prose, check_keys, key
from zephon.errors import PipelineError
from zephon.vision.headers import BadImage

MAX_ASPECT = 200
"""Most an image may be longer than wide, or wider than long, under a pixel budget."""
Channels = Annotated[tuple[float, float, float], Meta(title="three numbers, one for each of red, green and blue")]
Token = Annotated[str, Meta(title='a special token, or "" for none')]


class Grid(NamedTuple):
    """The patches of an image, and the pixels that they are cut from.

    `height` and `width` are patches; the picture is resized to `pixels_high` x `pixels_wide`, and the rest of the grid
    to the right and below is black.
    """

    height: int
    width: int
    pixels_high: int
    pixels_wide: int

    @property
    def patches(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """How a model sees images: its vision encoder, and its tokens. The model owns all of them."""

    patch_size: Limit = key(16, "Pixels of each side of a patch.")
    merge_size: Limit = key(2, "Patches of each side of the square that becomes one token.")
    temporal_patch_size: Limit = key(2, "Frames of a patch; an image is repeated so many times.")
    patch_order: Literal["block", "raster"] = key(
        "block", '"block": patches that become one token follow each other; "raster": row by row.'
    )
    budget: Literal["pixels", "patches"] = key(
        "pixels",
        '"pixels": an image is scaled, up or down, to between `min_pixels` and `max_pixels` (Qwen). "patches": it is '
        "only scaled down, to `max_patches` and `max_patches_per_side`, and filled up with black (Kimi).",
    )
    min_pixels: Positive = key(65_536, "Fewest pixels of an image.")
    max_pixels: Positive = key(16_777_216, "Most pixels of an image.")
    max_patches: Positive = key(4096, "Most patches of an image.")
    max_patches_per_side: Positive = key(512, "Most patches of each side of an image.")
    mean: Channels = key((0.5, 0.5, 0.5), "Subtracted from values from 0 to 1.")
    std: Channels = key((0.5, 0.5, 0.5), "What the difference is divided by.")
    image_token: Prose = key("<|image_pad|>", "The token that is repeated for each token of an image.")
    vision_start_token: Token = key("<|vision_start|>", 'The token before an image; "" is no token.')
    vision_end_token: Token = key("<|vision_end|>", 'The token after an image; "" is no token.')

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, "vision ")
        if self.min_pixels > self.max_pixels:
            raise PipelineError(
                f"vision min_pixels is {self.min_pixels}; expected at most max_pixels, {self.max_pixels}."
            )

    @property
    def patch_dim(self) -> int:
        """Values of a patch: 3 channels x frames x rows x columns."""
        return self.temporal_patch_size * self.pixels_per_patch

    @property
    def pixels_per_patch(self) -> int:
        """Bytes of a patch of one frame: 3 channels x rows x columns."""
        return 3 * self.patch_size**2

    @property
    def fewest_patches(self) -> int:
        """No image has fewer patches. One that is scaled down may lose up to half of each side to rounding."""
        fewest = min(self.min_pixels, self.max_pixels // 4) // self.patch_size**2 if self.budget == "pixels" else 0
        return max(self.merge_size**2, fewest)

    def grid(self, width: int, height: int) -> Grid:
        """The patches of an image of that size; `BadImage` where the model cannot see it."""
        high, wide, pad_high, pad_wide = (
            self._within_pixels(width, height) if self.budget == "pixels" else self._within_patches(width, height)
        )
        return Grid((high + pad_high) // self.patch_size, (wide + pad_wide) // self.patch_size, high, wide)

    def tokens(self, grid: Grid) -> int:
        """Tokens of an image."""
        return grid.patches // self.merge_size**2

    def _within_pixels(self, width: int, height: int) -> tuple[int, int, int, int]:
        """As Qwen's `smart_resize`, Python's rounding to even included; images below one token are scaled up first."""
        factor = self.patch_size * self.merge_size
        if height < factor or width < factor:
            scale = max(factor / width, factor / height)
            width, height = int(width * scale), int(height * scale)
        if max(height, width) / min(height, width) > MAX_ASPECT:
            raise BadImage(f"the image is {width} x {height}; expected an aspect ratio of at most {MAX_ASPECT}")
        high = max(round(height / factor) * factor, factor)
        wide = max(round(width / factor) * factor, factor)
        if high * wide > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            high = max(math.floor(height / beta / factor) * factor, factor)
            wide = max(math.floor(width / beta / factor) * factor, factor)
        elif high * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            high = math.ceil(height * beta / factor) * factor
            wide = math.ceil(width * beta / factor) * factor
        return high, wide, 0, 0

    def _within_patches(self, width: int, height: int) -> tuple[int, int, int, int]:
        """As Kimi's navit resize."""
        most = self.max_patches_per_side * self.patch_size
        patches = max(1.0, height // self.patch_size) * max(1.0, width // self.patch_size)
        scale = min(1.0, math.sqrt(self.max_patches / patches), most / height, most / width)
        high, wide = (min(max(1, int(side * scale)), most) for side in (height, width))
        factor = self.patch_size * self.merge_size
        return high, wide, -high % factor, -wide % factor
