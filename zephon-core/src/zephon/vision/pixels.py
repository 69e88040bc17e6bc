"""Pixels of images, as patches: decoded, turned upright, resized and cut.

Pillow decodes, and torchvision JPEG and WebP where it is installed, which is faster; torch resizes.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from zephon.errors import PipelineError
from zephon.vision.geometry import Grid, VisionSettings
from zephon.vision.headers import BadImage, Header, read_header

_GREY = 127
_AT_ONCE = 128  # patches that are normalized together
_Decoder = Callable[[bytes, Header], Any]


def image_patches(data: bytes, grid: Grid, settings: VisionSettings) -> np.ndarray:
    """The patches of an image file, uint8[patches, 3 * patch_size**2], each (channel, row, column).

    Raises:
        BadImage: the file cannot be decoded, or its picture has another size than its header says.
    """
    decoders = _decoders()
    import torch

    header = read_header(data)
    picture = _decoded(decoders[header.format], data, header)
    _check_size(picture.shape[2], picture.shape[1], header)
    picture = _upright(picture, header.orientation)
    if (header.height, header.width) != (grid.pixels_high, grid.pixels_wide):
        size = [grid.pixels_high, grid.pixels_wide]
        picture = torch.nn.functional.interpolate(picture[None], size, mode="bicubic", antialias=True)[0]
    side = settings.patch_size
    pad_high, pad_wide = grid.height * side - grid.pixels_high, grid.width * side - grid.pixels_wide
    shown = picture.numpy()
    if pad_high or pad_wide:
        # Not by torch, which would start threads of its own beneath each of the workers' threads.
        shown = np.pad(shown, ((0, 0), (0, pad_high), (0, pad_wide)))
    return _cut(shown, settings)


def grey_patches(grid: Grid, settings: VisionSettings) -> np.ndarray:
    """The patches that stand for an image that cannot be decoded."""
    return np.full((grid.patches, settings.pixels_per_patch), _GREY, dtype=np.uint8)


def normalized(patches: np.ndarray, settings: VisionSettings) -> Any:
    """Patches as the model takes them: a float32 tensor [patches, patch_dim], each (channel, frame, row, column)."""
    import torch

    mean, std = (torch.tensor(each, dtype=torch.float32).view(3, 1, 1) for each in (settings.mean, settings.std))
    # A batch is 100 MB and more. NumPy asks for huge pages, without which the pages take most of the time, and a part
    # at a time stays in the caches.
    shape = len(patches), 3, settings.temporal_patch_size, settings.patch_size**2
    values, taken = torch.from_numpy(np.empty(shape, dtype=np.float32)), torch.from_numpy(patches)
    for start in range(0, len(patches), _AT_ONCE):
        part = taken[start : start + _AT_ONCE].view(-1, 3, 1, shape[3])
        # Step by step as torchvision's to_dtype and normalize, so that every bit is theirs.
        values[start : start + _AT_ONCE] = part.to(torch.float32).mul_(1 / 255).sub_(mean).div_(std)
    return values.view(len(patches), settings.patch_dim)


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


def _decoded(decode: _Decoder, data: bytes, header: Header) -> Any:
    """uint8[3, height, width] as stored, a torch tensor; BadImage."""
    try:
        return decode(data, header)
    except (PipelineError, BadImage, MemoryError, Warning):  # the last where the process makes errors of warnings
        raise
    except Exception as error:  # decoders raise whatever they like
        if "allocate memory" in str(error):  # torch's, a RuntimeError
            raise MemoryError(str(error)) from None
        # Without the function and line of torchvision's source that it begins with.
        reason = re.sub(r"^\S+, \S+:\d+, ", "", " ".join(str(error).split()))[:200]
        raise BadImage(f"the {header.format} cannot be decoded ({reason})") from None


@functools.cache
def _decoders() -> dict[str, _Decoder]:
    """By format."""
    try:
        import torch
        from PIL import Image
    except ImportError as error:
        raise PipelineError(
            f"{error.name} is missing, and images need torch (which resizes them) and Pillow (which decodes them); "
            "install zephon-core[vision]."
        ) from None

    def pillow(data: bytes, header: Header) -> Any:
        with Image.open(io.BytesIO(data), formats=[header.format.upper()]) as picture:
            _check_size(picture.width, picture.height, header)
            # Of 16-bit grey Pillow would cut off what is above 255.
            grey = (np.asarray(picture) >> 8).astype(np.uint8) if picture.mode.startswith("I") else None
            rgb = picture.convert("RGB") if grey is None else Image.fromarray(grey).convert("RGB")
            return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)

    # The limit is that of `read_header`; a warning could be an error by the settings of the process.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    decoders: dict[str, _Decoder] = dict.fromkeys(("jpeg", "png", "webp", "gif"), pillow)
    try:
        import torchvision.io as tv
    except ImportError:
        return decoders

    def torchvision(data: bytes, header: Header) -> Any:
        return tv.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=tv.ImageReadMode.RGB)

    # torchvision 0.29 announces a successor of its decoders, once per image.
    warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning, "torchvision")
    # A third faster with JPEG. Not with PNG: of a damaged one torchvision 0.29 dies (a jump out of libpng).
    return decoders | dict.fromkeys(("jpeg", "webp"), torchvision)


def _check_size(width: int, height: int, header: Header) -> None:
    """Refuse a picture of another size than its header says, before it is turned upright."""
    says = (header.height, header.width) if header.orientation > 4 else (header.width, header.height)
    if (width, height) != says:
        raise BadImage(f"the picture is {width} x {height} pixels, its header says {says[0]} x {says[1]}")
