"""Images of rows: where their files come from, and how many tokens each has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage, read_header

MAX_FILE_BYTES = 64 << 20
_PATHS = ("path", "image_name", "file_name", "url")


class BadRow(Exception):
    """Why a row is no document of text and images."""


class Image(NamedTuple):
    """An image file, its grid (patches high and wide, pixels high and wide), and its tokens."""

    file: bytes
    grid: tuple[int, int, int, int]
    tokens: int


class Media:
    """Reads the images of rows: given as bytes, as a dict of bytes or path, or as a path below a folder."""

    def __init__(self, vision: VisionSettings, root: str | None) -> None:
        self._vision = vision
        self._root = None if root is None else Path(root)

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
                f"an image is the URL {value[:80]!r}; expected bytes, or a path below media_root, since nothing is "
                "fetched"
            )
        if self._root is None:
            raise BadRow(f"an image is the path {value!r}, and media_root is missing")
        root = self._root.resolve()
        path = (root / value).resolve()
        if not path.is_relative_to(root):
            raise BadRow(f"the path {value!r} leads out of media_root")
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise BadImage(f"the file {value!r} is larger than {MAX_FILE_BYTES:,} bytes")
            return path.read_bytes()
        except OSError as error:
            raise BadImage(f"the file {value!r} cannot be read ({error.strerror})") from None
        except ValueError:
            raise BadRow(f"the path {value!r} is none") from None
