"""A tokenizer.json, checked before any library sees it.

The libraries trust this file: an id near 2**32 makes them allocate until the process dies, ids with gaps are silently
renumbered, and a padding section lengthens every document. So its ids and structure are checked, and what libraries get
is written anew: without truncation, padding and post-processor, every token with a role marked special.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from zephon.errors import TokenizerError
from zephon.tokenizer.load import TOKENIZER, TokenizerFiles, read_json
from zephon.tokenizer.specials import (
    WELL_KNOWN_BOS,
    WELL_KNOWN_EOS,
    DeclaredTokens,
    declared_tokens,
    inferred_tokens,
)

MAX_ID = (1 << 24) - 1
MAX_TEXT = 1 << 16  # characters of an added token
MAX_SECTIONS_BYTES = 512 << 10  # JSON of normalizer, pre_tokenizer and decoder; T5's table of characters has 320 KiB

TokenId = Annotated[int, Meta(ge=0, le=MAX_ID)]
Tree = dict[str, Any]
_SECTIONS = ("normalizer", "pre_tokenizer", "decoder")


class AddedToken(msgspec.Struct):
    """A token that is found in text before any other; a special one has a role, and text never becomes it."""

    id: TokenId
    content: Annotated[str, Meta(max_length=MAX_TEXT)]
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Model(msgspec.Struct):
    vocab: Annotated[dict[str, TokenId], Meta(min_length=1)] | Annotated[list[tuple[str, float]], Meta(min_length=1)]
    merges: list[str | tuple[str, str]] = []
    dropout: float | None = None
    continuing_subword_prefix: str | None = None


class _File(msgspec.Struct):
    """What is used here of a tokenizer.json; the library that encodes checks the rest."""

    model: _Model
    added_tokens: list[AddedToken] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


@dataclass(frozen=True)
class TokenizerDefinition:
    """One tokenizer, checked. Plain data: pickles, and any backend can be built from it.

    Libraries get `json`, and to encode `encoder_json`, the same but for models that look words up whole. BOS and EOS
    may be None; `vocab_size` is the largest id + 1, added tokens included; `content_hash` a sha256 of all that decides
    ids (not decoder, post-processor or formatting), and of the choice of BOS and EOS.
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
        return msgspec.json.decode(self.json, type=Tree)

    def inner(self) -> TokenizerDefinition:
        """The same, but for Metaspace with prepend_scheme "first", for text that something comes before."""
        texts = [self.json, self.encoder_json]
        for n, text in enumerate(texts):
            tree = msgspec.json.decode(text)
            step = tree["pre_tokenizer"] or {}
            for each in [step, *step.get("pretokenizers", [])]:
                if each.get("type") == "Metaspace" and each.get("prepend_scheme") == "first":
                    each["prepend_scheme"] = "never"
                    texts[n] = msgspec.json.encode(tree).decode()
        return replace(self, json=texts[0], encoder_json=texts[1]) if texts[0] != self.json else self


def read_definition(files: TokenizerFiles) -> TokenizerDefinition:
    """Check the files of a tokenizer and make its definition; TokenizerError in one sentence that names the file."""
    tree = read_json(files.tokenizer, files.label, TOKENIZER)
    try:
        token_to_id = _checked(tree)
        declared = declared_tokens(files.config)
        _add(declared, tree, token_to_id)
        return _definition(files.label, tree, declared, token_to_id)
    except TokenizerError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).replace(" - at `$", " at `")
        raise TokenizerError(
            f"tokenizer.json of {files.label!r} is not usable: {reason}; expected files as save_pretrained writes "
            "them, with ids below 2**24."
        ) from None


