"""A tokenizer.json that has been looked at before any library sees it.

The libraries trust this file: an id near 2**32 makes them allocate until the process dies, ids with gaps are
silently renumbered, and a padding section lengthens every document. So it is parsed here, its ids and structure are
checked, and what the libraries get is written anew: no truncation, no padding, no post-processor, and every token
with a role (BOS, EOS, ...) marked special, which is what keeps text that spells it text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from zephon.errors import TokenizerError
from zephon.tokenizer.load import TokenizerFiles
from zephon.tokenizer.specials import declared_token, inferred_tokens, named_special_tokens

MAX_ID = (1 << 24) - 1
MAX_TEXT = 1 << 16  # characters of one string in normalizer, pre_tokenizer or decoder, or of one added token

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Tree = dict[str, Any]


class _AddedToken(msgspec.Struct):
    id: TokenId
    content: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Model(msgspec.Struct):
    vocab: (
        Annotated[dict[str, TokenId], msgspec.Meta(min_length=1)]
        | Annotated[list[tuple[str, float]], msgspec.Meta(min_length=1)]
    )
    merges: list[str | tuple[str, str]] = []
    dropout: float | None = None
    continuing_subword_prefix: str | None = None


class _File(msgspec.Struct):
    """What is used here of a tokenizer.json; the library that encodes checks the rest."""

    model: _Model
    added_tokens: list[_AddedToken] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


@dataclass(frozen=True)
class TokenizerDefinition:
    """One tokenizer, checked. Plain data: pickles, and any backend can be built from it.

    Attributes:
        label: what messages call it.
        json: the tokenizer.json that libraries get.
        encoder_json: the one to encode with; the same but for models that look words up whole (see `_hide_specials`).
        bos_token, eos_token: or None where it has none.
        bos_id, eos_id: their ids.
        vocab_size: largest id + 1, added tokens included.
        content_hash: sha256 (hex) of everything in the file that decides ids, and of the choice of BOS and EOS. Not
            of its formatting, nor of what has no effect on ids (decoder, post-processor).
    """

    label: str
    json: str
    encoder_json: str
    bos_token: str | None
    eos_token: str | None
    bos_id: int | None
    eos_id: int | None
    vocab_size: int
    content_hash: str

    def tree(self) -> Tree:
        """`json`, parsed."""
        tree: Tree = msgspec.json.decode(self.json)
        return tree


def read_definition(files: TokenizerFiles) -> tuple[TokenizerDefinition, Tree]:
    """Check the files of a tokenizer and make its definition.

    Returns:
        (the definition, its `json` as parsed).

    Raises:
        TokenizerError: invalid JSON, a wrong type, no vocabulary, ids that are huge or far from dense, nesting without
            end. One sentence that names the file.
    """
    label = files.label
    tree = _parse(files.tokenizer, label, "tokenizer.json")
    configs = [
        _parse(data, label, name)
        for data, name in (
            (files.config, "tokenizer_config.json"),
            (files.special_tokens_map, "special_tokens_map.json"),
        )
        if data is not None
    ]
    token_to_id = _checked(tree, label)

    inferred = inferred_tokens(tree)
    ends: list[tuple[str | None, int | None]] = []
    for kind, guess in zip(("bos_token", "eos_token"), inferred, strict=True):
        declared, token = declared_token(kind, configs)
        # A name without an id is a token that the model has never seen: as good as none.
        token = token if declared else guess
        ends.append((token, token_to_id[token]) if token in token_to_id else (None, None))
    (bos_token, bos_id), (eos_token, eos_id) = ends

    special = {name for config in configs for name in named_special_tokens(config)} | {bos_token, eos_token}
    for token in tree["added_tokens"]:
        token["special"] = token["special"] or token["content"] in special
    for section in ("truncation", "padding", "post_processor"):
        tree[section] = None

    text = msgspec.json.encode(tree).decode()
    hidden = _hide_specials(tree)
    definition = TokenizerDefinition(
        label=label,
        json=text,
        encoder_json=text if hidden is None else msgspec.json.encode(hidden).decode(),
        bos_token=bos_token,
        eos_token=eos_token,
        bos_id=bos_id,
        eos_id=eos_id,
        vocab_size=max(token_to_id.values()) + 1,
        content_hash=_content_hash(tree, bos_id, eos_id),
    )
    return definition, tree


def _parse(data: bytes, label: str, filename: str) -> Tree:
    try:
        tree = msgspec.json.decode(data)
    except RecursionError:
        raise TokenizerError(f"{filename} of {label!r} is nested too deeply; fetch or save it again") from None
    except ValueError as error:
        raise TokenizerError(f"{filename} of {label!r} is not valid JSON ({error}); fetch or save it again") from None
    if not isinstance(tree, dict):
        raise TokenizerError(f"{filename} of {label!r} holds a JSON {type(tree).__name__}; expected an object")
    return tree


def _checked(tree: Tree, label: str) -> dict[str, int]:
    """Check a tokenizer.json, fill in its optional sections, and give every token's id, added tokens included."""
    try:
        file = msgspec.convert(tree, _File)
    except ValueError as error:
        raise TokenizerError(
            f"tokenizer.json of {label!r} is not usable ({str(error).replace(' - at `$', ' at `')}); expected a file "
            "as written by tokenizers, with ids below 2**24"
        ) from None
    model = file.model
    if model.dropout and model.dropout != 1:
        raise TokenizerError(
            f"tokenizer.json of {label!r} has model.dropout {model.dropout}, which makes ids random; set it to null"
        )
    # tokenizers cuts this prefix off without looking, through the middle of a character if need be, and aborts.
    prefix = model.continuing_subword_prefix
    seconds = (merge.split(" ", 1)[-1] if isinstance(merge, str) else merge[1] for merge in model.merges)
    if prefix and not all(second.startswith(prefix) for second in seconds):
        raise TokenizerError(
            f"tokenizer.json of {label!r} has merges whose second token does not begin with continuing_subword_prefix "
            f"{prefix[:40]!r}; save the tokenizer again"
        )
    for section in ("normalizer", "pre_tokenizer", "decoder"):
        try:
            longest = _longest(tree.setdefault(section, None))
        except RecursionError:
            raise TokenizerError(f"{section} in tokenizer.json of {label!r} is nested too deeply") from None
        if longest > MAX_TEXT:  # each text would be lengthened by it
            raise TokenizerError(
                f"{section} in tokenizer.json of {label!r} holds a string of {longest} characters; expected at most "
                f"{MAX_TEXT}"
            )
    tree.setdefault("post_processor", None)
    tree["added_tokens"] = [msgspec.to_builtins(entry) for entry in file.added_tokens or []]
    if "type" not in tree["model"] and "merges" in tree["model"]:
        tree["model"]["type"] = "BPE"  # files of the first years, GPT-2's among them, leave it out
    vocab = model.vocab
    token_to_id = dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
    for entry in tree["added_tokens"]:
        token_to_id[entry["content"]] = entry["id"]
    top = max(token_to_id.values())
    # A few gaps are known in the field (and go to the reference library); a sparse range takes all memory.
    if top > 4 * len(token_to_id) + 1000:
        raise TokenizerError(
            f"tokenizer.json of {label!r} has {len(token_to_id)} tokens but ids up to {top}; expected ids without "
            "large gaps"
        )
    return token_to_id


