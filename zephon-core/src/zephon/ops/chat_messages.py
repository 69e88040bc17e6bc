"""Conversations in the shapes in which they lie in files, made into the one shape that chat templates know.

Structs of Arrow have the fields of all rows, so a null in one may say that the field is not there: nulls in structs are
left out, at any depth. JSON in text says what it says, so its nulls are kept, but for those of a message's own keys,
which transformers leaves out as well.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pyarrow as pa

from zephon.columns.arrow import list_offsets, one_chunk
from zephon.config.keys import seen

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
# Keys of a message's thoughts. Templates find them under the first two, as in transformers.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_FLAGS = ("weight", "train", "training", "loss")
UNTRAINED = "untrained"
"""The key of messages of which nothing is trained on."""
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "a flag", int: "a number", float: "a number"}


def is_image(part: Any) -> bool:
    """Whether a part of a message stands for an image."""
    return isinstance(part, dict) and (part.get("type") in ("image", "image_url") or part.get("image") is not None)


class MessageFailure(Exception):
    """A conversation of another shape. Never leaves this package."""

    def __init__(self, what: str, value: Any, expected: str) -> None:
        kind = "null" if value is None else _KINDS.get(type(value), type(value).__name__)
        super().__init__(f"{what} is {kind}; expected {expected}")


def python_values(column: Any) -> list[Any]:
    """A column of conversations as Python values; JSON is left as text.

    The common case, lists of structs of texts, is taken apart by columns: five times faster than row by row.
    """
    array = one_chunk(column)
    kind = array.type
    flat = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not flat or not pa.types.is_struct(kind.value_type) or array.null_count:
        return array.to_pylist()
    bounds = list_offsets(array)
    items = array.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    if items.null_count:
        return array.to_pylist()
    names = [field.name for field in items.type]
    values = [items.field(i).to_pylist() for i in range(len(names))]
    messages = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    return [messages[a:b] for a, b in pairwise((bounds - bounds[0]).tolist())]


def normal_messages(value: Any, *, images: bool = False) -> list[dict[str, Any]]:
    """The messages of a conversation as dicts with role and content, empty where there are none; or MessageFailure.

    With `images`, a content with image parts stays a list.
    """
    keeps_nulls = isinstance(value, str)
    value = _parsed(value, "the conversation")
    if isinstance(value, dict) and len(value) == 1:  # {"messages": [...]}
        value = next(iter(value.values()))
    if value is None:
        return []
    if not isinstance(value, list):
        raise MessageFailure("the conversation", value, "a list of messages")
    return [_message(f"message {n}", message, keeps_nulls, images) for n, message in enumerate(value)]


def paired_messages(
    names: tuple[str, str, str], prompt: Any, answer: Any, more: Any, *, images: bool = False
) -> list[dict[str, Any]]:
    """The messages of a prompt and its answer, each text or a list of messages; empty where there are none.

    `names` are those of the columns, for MessageFailure; `more` goes below a prompt that is text.
    """
    if not prompt and not answer:
        return []
    if more is not None and not isinstance(more, str):
        raise MessageFailure(f'column "{names[2]}"', more, "text")
    if more and isinstance(prompt, str):
        prompt = f"{prompt}\n\n{more}"
    messages: list[dict[str, Any]] = []
    for name, value, role in zip(names, (prompt, answer), ("user", "assistant"), strict=False):
        said = [{"role": role, "content": value}] if isinstance(value, str) else value
        if not isinstance(said, list):
            raise MessageFailure(f'column "{name}"', value, "text or a list of messages")
        first = len(messages)
        messages += [_message(f"message {n}", message, False, images) for n, message in enumerate(said, first)]
    return messages


def _message(name: str, message: Any, keeps_nulls: bool, images: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise MessageFailure(name, message, "role and content")
    role, content = message.get("role"), message.get("content")
    # By far the most: nothing else in it, or only nulls.
    if type(role) is str and type(content) is str and (len(message) == 2 or _is_plain(message)):
        return {"role": role, "content": content}
    normal = {k: value if keeps_nulls else _without_nulls(value) for k, value in message.items() if value is not None}
    if any(key in normal for key in _FLAGS):
        _flagged(name, normal)
    if "role" not in normal and "from" in normal:
        role = normal.pop("from")
        normal["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
        if "value" in normal and "content" not in normal:
            normal["content"] = normal.pop("value")
    if not isinstance(normal.get("role"), str):
        keys = ", ".join(map(str, message)) or "nothing"
        raise MessageFailure(f"the role of {name} (with {keys})", normal.get("role"), "text in role or from")
    content = normal.get("content")
    if isinstance(content, list):
        shown = images and any(map(is_image, content))
        texts = [part if shown and is_image(part) else _part(name, part) for part in content]
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in texts]
        normal["content"] = parts if shown else "".join(texts)
    # Calls of tools come without words.
    elif not isinstance(content, str) and (
        content is not None or not any(key in normal for key in ("tool_calls", "function_call", *_THOUGHTS))
    ):
        raise MessageFailure(f"the content of {name}", content, "text, or parts of text")
    thought = next((normal[key] for key in _THOUGHTS if key in normal), None)
    return normal if thought is None else {"thinking": thought, **normal, "reasoning_content": thought}


def _flagged(name: str, message: dict[str, Any]) -> None:
    """Put one key, or none, in place of those that say whether a message is trained on."""
    flags = {key: message.pop(key) for key in _FLAGS if key in message}
    for key, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise MessageFailure(f"{key} of {name} ({seen(flag)})", flag, "0 or 1, or true or false")
    if not all(flags.values()):
        message[UNTRAINED] = True


def _is_plain(message: dict[str, Any]) -> bool:
    return all(value is None for key, value in message.items() if key not in ("role", "content"))


def _part(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = f" ({part.get('type')!r})" if isinstance(part, dict) else ""
        raise MessageFailure(
            f"a part of the content of {name}{kind}", text, "text; for images set images_field (tokenize_chat images)"
        )
    return text


def normal_tools(value: Any) -> list[Any] | None:
    """The tools of a conversation as a list, None where there are none; or MessageFailure."""
    value = _parsed(value, "tools") if isinstance(value, str) else _without_nulls(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise MessageFailure("tools", value, "a list of descriptions of functions")
    tools = [_parsed(tool, "a tool") for tool in value]
    for tool in tools:
        if not isinstance(tool, dict):
            raise MessageFailure("a tool", tool, "the description of a function")
    return tools


def _parsed(value: Any, what: str) -> Any:
    """JSON in text, however often it was wrapped."""
    for _ in range(3):
        if not isinstance(value, str):
            return value
        if not value.strip():
            return None
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise MessageFailure(what, value, f"JSON ({error})") from None
    return value


def _without_nulls(value: Any) -> Any:
    """Without the nulls that Arrow puts where a struct of another row has a field."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
