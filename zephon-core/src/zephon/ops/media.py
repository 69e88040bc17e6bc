"""Images of rows: where their files come from, and how many tokens each has."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from zephon.columns.images import Images
from zephon.errors import DataError, PipelineError
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage, read_header

MAX_FILE_BYTES = 64 << 20
_NAMED = 100  # characters of a path
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that say what is in the folder; others say how the machine is."""
_PATHS = ("path", "image_name", "file_name", "url")


class BadRow(Exception):
    """Why a row is no document of text and images."""


class Image(NamedTuple):
    """An image file, its grid (patches high and wide, pixels high and wide), and its tokens."""

    file: bytes
    grid: tuple[int, int, int, int]
    tokens: int


def vision_ids(vision: VisionSettings, tokenizer: Tokenizer) -> list[int | None]:
    """Ids of the tokens before, for and after an image, None for none; PipelineError where the tokenizer lacks one."""
    known = {token.content: token.id for token in tokenizer.special_tokens}
    for option in ("vision_start_token", "image_token", "vision_end_token"):
        token = getattr(vision, option)
        if token and token not in known:
            raise PipelineError(
                f"vision {option} is {token!r}; expected a special token of the tokenizer: "
                f"{', '.join(known) or 'it has none'}."
            )
    return [known.get(token) for token in (vision.vision_start_token, vision.image_token, vision.vision_end_token)]


def images_of(documents: Sequence[Sequence[Image]]) -> Images:
    """The images of documents as columns."""
    flat = [image for images in documents for image in images]
    return Images(
        np.cumsum([0, *map(len, documents)], dtype=np.int64),
        np.array([image.grid for image in flat], dtype=np.int32).reshape(-1, 4),
        pa.array([image.file for image in flat], pa.large_binary()),
    )


class Media:
    """Reads the images of rows: given as bytes, as a dict of bytes or path, or as a path below a folder."""

    def __init__(self, vision: VisionSettings, root: str | None) -> None:
        self._vision = vision
        self._root = None if root is None else Path(root).resolve()
        if self._root is not None and not self._root.is_dir():
            raise PipelineError(
                f"media_root is {root}; expected an existing folder. Unpack an archive, or mount a store."
            )

    def image(self, value: Any) -> Image:
        """The image; `BadRow` or `BadImage` where there is none that can be used."""
        file = self._file(value)
        header = read_header(file)
        grid = self._vision.grid(header.width, header.height)
        return Image(file, (grid.height, grid.width, grid.pixels_high, grid.pixels_wide), self._vision.tokens(grid))

    def _file(self, value: Any) -> bytes:
        if isinstance(value, dict):
            value = value.get("bytes") or next((value[key] for key in _PATHS if value.get(key)), None)
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value:
            raise BadRow(f"an image is {type(value).__name__}; expected bytes, a struct with bytes or path, or a path")
        if "://" in value or value.startswith("data:"):
            raise BadRow(
                f"an image is the URL {value[:_NAMED]!r}; expected bytes, or a path below media_root, since nothing is "
                "fetched"
            )
        named = repr(value[:_NAMED])
        if self._root is None:
            raise BadRow(f"an image is the path {named}, and media_root is missing")
        try:
            path = Path(os.path.realpath(self._root / value))
            if not path.is_relative_to(self._root):
                raise BadRow(f"the path {named} leads out of media_root")
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise BadImage(f"the path {named} is no file")
            if status.st_size > MAX_FILE_BYTES:
                raise BadImage(f"the file {named} is larger than {MAX_FILE_BYTES:,} bytes")
            return path.read_bytes()
        except OSError as error:
            if error.errno in _ABSENT:
                raise BadImage(f"the file {named} cannot be read ({error.strerror})") from None
            # Which rows are left out must not depend on the moment.
            raise DataError(f"cannot read {named} below media_root {self._root}: {error.strerror}.") from None
        except ValueError:
            raise BadRow(f"the path {named} is none") from None
