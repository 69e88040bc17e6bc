"""Cutting very long documents, so that no single one holds up a stream.

All libraries need more than linear time and a multiple of the memory for one very long word: 20 MB take 10 s in one
piece and 3 s in pieces of 1 MiB. A document is cut by its own bytes alone, so its tokens do not depend on what it is
batched with.

The cuts are in front of a space between two ASCII letters, or at least between two ASCII characters that are not
white space. Every tokenizer in use begins a new word there, so the ids are those of the uncut document;
`joins_at_space` finds out how the tokenizer at hand must be given the second piece. Where a whole stretch has no such
place (one endless word, languages without spaces), the cut is between two characters, and the ids may differ from those
of the uncut document at that point, once per mebibyte.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MAX_DOCUMENT_BYTES = 4 << 20  # longer ones are cut
PIECE_BYTES = 1 << 20
SEARCH_BYTES = 64 << 10  # how far back from the end of a piece a good place is looked for

_SPACE = 0x20


def joins_at_space(encode: Callable[[str], list[int]]) -> bool:
    """Whether "word" + " word" in two pieces needs the space on the second piece to give the ids of the whole.

    False for a tokenizer that puts a space in front of whatever it gets (Llama 2): there the piece must begin after
    the space, because the tokenizer puts it back.
    """
    pairs = [("The quick brown", "fox jumps"), ("import os", "and sys"), ("eine lange", "Zeile Text"), ("a b", "c d")]
    wholes = [encode(f"{a} {b}") for a, b in pairs]
    with_space = [encode(a) + encode(f" {b}") for a, b in pairs]
    without = [encode(a) + encode(b) for a, b in pairs]
    return with_space == wholes or without != wholes


def cut(text: np.ndarray, skip_space: bool) -> list[tuple[int, int]]:
    """Where to cut one document.

    Args:
        text: uint8[n_bytes], valid UTF-8.
        skip_space: leave out the space at which it is cut (see `joins_at_space`).

    Returns:
        (start, stop) of each piece, at most PIECE_BYTES long; together they are the document, but for the spaces left
        out.
    """
    pieces = []
    start, n = 0, len(text)
    while n - start > PIECE_BYTES:
        stop, at_space = _cut_before(text, start + PIECE_BYTES)
        pieces.append((start, stop))
        start = stop + (at_space and skip_space)
    pieces.append((start, n))
    return pieces


def _cut_before(text: np.ndarray, limit: int) -> tuple[int, bool]:
    """The last good place at or before `limit`, and whether it is at a space between words."""
    window = text[limit - SEARCH_BYTES : limit + 2]
    letter = ((window | 0x20) >= ord("a")) & ((window | 0x20) <= ord("z"))
    visible = (window > _SPACE) & (window < 0x7F)
    for neighbour in (letter, visible):
        places = np.flatnonzero(neighbour[:-2] & (window[1:-1] == _SPACE) & neighbour[2:])
        if len(places):
            return int(limit - SEARCH_BYTES + places[-1] + 1), True
    while text[limit] & 0xC0 == 0x80:  # inside a character
        limit -= 1
    return limit, False
