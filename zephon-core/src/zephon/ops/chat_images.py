"""Images in conversations: the parts that stand for them, which image each is, and their placeholders as tokens.

The template writes one placeholder for each image, with what it puts around it; the placeholder is then repeated for
each token of the image.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zephon.ops.chat_messages import is_image
from zephon.ops.encode import Documents
from zephon.ops.image_rows import MARK, Shown, from_json, placed
from zephon.ops.media import BadRow, Image, images_of

_OWN = ("image", "image_url", "bytes", "path", "url")
"""Keys of a part that has its image in itself."""


def with_images(messages: list[dict[str, Any]], column: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages with an image part for each image, and the images in that order; BadRow where they do not fit.

    Args:
        column: the image or images beside the conversation, for parts without one of their own, or for the marks in
            texts where no message has image parts.
    """
    column = from_json(column, always=isinstance(column, str) and column.startswith('"'))
    waiting = [each for each in (column if isinstance(column, list) else [column]) if each is not None]
    count, shown, out = len(waiting), list[Any](), list[dict[str, Any]]()
    marked = not any(isinstance(message.get("content"), list) for message in messages)
    marks = sum(message["content"].count(MARK) for message in messages if message.get("content")) if marked else 0
    if marked and marks != count:
        raise BadRow(
            f"{count} images, and {marks} {MARK} in the messages, which have no image parts; expected as many of both"
        )
    for message in messages:
        content: Any = message.get("content")
        if marks and MARK in (content or ""):
            here = [waiting.pop(0) for _ in range(content.count(MARK))]
            content = [_PART if isinstance(each, Shown) else _text(each) for each in placed(content, here)]
            shown += here
        elif isinstance(content, list):
            for part in filter(is_image, content):
                own = next((part[key] for key in _OWN if part.get(key) is not None), None)
                if own is None and not waiting:
                    raise BadRow(f"more image parts than images, of which there are {count}")
                shown.append(waiting.pop(0) if own is None else own)
            content = [_PART if is_image(part) else part for part in content]
        out.append({**message, "content": content})
    if waiting:
        raise BadRow(f"{len(waiting)} of {count} images are in no message; expected an image part for each")
    return out, shown


_PART = {"type": "image"}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def check_placeholders(text: str, said: frozenset[int], token: str, count: int) -> None:
    """BadRow unless the template has written one placeholder for each image."""
    written = sum(match.start() not in said for match in re.finditer(re.escape(token), text))
    if written != count:
        raise BadRow(f"the template writes {written} {token} for {count} images; expected one for each")


def expanded(documents: Documents, images: Sequence[Sequence[Image]], ids: Sequence[int | None]) -> Documents:
    """Documents with each placeholder repeated for the tokens of its image, none of which are trained on.

    Args:
        images: those of each document.
        ids: of the tokens before, for and after an image.
    """
    tokens = documents.tokens
    repeats = np.ones(len(tokens), dtype=np.int64)
    repeats[tokens == ids[1]] = [image.tokens for shown in images for image in shown]
    vision = np.isin(tokens, [each for each in ids if each is not None])
    loss = ~vision if documents.loss is None else documents.loss & ~vision
    offsets = np.concatenate([[0], np.cumsum(repeats)])[documents.offsets]
    return replace(
        documents,
        tokens=np.repeat(tokens, repeats),
        offsets=offsets,
        loss=np.repeat(loss, repeats),
        images=images_of(images),
    )
