"""Special tokens in rendered conversations: those that the template wrote, and what only looks like them.

A special token is the template's where the template wrote its first character. Where a conversation may have written
one, it is rendered once more with the first characters of special tokens in its messages replaced by stand-ins. Put
back, they must give the same text; their places are then those at which no special token begins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zephon.ops.chat_template import ChatTemplate, TemplateFailure
from zephon.ops.chat_turns import ASSISTANT
from zephon.tokenizer.definition import AddedToken

_SPEECH = ("content", "reasoning_content", "reasoning", "thinking")
_STAND_IN = 0xDC00  # and the next few: lone surrogates, which no text holds
_STAND_INS = re.compile("[\udc00-\udcdf]")
# White space, as the tokenizers see it that strip it round a special token.
_SPACE = rb"(?:\s|\xc2\x85|\xc2\xa0|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)*"
_AFTER = re.compile(_SPACE)
# A run of white space is looked at from its beginning alone, or long ones would take for ever.
_BEFORE = re.compile(rb"(?<![ \t\n\r\f\v])" + _SPACE + rb"\Z")


class SpellableTokens:
    """The special tokens of a tokenizer, as a conversation may spell them; `allowed`: those of the assistant, or "all".

    `ends` finds those that may end a turn, being none that the assistant says within one; None without any.
    """

    def __init__(self, tokens: Sequence[AddedToken], allowed: Collection[str]) -> None:
        tokens = sorted((token for token in tokens if token.content), key=lambda token: -len(token.content))
        within = ("<think>", "</think>") if allowed == "all" else allowed
        self._tokens = {token.content.encode(): token for token in tokens}
        self._any = _alternatives(token.content for token in tokens)
        self._in_bytes = re.compile(b"|".join(map(re.escape, self._tokens))) if tokens else None
        self.ends = _alternatives(token.content for token in tokens if token.content not in within)
        self._letters = {frozenset(token.content.casefold()) for token in tokens}
        heads = {token.content[0] for token in tokens}
        firsts = {case for head in heads for case in (head, head.lower(), head.upper()) if len(case) == 1}
        self._stand_ins = {char: chr(_STAND_IN + n) for n, char in enumerate(sorted(firsts))}
        self._back = str.maketrans({mark: char for char, mark in self._stand_ins.items()})
        # Every such character, or, for templates that look at some of them, those that begin a special token.
        every = "|".join(map(re.escape, sorted(firsts)))
        whole = "|".join(f"{re.escape(t.content[0])}(?={re.escape(t.content[1:])})" for t in tokens)
        kept = "" if allowed == "all" else "".join(f"{re.escape(text)}|" for text in allowed)
        self._hidden = [
            (re.compile(f"({which})"), None if allowed == "all" else re.compile(f"{kept}({which})"))
            for which in (every, whole)
        ]

    def spelled_in(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts spells a special token."""
        return self._any is not None and any(self._any.search(text) for text in texts)

    def split(self, text: str) -> list[str]:
        """What lies between special tokens."""
        return self._any.split(text) if self._any else [text]

    def may_spell(self, messages: Any, tools: Any) -> bool:
        """Whether a conversation has all the characters of some special token, in whatever order and case."""
        letters = set("".join(_texts([messages, tools])).casefold())
        return any(token <= letters for token in self._letters)

    def said(self, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, text: str) -> frozenset[int]:
        """The characters of a rendered conversation at which no special token begins, as the conversation wrote it."""
        if not self.spelled_in([text]):
            return frozenset()
        for everyone, assistant in self._hidden:
            hidden = [self._hide_in_message(message, everyone, assistant) for message in messages]
            try:
                other, _ = template.render(hidden, self._hide(tools, everyone))
            except TemplateFailure:
                continue
            if other.translate(self._back) == text:
                return frozenset(match.start() for match in _STAND_INS.finditer(other))
        raise TemplateFailure(
            "a message spells a special token, and the template changes messages in a way that hides who wrote it; "
            "remove the token from the conversation"
        )

    def find(self, buffer: bytes, said: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        """Spans int64[m, 2] of the template's special tokens in UTF-8, with the space they take in; ids uint32[m]."""
        rows: list[tuple[int, int, int]] = []
        at = done = 0
        while self._in_bytes and (match := self._in_bytes.search(buffer, at)):
            begin, at = match.span()
            if begin in said:
                at = begin + 1
                continue
            token = self._tokens[match[0]]
            if token.rstrip and (space := _AFTER.match(buffer, at)):
                at = space.end()
            if token.lstrip and (space := _BEFORE.search(buffer, done, begin)):
                begin = space.start()
            rows.append((begin, at, token.id))
            done = at
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, :2], table[:, 2].astype(np.uint32)

    def _hide_in_message(
        self, message: dict[str, Any], everyone: re.Pattern[str], assistant: re.Pattern[str] | None
    ) -> dict[str, Any]:
        hidden: dict[str, Any] = self._hide(message, everyone)
        if message["role"] == ASSISTANT:
            hidden |= {key: self._hide(message[key], assistant) for key in _SPEECH if isinstance(message.get(key), str)}
        return hidden

    def _hide(self, value: Any, which: re.Pattern[str] | None) -> Any:
        if which is None:
            return value
        if isinstance(value, str):
            return which.sub(lambda match: self._stand_ins[match[1]] if match[1] else match[0], value)
        if isinstance(value, dict):
            return {self._hide(key, which): self._hide(item, which) for key, item in value.items()}
        if isinstance(value, list):
            return [self._hide(item, which) for item in value]
        return value


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    pattern = "|".join(map(re.escape, texts))
    return re.compile(pattern) if pattern else None


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
