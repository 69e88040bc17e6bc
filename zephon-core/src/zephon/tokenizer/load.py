"""Where a tokenizer's files come from: a folder, a tokenizer.json, or a model on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from zephon.columns.faults import reason_of
from zephon.errors import TokenizerError
from zephon.tokenizer.specials import ROLES, token_texts

__all__ = ["TokenizerFiles", "find_tokenizer", "read_chat_settings", "read_json", "read_template_file"]

MAX_TOKENIZER_BYTES = 128 << 20  # the largest published ones (a million entries) are about half of this
MAX_CONFIG_BYTES = 16 << 20
TOKENIZER, CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(@\w[\w./-]*)?", re.ASCII)


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of one tokenizer.

    Attributes:
        label: its name in messages: the path of its tokenizer.json, or its hub name.
        tokenizer: bytes of tokenizer.json.
        configs: names of the other files that say what its special tokens are.
        find: the path of a file by its name, or None where there is none.
    """

    label: str
    tokenizer: bytes
    configs: tuple[str, ...]
    find: Callable[[str], Path | None]

    def read(self, filename: str) -> bytes | None:
        """The bytes of a file other than tokenizer.json, or None where there is none."""
        path = self.find(filename)
        return None if path is None else _read(path, MAX_CONFIG_BYTES)

    def read_config(self, filename: str) -> dict[str, Any]:
        """The object in a JSON file, empty where there is no such file."""
        data = self.read(filename) if filename in self.configs else None
        return {} if data is None else read_json(data, self.label, filename)


def find_tokenizer(tokenizer_id: str | os.PathLike[str]) -> TokenizerFiles:
    """Find the files of `tokenizer_id`.

    What exists on disk is a path, whatever its name; what only looks like a path and does not exist is an error. The
    network is asked for plain names alone, like "gpt2" or "organization/name@revision".

    Raises:
        TokenizerError: nothing there, no tokenizer.json in it, unreadable, too large, or the hub does not give it.
    """
    text = os.fspath(tokenizer_id) if isinstance(tokenizer_id, str | os.PathLike) else ""
    path = Path(text).expanduser() if isinstance(text, str) and text.strip() and "\0" not in text else None
    if path is not None and path.exists():
        file = path / TOKENIZER if path.is_dir() else path
        if not file.exists():
            raise TokenizerError(
                f"tokenizer folder '{path}' has no tokenizer.json; save the tokenizer in that format (save_pretrained "
                "of a fast tokenizer writes it) or pass another folder."
            )
        configs = (CONFIG, SPECIAL_TOKENS) if path.is_dir() else ()
        return TokenizerFiles(str(file), _read(file, MAX_TOKENIZER_BYTES), configs, partial(_in_folder, file.parent))
    if path is None or isinstance(tokenizer_id, os.PathLike) or text.endswith(".json") or not _HUB_NAME.fullmatch(text):
        raise TokenizerError(
            f"tokenizer_id is {tokenizer_id!r}, which does not exist; expected a folder with a tokenizer.json, the "
            "path of a tokenizer.json, or a hub name: 'name', 'organization/name' or 'organization/name@revision'."
        )
    repo, _, revision = text.partition("@")
    downloaded = _from_hub(repo, revision or None, TOKENIZER)
    if downloaded is None:
        raise TokenizerError(
            f"hub model {text!r} has no tokenizer.json; choose one that has, or save the tokenizer in that format and "
            "pass the folder."
        )
    # All files from one commit: its hash is the name of the snapshot folder.
    commit = downloaded.parent.name
    return TokenizerFiles(text, _read(downloaded, MAX_TOKENIZER_BYTES), (CONFIG,), partial(_from_hub, repo, commit))


def _in_folder(folder: Path, filename: str) -> Path | None:
    path = folder / filename
    return path if path.exists() else None


def _from_hub(repo: str, revision: str | None, filename: str) -> Path | None:
    """A file of a hub model, through the hub's own local cache; None where the model has no such file.

    Offline on purpose, an optional file that the cache lacks counts as missing; but where the network failed, going on
    would give another BOS, EOS or template than the next start.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, filename, revision=revision))
    except Exception as error:
        on_purpose = constants.HF_HUB_OFFLINE and filename != TOKENIZER
        if isinstance(error, EntryNotFoundError) and (on_purpose or not isinstance(error, LocalEntryNotFoundError)):
            return None
        raise TokenizerError(
            f"cannot fetch {filename} of hub model {repo!r} ({reason_of(error)}); check the name, the network and "
            "HF_TOKEN, or pass the path of a local folder."
        ) from None


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise TokenizerError(
            f"'{path}' cannot be read ({error.strerror}); check that it exists and may be read."
        ) from None
    if len(data) > limit:
        raise TokenizerError(f"'{path}' has more than {limit >> 20} MiB; expected a smaller file of this kind.")
    return data


def read_json(data: bytes, label: str, filename: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        TokenizerError: it is no valid JSON, is nested too deeply or holds something else.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{filename} of {label!r} is no JSON object ({reason_of(error)}); fetch or save it again."
        ) from None


def read_chat_settings(tokenizer_id: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The chat templates of a tokenizer by name ("default", "tool_use"), and its special tokens by role.

    Raises:
        TokenizerError: the files cannot be read, or are damaged.
    """
    files = find_tokenizer(tokenizer_id)
    config = files.read_config(CONFIG)
    roles = {**files.read_config(SPECIAL_TOKENS), **config}
    tokens = {role: text for role in ROLES for text in token_texts(roles.get(role))}
    declared = config.get("chat_template")
    entries = declared if isinstance(declared, list) else [{"name": "default", "template": declared}]
    templates = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    own_file = files.read("chat_template.jinja")
    if own_file is not None:
        templates["default"] = _text(own_file, f"chat_template.jinja of {files.label!r}")
    return templates, tokens


def read_template_file(path: str | os.PathLike[str]) -> str:
    """The chat template in a file.

    Raises:
        TokenizerError: it cannot be read or is not UTF-8.
    """
    return _text(_read(Path(path), MAX_CONFIG_BYTES), f"chat template '{os.fspath(path)}'")


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise TokenizerError(f"{what} is not UTF-8 text; save it again.") from None
