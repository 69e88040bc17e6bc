"""Which configurations a fast library may be trusted with.

fastokens and gigatoken accept many configurations that they then encode differently from `tokenizers`, some of them
only on rare text that no probe is sure to hold. So a fast library gets a tokenizer only when everything in it is of
a kind on which it was found to agree on hundreds of megabytes and hundreds of thousands of fuzz strings; and then it
still has to pass the probes. Anything else is encoded by `tokenizers`: slower, never wrong.

The functions return the reason of a refusal, or None.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

Part = dict[str, Any]

_MODEL_KEYS = {
    "type",
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "vocab",
    "merges",
}
_METASPACE = "▁"


def fastokens_refusal(tree: Part) -> str | None:
    """Why fastokens must not run this tokenizer."""
    return _model_refusal(tree) or _added_token_refusal(tree) or _pipeline_refusal(tree, library="fastokens")


def gigatoken_refusal(tree: Part) -> str | None:
    """Why gigatoken must not run this tokenizer."""
    return (
        _model_refusal(tree)
        or _added_token_refusal(tree)
        or _overlap_refusal(tree)
        or _pipeline_refusal(tree, library="gigatoken")
    )


def _model_refusal(tree: Part) -> str | None:
    model = tree["model"]
    if model.get("type") != "BPE" or not isinstance(model["vocab"], dict):
        return f"model {model.get('type')}"
    if unknown := set(model) - _MODEL_KEYS:
        return f"model key {min(unknown)}"
    if model.get("dropout"):
        return "BPE dropout"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "subword prefix or suffix"
    ids = sorted(model["vocab"].values())
    if ids != list(range(len(ids))):
        return "vocabulary ids with gaps or repeats"
    merges = model.get("merges", [])
    # One file spells all its merges one way; the two spellings must not meet in one set.
    if len({m if isinstance(m, str) else tuple(m) for m in merges}) != len(merges):
        return "repeated merges"
    return None


def _added_token_refusal(tree: Part) -> str | None:
    ids = set(tree["model"]["vocab"].values())
    vocab = tree["model"]["vocab"]
    for token in tree["added_tokens"]:
        content = token["content"]
        if content not in vocab and token["id"] in ids:
            return f"two tokens with id {token['id']}"
        ids.add(token["id"])
        if token["special"]:
            continue  # never matched in text
        if not content:
            return "empty added token"
        if token["single_word"]:
            return f"added token {content[:40]!r} that must be a whole word"
        if token["normalized"] and tree["normalizer"] is not None:
            return f"added token {content[:40]!r} matched after normalization"
        if not unicodedata.is_normalized("NFC", content):
            return f"added token {content[:40]!r} that is not in NFC"
    return None


def _overlap_refusal(tree: Part) -> str | None:
    """gigatoken gets no special tokens at all, so they no longer shadow other added tokens that overlap with them."""
    special = [t["content"] for t in tree["added_tokens"] if t["special"] and t["content"]]
    plain = [t["content"] for t in tree["added_tokens"] if not t["special"]]
    if not special or not plain:
        return None
    heads = [{text[:n] for text in group for n in range(1, len(text) + 1)} for group in (special, plain)]
    joined = ["\0".join(group) for group in (special, plain)]
    for other, group in ((1, special), (0, plain)):
        for text in group:
            if text in joined[other] or any(text[n:] in heads[other] for n in range(len(text))):
                return f"added token {text[:40]!r} that overlaps with a special token"
    return None


def _pipeline_refusal(tree: Part, *, library: str) -> str | None:
    if tree["model"].get("byte_fallback"):
        return _sentencepiece_refusal(tree, metaspace=library == "gigatoken")
    return _byte_level_refusal(tree, nfc=library == "fastokens", digits=library == "fastokens")


def _byte_level_refusal(tree: Part, *, nfc: bool, digits: bool) -> str | None:
    """GPT-2, Llama 3, Qwen, DeepSeek: optional NFC, optional splits by regex, bytes as characters."""
    model = tree["model"]
    if model.get("unk_token") is not None or model.get("fuse_unk"):
        return "byte-level model with an unknown token"
    for step in _steps(tree["normalizer"], "normalizers"):
        if step.get("type") != "NFC" or not nfc:  # gigatoken's tables order some rare marks differently
            return f"normalizer {step.get('type')}"
    *splits, last = _steps(tree["pre_tokenizer"], "pretokenizers") or [{}]
    if last.get("type") != "ByteLevel":
        return "no ByteLevel at the end of pre_tokenizer"
    if missing := [c for c in byte_alphabet() if c not in model["vocab"]]:
        return f"vocabulary without {len(missing)} of the 256 byte characters"
    if not splits:
        return None if last.get("use_regex", True) else "ByteLevel that does not split"
    if last.get("add_prefix_space", True):
        return "ByteLevel with add_prefix_space after a split"
    # StarCoder and others isolate digits first and leave the rest to ByteLevel.
    others = [step for step in splits if not (digits and step.get("type") == "Digits")]
    if last.get("use_regex", True) and others:
        return "ByteLevel that splits once more after another split"
    if not last.get("use_regex", True) and not others:
        return "ByteLevel that does not split"
    return next((reason for split in others if (reason := _split_refusal(split))), None)


def _split_refusal(split: Part) -> str | None:
    if split.get("type") != "Split":
        return f"pre_tokenizer {split.get('type')}"
    pattern = split.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if not isinstance(regex, str):
        return "Split at a fixed string"
    kind = (split.get("behavior"), split.get("invert"))
    if kind not in (("Isolated", False), ("Removed", True)):
        return f"Split with behavior {kind[0]}" + (", inverted" if kind[1] else "")
    return regex_refusal(regex)


def _sentencepiece_refusal(tree: Part, *, metaspace: bool) -> str | None:
    """Llama 2, Mistral, Gemma: spaces as "▁", characters outside the vocabulary as bytes <0x00> to <0xFF>."""
    model = tree["model"]
    if missing := sum(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256)):
        return f"vocabulary without {missing} of the 256 byte tokens"
    if model.get("ignore_merges"):
        return "byte_fallback with ignore_merges"
    normalizers = _steps(tree["normalizer"], "normalizers")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _METASPACE}
    steps = _steps(tree["pre_tokenizer"], "pretokenizers")
    match steps:
        case []:
            if normalizers not in ([{"type": "Prepend", "prepend": _METASPACE}, replace], [replace]):
                return "normalizer other than 'space becomes ▁'"
        case [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]:
            if normalizers != [replace]:
                return "normalizer other than 'space becomes ▁'"
        case [{"type": "Metaspace"} as step]:
            if not metaspace:
                return "pre_tokenizer Metaspace"
            if normalizers:
                return "Metaspace after a normalizer"
            if step.get("replacement") != _METASPACE or step.get("prepend_scheme") not in ("always", "first", "never"):
                return "Metaspace of another kind"
        case _:
            return f"pre_tokenizer {steps[0].get('type')} with byte_fallback"
    return None


def _steps(part: Part | None, key: str) -> list[Part]:
    """The steps of a normalizer or pre_tokenizer, with sequences opened; a step that is no object counts as {}."""
    if part is None:
        return []
    inner = part.get(key) if part.get("type") == "Sequence" else None
    if not isinstance(inner, list):
        return [part]
    return [step for item in inner for step in (_steps(item, key) if isinstance(item, dict) else [{}])]


def byte_alphabet() -> Iterator[str]:
    """The 256 characters that stand for the bytes in a byte-level vocabulary (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    yield from map(chr, printable)
    yield from (chr(0x100 + n) for n in range(256 - len(printable)))


_GROUP = re.compile(r"\?(:|i:|!|=|>|<!|<=)")
_ESCAPE = re.compile(r"\\(?:[pP]\{\^?\w+\}|[sSdDwWnrt]|[^\w\s])", re.ASCII)
_REPEAT = re.compile(r"\{(\d+)(,\d*)?\}")


def regex_refusal(regex: str) -> str | None:
    """Refuse a pattern that Oniguruma (in `tokenizers`) and the engines of the fast libraries read differently.

    Read differently, for instance: `{1,3}+`, `^`, `$`, `.`, `\\h`, `&&` and brackets inside brackets.
    """
    at, in_class, class_start = 0, False, 0
    while at < len(regex):
        char = regex[at]
        if char == "\\":
            escape = _ESCAPE.match(regex, at)
            if not escape:
                return f"regex escape {regex[at : at + 2]!r}"
            at = escape.end()
            continue
        if in_class:
            if char == "[" or (char == "]" and at == class_start) or regex.startswith("&&", at):
                return f"regex class with {regex[at : at + 2]!r}"
            in_class = char != "]"
        elif char == "[":
            in_class = True
            class_start = at + 1 + regex.startswith("^", at + 1)
            at = class_start
            continue
        elif char in "^$.":
            return f"regex with {char!r}"
        elif char == "(" and regex.startswith("?", at + 1):
            if not _GROUP.match(regex, at + 1):
                return f"regex group {regex[at : at + 3]!r}"
        elif char == "{":
            repeat = _REPEAT.match(regex, at)
            if not repeat or regex.startswith("+", repeat.end()):
                return f"regex repeat {regex[at : at + 6]!r}"
            at = repeat.end()
            continue
        at += 1
    return None
