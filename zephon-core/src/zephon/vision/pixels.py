"""Pixels of images, as patches: decoded, turned upright, resized and cut.

Pillow decodes, and torchvision JPEG and WebP where it is installed, which is faster; torch resizes.
"""

from __future__ import annotations

import functools
import io
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from zephon.columns.images import PixelForm
from zephon.errors import PipelineError
from zephon.vision.geometry import Grid, VisionSettings
from zephon.vision.headers import MAX_PIXELS, BadImage, Header, read_header

_GREY = 127
_LARGE = 1 << 24  # pixels of a picture that is decoded alone
_BYTES_PER_PIXEL = 16  # most that decoders and what turns pictures into RGB hold at a time
_AT_ONCE = 128  # patches that are normalized together
_Decoder = Callable[[bytes, Header], Any]
_one_large = threading.Lock()


def decoding_bytes(workers: int) -> int:
    """Most memory that so many threads decode in."""
    return _BYTES_PER_PIXEL * (MAX_PIXELS + (workers - 1) * _LARGE)


def image_patches(data: bytes, grid: Grid, settings: VisionSettings) -> np.ndarray:
    """The patches of an image file, uint8[patches, 3 * patch_size**2], each (channel, row, column).

    Raises:
        BadImage: the file cannot be decoded, or its picture has another size than its header says.
    """
    decoders = _decoders()
    import torch

    header = read_header(data)
    with _one_large if header.width * header.height > _LARGE else nullcontext():
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


def values_shape(form: PixelForm, counts: Sequence[int], settings: VisionSettings) -> tuple[int, ...]:
    """The shape of the pixels of images with so many patches each."""
    width = settings.patch_dim if form.dtype == "float32" else settings.pixels_per_patch
    return (sum(counts), width) if form.layout == "packed" else (len(counts), max(counts, default=0), width)


def put(
    values: np.ndarray, form: PixelForm, number: int, first: int, patches: np.ndarray, settings: VisionSettings
) -> None:
    """Put an image into its place among pixels of that form: it is image `number`, with `first` patches before it."""
    if form.layout == "packed":
        place = values[first : first + len(patches)]
    else:
        place = values[number, : len(patches)]
        values[number, len(patches) :] = 0
    if form.dtype == "float32":
        normalize(patches, settings, place)
    else:
        place[:] = patches


def normalize(patches: np.ndarray, settings: VisionSettings, out: np.ndarray) -> None:
    """Write patches as the model takes them: float32[patches, patch_dim], each (channel, frame, row, column)."""
    scale, mean, std = _steps(settings.mean, settings.std)
    frames = out.reshape(len(patches), 3, settings.temporal_patch_size, settings.patch_size**2)
    for start in range(0, len(patches), _AT_ONCE):
        here = frames[start : start + _AT_ONCE]
        values = patches[start : start + _AT_ONCE].astype(np.float32).reshape(-1, 3, 1, here.shape[3])
        np.multiply(values, scale, out=values)
        if std is None:
            np.subtract(values, mean, out=here)
        else:
            np.divide(np.subtract(values, mean, out=values), std, out=here)


@functools.cache
def _steps(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What values from 0 to 255 are multiplied with, what is then subtracted, and what divides the difference, for each
    channel, or for all where they are alike, which is a third faster.

    The steps are those of torchvision's to_dtype and normalize, so that every bit is theirs. Where no value changes by
    it, the divisor is in the other two, and None.
    """
    alike = len(set(mean)) == len(set(std)) == 1
    of_means, of_stds = (np.array(each[: 1 if alike else 3], np.float32).reshape(-1, 1, 1) for each in (mean, std))
    scale, values = np.full_like(of_means, 1 / 255), np.arange(256, dtype=np.float32)
    divided_scale, divided_mean = scale / of_stds, of_means / of_stds
    if ((values * scale - of_means) / of_stds).tobytes() == (values * divided_scale - divided_mean).tobytes():
        return divided_scale, divided_mean, None
    return scale, of_means, of_stds


def _cut(picture: np.ndarray, settings: VisionSettings) -> np.ndarray:
    """uint8[3, high, wide] to patches in the order of the model, uint8[patches, 3 * patch_size**2]."""
    side, merge = settings.patch_size, settings.merge_size if settings.patch_order == "block" else 1
    _, high, wide = picture.shape
    # The row of a patch is moved as one piece.
    rows = np.ascontiguousarray(picture).view(f"V{side}")
    shape = 3, high // side // merge, merge, side, wide // side // merge, merge
    parts = rows.reshape(shape).transpose(1, 4, 2, 5, 0, 3)
    return np.ascontiguousarray(parts).view(np.uint8).reshape(-1, settings.pixels_per_patch)


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
