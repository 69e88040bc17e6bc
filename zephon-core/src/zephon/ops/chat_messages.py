"""Conversations in the shapes in which they lie in files, made into the one shape that chat templates know.

The usual shapes: a column `messages` or `conversations`; messages with role and content, or with from and value
(ShareGPT, whose human is the user and whose gpt the assistant); content as text, or as parts of text; lists of structs
as Parquet has them, or JSON as text; or two columns, prompts and answers.

Structs of Arrow have the fields of all rows, so a null in one may say that the field is not there: nulls in structs are
left out, at any depth. JSON in text says what it says, so its nulls are kept, but for those of a message's own keys,
which transformers leaves out as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import pyarrow as pa

from zephon.columns.arrow import list_offsets, one_chunk

__all__ = ["MessageFailure", "normal_messages", "normal_tools", "paired_messages", "python_values"]

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


class MessageFailure(Exception):
    """A conversation of another shape. Never leaves this package."""


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
    names = [field.name for field in items.type]
    if items.null_count:
        return array.to_pylist()
    values = [items.field(i).to_pylist() for i in range(len(names))]
    messages = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    starts = (bounds - bounds[0]).tolist()
    return [messages[a:b] for a, b in pairwise(starts)]


def normal_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a conversation as dicts with role and content; empty where there are none.

    Raises:
        MessageFailure: it is no list of messages.
    """
    keeps_nulls = isinstance(value, str)
    value = _parsed(value, "the conversation")
    if isinstance(value, Mapping) and len(value) == 1:  # {"messages": [...]}
        value = next(iter(value.values()))
    if value is None:
        return []
    if not isinstance(value, list):
        raise MessageFailure(f"the conversation is {_kind(value)}; a list of messages is needed")
    return [_message(nth, message, keeps_nulls) for nth, message in enumerate(value)]


def paired_messages(names: tuple[str, str, str], prompt: Any, answer: Any, more: Any) -> list[dict[str, Any]]:
    """The messages of a prompt and its answer, each text or a list of messages; empty where there are none.

    Args:
        names: of the columns.
        prompt, answer: what they hold.
        more: what goes below a prompt that is text, or nothing.

    Raises:
        MessageFailure: one of them is something else.
    """
    if not prompt and not answer:
        return []
    made: list[dict[str, Any]] = []
    for name, value, role in zip(names, (prompt, answer), ("user", "assistant"), strict=False):
        if isinstance(value, list):
            made += [_message(len(made) + nth, message, False) for nth, message in enumerate(value)]
        elif isinstance(value, str):
            made.append({"role": role, "content": value})
        else:
            raise MessageFailure(f'column "{name}" holds {_kind(value)}; text or a list of messages is needed')
    if more is not None and not isinstance(more, str):
        raise MessageFailure(f'column "{names[2]}" holds {_kind(more)}; text is needed')
    if more and isinstance(prompt, str):
        made[0]["content"] = f"{prompt}\n\n{more}"
    return made


def _message(nth: int, message: Any, keeps_nulls: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageFailure(f"message {nth} is {_kind(message)}; role and content are needed")
    role = message.get("role")
    content = message.get("content")
    # By far the most: nothing else in it, or nothing that says something.
    if type(role) is str and type(content) is str and (len(message) == 2 or not _says_more(message)):
        return {"role": role, "content": content}
    made = {key: value if keeps_nulls else _without_nulls(value) for key, value in message.items() if value is not None}
    if "role" not in made and "from" in made:
        role = made.pop("from")
        made["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
        if "value" in made and "content" not in made:
            made["content"] = made.pop("value")
    if not isinstance(made.get("role"), str):
        keys = ", ".join(map(str, message)) or "nothing"
        raise MessageFailure(
            f"message {nth} has no role (it has {keys}); role and content, or from and value, are needed"
        )
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = _text_of_parts(nth, content)
    elif content is None:
        # Calls of tools come without words.
        if not any(key in made for key in ("tool_calls", "function_call", *_THOUGHTS)):
            raise MessageFailure(f"message {nth} ({made['role']}) has no content")
    elif not isinstance(content, str):
        raise MessageFailure(f"the content of message {nth} is {_kind(content)}; text is needed")
    thought = next((made[key] for key in _THOUGHTS if key in made), None)
    return made if thought is None else {"thinking": thought, **made, "reasoning_content": thought}


def _says_more(message: Mapping[str, Any]) -> bool:
    return any(value is not None for key, value in message.items() if key not in ("role", "content"))


def _text_of_parts(nth: int, parts: list[Any]) -> str:
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
            raise MessageFailure(
                f"a part of the content of message {nth} is {kind!r}; only parts of text are supported"
            )
        texts.append(text)
    return "".join(texts)


def normal_tools(value: Any) -> list[Any] | None:
    """The tools of a conversation as a list, None where there are none.

    Raises:
        MessageFailure: it is no list of tools.
    """
    value = _parsed(value, "tools") if isinstance(value, str) else _without_nulls(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise MessageFailure(f"tools is {_kind(value)}; a list of descriptions of functions is needed")
    tools = [_parsed(tool, "a tool") for tool in value]
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise MessageFailure(f"a tool is {_kind(tool)}; the description of a function is needed")
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
            raise MessageFailure(f"{what} is text that is no JSON ({error})") from None
    return value


def _without_nulls(value: Any) -> Any:
    """Without the nulls that Arrow puts where a struct of another row has a field."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a flag", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
