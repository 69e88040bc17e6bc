"""Where a tokenizer's files come from: a folder, a tokenizer.json, or a model on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from zephon.columns.faults import reason_of
from zephon.data.formats.content import LFS_POINTER
from zephon.errors import TokenizerError
from zephon.tokenizer.specials import CONFIG, ROLES, declared_tokens

MAX_TOKENIZER_BYTES = 128 << 20  # the largest published ones (a million entries) are about half of this
MAX_CONFIG_BYTES = 16 << 20
TOKENIZER, TEMPLATES = "tokenizer.json", "additional_chat_templates"
_TEMPLATE = re.compile(rf"{TEMPLATES}/[^/]+\.jinja")
_EXPECTED = (
    "a folder with a tokenizer.json, the path of a tokenizer.json, a hub name ('name', 'organization/name' or "
    "'organization/name@revision'), or a fast tokenizer of transformers or tokenizers.Tokenizer"
)
_NO_FILE = "has no tokenizer.json; pass a folder to which save_pretrained of a fast tokenizer has written one."
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(@\w[\w./-]*)?", re.ASCII)


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of one tokenizer: a name for messages, tokenizer.json, and what reads others, or gives None.

    `templates` lists the folder of additional chat templates; `alone`: no other file declares special tokens.
    """

    label: str
    tokenizer: bytes
    read: Callable[[str], bytes | None]
    templates: Callable[[], Iterable[str]]
    alone: bool = False

    def config(self, filename: str) -> dict[str, Any]:
        """The object in a JSON file, empty where there is no such file."""
        data = None if self.alone else self.read(filename)
        return {} if data is None else read_json(data, self.label, filename)


@dataclass(frozen=True, repr=False)
class TokenizerCopy:
    """The files that a tokenizer object would save; plain data that pickles and compares."""

    label: str
    files: tuple[tuple[str, bytes], ...]

    def __repr__(self) -> str:
        return self.label


TokenizerId = str | os.PathLike[str] | TokenizerCopy
"""What names a tokenizer, or holds it."""


def portable_tokenizer(tokenizer: Any) -> TokenizerId:
    """A name as it is; the files of a tokenizer object of transformers or `tokenizers`; else TokenizerError."""
    if isinstance(tokenizer, str | os.PathLike | TokenizerCopy):
        return tokenizer
    files, kind = dict[str, bytes](), type(tokenizer).__name__
    try:
        if isinstance(tokenizer, type):
            kind = f"class {tokenizer.__name__}"
        elif hasattr(tokenizer, "backend_tokenizer"):
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
                files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        elif callable(to_json := getattr(tokenizer, "to_str", None)):
            files = {TOKENIZER: to_json().encode()}
    except Exception as error:  # of libraries, for parts written in Python
        raise TokenizerError(
            f"the tokenizer, an object of type {kind}, cannot be saved ({reason_of(error)}); expected one whose parts "
            "are those of the library tokenizers."
        ) from error
    if TOKENIZER not in files:
        shown = f"an object of type {kind}" if hasattr(tokenizer, "__dict__") else f"{tokenizer!r:.80}"
        shown = f"the {kind}, no object" if isinstance(tokenizer, type) else shown
        raise TokenizerError(f"the tokenizer is {shown}; expected {_EXPECTED}.")
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:8]
    return TokenizerCopy(f"{kind} object {digest}", tuple(files.items()))


