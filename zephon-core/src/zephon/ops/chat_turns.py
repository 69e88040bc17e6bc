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

__all__ = ["ASSISTANT", "Conversation", "Skeleton", "Turn", "skeleton_of"]

ASSISTANT = "assistant"
Turn = tuple[int, int, int]
"""A message, and the characters [begin, end) of it that are trained on."""


def _mark(n: int) -> str:
    """What stands for message n; no text holds lone surrogates."""
    return f"\udcf0{n}\udcf1"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A conversation of certain roles without its words.

    Attributes:
        between: n_messages + 1 texts round the messages.
        turns: for each turn of the assistant, its message, how far into the text before it the turn begins, and how
            far into the text after it it ends.
        touching: whether there is nothing between two of the messages.
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


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation.

    Attributes:
        template, messages, tools: what was rendered.
        text: the rendering.
        ends: finds special tokens that may end a turn, or None where there are none.
        said: characters at which the conversation itself spells a special token.
    """

    template: ChatTemplate
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    text: str
    ends: re.Pattern[str] | None
    said: frozenset[int] = frozenset()

    def turns(self) -> list[Turn]:
        """The turns of the assistant, each found by rendering parts of the conversation."""
        turns: list[Turn] = []
        done = 0
        for n, message in enumerate(self.messages):
            if message["role"] != ASSISTANT:
                continue
            words, prompted = self._words(n), self.begin(n)
            if words is None:
                if prompted is None:
                    continue
                begin, end = prompted, self.end(n, prompted)
            else:
                begin = words[0] if prompted is None else min(words[0], max(done, prompted))
                space = re.compile(r"\s*").match(self.text, words[1])
                follows = self.ends.match(self.text, space.end()) if self.ends and space else None
                if follows and follows.start() not in self.said:
                    end = follows.end()
                else:
                    end = max(words[1], self.end(n, words[1]))
            if end > max(begin, done):
                turns.append((n, max(begin, done), end))
                done = end
        return turns

    def begin(self, n: int) -> int | None:
        """Where the turn of message n begins: where the generation prompt before it ends. None without a prompt."""
        prompt = self._render(self.messages[:n], prompt=True)
        if prompt is None:  # many templates want a user first
            return None
        common = _common_length(prompt, self.text)
        if common < len(prompt):
            # The prompt goes on in another way, by a tag for thoughts for example: what both begin with may be chance.
            common = max(self.text.rfind("\n", 0, common) + 1, *self._written(0, common)[-1:], 0)
        return common

    def end(self, n: int, begin: int) -> int:
        """Where the turn of message n, whose words end at or after `begin`, ends: after its end-of-turn token."""
        upto = self._render(self.messages[: n + 1])
        end = begin if upto is None else _common_length(upto, self.text)
        return (self._written(begin, end) or [end])[-1]

    def _words(self, n: int) -> tuple[int, int] | None:
        """Where the content of message n lies in the text: found by rendering it with a mark."""
        message, mark = self.messages[n], _mark(n)
        if not isinstance(message.get("content"), str) or "tool_calls" in message:
            return None
        other = self._render([*self.messages[:n], {**message, "content": mark}, *self.messages[n + 1 :]])
        if other is None or other.count(mark) != 1:
            return None
        before, after = other.split(mark)
        if (
            len(before) + len(after) > len(self.text)
            or not self.text.startswith(before)
            or not self.text.endswith(after)
        ):
            return None
        return len(before), len(self.text) - len(after)

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str | None:
        try:
            return self.template.render(messages, self.tools, prompt=prompt).text
        except TemplateFailure:
            return None

    def _written(self, begin: int, end: int) -> list[int]:
        """Where the special tokens end that the template wrote between two places."""
        found = self.ends.finditer(self.text, begin, end) if self.ends else ()
        return [match.end() for match in found if match.start() not in self.said]


def skeleton_of(template: ChatTemplate, roles: Sequence[str], ends: re.Pattern[str] | None) -> Skeleton | None:
    """The skeleton of conversations with these roles; None where the template does more than put messages in."""
    if ends and any(ends.search(role) for role in roles):
        return None
    marks = [_mark(n) for n in range(len(roles))]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        text = template.render(messages).text
    except TemplateFailure:
        return None
    between, starts, at = [], [], 0
    for mark in marks:
        found = text.find(mark, at)
        if found < 0 or text.count(mark) != 1:
            return None
        between.append(text[at:found])
        starts.append(found)
        at = found + len(mark)
    between.append(text[at:])
    conversation = Conversation(template, messages, None, text, ends)
    turns = []
    for n, start in enumerate(starts):
        if roles[n] == ASSISTANT:
            prompted, stop = conversation.begin(n), start + len(marks[n])
            begin = start if prompted is None else min(start, prompted)
            end = max(stop, conversation.end(n, stop))
            if start - begin > len(between[n]) or end - stop > len(between[n + 1]):
                return None
            turns.append((n, len(between[n]) - (start - begin), end - stop))
    return Skeleton(tuple(between), tuple(turns), "" in between[1:-1])


def _common_length(one: str, other: str) -> int:
    """How long the beginning is that both have."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: comparing slices is much faster than going character by character
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
