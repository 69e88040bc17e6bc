"""Small images of every kind, by which pixels of this machine are told from those of others."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

from zephon.vision.geometry import Grid, VisionSettings
from zephon.vision.headers import BadImage
from zephon.vision.pixels import image_patches

_SUFFIXES = (".gif", ".jpg", ".png", ".webp")
_SETTINGS = VisionSettings(patch_size=8, merge_size=1)
_GRIDS = (Grid(2, 3, 16, 24), Grid(6, 7, 48, 56))
"""One is smaller than all probes but the smallest, the other larger."""


def probe_files() -> dict[str, bytes]:
    """The probes by name: the files of this package, and the first part of some of them, which cannot be decoded."""
    files = sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    probes = {file.name: file.read_bytes() for file in files if file.name.endswith(_SUFFIXES)}
    halves = ("420.jpg", "8bit.png", "lossy.webp", "palette.gif")
    return probes | {f"half of {name}": probes[name][: len(probes[name]) * 3 // 4] for name in halves}


@functools.cache
def image_pixels() -> str:
    """SHA-256, shortened, over the patches of all probes, as this machine's libraries decode and resize them.

    Versions say little: of the same version of torchvision or Pillow there are builds with different decoders.
    """
    digest = hashlib.sha256()
    for data in probe_files().values():
        for grid in _GRIDS:
            try:
                digest.update(image_patches(data, grid, _SETTINGS).tobytes())
            except BadImage:
                digest.update(b"cannot be decoded")
    return digest.hexdigest()[:16]
