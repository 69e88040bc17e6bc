"""Images of rows: where their files come from, and how many tokens each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from zephon.columns.images import Images
from zephon.data.media import NAMED, NoFile, open_media
from zephon.errors import PipelineError
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import read_header

_AT_ONCE = 32  # rows whose images come from a store
_PATHS = ("path", "image_name", "file_name", "url")


_T = TypeVar("_T")


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
    """Reads the images of rows: given as bytes, as a dict of bytes or path, or as a path below `root`."""

    def __init__(self, vision: VisionSettings, root: str | None) -> None:
        self._vision = vision
        self._files = None if root is None else open_media(root)

    @property
    def reads_files(self) -> bool:
        """Whether images may be files of their own."""
        return self._files is not None

    def each(self, function: Callable[..., _T], rows: Iterable[tuple[Any, ...]]) -> Iterator[Callable[[], _T]]:
        """For each row what gives its result; side by side where the images of rows come from a store."""
        if self._files is None or not self._files.is_slow:
            yield from (partial(function, *row) for row in rows)
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="zephon-media") as pool:
            try:
                yield from [pool.submit(function, *row).result for row in rows]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

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
                f"an image is the URL {value[:NAMED]!r}; expected bytes, or a path below media_root, since nothing is "
                "fetched"
            )
        if self._files is None:
            raise BadRow(f"an image is the path {value[:NAMED]!r}, and media_root is missing")
        try:
            return self._files.read(value)
        except NoFile as error:
            raise BadRow(str(error)) from None