def _longest(part: Any) -> int:
    """Characters of the longest string in a section, but for T5's table of characters, which is long by design."""
    if isinstance(part, dict):
        return max((_longest(item) for key, item in part.items() if key != "precompiled_charsmap"), default=0)
    if isinstance(part, list):
        return max(map(_longest, part), default=0)
    return len(part) if isinstance(part, str) else 0


def _hide_specials(tree: Tree) -> Tree | None:
    """A tokenizer of the same ids in which text cannot be a special token, where that takes more than a switch.

    Unigram, WordLevel and WordPiece models hold their special tokens as words and find them in text, whatever
    `tokenizers` is told. So here those words get spaces around them, which the pre-tokenizers of such models never
    leave in a word. BPE finds only what it can merge, and is left as it is.
    """
    vocab = tree["model"]["vocab"]
    if tree["model"].get("type") == "BPE":
        return None
    words = set(vocab) if isinstance(vocab, dict) else {entry[0] for entry in vocab}
    special = {token["content"] for token in tree["added_tokens"] if token["special"]} & words
    special.discard(tree["model"].get("unk_token"))
    if not special:
        return None
    names = {word: f" {word} " if word in special else word for word in words}
    if isinstance(vocab, dict):
        renamed: Any = {names[word]: i for word, i in vocab.items()}
    else:
        renamed = [[names[word], score] for word, score in vocab]
    added = [token for token in tree["added_tokens"] if token["content"] not in special]
    return {**tree, "model": {**tree["model"], "vocab": renamed}, "added_tokens": added}


def _content_hash(tree: Tree, bos_id: int | None, eos_id: int | None) -> str:
    model = {k: v for k, v in tree["model"].items() if k not in ("vocab", "merges")}
    vocab, merges = tree["model"]["vocab"], tree["model"].get("merges", [])
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        digest.update(f"{len(text)}:".encode())
        digest.update(text.encode())

    add([tree["normalizer"], tree["pre_tokenizer"], tree["added_tokens"], model, bos_id, eos_id])
    if isinstance(vocab, dict):
        ordered = sorted(vocab.items(), key=lambda item: (item[1], item[0]))
        add([token for token, _ in ordered])
        digest.update(np.fromiter((i for _, i in ordered), dtype="<i8", count=len(ordered)).tobytes())
    else:
        add(vocab)
    # "a b" and ["a", "b"] are two spellings of one merge.
    add([merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges])
    return digest.hexdigest()
