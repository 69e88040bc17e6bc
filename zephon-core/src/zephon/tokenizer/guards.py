"""Which configurations a fast library may be trusted with.

fastokens and gigatoken accept many configurations that they then encode differently from `tokenizers`, some of them
only on rare text that no probe is sure to hold. So a fast library gets a tokenizer only when everything in it is of
a kind on which it was found to agree on hundreds of megabytes and hundreds of thousands of fuzz strings; and then it
still has to pass the probes. Anything else is encoded by `tokenizers`: slower, never wrong.

Rules are lines of generators: the first reason that one yields is the refusal, so later rules rely on earlier ones.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

Part = dict[str, Any]

_MODEL_KEYS = {
    "type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges", "vocab", "merges",
}  # fmt: skip
_METASPACE = "▁"
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _METASPACE}


def refusal(tree: Part, library: str) -> str | None:
    """Why "fastokens" or "gigatoken" must not run this tokenizer, or None."""
    return next(_reasons(tree, library), None)


def _reasons(tree: Part, library: str) -> Iterator[str]:
    yield from _model_reasons(tree["model"])
    yield from _added_token_reasons(tree)
    if library == "gigatoken":
        yield from _overlap_reasons(tree["added_tokens"])
    yield from (_sentencepiece_reasons if tree["model"].get("byte_fallback") else _byte_level_reasons)(tree, library)


def _model_reasons(model: Part) -> Iterator[str]:
    if model.get("type") != "BPE" or not isinstance(model["vocab"], dict):
        yield f"model {model.get('type')}"
    for key in sorted(set(model) - _MODEL_KEYS):
        yield f"model key {key}"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            yield f"model.{key}"
    if sorted(model["vocab"].values()) != list(range(len(model["vocab"]))):
        yield "vocabulary ids with gaps or repeats"
    merges = model.get("merges", [])
    # One file spells all its merges one way; the two spellings must not meet in one set.
    if len({m if isinstance(m, str) else tuple(m) for m in merges}) != len(merges):
        yield "repeated merges"


def _added_token_reasons(tree: Part) -> Iterator[str]:
    vocab = tree["model"]["vocab"]
    ids = set(vocab.values())
    for token in tree["added_tokens"]:
        content, name = token["content"], f"added token {token['content'][:40]!r}"
        if content not in vocab and token["id"] in ids:
            yield f"two tokens with id {token['id']}"
        ids.add(token["id"])
        if token["special"]:
            continue  # never matched in text
        if not content:
            yield "empty added token"
        if token["single_word"]:
            yield f"{name} that must be a whole word"
        if token["normalized"] and tree["normalizer"] is not None:
            yield f"{name} matched after normalization"
        if not unicodedata.is_normalized("NFC", content):
            yield f"{name} that is not in NFC"


def _overlap_reasons(added: list[Part]) -> Iterator[str]:
    """gigatoken gets no special tokens at all, so they no longer shadow other added tokens that overlap with them."""
    special, plain = ([t["content"] for t in added if t["special"] is of and t["content"]] for of in (True, False))
    for group, others in ((special, plain), (plain, special)):
        joined, heads = "\0".join(others), {text[: n + 1] for text in others for n in range(len(text))}
        for text in group if others else ():
            if text in joined or any(text[n:] in heads for n in range(len(text))):
                yield f"added token {text[:40]!r} that overlaps with a special token"


def _byte_level_reasons(tree: Part, library: str) -> Iterator[str]:
    """GPT-2, Llama 3, Qwen, DeepSeek: optional NFC, optional splits by regex, bytes as characters."""
    model = tree["model"]
    if model.get("unk_token") is not None or model.get("fuse_unk"):
        yield "byte-level model with an unknown token"
    for step in _steps(tree["normalizer"], "normalizers"):
        if step.get("type") != "NFC" or library == "gigatoken":  # its tables order some rare marks differently
            yield f"normalizer {step.get('type')}"
    *splits, last = _steps(tree["pre_tokenizer"], "pretokenizers") or [{}]
    if last.get("type") != "ByteLevel":
        yield "no ByteLevel at the end of pre_tokenizer"
    if missing := [c for c in byte_alphabet() if c not in model["vocab"]]:
        yield f"vocabulary without {len(missing)} of the 256 byte characters"
    if splits and last.get("add_prefix_space", True):
        yield "ByteLevel with add_prefix_space after a split"
    # StarCoder and others isolate digits first and leave the rest to ByteLevel.
    splits = [step for step in splits if not (library == "fastokens" and step.get("type") == "Digits")]
    if last.get("use_regex", True) and splits:
        yield "ByteLevel that splits once more after another split"
    if not last.get("use_regex", True) and not splits:
        yield "ByteLevel that does not split"
    for split in splits:
        match split:
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False} | {
                "type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Removed", "invert": True
            }:  # fmt: skip
                if reason := regex_refusal(regex):
                    yield reason
            case _:
                yield f"pre_tokenizer {', '.join(f'{key} {value}' for key, value in split.items())[:80]}"


def _sentencepiece_reasons(tree: Part, library: str) -> Iterator[str]:
    """Llama 2, Mistral, Gemma: spaces as "▁", characters outside the vocabulary as bytes <0x00> to <0xFF>."""
    model = tree["model"]
    if missing := sum(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256)):
        yield f"vocabulary without {missing} of the 256 byte tokens"
    if model.get("ignore_merges"):
        yield "byte_fallback with ignore_merges"
    normalizers = _steps(tree["normalizer"], "normalizers")
    match _steps(tree["pre_tokenizer"], "pretokenizers"):
        case []:
            known = normalizers in ([{"type": "Prepend", "prepend": _METASPACE}, _SPACES], [_SPACES])
        case [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]:
            known = normalizers == [_SPACES]
        case [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always" | "first" | "never"}]:
            known = not normalizers and library == "gigatoken"
        case _:
            known = False
    if not known:
        kinds = [
            step.get("type")
            for section in ("normalizer", "pre_tokenizer")
            for step in _steps(tree[section], f"{section}s")
        ]
        yield f"byte_fallback with {', '.join(map(str, kinds)) or 'no steps'}"


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


_ESCAPE = r"\\(?:[pP]\{\^?\w+\}|[sSdDwWnrt]|[^\w\s])"
_CLASS = rf"\[\^?+(?:{_ESCAPE}|[^\\\[\]&]|&(?!&))+\]"
_GROUP = r"\((?:\?(?::|i:|!|=|>|<!|<=)|(?!\?))"
_REPEAT = r"\{\d+(?:,\d*)?\}(?!\+)"
_TRUSTED = re.compile(rf"(?:{_ESCAPE}|{_CLASS}|{_GROUP}|{_REPEAT}|[^\\\[^$.({{])*", re.ASCII)


def regex_refusal(regex: str) -> str | None:
    """Refuse a pattern that Oniguruma (in `tokenizers`) and the engines of the fast libraries read differently.

    Read differently, for instance: `{1,3}+`, `^`, `$`, `.`, `\\h`, `&&` and brackets inside brackets.
    """
    match = _TRUSTED.match(regex)
    at = match.end() if match else 0
    return None if at == len(regex) else f"regex with {regex[at : at + 6]!r}"
