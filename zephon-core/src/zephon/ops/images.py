"""Documents of text and images: which images, how many tokens each, and nothing of their pixels.

Of an image only the header is read here, which tells its size and with it the number of its tokens. The file itself
travels on, compressed, and is decoded once the record that shows it is given out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import string_array
from zephon.config.keys import Column, MediaRoot, Names, key
from zephon.errors import PipelineError
from zephon.ops.encode import Documents, EncodeOptions, Encoder
from zephon.ops.image_rows import from_json, pieces_of
from zephon.ops.media import BadRow, Image, Media, images_of, vision_ids
from zephon.ops.rows import Rows
from zephon.tokenizer.load import TokenizerId
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage

_TEXTS = ("texts", "text", "txt", "caption", "text_list")
_IMAGES = ("images", "image", "image_info")
_FILES = ("jpg", "jpeg", "png", "webp", "gif")  # of tar archives; each row has one of them


@dataclass(frozen=True, kw_only=True)
class TokenizeImages(EncodeOptions):
    """Turn rows of text and images into tokens, with a run of placeholders for each image.

    A row has one text and one image, or several, or lists of them; see `zephon.ops.image_rows`.
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
    more: Names = key((), "Columns with the images of rows that have none in `images`.", decides_data=False)
    json: Names = key((), "Columns of JSON lines whose values come as JSON.", decides_data=False)
    media_root: MediaRoot | None = key(
        None, "The folder, tar archive or prefix of a store that paths of images are below.", decides_data=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            raise PipelineError(
                f"{self.kind} max_length is {self.max_length}, which would cut images; leave it out: documents longer "
                "than a record are left out and counted."
            )

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The columns of images."""
        return (self.images, *self.more)

    def found(self, present: Mapping[str, str | None]) -> TokenizeImages:
        """The same with the columns found among those of a dataset, and which of them hold JSON."""
        files = [name for name in _FILES if name in present]
        images, *more = [name for name in _IMAGES if name in present][:1] or files or [self.images]
        if self.images != "auto":
            images, more = self.images, []
        text = next((name for name in _TEXTS if name in present), self.field) if self.field == "auto" else self.field
        for name, what, option, known in (
            (text, "text", "text_field", _TEXTS),
            (images, "images", "images_field", (*_IMAGES, *_FILES)),
        ):
            if name == "auto":
                hint = ', as in "json.caption"' if "json" in present and what == "text" else ""
                raise PipelineError(
                    f"{self.kind} finds no column of {what} among {', '.join(present)}; expected one of "
                    f"{', '.join(known)}. Name the column ({option} in a recipe{hint})."
                )
        json = tuple(name for name in (text, images) if present.get(name) == "json")
        return replace(self, field=text, images=images, more=tuple(more), json=json)

    def encoder(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> ImagesEncoder:
        """The worker."""
        return ImagesEncoder(self, tokenizer, bos, eos)


_Part = str | Image
"""A piece of a document."""


class ImagesEncoder(Encoder):
    """The worker of `TokenizeImages`; PipelineError where the tokenizer lacks a token."""

    def __init__(self, spec: TokenizeImages, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
        super().__init__(spec, bos, eos)
        self._spec, self._tokenizer = spec, tokenizer
        self._ids = vision_ids(spec.vision, tokenizer)
        if eos is None and not spec.vision.vision_end_token:
            raise PipelineError(
                f"{spec.kind} special_tokens adds no EOS, and vision_end_token is empty; expected one of them, or a "
                "document may end with a placeholder that is a label only. Set special_tokens to eos."
            )
        self._media = Media(spec.vision, spec.media_root)

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        documents: list[list[_Part]] = []
        good: list[int] = []
        blank: list[int] = []
        texts = self.column(rows, self._spec.field).to_pylist()
        images = self.column(rows, self._spec.images).to_pylist()
        for more in self._spec.more:
            others = self.column(rows, more).to_pylist()
            images = [a if a is not None else b for a, b in zip(images, others, strict=True)]
        for index, parts_of in enumerate(self._media.each(self._parts, zip(texts, images, strict=True))):
            try:
                parts = parts_of()
            except (BadImage, BadRow) as error:
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
        spec = self._spec
        shown = from_json(shown, always=spec.images in spec.json)
        if spec.field in spec.json or "." in spec.field:  # a path may lead into the JSON of a tar archive
            text = from_json(text, always=spec.field in spec.json)
        pieces = pieces_of(text, shown)
        parts: list[_Part] = [piece if isinstance(piece, str) else self._media.image(piece.value) for piece in pieces]
        return parts if any(isinstance(part, Image) or part.strip() for part in parts) else []

    def _joined(self, documents: Sequence[Sequence[_Part]], places: list[int], blank: list[int]) -> Documents:
        """The documents as columns."""
        texts = [part for parts in documents for part in parts if isinstance(part, str)]
        ids, bounds = self._tokenizer.encode(string_array(texts, pa.large_string()))
        pieces: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        lengths, text = [0], 0
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
                pieces.append(piece)
                trained.append(np.full(len(piece), isinstance(part, str)))
                count += len(piece)
            lengths.append(count)
        return Documents(
            tokens=np.concatenate([np.zeros(0, dtype=np.uint32), *pieces]),
            offsets=np.cumsum(lengths, dtype=np.int64),
            places=np.array(places, dtype=np.int64),
            blank=np.array(blank, dtype=np.int64),
            loss=np.concatenate([np.zeros(0, dtype=bool), *trained]),
            images=images_of([[part for part in parts if isinstance(part, Image)] for parts in documents]),
        )
