"""Documents of text and images: which images, how many tokens each, and nothing of their pixels.

Of an image only the header is read here, which tells its size and with it the number of its tokens. The file itself
travels on, compressed, and is decoded once the record that shows it is given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import string_array
from zephon.columns.images import Images
from zephon.config.keys import Column, Folder, key
from zephon.errors import PipelineError
from zephon.ops.encode import Documents, EncodeOptions, Encoder
from zephon.ops.rows import Rows
from zephon.tokenizer.load import TokenizerId
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage, read_header

MAX_FILE_BYTES = 64 << 20
_TEXTS = ("texts", "text", "txt", "caption", "text_list")
_IMAGES = ("images", "image", "jpg", "jpeg", "png", "webp", "gif", "image_info")


@dataclass(frozen=True, kw_only=True)
class TokenizeImages(EncodeOptions):
    """Turn rows of text and images into tokens, with a run of placeholders for each image.

    A row is one image and its text (the image comes first), or a list of texts and a list of images of the same length,
    where each place holds a text or an image, or both, the image first.
    """

    kind: ClassVar[str] = "tokenize_images"
    layout: ClassVar[str] = "images {datasets} {field} {images}"
    tokenizer_id: TokenizerId
    vision: VisionSettings = field(default_factory=VisionSettings)
    field: Column = key("auto", 'The column of the text, or of lists of texts; "auto": texts, text, txt or caption.')
    images: Column = key(
        "auto",
        "The column of images, or of lists of them: files as bytes, structs with bytes or path as Hugging Face writes "
        'them, or paths; "auto": images, image, jpg, jpeg, png, webp or gif.',
    )
    media_root: Folder | None = key(None, "The folder that paths of images are below.", decides_data=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            raise PipelineError(
                f"{self.kind} max_length is {self.max_length}, which would cut images; leave it out: documents longer "
                "than a record are left out and counted."
            )

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The column of images."""
        return (self.images,)

    def found(self, present: Sequence[str]) -> TokenizeImages:
        """The same with the columns found among those of a dataset."""

        def of(name: str, candidates: Sequence[str], what: str) -> str:
            if name != "auto":
                return name
            if found := next((each for each in candidates if each in present), None):
                return found
            raise PipelineError(
                f"{self.kind} finds no column of {what} among {', '.join(present)}; expected one of "
                f"{', '.join(candidates)}. Name the column."
            )

        return replace(self, field=of(self.field, _TEXTS, "text"), images=of(self.images, _IMAGES, "images"))

    def encoder(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> ImagesEncoder:
        """The worker."""
        return ImagesEncoder(self, tokenizer, bos, eos)


class _Image(NamedTuple):
    file: bytes
    grid: tuple[int, int, int, int]
    tokens: int


_Part = str | _Image
"""A piece of a document."""


class ImagesEncoder(Encoder):
    """The worker of `TokenizeImages`; PipelineError where the tokenizer lacks a token."""

    def __init__(self, spec: TokenizeImages, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
        super().__init__(spec, bos, eos)
        self._spec, self._tokenizer = spec, tokenizer
        ids = {token.content: token.id for token in tokenizer.special_tokens}
        self._ids: list[int | None] = []
        for option in ("vision_start_token", "image_token", "vision_end_token"):
            token = getattr(spec.vision, option)
            if token and token not in ids:
                raise PipelineError(
                    f"vision {option} is {token!r}; expected a special token of the tokenizer: "
                    f"{', '.join(ids) or 'it has none'}."
                )
            self._ids.append(ids[token] if token else None)
        if eos is None and not spec.vision.vision_end_token:
            raise PipelineError(
                f"{spec.kind} special_tokens adds no EOS, and vision_end_token is empty; expected one of them, or a "
                "document may end with a placeholder that is a label only. Set special_tokens to eos."
            )
        self._root = None if spec.media_root is None else Path(spec.media_root)

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        documents: list[list[_Part]] = []
        good: list[int] = []
        blank: list[int] = []
        texts, images = (self.column(rows, name).to_pylist() for name in (self._spec.field, self._spec.images))
        for index, (text, shown) in enumerate(zip(texts, images, strict=True)):
            try:
                parts = self._parts(text, shown)
            except (BadImage, _BadRow) as error:
                rows.fail(index, self._spec.kind, str(error))
                continue
            (good if parts else blank).append(int(rows.places[index]))
            if parts:
                documents.append(parts)
        return self.finished(self._joined(documents, good, blank))

    def texts(self, rows: Rows) -> list[str]:
        """The texts of rows."""
        values = self.column(rows, self._spec.field).to_pylist()
        return [text for value in values for text in (value if isinstance(value, list) else [value]) if text]

    def _parts(self, text: Any, shown: Any) -> list[_Part]:
        """The pieces of a document in order; none where it is blank."""
        if not isinstance(text, list) and not isinstance(shown, list):
            text, shown = [text], [shown]
        elif not isinstance(text, list):
            text, shown = [*[None] * len(shown), text], [*shown, None]
        elif not isinstance(shown, list) or len(text) != len(shown):
            count = len(shown) if isinstance(shown, list) else 0
            raise _BadRow(f"{len(text)} texts and {count} images; expected lists of the same length")
        parts: list[_Part] = []
        for piece, image in zip(text, shown, strict=True):
            if image is not None:
                parts.append(self._image(image))
            if piece:
                parts.append(piece)
        return parts if any(isinstance(part, _Image) or part.strip() for part in parts) else []

    def _image(self, value: Any) -> _Image:
        file = self._file(value)
        header = read_header(file)
        vision = self._spec.vision
        grid = vision.grid(header.width, header.height)
        return _Image(file, (grid.height, grid.width, grid.pixels_high, grid.pixels_wide), vision.tokens(grid))

    def _file(self, value: Any) -> bytes:
        """The file of an image that is given as bytes, as a struct, or as a path below `media_root`."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value:
            raise _BadRow(f"an image is {type(value).__name__}; expected bytes, a struct with bytes or path, or a path")
        if self._root is None:
            raise _BadRow(f"an image is the path {value!r}, and media_root is missing")
        root = self._root.resolve()
        path = (root / value).resolve()
        if not path.is_relative_to(root):
            raise _BadRow(f"the path {value!r} leads out of media_root")
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise BadImage(f"the file {value!r} is larger than {MAX_FILE_BYTES:,} bytes")
            return path.read_bytes()
        except OSError as error:
            raise BadImage(f"the file {value!r} cannot be read ({error.strerror})") from None

    def _joined(self, documents: Sequence[Sequence[_Part]], places: list[int], blank: list[int]) -> Documents:
        """The documents as columns."""
        texts = [part for parts in documents for part in parts if isinstance(part, str)]
        ids, bounds = self._tokenizer.encode(string_array(texts, pa.large_string()))
        pieces: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        files: list[bytes] = []
        grids: list[tuple[int, int, int, int]] = []
        lengths, shown, text = [0], [0], 0
        start, image_id, end = self._ids
        for parts in documents:
            count = 0
            for part in parts:
                if isinstance(part, str):
                    piece = ids[bounds[text] : bounds[text + 1]]
                    text += 1
                else:
                    run = [image_id] * part.tokens
                    around = [*([] if start is None else [start]), *run, *([] if end is None else [end])]
                    piece = np.array(around, dtype=np.uint32)
                    files.append(part.file)
                    grids.append(part.grid)
                pieces.append(piece)
                trained.append(np.full(len(piece), isinstance(part, str)))
                count += len(piece)
            lengths.append(count)
            shown.append(len(files))
        images = Images(
            np.array(shown, dtype=np.int64),
            np.array(grids, dtype=np.int32).reshape(-1, 4),
            pa.array(files, pa.large_binary()),
        )
        return Documents(
            tokens=np.concatenate([np.zeros(0, dtype=np.uint32), *pieces]),
            offsets=np.cumsum(lengths, dtype=np.int64),
            places=np.array(places, dtype=np.int64),
            blank=np.array(blank, dtype=np.int64),
            loss=np.concatenate([np.zeros(0, dtype=bool), *trained]),
            images=images,
        )


class _BadRow(Exception):
    """Why a row is no document of text and images."""
