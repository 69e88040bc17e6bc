"""Pixels of images, as patches: decoded, turned upright, resized and cut.

torchvision decodes where it is installed, else Pillow; torch resizes, so its version is what pixels depend on.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from zephon.errors import PipelineError
from zephon.vision.geometry import Grid, VisionSettings
from zephon.vision.headers import BadImage, Header, read_header

_GREY = 127


def image_patches(data: bytes, grid: Grid, settings: VisionSettings) -> np.ndarray:
    """The patches of an image file, uint8[patches, 3 * patch_size**2], each (channel, row, column).

    Raises:
        BadImage: the file cannot be decoded, or its picture has another size than its header says.
    """
    import torch

    header = read_header(data)
    picture = _upright(_decoded(data, header), header.orientation)
    if tuple(picture.shape[1:]) != (header.height, header.width):
        high, wide = picture.shape[1:]
        raise BadImage(f"the picture is {wide} x {high} pixels, its header says {header.width} x {header.height}")
    if (header.height, header.width) != (grid.pixels_high, grid.pixels_wide):
        size = [grid.pixels_high, grid.pixels_wide]
        picture = torch.nn.functional.interpolate(picture[None], size, mode="bicubic", antialias=True)[0]
    side = settings.patch_size
    pad_high, pad_wide = grid.height * side - grid.pixels_high, grid.width * side - grid.pixels_wide
    if pad_high or pad_wide:
        picture = torch.nn.functional.pad(picture, [0, pad_wide, 0, pad_high])
    return _cut(picture.numpy(), settings)


def grey_patches(grid: Grid, settings: VisionSettings) -> np.ndarray:
    """The patches that stand for an image that cannot be decoded."""
    return np.full((grid.patches, settings.pixels_per_patch), _GREY, dtype=np.uint8)


def normalized(patches: np.ndarray, settings: VisionSettings) -> Any:
    """Patches as the model takes them: a float32 tensor [patches, patch_dim], each (channel, frame, row, column)."""
    import torch

    # Step by step as torchvision's to_dtype and normalize, so that every bit is theirs.
    values = torch.from_numpy(patches).view(len(patches), 3, 1, -1).to(torch.float32).mul_(1 / 255)
    mean, std = (torch.tensor(each, dtype=torch.float32).view(3, 1, 1) for each in (settings.mean, settings.std))
    values.sub_(mean).div_(std)
    return values.expand(-1, -1, settings.temporal_patch_size, -1).reshape(len(patches), -1)


def _cut(picture: np.ndarray, settings: VisionSettings) -> np.ndarray:
    """uint8[3, high, wide] to patches in the order of the model."""
    side = settings.patch_size
    _, high, wide = picture.shape
    if settings.patch_order == "raster":
        parts = picture.reshape(3, high // side, side, wide // side, side).transpose(1, 3, 0, 2, 4)
    else:
        merge = settings.merge_size
        shape = 3, high // side // merge, merge, side, wide // side // merge, merge, side
        parts = picture.reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(parts).reshape(-1, settings.pixels_per_patch)


def _upright(picture: Any, orientation: int) -> Any:
    """The picture [3, height, width] turned as its EXIF orientation says."""
    if orientation > 4:
        picture = picture.transpose(1, 2)
    flips = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation, [])
    return picture.flip(flips) if flips else picture


def _decoded(data: bytes, header: Header) -> Any:
    """uint8[3, height, width] as stored, a torch tensor; BadImage."""
    try:
        return _decoder()(data, header.format)
    except (PipelineError, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever they like
        reason = " ".join(str(error).split())[:200]
        raise BadImage(f"the {header.format} cannot be decoded ({reason})") from None


@functools.cache
def _decoder() -> Callable[[bytes, str], Any]:
    import torch

    try:
        import torchvision.io as tv

        # torchvision 0.29 announces a successor of its decoders, once per image.
        warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning, "torchvision")

        def decode(data: bytes, kind: str) -> Any:
            raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if kind == "gif":
                frames = tv.decode_gif(raw)
                return frames if frames.ndim == 3 else frames[0]
            return tv.decode_image(raw, mode=tv.ImageReadMode.RGB)

        return decode
    except ImportError:
        pass
    try:
        from PIL import Image
    except ImportError:
        raise PipelineError(
            "images are decoded by torchvision or Pillow, and neither is installed; install zephon-core[vision]."
        ) from None

    def decode_pillow(data: bytes, kind: str) -> Any:
        with Image.open(io.BytesIO(data), formats=[kind.upper()]) as picture:
            return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)

    return decode_pillow
