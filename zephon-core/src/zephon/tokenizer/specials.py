# ruff: noqa: RUF001 (these are the characters that DeepSeek uses)
"""Which tokens begin and end a document, and which of them a policy adds.

Text never produces these ids (see `definition`); the loader puts them between documents by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zephon.config.keys import quote
from zephon.config.settings import SpecialTokens
from zephon.errors import TokenizerError

__all__ = ["inferred_tokens", "resolve_special_tokens"]

# For a tokenizer.json that comes without any other file. The first one present wins.
WELL_KNOWN_BOS = (
    "<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<｜begin▁of▁sentence｜>", "<|startoftext|>", "[BOS]"
)  # fmt: skip
WELL_KNOWN_EOS = (
    "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|im_end|>"
)  # fmt: skip


def resolve_special_tokens(policy: SpecialTokens, bos: int | None, eos: int | None) -> tuple[int | None, int | None]:
    """The ids to put before and after every document.

    Args:
        policy: "auto" (EOS, and BOS where the tokenizer has one that is not its EOS), "bos_eos", "bos", "eos", "none".
        bos, eos: ids that the tokenizer declares.

    Returns:
        (BOS id or None, EOS id or None).

    Raises:
        TokenizerError: the policy needs a token that the tokenizer does not declare.
    """
    adds_bos, adds_eos = "bos" in policy, "eos" in policy or policy == "auto"
    for added, token_id, kind in ((adds_bos, bos, "BOS"), (adds_eos, eos, "EOS")):
        if added and token_id is None:
            raise TokenizerError(
                f"special_tokens is {quote(policy)}, which needs {kind}, and the tokenizer declares none; name it as "
                f"{kind.lower()}_token in tokenizer_config.json or choose another policy."
            )
    if policy == "auto" and bos != eos:
        adds_bos = True
    return bos if adds_bos else None, eos if adds_eos else None


def inferred_tokens(tree: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(BOS, EOS) of a tokenizer.json alone: by its post-processor, else by well-known names among its added tokens."""
    before, after = _template_ends(tree.get("post_processor"))
    added = {token["content"] for token in tree["added_tokens"]}
    bos = before if before in added else next((t for t in WELL_KNOWN_BOS if t in added), None)
    eos = after if after in added else next((t for t in WELL_KNOWN_EOS if t in added), None)
    return bos, eos


def _template_ends(processor: Any) -> tuple[str | None, str | None]:
    """The tokens that a post-processor puts first and last around a single sequence."""
    match processor:
        case {"type": "Sequence", "processors": list(steps)}:
            ends = [_template_ends(step) for step in steps]
            return next((b for b, _ in ends if b), None), next((e for _, e in ends if e), None)
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [str(first), *_], "sep": [str(last), *_]}:
            return first, last
        case {"type": "TemplateProcessing", "single": [first, *_] as pieces}:
            return _special_piece(first), _special_piece(pieces[-1])
    return None, None


def _special_piece(piece: Any) -> str | None:
    match piece:
        case {"SpecialToken": {"id": str(token)}}:
            return token
    return None
