"""A tokenizer.json that has been looked at before any library sees it.

The libraries trust this file: an id near 2**32 makes them allocate until the process dies, ids with gaps are
silently renumbered, and a padding section lengthens every document. So it is parsed here, its ids and structure are
checked, and what the libraries get is written anew: no truncation, no padding, no post-processor, and every token
with a role (BOS, EOS, ...) marked special, which is what keeps text that spells it text.
"""

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
MAX_DEPTH = 32  # of normalizer, pre_tokenizer and decoder; published ones reach 5
MAX_TEXT = 1 << 16  # characters of one string in them, or of one added token

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
    _check_structure(tree, label)
    token_to_id = _token_ids(tree, label)

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
        raise TokenizerError(f"{filename} of {label!r} holds a JSON {_kind(tree)}; expected an object")
    return tree


def _check_structure(tree: Tree, label: str) -> None:
    """Check the types of the sections that are used here, and fill in the optional ones."""

    def refuse(where: str, found: object, expected: str) -> TokenizerError:
        return TokenizerError(
            f"tokenizer.json of {label!r} has {_kind(found)} as {where}; expected {expected}, as written by tokenizers"
        )

    model = tree.get("model")
    if not isinstance(model, dict):
        raise refuse("model", model, "an object")
    if not isinstance(model.get("vocab"), dict | list) or not model["vocab"]:
        raise refuse("model.vocab", model.get("vocab"), "a vocabulary that is not empty")
    _check_merges(model, label)
    dropout = model.get("dropout")
    if dropout is not None and (isinstance(dropout, bool) or not isinstance(dropout, int | float)):
        raise refuse("model.dropout", dropout, "null")
    if dropout and dropout != 1:
        raise TokenizerError(
            f"tokenizer.json of {label!r} has model.dropout {dropout}, which makes ids random; set it to null"
        )
    if "type" not in model and "merges" in model:
        model["type"] = "BPE"  # files of the first years, GPT-2's among them, leave it out
    for section in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        part = tree.setdefault(section, None)
        if part is not None and not isinstance(part, dict):
            raise refuse(section, part, "an object or null")
        _check_depth(part, section, label)
    added = tree.get("added_tokens")
    try:
        entries = msgspec.convert([] if added is None else added, list[_AddedToken])
    except ValueError as error:
        raise TokenizerError(
            f"added_tokens in tokenizer.json of {label!r} is not usable ({_detail(error)}); save the tokenizer again"
        ) from None
    tree["added_tokens"] = [msgspec.to_builtins(entry) for entry in entries]


def _check_merges(model: Tree, label: str) -> None:
    merges = model.get("merges", [])
    try:
        if merges and isinstance(merges, list) and isinstance(merges[0], str):
            pairs = [tuple(merge.split(" ", 1)) for merge in msgspec.convert(merges, list[str])]
        else:
            pairs = msgspec.convert(merges, list[tuple[str, str]])
    except ValueError as error:
        raise TokenizerError(
            f"model.merges in tokenizer.json of {label!r} is not usable ({_detail(error)}); expected pairs of tokens"
        ) from None
    # tokenizers cuts this prefix off without looking, through the middle of a character if need be, and aborts.
    prefix = model.get("continuing_subword_prefix") or ""
    if prefix and not all(isinstance(prefix, str) and pair[-1].startswith(prefix) for pair in pairs):
        raise TokenizerError(
            f"tokenizer.json of {label!r} has merges whose second token does not begin with continuing_subword_prefix "
            f"{str(prefix)[:40]!r}; save the tokenizer again"
        )


def _check_depth(part: Any, section: str, label: str) -> None:
    level = [part]
    for _ in range(MAX_DEPTH):
        deeper = []
        for value in level:
            if isinstance(value, dict | list):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    # T5's table of characters is a long string by design.
                    if isinstance(item, str) and len(item) > MAX_TEXT and key != "precompiled_charsmap":
                        raise TokenizerError(
                            f"{section} in tokenizer.json of {label!r} holds a string of {len(item)} characters; "
                            f"expected at most {MAX_TEXT}"
                        )
                    deeper.append(item)
        level = deeper
        if not level:
            return
    raise TokenizerError(
        f"{section} in tokenizer.json of {label!r} is nested more than {MAX_DEPTH} deep; expected a file as written by "
        "tokenizers"
    )


def _token_ids(tree: Tree, label: str) -> dict[str, int]:
    """Every token's id, added tokens included; ids must be nearly dense and below 2**24."""
    vocab = tree["model"]["vocab"]
    try:
        if isinstance(vocab, dict):
            token_to_id = dict(msgspec.convert(vocab, dict[str, TokenId]))
        else:
            token_to_id = {token: i for i, (token, _) in enumerate(msgspec.convert(vocab, list[tuple[str, float]]))}
    except ValueError as error:
        raise TokenizerError(
            f"model.vocab in tokenizer.json of {label!r} is not usable ({_detail(error)}); expected tokens with ids "
            f"from 0 to {MAX_ID}"
        ) from None
    for entry in tree["added_tokens"]:
        token_to_id[entry["content"]] = entry["id"]
    top = max(token_to_id.values())
    # A few holes are known in the field (and go to the reference library); an array over a sparse range is an attack.
    if top > 4 * len(token_to_id) + 1000:
        raise TokenizerError(
            f"tokenizer.json of {label!r} has {len(token_to_id)} tokens but ids up to {top}; expected ids without "
            "large gaps"
        )
    return token_to_id


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


def _detail(error: ValueError) -> str:
    """msgspec's message, in words that make sense here."""
    return str(error).replace(" - at `$", " at `")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "nothing"}
    if isinstance(value, dict | list) and not value:
        return f"an empty {'object' if isinstance(value, dict) else 'list'}"
    return names.get(type(value), "a number")
