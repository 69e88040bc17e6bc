"""The tokens that the files beside a tokenizer.json declare, as AutoTokenizer of transformers reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

__all__ = ["ADDED_TOKENS", "CONFIG", "SPECIAL_TOKENS", "Declared", "DeclaredTokens", "declared_tokens"]

CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Declared(msgspec.Struct, frozen=True):
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

    Attributes:
        roles: by name ("bos_token", "image_token"), None where a file says that there is none.
        extra: special tokens without a name.
        numbered: by id, tokens with an id of their own.
        replaces: whether `numbered` holds for tokens of tokenizer.json, too.
        overruled: special tokens that one file names and another one leaves out.
    """

    roles: dict[str, Declared | None]
    extra: list[Declared]
    numbered: dict[int, Declared]
    replaces: bool
    overruled: list[Declared]

    @property
    def texts(self) -> dict[str, str]:
        """The texts of tokens by name, as chat templates get them."""
        return {name: token.content for name, token in self.roles.items() if token}

    @property
    def special(self) -> set[str]:
        """Every token with a role, or marked special."""
        marked = [token.content for token in self.numbered.values() if token.special]
        return {*self.texts.values(), *marked, *(token.content for token in self.extra)}

    def in_order(self) -> list[tuple[int | None, Declared]]:
        """Ids, where there are some, and tokens, in the order in which transformers adds them."""
        numbered = [(number, self.numbered[number]) for number in sorted(self.numbered)]
        return [*numbered, *((None, token) for token in (*self.roles.values(), *self.extra) if token)]


def declared_tokens(read: Callable[[str], Mapping[str, Any]]) -> DeclaredTokens:
    """The tokens that a tokenizer's files declare.

    Args:
        read: gives the object in a JSON file, empty where there is no such file.

    Raises:
        ValueError: what is no token.
    """
    config = read(CONFIG)
    replaces = "added_tokens_decoder" in config  # of version 4.34 or later, and no other file counts
    more = {} if replaces else read(SPECIAL_TOKENS)
    named: dict[str, Any] = {}
    lists: list[list[Declared] | None] = []
    for file, key in product((config, more), ("extra_special_tokens", "additional_special_tokens")):
        entries = file.get(key)
        if isinstance(entries, Mapping):
            named |= entries
        elif not isinstance(entries, list | None):
            raise ValueError(f"{key} is {entries!r:.80}; expected a list of tokens")
        lists.append([_token(key, each) for each in entries] if isinstance(entries, list) else None)
    extra, additional, more_extra, more_additional = lists
    taken = extra or (extra if additional is None else additional)
    if more_extra is not None:
        taken = list(dict.fromkeys([*(taken or []), *more_extra]))
    taken = (more_additional if taken is None else taken) or []
    values = {**config, **more}
    roles = {name: values[name] for name in _ROLES if name in values}
    roles |= {name: each for name, each in values.items() if name.endswith("_token") and isinstance(each, str | dict)}
    declared = DeclaredTokens(
        roles={name: None if each in (None, "") else _token(name, each) for name, each in {**roles, **named}.items()},
        extra=taken,
        numbered={int(id_): _token(f"token {id_}", each, False) for id_, each in _table(config).items()},
        replaces=replaces,
        overruled=[token for tokens in lists for token in tokens or [] if token not in taken],
    )
    # As there, by the roles that all tokenizers have; `special` of the others comes with their role.
    special = {declared.texts.get(role) for role in _ROLES}
    special |= {token.content for token in taken if taken is not more_additional}
    for text, number in ({} if replaces else read(ADDED_TOKENS)).items():
        declared.numbered[int(number)] = Declared(text, normalized=text not in special, special=text in special)
    return declared


def _table(config: Mapping[str, Any]) -> Mapping[str, Any]:
    table = config.get("added_tokens_decoder") or {}
    if not isinstance(table, Mapping):
        raise ValueError(f"added_tokens_decoder is {table!r:.80}; expected an object of tokens by id")
    return table


def _token(name: str, entry: Any, special: bool = True) -> Declared:
    """A token in a config file, which is a text or an object with flags."""
    if isinstance(entry, str):
        return Declared(entry)
    try:
        flags = {"special": special, **entry}
        return msgspec.convert({"normalized": not flags["special"], **flags}, Declared)
    except (TypeError, msgspec.ValidationError):
        raise ValueError(f"{name} is {entry!r:.80}; expected the text of a token, or an object with content") from None