def find_tokenizer(tokenizer_id: TokenizerId) -> TokenizerFiles:
    """Find the files of a tokenizer, or TokenizerError.

    What exists on disk is a path, whatever its name; what only looks like a path and does not exist is an error. The
    network is asked for plain names alone, like "gpt2" or "organization/name@revision".
    """
    if isinstance(tokenizer_id := portable_tokenizer(tokenizer_id), TokenizerCopy):
        files = dict(tokenizer_id.files)
        return TokenizerFiles(tokenizer_id.label, files[TOKENIZER], files.get, lambda: files)
    text = os.fspath(tokenizer_id)
    path = Path(text).expanduser() if text.strip() and "\0" not in text else None
    if path is not None and path.exists():
        file = path / TOKENIZER if path.is_dir() else path
        if not file.exists():
            raise TokenizerError(f"tokenizer folder '{path}' {_NO_FILE}")
        folder = file.parent
        return TokenizerFiles(
            str(file),
            _read(file, MAX_TOKENIZER_BYTES),
            lambda name: _read(folder / name, MAX_CONFIG_BYTES) if (folder / name).exists() else None,
            partial(_templates_in, folder),
            alone=not path.is_dir(),
        )
    if path is None or isinstance(tokenizer_id, os.PathLike) or text.endswith(".json") or not _HUB_NAME.fullmatch(text):
        raise TokenizerError(f"tokenizer_id is {tokenizer_id!r}, which does not exist; expected {_EXPECTED}.")
    repo, _, revision = text.partition("@")
    downloaded = _from_hub(repo, revision or None, TOKENIZER)
    if downloaded is None:
        raise TokenizerError(f"hub model {text!r} {_NO_FILE}")
    # All files from one commit: its hash is the name of the snapshot folder.
    snapshot = downloaded.parent

    def read(filename: str) -> bytes | None:
        file = _from_hub(repo, snapshot.name, filename)
        return None if file is None else _read(file, MAX_CONFIG_BYTES)

    return TokenizerFiles(
        text, _read(downloaded, MAX_TOKENIZER_BYTES), read, partial(_templates_on_hub, repo, snapshot)
    )


def _templates_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob(f"{TEMPLATES}/*.jinja"))


def _templates_on_hub(repo: str, snapshot: Path) -> list[str]:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import EntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _templates_in(snapshot)
    try:
        return [entry.path for entry in HfApi().list_repo_tree(repo, TEMPLATES, revision=snapshot.name)]
    except EntryNotFoundError:
        return []
    except Exception as error:
        raise _unreachable(f"list {TEMPLATES}", repo, error) from None


def _unreachable(action: str, repo: str, error: Exception) -> TokenizerError:
    return TokenizerError(
        f"cannot {action} of hub model {repo!r} ({reason_of(error)}); check the name, the network and HF_TOKEN, or "
        "pass the path of a local folder."
    )


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
        raise _unreachable(f"fetch {filename}", repo, error) from None


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
    if data.startswith(LFS_POINTER):
        raise TokenizerError(f"'{path}' is a pointer of Git LFS to the file; get the file itself with: git lfs pull")
    return data


def read_json(data: bytes, label: str, filename: str) -> dict[str, Any]:
    """The object in a JSON file, or TokenizerError."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{filename} of {label!r} is no JSON object ({reason_of(error)}); fetch or save it again."
        ) from None


def read_chat_settings(tokenizer_id: TokenizerId) -> tuple[dict[str, str], dict[str, str | None]]:
    """The chat templates of a tokenizer by name ("default", "tool_use"), and its special tokens by declared role.

    As in transformers, templates in files of their own take the place of all that tokenizer_config.json has.
    """
    files = find_tokenizer(tokenizer_id)
    declared = declared_tokens(files.config)
    if files.config(CONFIG).get("split_special_tokens"):
        raise TokenizerError(
            f"split_special_tokens in {CONFIG} of {files.label!r} is true, so that a chat template's special tokens "
            "would be text; set it to false."
        )
    # Files without the table of tokens may leave out what a class of transformers has by default.
    tokens: dict[str, str | None] = dict.fromkeys(ROLES) if declared.replaces else {}
    tokens |= {name: token.content if token else None for name, token in declared.roles.items()}
    paths = [name for name in files.templates() if _TEMPLATE.fullmatch(name)]
    found = {"default": files.read("chat_template.jinja")} | {Path(name).stem: files.read(name) for name in paths}
    own = {name: _text(data, f"a chat template of {files.label!r}") for name, data in found.items() if data is not None}
    if own:
        return own, tokens
    entries = files.config(CONFIG).get("chat_template")
    try:
        if isinstance(entries, list):
            entries = {entry["name"]: entry["template"] for entry in entries}
        named = {"default": entries} if isinstance(entries, str) else entries or {}
        return msgspec.convert(named, dict[str, str]), tokens
    except (KeyError, TypeError, msgspec.ValidationError):
        raise TokenizerError(
            f"chat_template in {CONFIG} of {files.label!r} is {entries!r:.80}; expected a template, or a list of "
            "objects with name and template."
        ) from None


def read_template_file(path: str | os.PathLike[str]) -> str:
    """The chat template in a file."""
    return _text(_read(Path(path), MAX_CONFIG_BYTES), f"chat template '{os.fspath(path)}'")


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise TokenizerError(f"{what} is not UTF-8 text; save it again.") from None
