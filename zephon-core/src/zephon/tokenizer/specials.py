"""Which tokens begin and end a document, and which of them a policy adds.

Text never produces these ids (see `definition`); the loader puts them between documents by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from zephon.config.keys import check
from zephon.config.settings import SpecialTokens
from zephon.errors import TokenizerError

# For a tokenizer.json that comes without any other file. The first one present wins.
WELL_KNOWN_BOS = (
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<|bos|>",
    "<｜begin▁of▁sentence｜>",  # noqa: RUF001 (these are the characters DeepSeek uses)
    "<|startoftext|>",
    "[BOS]",
)
WELL_KNOWN_EOS = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "[EOS]",
    "<|im_end|>",
)

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HasSpecialTokens(Protocol):
    """What a policy needs to know about a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...


def resolve_special_tokens(policy: str, tokenizer: HasSpecialTokens) -> tuple[int | None, int | None]:
    """The ids to put before and after every document.

    Args:
        policy: "auto" (EOS, and BOS where the tokenizer has one that is not its EOS), "bos_eos", "bos", "eos", "none".

    Returns:
        (BOS id or None, EOS id or None).

    Raises:
        TokenizerError: unknown policy, or it needs a token that the tokenizer does not have.
    """
    check(SpecialTokens, policy, "special_tokens", TokenizerError)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if policy == "none":
        return None, None
    wants_bos = policy in ("bos", "bos_eos")
    wants_eos = policy in ("auto", "eos", "bos_eos")
    for wanted, token_id, kind in ((wants_bos, bos, "BOS"), (wants_eos, eos, "EOS")):
        if wanted and token_id is None:
            raise TokenizerError(
                f"special_tokens = {policy!r} needs {'an' if kind == 'EOS' else 'a'} {kind} token and the tokenizer "
                f"declares none; name it as {kind.lower()}_token in tokenizer_config.json or choose another policy"
            )
    if policy == "auto" and bos != eos:
        wants_bos = True
    return bos if wants_bos else None, eos if wants_eos else None


def named_special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """Every token that a tokenizer_config.json or special_tokens_map.json gives a role or marks as special."""
    for key in _NAMED:
        yield from _contents(config.get(key))
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = config.get(key)
        if isinstance(entries, Mapping):
            entries = entries.values()
        for entry in entries if isinstance(entries, Iterable) and not isinstance(entries, str) else ():
            yield from _contents(entry)
    decoder = config.get("added_tokens_decoder")
    for entry in decoder.values() if isinstance(decoder, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("special") is True:
            yield from _contents(entry)


def declared_token(kind: str, configs: Iterable[Mapping[str, Any]]) -> tuple[bool, str | None]:
    """What the first file that speaks about `kind` ("bos_token" or "eos_token") says.

    Returns:
        (some file speaks about it, the token or None where that file says there is none).
    """
    for config in configs:
        if kind in config:
            return True, next(_contents(config[kind]), None)
    return False, None


def inferred_tokens(tree: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(BOS, EOS) of a tokenizer.json alone: by its post-processor, else by well-known names among its added tokens."""
    before, after = _template_ends(tree.get("post_processor"))
    added = {token["content"] for token in tree["added_tokens"]}
    bos = before if before in added else next((t for t in WELL_KNOWN_BOS if t in added), None)
    eos = after if after in added else next((t for t in WELL_KNOWN_EOS if t in added), None)
    return bos, eos


def _contents(entry: Any) -> Iterator[str]:
    content = entry.get("content") if isinstance(entry, Mapping) else entry
    if isinstance(content, str) and content:
        yield content


def _template_ends(processor: Any) -> tuple[str | None, str | None]:
    """The tokens that a post-processor puts first and last around a single sequence."""
    if not isinstance(processor, Mapping):
        return None, None
    match processor.get("type"):
        case "Sequence":
            steps = processor.get("processors")
            ends = [_template_ends(step) for step in (steps if isinstance(steps, list) else [])]
            return next((b for b, _ in ends if b), None), next((e for _, e in ends if e), None)
        case "BertProcessing" | "RobertaProcessing":
            cls, sep = processor.get("cls"), processor.get("sep")
            return tuple(p[0] if isinstance(p, list) and p and isinstance(p[0], str) else None for p in (cls, sep))  # type: ignore[return-value]
        case "TemplateProcessing":
            single = processor.get("single")
            pieces = [p for p in single if isinstance(p, Mapping)] if isinstance(single, list) else []
            first = pieces[0].get("SpecialToken") if pieces else None
            last = pieces[-1].get("SpecialToken") if pieces else None
            return _piece_id(first), _piece_id(last)
    return None, None


def _piece_id(piece: Any) -> str | None:
    token = piece.get("id") if isinstance(piece, Mapping) else None
    return token if isinstance(token, str) else None
