"""Which parts of a rendered conversation are turns of the assistant, for templates without {% generation %}.

A turn is what the conversation up to and with it has that the one before it, rendered with the generation prompt, has
not: the words and the end-of-turn token, without the header and the white space after it. That takes two renderings per
turn, so it is asked once for every sequence of roles, on a skeleton whose messages are marks. A conversation that is
its skeleton with the messages put in has its turns in the same places; any other is rendered turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from zephon.ops.chat_template import ChatTemplate, TemplateFailure

ASSISTANT = "assistant"
Turn = tuple[int, int, int]
"""A message, and the characters [begin, end) of it that are trained on."""

_MARK = "\udcf0{}\udcf1"  # stands for message n; no text holds lone surrogates
_MARKS = re.compile("\udcf0([0-9]+)\udcf1")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A conversation of certain roles without its words: the n + 1 texts `between` and round n messages.

    A turn of the assistant has its message, how far into the text before it the turn begins, and how far into the text
    after it it ends. `touching` says whether there is nothing between two of the messages.
    """

    between: tuple[str, ...]
    turns: tuple[Turn, ...]
    touching: bool

    def fill(self, contents: Sequence[str], text: str) -> list[Turn] | None:
        """The turns of a text that is this skeleton with messages put in, as they are or stripped; else None."""
        for words in (contents, [content.strip() for content in contents]):
            parts = [self.between[0]]
            for content, after in zip(words, self.between[1:], strict=True):
                parts += (content, after)
            if "".join(parts) == text:
                starts = list(accumulate(map(len, parts), initial=0))  # message n is part 2n + 1
                return [(n, starts[2 * n] + begin, starts[2 * n + 2] + end) for n, begin, end in self.turns]
        return None


def skeleton_of(template: ChatTemplate, roles: Sequence[str], ends: re.Pattern[str] | None) -> Skeleton | None:
    """The skeleton of conversations with these roles; None where the template does more than put messages in."""
    if ends and any(ends.search(role) for role in roles):
        return None
    messages = [{"role": role, "content": _MARK.format(n)} for n, role in enumerate(roles)]
    try:
        text = template.render(messages)[0]
    except TemplateFailure:
        return None
    if _MARKS.findall(text) != [str(n) for n in range(len(roles))]:
        return None
    spans = [match.span() for match in _MARKS.finditer(text)]
    between = _MARKS.sub("\udcf0", text).split("\udcf0")
    turns = [
        (n, begin - spans[n][0] + len(between[n]), end - spans[n][1])
        for n, begin, end in Conversation(template, messages, None, text, ends).turns(marks=True)
    ]
    if any(begin < 0 or end > len(between[n + 1]) for n, begin, end in turns):
        return None
    return Skeleton(tuple(between), tuple(turns), "" in between[1:-1])


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation: `text` is made of the rest, `ends` finds special tokens that may end a turn, and at the
    characters `said` the conversation itself spells a special token.
    """

    template: ChatTemplate
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    text: str
    ends: re.Pattern[str] | None
    said: frozenset[int] = frozenset()

    def turns(self, *, marks: bool = False) -> list[Turn]:
        """The turns of the assistant, each found by rendering parts of it; contents may be marks."""
        turns: list[Turn] = []
        done = 0
        for n, message in enumerate(self.messages):
            if message["role"] != ASSISTANT:
                continue
            words, prompted = self._words(n), self._prompted(n)
            first, last = words or (prompted, prompted)
            if first is None or last is None:
                continue
            begin = max(done, first if prompted is None else min(first, max(done, prompted)))
            # Up to here the conversation may be another text, with the thoughts of this turn for example, so the token
            # for the end of a turn is looked for behind the words first.
            end = (words and not marks and self._token_after(last)) or max(last, self._end(n, last))
            if end > begin:
                turns.append((n, begin, end))
                done = end
        return turns

    def _prompted(self, n: int) -> int | None:
        """Where the generation prompt before message n ends. None without a prompt."""
        prompt = self._render(self.messages[:n], prompt=True)
        if prompt is None:  # many templates want a user first
            return None
        common = _common_length(prompt, self.text)
        if common < len(prompt):
            # The prompt goes on in another way, by a tag for thoughts for example: what both begin with may be chance.
            common = max(self.text.rfind("\n", 0, common) + 1, *self._written(0, common)[-1:], 0)
        return common

    def _end(self, n: int, last: int) -> int:
        """Where the turn of message n, whose words end at or after `last`, ends: after its end-of-turn token."""
        upto = self._render(self.messages[: n + 1])
        common = last if upto is None else _common_length(upto, self.text)
        return (self._written(last, common) or [common])[-1]

    def _token_after(self, last: int) -> int | None:
        """The end of the template's special token behind `last` and white space."""
        space = _SPACE.match(self.text, last)
        token = self.ends.match(self.text, space.end()) if self.ends and space else None
        return token.end() if token and token.start() not in self.said else None

    def _words(self, n: int) -> tuple[int, int] | None:
        """Where the content of message n lies in the text: found by rendering it with a mark."""
        message, mark = self.messages[n], _MARK.format(n)
        if not isinstance(message.get("content"), str) or "tool_calls" in message:
            return None
        other = self._render([*self.messages[:n], {**message, "content": mark}, *self.messages[n + 1 :]])
        if other is None or other.count(mark) != 1:
            return None
        before, after = other.split(mark)
        fits = len(before) + len(after) <= len(self.text)
        if not (fits and self.text.startswith(before) and self.text.endswith(after)):
            return None
        return len(before), len(self.text) - len(after)

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str | None:
        try:
            return self.template.render(messages, self.tools, prompt=prompt)[0]
        except TemplateFailure:
            return None

    def _written(self, begin: int, end: int) -> list[int]:
        """Where the special tokens end that the template wrote between two places."""
        tokens = self.ends.finditer(self.text, begin, end) if self.ends else ()
        return [match.end() for match in tokens if match.start() not in self.said]


def _common_length(one: str, other: str) -> int:
    """How long the beginning is that both have."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: comparing slices is much faster than going character by character
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
