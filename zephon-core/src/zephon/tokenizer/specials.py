# ruff: noqa: RUF001 (these are the characters that DeepSeek uses)
"""Which tokens are special, which of them begin and end a document, and which of those a policy adds.

Text never produces these ids (see `definition`); the loader puts them between documents by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from zephon.config.keys import quote
from zephon.config.settings import SpecialTokens
from zephon.errors import TokenizerError

CONFIG = "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")  # without tokens of their own

# For a tokenizer.json beside which no file declares tokens. The first one present wins.
WELL_KNOWN_BOS = (
    "<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<｜begin▁of▁sentence｜>", "<|startoftext|>", "[BOS]"
)  # fmt: skip
WELL_KNOWN_EOS = (
    "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|im_end|>"
)  # fmt: skip


def resolve_special_tokens(policy: SpecialTokens, bos: int | None, eos: int | None) -> tuple[int | None, int | None]:
    """The ids to put before and after every document by a policy, given the tokenizer's own, or None.

    "auto" is EOS, and BOS where it is another token. TokenizerError where a token is missing that the policy needs.
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


class Declared(msgspec.Struct):
    """A token as a file describes it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


@dataclass(frozen=True)
class DeclaredTokens:
    """What the files beside a tokenizer.json say of its tokens.

    `roles` are by name ("bos_token", "image_token"), None where a file says that there is none; `extra` special tokens
    without a name; `numbered` those with an id, which if `replaces` hold for tokens of tokenizer.json, too; `overruled`
    those of a list that does not count beside another one. `infers` names the roles that come from tokenizer.json,
    where they say nothing; `owner` is the class of transformers, or kind of model, that may have tokens of its own.
    """

    roles: dict[str, Declared | None]
    extra: list[Declared]
    numbered: dict[int, Declared]
    replaces: bool
    overruled: list[Declared]
    infers: tuple[str, ...]
    owner: str | None

    @property
    def texts(self) -> dict[str, str]:
        """The texts of tokens by name, as chat templates get them."""
        return {name: token.content for name, token in self.roles.items() if token}

    @property
    def special(self) -> set[str]:
        """Every token with a role, or marked special."""
        tokens = [*self.extra, *(token for token in self.numbered.values() if token.special)]
        return {*self.texts.values(), *(token.content for token in tokens)}

    def role(self, name: str, inferred: str | None, known: tuple[str, ...]) -> str | None:
        """The text of BOS or EOS, or None; `inferred` from tokenizer.json, and `known` the names that it looks for."""
        if name in self.roles:
            return self.texts.get(name)
        if not self.owner:
            return inferred if name in self.infers else None
        if inferred not in known:
            return None
        if name not in self.infers:
            raise ValueError(
                f"{name} is left out in {CONFIG}, where {self.owner} may have one of its own; name it there, as null "
                "where there is none"
            )
        return inferred

    def in_order(self) -> list[tuple[int | None, Declared]]:
        """Ids, where there are some, and tokens, in the order in which transformers adds them."""
        numbered = [(number, self.numbered[number]) for number in sorted(self.numbered)]
        return [*numbered, *((None, token) for token in self.unnumbered)]

    @property
    def unnumbered(self) -> list[Declared]:
        """Tokens without an id, as often as they are declared."""
        return [token for token in (*self.roles.values(), *self.extra) if token]


def declared_tokens(read: Callable[[str], Mapping[str, Any]]) -> DeclaredTokens:
    """The tokens that a tokenizer's files declare; `read` gives what a file holds. ValueError for no token."""
    config = read(CONFIG)
    replaces = "added_tokens_decoder" in config  # of version 4.34 or later, and no other file counts
    more, legacy = ({}, {}) if replaces else (read("special_tokens_map.json"), read("added_tokens.json"))
    values = {**config, **more}
    roles = {name: values[name] for name in ROLES if name in values}
    roles |= {name: each for name, each in values.items() if name.endswith("_token") and isinstance(each, str | dict)}
    owner = config.get("tokenizer_class")
    silent = not (owner or replaces or legacy or {*roles, *_LISTS} & {*values})
    if not owner and values:
        model = read("config.json")
        owner = model.get("tokenizer_class") or model.get("model_type")
    owner = None if owner in _PLAIN_CLASSES else owner
    lists: list[list[Declared]] = []
    for file, key in product((config, more), _LISTS):
        if isinstance(entries := file.get(key), Mapping):
            roles |= entries
        elif entries is not None:
            lists.append(_tokens(key, entries, list[str | Declared]))
    extra, *others = lists or [[]]
    declared = DeclaredTokens(
        roles={name: _tokens(name, [entry], list[str | Declared | None])[0] for name, entry in roles.items()},
        extra=extra,
        numbered=_tokens("added_tokens_decoder", config.get("added_tokens_decoder") or {}, dict[int, Declared]),
        replaces=replaces,
        overruled=[token for tokens in others for token in tokens if token not in extra],
        # Older models, GPT-2 among them, name nothing; their EOS is always a well-known one.
        infers=("eos_token",) if silent and owner else () if values else ROLES,
        owner=owner,
    )
    # As there, not by "additional_special_tokens" of the map.
    special = {declared.texts.get(role) for role in ROLES}
    special |= {token.content for token in extra if len(lists) > 1 or "additional_special_tokens" not in more}
    for text, number in _tokens("added_tokens.json", legacy, dict[str, int]).items():
        declared.numbered[number] = Declared(text, normalized=text not in special, special=text in special)
    return declared


def _tokens(name: str, entries: Any, kind: Any) -> Any:
    """Entries of a file, with objects for texts that are tokens."""
    try:
        values = msgspec.convert(entries, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} is {entries!r:.80}; expected tokens ({error})") from None
    if isinstance(values, list):
        return [Declared(each) if isinstance(each, str) and each else each or None for each in values]
    return values
