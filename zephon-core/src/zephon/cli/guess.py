"""What the documents of a dataset are, by some of its rows: text, conversations, token ids or images."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from zephon.errors import DataError, PipelineError
from zephon.ops.chat import TokenizeChat
from zephon.ops.chat_messages import MessageFailure, normal_messages
from zephon.ops.images import TokenizeImages
from zephon.vision.headers import BadImage, read_header

USUAL_TEXT = ("text", "txt", "content")
"""Columns of texts that are taken before longer ones."""


@dataclass(kw_only=True)
class Documents:
    """Where the documents of a source are: keys of a recipe, and the columns that hold them, the main one first."""

    keys: dict[str, Any]
    columns: list[str]

    @property
    def kind(self) -> str:
        """The value of the key `documents`."""
        return str(self.keys.get("documents", "text"))

    @property
    def shows_images(self) -> bool:
        """Whether there are images, whose column is the last one then."""
        return self.kind == "images" or "images_field" in self.keys


def guess(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], *, by_format: bool = False, kind: str | None = None
) -> Documents:
    """What the documents of a dataset are, by some of its rows and the names of its columns.

    Args:
        rows: as Python values, JSON parsed.
        names: of all columns.
        by_format: whether the files can hold nothing but token ids.
        kind: the value of `documents` where it is known.

    Raises:
        DataError: no column looks like documents.
    """
    present = dict.fromkeys(names)
    keys: dict[str, Any]
    ids = [name for name in ("input_ids", "tokens", *names) if name in present and _all(rows, name, _is_ids)]
    if kind in (None, "tokens") and (ids or by_format):
        column = ids[0] if ids else names[0]
        keys = {"documents": "tokens"}
        return Documents(keys=keys if column == "input_ids" else keys | {"tokens_field": column}, columns=[column])
    pictures = [name for name in names if _all(rows, name, _is_picture)]
    talks = [name for name in ("messages", "conversations", "conversation", *names) if _all(rows, name, _is_talk)]
    pair = _pair(names)
    if kind in (None, "chat") and (talks or (pair and not pictures)):
        columns = [talks[0]] if talks else list(pair)
        keys = {"documents": "chat"}
        if talks and talks[0] not in ("messages", "conversations", "conversation"):
            keys["messages_field"] = talks[0]
        if pictures:
            keys["images_field"] = "auto" if pictures[0] in ("images", "image") else pictures[0]
        return Documents(keys=keys, columns=[*columns, *pictures[:1]])
    sizes = Counter[str]()
    for row in rows:
        for path, content in _texts(row):
            sizes[path] += len(content)
    for path in pictures:
        del sizes[path]
    usual = [name for name in USUAL_TEXT if sizes[name]]
    text = next(iter([*usual, *(name for name, size in sizes.most_common() if size)]), None)
    if kind in (None, "images") and pictures:
        keys = {"documents": "images"}
        found = TokenizeImages(tokenizer_id="-", field=text or pictures[0]).found(present)
        files = [found.images, *found.more]
        if set(pictures) - set(files):
            keys["images_field"], files = pictures[0], pictures[:1]
        if text not in (None, "texts", "text", "txt", "caption", "text_list"):
            keys["text_field"] = text
        return Documents(keys=keys, columns=[*([text] if text else []), *files])
    if text is None:
        raise DataError(
            f"no column of {', '.join(names[:20])} looks like text, conversations, token ids or images; expected one. "
            "Name it in a recipe, and inspect that."
        )
    return Documents(keys={} if text == "text" else {"text_field": text}, columns=[text])


def _pair(names: Sequence[str]) -> tuple[str, ...]:
    """The columns of prompts and answers, if these are there."""
    try:
        found = TokenizeChat(tokenizer_id="-").found(list(names))
    except PipelineError:
        return ()
    return (found.field, *found.extra_columns) if found.extra_columns else ()


def _all(rows: Sequence[Mapping[str, Any]], name: str, test: Any) -> bool:
    """Whether a column has values, and all pass a test but one in ten, which may be damaged."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return bool(values) and sum(map(test, values)) >= 0.9 * len(values)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _is_talk(value: Any) -> bool:
    if not isinstance(value, list | dict | str) or (isinstance(value, str) and value[:1] not in ("[", "{")):
        return False
    try:
        return bool(normal_messages(value, images=True))
    except MessageFailure:
        return False


def media_root(rows: Sequence[Mapping[str, Any]], column: str, folder: str) -> str | None:
    """`folder`, if paths of images in a column are below it."""
    for row in rows:
        values = row.get(column)
        for value in values if isinstance(values, list) else [values]:
            path = _file_of(value)
            if isinstance(path, str) and not os.path.isabs(path) and os.path.isfile(os.path.join(folder, path)):
                return folder
    return None


def _file_of(value: Any) -> Any:
    """The bytes, or the path, of an image that may be a struct."""
    if isinstance(value, dict):
        keys = ("bytes", "path", "image_name", "file_name")
        return next((value[key] for key in keys if value.get(key)), None)
    return value


def _is_picture(value: Any) -> bool:
    """Whether a value is an image file, or names one, or a list of such."""
    if isinstance(value, list):
        return any(value) and all(each is None or _is_picture(each) for each in value)
    value = _file_of(value)
    if isinstance(value, bytes):
        try:
            return bool(read_header(value))
        except BadImage:
            return False
    return isinstance(value, str) and bool(re.search(r"^[^\n]{1,400}\.(jpe?g|png|webp|gif)$", value, re.I))


def _texts(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Texts in a row and its structs, by the name that text_field has for them."""
    for name, value in row.items():
        if isinstance(value, str) and not name.startswith("__"):
            yield above + name, value
        elif isinstance(value, dict):
            yield from _texts(value, f"{above}{name}.")


def parsed(value: Any) -> Any:
    """What a JSON text says, or the value as it is."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
