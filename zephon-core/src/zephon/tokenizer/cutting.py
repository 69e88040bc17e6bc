"""Cutting very long documents: libraries need more than linear time and much memory for one very long word.

A document is cut by its own bytes alone, in front of a space between two ASCII letters, or at least between two ASCII
characters that are not white space. Every tokenizer in use begins a new word there, so the ids are those of the uncut
document; `joins_at_space` finds out how the second piece must be given. Where a whole stretch has no such place (one
endless word, languages without spaces), the cut is between two characters, and the ids may differ from those of the
uncut document there, once per mebibyte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

MAX_DOCUMENT_BYTES = 4 << 20  # longer ones are cut
PIECE_BYTES = 1 << 20
SEARCH_BYTES = 64 << 10  # how far back from the end of a piece a good place is looked for

_GOOD_PLACES = (re.compile(rb"(?<=[A-Za-z]) (?=[A-Za-z])"), re.compile(rb"(?<=[!-~]) (?=[!-~])"))


def joins_at_space(encode: Callable[[str], list[int]]) -> bool:
    """Whether "word" + " word" in two pieces needs the space on the second piece to give the ids of the whole.

    False for a tokenizer that puts a space in front of whatever it gets (Llama 2), and so would put a second one.
    """
    pairs = [("The quick brown", "fox jumps"), ("import os", "and sys"), ("eine lange", "Zeile Text"), ("a b", "c d")]
    wholes = [encode(f"{a} {b}") for a, b in pairs]
    with_space = [encode(a) + encode(f" {b}") for a, b in pairs]
    without = [encode(a) + encode(b) for a, b in pairs]
    return with_space == wholes or without != wholes


def cut_documents(column: pa.Array, *, keeps_space: bool) -> tuple[pa.Array, np.ndarray]:
    """A large_string column with long documents cut, and int64[n_docs + 1], the piece that each begins with."""
    pieces: list[bytes] = []
    first = [0]
    for document in column.cast(pa.large_binary()).to_pylist():
        pieces += cut(document, keeps_space) if len(document) > MAX_DOCUMENT_BYTES else [document]
        first.append(len(pieces))
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    array = pa.LargeStringArray.from_buffers(len(pieces), pa.py_buffer(offsets), pa.py_buffer(b"".join(pieces)))
    return array, np.array(first, dtype=np.int64)


def cut(document: bytes, keeps_space: bool) -> Iterator[bytes]:
    """The pieces of a document, of at most PIECE_BYTES; together they are the document, but for spaces left out."""
    start = 0
    while len(document) - start > PIECE_BYTES:
        stop, at_space = _cut_before(document, start + PIECE_BYTES)
        yield document[start:stop]
        start = stop + (at_space and not keeps_space)
    yield document[start:]


def _cut_before(document: bytes, limit: int) -> tuple[int, bool]:
    """The last good place at or before `limit`, and whether it is at a space between words."""
    for pattern in _GOOD_PLACES:
        places = [match.start() for match in pattern.finditer(document, limit - SEARCH_BYTES + 1, limit + 2)]
        if places:
            return places[-1], True
    while document[limit] & 0xC0 == 0x80:  # inside a character
        limit -= 1
    return limit, False
