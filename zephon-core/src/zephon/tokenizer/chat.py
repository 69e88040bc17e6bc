"""What a model's files say about conversations: its chat templates, and its special tokens by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from zephon.errors import TokenizerError
from zephon.tokenizer.load import MAX_CONFIG_BYTES, find_chat_template, find_tokenizer, read_file

__all__ = ["ChatSettings", "read_chat_settings", "read_template_file"]

TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatSettings:
    """Templates and tokens for them.

    Attributes:
        templates: by name; "default" is used unless there are tools and a "tool_use".
        tokens: the named special tokens.
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]


def read_chat_settings(tokenizer_id: str | os.PathLike[str]) -> ChatSettings:
    """Read them from beside the tokenizer.

    Raises:
        TokenizerError: the files cannot be read, or are not what they should be.
    """
    files = find_tokenizer(tokenizer_id)
    config = _object(files.config, files.label, "tokenizer_config.json")
    roles = _object(files.special_tokens_map, files.label, "special_tokens_map.json")
    tokens = {}
    for name in _NAMED:
        entry = config.get(name, roles.get(name))
        text = entry.get("content") if isinstance(entry, Mapping) else entry
        if isinstance(text, str):
            tokens[name] = text
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        for entry in given:
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
                templates[entry["name"]] = str(entry.get("template", ""))
    own_file = find_chat_template(tokenizer_id)
    if own_file is not None:
        templates["default"] = _text(own_file, f"chat_template.jinja of {files.label!r}")
    return ChatSettings(templates, tokens)


def read_template_file(path: str | os.PathLike[str]) -> str:
    """The template in a file.

    Raises:
        TokenizerError: it cannot be read or is not UTF-8.
    """
    return _text(read_file(Path(path), MAX_CONFIG_BYTES), f"chat template '{os.fspath(path)}'")


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise TokenizerError(f"{what} is not UTF-8 text; save it again") from None


def _object(data: bytes | None, label: str, filename: str) -> Mapping[str, Any]:
    if data is None:
        return {}
    try:
        parsed = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{filename} of {label!r} is not valid JSON ({error}); fetch or save it again") from None
    return parsed if isinstance(parsed, Mapping) else {}