def _checked(tree: Tree) -> dict[str, int]:
    """Check a tokenizer.json, fill in its optional sections, and give every token's id, or ValueError."""
    file = msgspec.convert(tree, _File)
    model = file.model
    if model.dropout and model.dropout != 1:
        raise ValueError(f"model.dropout is {model.dropout}, which makes ids random; set it to null")
    # tokenizers cuts this prefix off without looking, through the middle of a character if need be, and aborts.
    prefix = model.continuing_subword_prefix
    seconds = (merge.split(" ", 1)[-1] if isinstance(merge, str) else merge[1] for merge in model.merges)
    if prefix and not all(second.startswith(prefix) for second in seconds):
        raise ValueError(f"second tokens of merges do not begin with continuing_subword_prefix {prefix[:40]!r}")
    size = len(msgspec.json.encode([tree.setdefault(section, None) for section in _SECTIONS]))
    if size > MAX_SECTIONS_BYTES:  # a long string in them would lengthen each text
        raise ValueError(f"{', '.join(_SECTIONS)} have {size} bytes; expected at most {MAX_SECTIONS_BYTES}")
    tree.setdefault("post_processor", None)
    tree["added_tokens"] = [msgspec.to_builtins(entry) for entry in file.added_tokens or []]
    if "type" not in tree["model"] and "merges" in tree["model"]:
        tree["model"]["type"] = "BPE"  # files of the first years, GPT-2's among them, leave it out
    vocab = model.vocab
    token_to_id = dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
    token_to_id |= {entry["content"]: entry["id"] for entry in tree["added_tokens"]}
    top = max(token_to_id.values())
    # A few gaps are known in the field (and go to the reference library); a sparse range takes all memory.
    if top > 4 * len(token_to_id) + 1000:
        raise ValueError(f"there are {len(token_to_id)} tokens but ids up to {top}, with large gaps")
    return token_to_id


def _add(declared: DeclaredTokens, tree: Tree, token_to_id: dict[str, int]) -> None:
    """Add the declared tokens that the file lacks, with the ids that transformers gives them.

    ValueError where that would be another id than the declared one, or none.
    """
    added = {token["content"]: token for token in tree["added_tokens"]}
    next_id = max([len(tree["model"]["vocab"]), *(token["id"] + 1 for token in added.values())])
    for number, token in declared.in_order():
        if not (content := token.content):
            continue
        if number is None and declared.owner and content not in token_to_id:
            raise ValueError(
                f"token {content[:40]!r} is declared without an id beside {declared.owner}, which may add tokens "
                "of its own before it; save what AutoTokenizer loads"
            )
        new_id = token_to_id.setdefault(content, next_id)
        next_id = max(next_id, new_id + 1)
        if number not in (None, new_id):
            raise ValueError(f"token {content[:40]!r} is declared with id {number}, and has, or would get, {new_id}")
        if content not in added:
            added[content] = {"id": new_id, **msgspec.structs.asdict(token)}
            if number is None and any(each.content == content and each != token for each in declared.unnumbered):
                raise ValueError(f"token {content[:40]!r} is declared twice, with different flags")
        elif number is not None and declared.replaces:
            special = token.special or added[content]["special"]
            added[content] |= {**msgspec.structs.asdict(token), "special": special}
    tree["added_tokens"] = list(added.values())
    for token in declared.overruled:
        if not added.get(token.content, {"special": False})["special"]:
            raise ValueError(f"special token {token.content[:40]!r} is declared in a list that another list overrules")


def _definition(label: str, tree: Tree, declared: DeclaredTokens, token_to_id: dict[str, int]) -> TokenizerDefinition:
    before, after = inferred_tokens(tree)
    bos = declared.role("bos_token", before, WELL_KNOWN_BOS)
    eos = declared.role("eos_token", after, WELL_KNOWN_EOS)
    bos_id, eos_id = (None if token is None else token_to_id[token] for token in (bos, eos))
    special = {bos, eos} | declared.special
    for token in tree["added_tokens"]:
        token["special"] = token["special"] or token["content"] in special
    for section in ("truncation", "padding", "post_processor"):
        tree[section] = None
    text, hidden = msgspec.json.encode(tree).decode(), _hide_specials(tree)
    return TokenizerDefinition(
        label=label,
        json=text,
        encoder_json=text if hidden is None else msgspec.json.encode(hidden).decode(),
        bos_token=bos,
        eos_token=eos,
        bos_id=bos_id,
        eos_id=eos_id,
        vocab_size=max(token_to_id.values()) + 1,
        content_hash=_content_hash(tree, bos_id, eos_id),
    )


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
