"""Where a tokenizer's files come from: a folder, a tokenizer.json, or a model on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from zephon.errors import TokenizerError

MAX_TOKENIZER_BYTES = 128 << 20  # the largest published ones (a million entries) are about half of this
MAX_CONFIG_BYTES = 16 << 20

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(@\w[\w./-]*)?", re.ASCII)


@dataclass(frozen=True)
class TokenizerFiles:
    """The raw files of one tokenizer.

    Attributes:
        label: what messages call it: the path of its tokenizer.json, or its hub name.
        tokenizer: bytes of tokenizer.json.
        config: bytes of tokenizer_config.json, if there is one.
        special_tokens_map: bytes of special_tokens_map.json, if there is one.
    """

    label: str
    tokenizer: bytes
    config: bytes | None = None
    special_tokens_map: bytes | None = None


def find_tokenizer(tokenizer_id: str | os.PathLike[str]) -> TokenizerFiles:
    """Read the files of `tokenizer_id`.

    What exists on disk is a path, whatever it is called; what only looks like a path and does not exist is an
    error. The network is asked for plain names alone, like "gpt2" or "organization/name@revision".

    Raises:
        TokenizerError: nothing there, no tokenizer.json in it, unreadable, too large, or the hub says no.
    """
    text = os.fspath(tokenizer_id) if isinstance(tokenizer_id, str | os.PathLike) else repr(tokenizer_id)[:80] + "\0"
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise TokenizerError(
            f"tokenizer_id is {text!r}; expected a folder with a tokenizer.json, the path of a tokenizer.json or a hub "
            "name like 'gpt2'"
        )
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if path.is_dir():
        return _from_folder(path)
    if path.exists():
        return TokenizerFiles(str(path), read_file(path, MAX_TOKENIZER_BYTES))
    if not isinstance(tokenizer_id, str) or _looks_like_path(text):
        raise TokenizerError(
            f"tokenizer {text!r} does not exist; expected a folder with a tokenizer.json or the path of one"
        )
    if not _HUB_NAME.fullmatch(text):
        raise TokenizerError(
            f"tokenizer {text!r} is neither an existing path nor a hub name (expected 'name', 'organization/name' or "
            "'organization/name@revision'); correct it or pass a local folder"
        )
    return _from_hub(text)


def find_chat_template(tokenizer_id: str | os.PathLike[str]) -> bytes | None:
    """The chat_template.jinja beside a tokenizer that `find_tokenizer` finds, or None where there is none."""
    path = Path(os.fspath(tokenizer_id)).expanduser()
    if path.is_file():
        path = path.parent
    if path.is_dir():
        return _read_optional(path / "chat_template.jinja")
    repo, _, revision = os.fspath(tokenizer_id).partition("@")
    return _optional_from_hub(repo, repo, "chat_template.jinja", revision or None)


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "~", "/")) or text.endswith((".json", "/")) or "\\" in text or text.count("/") > 1


def _from_folder(folder: Path) -> TokenizerFiles:
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [n for n in ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt") if (folder / n).exists()]
        found = f"only {' and '.join(others)}" if others else "no tokenizer file at all"
        raise TokenizerError(
            f"tokenizer folder '{folder}' has no tokenizer.json ({found}); save the tokenizer in that format "
            "(save_pretrained of a fast tokenizer writes it) or pass another folder"
        )
    return TokenizerFiles(
        str(path),
        read_file(path, MAX_TOKENIZER_BYTES),
        _read_optional(folder / "tokenizer_config.json"),
        _read_optional(folder / "special_tokens_map.json"),
    )


def _read_optional(path: Path) -> bytes | None:
    return read_file(path, MAX_CONFIG_BYTES) if path.exists() else None


def read_file(path: Path, limit: int) -> bytes:
    """Bytes of a file of at most `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise TokenizerError(
            f"'{path}' cannot be read ({error.strerror}); check that it exists and may be read"
        ) from None
    if len(data) > limit:
        raise TokenizerError(
            f"'{path}' is larger than {limit >> 20} MiB, the limit for such a file; is it the right one?"
        )
    return data


def _from_hub(name: str) -> TokenizerFiles:
    """tokenizer.json and tokenizer_config.json of one commit of a hub model, through the hub's own local cache."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repo, _, revision = name.partition("@")
    try:
        path = _download(repo, "tokenizer.json", revision or None)
    except LocalEntryNotFoundError as error:
        raise _hub_error(name, "tokenizer.json", error) from None
    except EntryNotFoundError:
        raise TokenizerError(
            f"hub model {name!r} has no tokenizer.json; choose one that has, or save the tokenizer in that format and "
            "pass the folder"
        ) from None
    except Exception as error:
        raise _hub_error(name, "tokenizer.json", error) from None

    # Both files from the same commit: its hash is the name of the snapshot folder.
    config = _optional_from_hub(name, repo, "tokenizer_config.json", path.parent.name)
    return TokenizerFiles(name, read_file(path, MAX_TOKENIZER_BYTES), config)


def _optional_from_hub(name: str, repo: str, filename: str, revision: str | None) -> bytes | None:
    """A file that a hub model may have.

    Offline on purpose, a file that the local cache lacks counts as missing; but when the network failed, going on would
    give another BOS, EOS or template than the next start.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        path = _download(repo, filename, revision)
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            return None
        raise _hub_error(name, filename, error) from None
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise _hub_error(name, filename, error) from None
    return read_file(path, MAX_CONFIG_BYTES)


def _download(repo: str, filename: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, filename, revision=revision))


def _hub_error(name: str, filename: str, error: Exception) -> TokenizerError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    lines = str(error).strip().splitlines()
    reason = lines[0][:200].rstrip(". ") if lines else type(error).__name__
    if isinstance(error, LocalEntryNotFoundError):
        reach = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        reason = f"{reach} and the local cache does not hold it"
    return TokenizerError(
        f"cannot fetch {filename} of hub model {name!r} ({reason}); check the name, the network and HF_TOKEN, or pass "
        "the path of a local folder that exists"
    )
