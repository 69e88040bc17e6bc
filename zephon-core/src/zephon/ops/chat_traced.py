"""Text that knows who wrote each of its characters: the template or the conversation.

A message may spell a special token without being one, so it has to be known which of the tokens in a rendered text the
template wrote. The text alone does not tell, and marks put into messages would be seen by templates, which split,
compare and measure what they are given. `Traced` text reads like any other and carries its marks beside it, through
everything that templates do with text. Where a way of changing text is not followed character by character, all of what
comes out counts as the conversation's, so that it can never make a special token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

__all__ = [
    "EVEN",
    "MAY",
    "ODD",
    "SAID",
    "Traced",
    "TracingFailure",
    "blurred",
    "holds_traced",
    "in_block",
    "joined",
    "merged",
    "runs",
    "said",
    "traced",
    "without",
]

SAID = 1
"""The conversation brought it in."""
MAY = 8
"""Besides, it may make a special token."""
ODD, EVEN = 2, 4
"""It stands in a {% generation %} block; neighbouring blocks take turns, so that they can be told apart."""

_IN_BLOCK = {block: bytes(mark & (SAID | MAY) | block for mark in range(256)) for block in (ODD, EVEN)}

_HAS = {wanted: bytes(bool(mark & wanted) for mark in range(256)) for wanted in (SAID, MAY, ODD, EVEN)}


class TracingFailure(Exception):
    """Something was done to text that cannot be followed. Never leaves this package."""


class Traced(str):
    """A text and, for each of its characters, a byte of `SAID`, `MAY`, `ODD` and `EVEN`."""

    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, text: str, marks: bytes) -> Traced:
        made = super().__new__(cls, text)
        made._marks = marks
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Traced(str.__add__(self, other), self._marks + _marks(other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Traced(str.__add__(other, self), _marks(other) + self._marks)

    def __mul__(self, times: SupportsIndex) -> str:
        return Traced(str.__mul__(self, times), self._marks * times.__index__())

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        marks = self._marks[key] if isinstance(key, slice) else bytes((self._marks[key],))
        return Traced(str.__getitem__(self, key), marks)

    def __iter__(self) -> Iterator[str]:
        for nth, char in enumerate(str.__iter__(self)):
            yield Traced(char, self._marks[nth : nth + 1])

    def _piece(self, start: int, length: int) -> Traced:
        return Traced(str.__getitem__(self, slice(start, start + length)), self._marks[start : start + length])

    def join(self, parts: Iterable[str], /) -> str:
        woven: list[str] = []
        for part in parts:
            woven += (self, part) if woven else (part,)
        return joined(woven)

    def strip(self, chars: str | None = None, /) -> str:
        return self._piece(len(self) - len(str.lstrip(self, chars)), len(str.strip(self, chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        left = len(str.lstrip(self, chars))
        return self._piece(len(self) - left, left)

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._piece(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        left = len(str.removeprefix(self, prefix))
        return self._piece(len(self) - left, left)

    def removesuffix(self, suffix: str, /) -> str:
        return self._piece(0, len(str.removesuffix(self, suffix)))

    def _split(self, words: list[str], sep: str | None) -> list[str]:
        pieces: list[str] = []
        at = 0
        for word in words:
            # Words between white space begin with none, so the next place where one is found is its own.
            start = str.find(self, word, at) if sep is None else at
            pieces.append(self._piece(start, len(word)))
            at = start + len(word) + len(sep or "")
        return pieces

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        pieces: list[str] = []
        at = 0
        for line, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            pieces.append(self._piece(at, len(line)))
            at += len(whole)
        return pieces

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(len(str.partition(self, sep)[0]), len(sep) if sep in self else 0)

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(len(str.rpartition(self, sep)[0]), len(sep) if sep in self else 0)

    def _parted(self, start: int, width: int) -> tuple[str, str, str]:
        end = start + width
        return self._piece(0, start), self._piece(start, width), self._piece(end, len(self) - end)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:  # between all characters
            return blurred(str.replace(self, old, new, count), self, new)
        return traced(new).join(self.split(old, count))

    def _changed(self, text: str) -> str:
        return Traced(text, self._marks) if len(text) == len(self) else blurred(text, self)

    def lower(self) -> str:
        return self._changed(str.lower(self))

    def upper(self) -> str:
        return self._changed(str.upper(self))

    def casefold(self) -> str:
        return self._changed(str.casefold(self))

    def capitalize(self) -> str:
        return self._changed(str.capitalize(self))

    def title(self) -> str:
        return self._changed(str.title(self))

    def swapcase(self) -> str:
        return self._changed(str.swapcase(self))

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise TracingFailure("it makes bytes of text")


def joined(parts: Iterable[str]) -> str:
    """The parts in one text, traced where one of them is."""
    parts = list(parts)
    text = "".join(parts)
    for part in parts:
        if type(part) is Traced:
            return Traced(text, b"".join([_marks(part) for part in parts]))
    return text


def traced(text: str) -> Traced:
    """The text with its marks; with none, as the template's own, where it has not been traced."""
    return text if type(text) is Traced else Traced(text, bytes(len(text)))


def said(text: str, may: re.Pattern[str] | None = None) -> Traced:
    """The text as the conversation's; what the pattern finds may make special tokens."""
    marks = bytearray((SAID,)) * len(text)
    for found in may.finditer(text) if may else ():
        start, end = found.span()
        marks[start:end] = bytes((SAID | MAY,)) * (end - start)
    return Traced(text, bytes(marks))


def blurred(text: str, *sources: str) -> Traced:
    """What was made of other texts in a way that was not followed: all of it is the conversation's."""
    blocks = max((mark & (ODD | EVEN) for source in sources for mark in set(_marks(source))), default=0)
    return Traced("".join((text,)), bytes((SAID | blocks,)) * len(text))


def in_block(text: str, block: int) -> Traced:
    """The same in a {% generation %} block, `ODD` or `EVEN`."""
    return Traced(text, _marks(text).translate(_IN_BLOCK[block]))


def runs(text: Traced, mark: int) -> list[tuple[int, int]]:
    """Where a text bears this mark: characters [begin, end), in order and apart."""
    marks = text._marks.translate(_HAS[mark])
    if 0 not in marks:
        return [(0, len(marks))] if marks else []
    found = []
    begin = marks.find(1)
    while begin >= 0:
        end = marks.find(0, begin)
        end = len(marks) if end < 0 else end
        found.append((begin, end))
        begin = marks.find(1, end)
    return found


def without(spans: list[tuple[int, int]], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of spans outside of others; all in order and apart."""
    left = []
    nth = 0
    for begin, end in spans:
        at = begin
        while nth < len(holes) and holes[nth][0] < end:
            start, stop = holes[nth]
            left.append((at, max(at, start)))
            at = min(max(at, stop), end)
            nth += 1
        left.append((at, end))
    return merged(left)


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that touch made one, without empty ones."""
    out: list[tuple[int, int]] = []
    for begin, end in spans:
        if begin == end:
            continue
        if out and out[-1][1] == begin:
            out[-1] = out[-1][0], end
        else:
            out.append((begin, end))
    return out


def holds_traced(value: Any) -> bool:
    """Whether a value is traced text or has some in it; the value is known to be bounded."""
    if isinstance(value, str):
        return type(value) is Traced
    if isinstance(value, dict):
        return any(map(holds_traced, value)) or any(map(holds_traced, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_traced, value))


def _marks(text: str) -> bytes:
    return text._marks if type(text) is Traced else bytes(len(text))
