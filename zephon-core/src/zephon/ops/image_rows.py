"""The forms in which rows hold text and images, made into pieces in the order of the document.

One text and one image, or several
    The images come first, or where the text has as many `<image>` as there are images, in their places.
Lists of texts and images of the same length (OBELICS)
    Each place holds a text or an image, or both, the image first.
A list of texts and a list of images with `matched_text_index` (MMC4)
    Each image comes before the text that it is matched with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from zephon.ops.media import BadRow

MARK = "<image>"
MATCHED = "matched_text_index"


class Shown(NamedTuple):
    """An image as a row has it."""

    value: Any


Piece = str | Shown


def pieces_of(text: Any, images: Any) -> list[Piece]:
    """The pieces of a row by its text, or texts, and its image, or images; BadRow where they do not fit together."""
    if isinstance(images, list) and any(isinstance(each, dict) and MATCHED in each for each in images):
        return _matched(text, images)
    if isinstance(text, list) and images is not None:
        aligned = images if isinstance(images, list) else [images]
        if len(text) != len(aligned):
            raise BadRow(f"{len(text)} texts and {len(aligned)} images; expected lists of the same length")
        pairs = zip(text, aligned, strict=True)
        return [piece for words, image in pairs for piece in _pair(words, image)]
    if isinstance(text, list):
        return [piece for words in text for piece in _pair(words, None)]
    shown = [image for image in (images if isinstance(images, list) else [images]) if image is not None]
    if isinstance(text, str) and MARK in text:
        return placed(text, shown)
    return [*map(Shown, shown), *_pair(text, None)]


def placed(text: str, images: Sequence[Any]) -> list[Piece]:
    """A text with images in the places of its marks; BadRow where their numbers differ."""
    parts = text.split(MARK)
    if len(parts) - 1 != len(images):
        raise BadRow(
            f"{len(parts) - 1} {MARK} in the text and {len(images)} images; expected as many of one as of both"
        )
    pieces: list[Piece] = [parts[0]]
    for image, part in zip(images, parts[1:], strict=True):
        pieces += [Shown(image), part]
    return [piece for piece in pieces if piece != ""]


def from_json(value: Any, *, always: bool) -> Any:
    """What a JSON text says; where it is not `always` JSON, lists and objects alone. BadRow where it is none."""
    if not isinstance(value, str) or not (always or value[:1] in ("[", "{")):
        return value
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError):
        if not always:
            return value
        raise BadRow(f"{value[:80]!r} is no JSON") from None


def _pair(text: Any, image: Any) -> list[Piece]:
    if text is not None and not isinstance(text, str):
        raise BadRow(f"a text is {type(text).__name__}; expected text")
    return [*([] if image is None else [Shown(image)]), *([text] if text else [])]


def _matched(texts: Any, images: Sequence[Any]) -> list[Piece]:
    if not isinstance(texts, list):
        raise BadRow(f"images have {MATCHED}, and the texts are no list")
    before: list[list[Piece]] = [[] for _ in texts]
    for image in images:
        at = image.get(MATCHED) if isinstance(image, dict) else None
        number = int(at) if isinstance(at, int | float) and math.isfinite(at) and at == int(at) else -1
        if not 0 <= number < len(texts):
            raise BadRow(f"an image has the {MATCHED} {at!r}; expected the place of one of {len(texts)} texts")
        before[number].append(Shown(image))
    return [piece for shown, text in zip(before, texts, strict=True) for piece in (*shown, *_pair(text, None))]
