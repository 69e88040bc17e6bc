"""Rendered conversations into tokens, and which of them are trained on.

It goes over a whole block at once: all texts lie in one buffer, special tokens are found in it by one regular
expression, what is between them is tokenized as one column, and the loss of each token comes from where it lies in the
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.columns.records import ragged_take
from zephon.ops.chat_specials import SpecialTokens
from zephon.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatText", "tokens_of"]

_APART = b"\xff"  # between the texts of a buffer; in no UTF-8, so nothing is found across it


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered conversation.

    Attributes:
        text: all of it.
        data: the same as UTF-8.
        trained: the characters [begin, end) that are trained on, in order and apart.
        said: the characters at which no special token begins.
    """

    text: str
    data: bytes
    trained: list[tuple[int, int]]
    said: frozenset[int]


def tokens_of(
    texts: list[ChatText], tokenizer: Tokenizer, special: SpecialTokens
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens uint32[n], offsets int64[n_docs + 1] and loss bool[n] of rendered conversations."""
    buffer = _APART.join([one.data for one in texts])
    lengths = np.array([len(one.data) for one in texts], dtype=np.int64)
    ends = np.cumsum(lengths + 1) - 1
    starts = ends - lengths
    trained: list[int] = []
    said: list[int] = []
    for one, base in zip(texts, starts.tolist(), strict=True):
        trained += _in_bytes(one.text, base, [edge for span in one.trained for edge in span])
        said += _in_bytes(one.text, base, sorted(one.said))
    cuts, special_ids = special.find(buffer, frozenset(said))
    # Pieces of text lie between the cuts and the bounds of texts, which are paired when both are in order.
    first = np.sort(np.concatenate([starts, cuts[:, 1]]))
    last = np.sort(np.concatenate([ends, cuts[:, 0]]))
    leads = np.isin(first, starts)
    inner = tokenizer.inner
    parts = [(special_ids, np.arange(len(cuts) + 1), cuts[:, 0], cuts[:, 0], cuts[:, 1])]
    everything = np.ones(len(first), dtype=bool)
    for encoder, wanted in [(inner, everything)] if inner is tokenizer else [(tokenizer, leads), (inner, ~leads)]:
        ids, bounds, begin, end = _encoded(encoder, buffer, first[wanted], last[wanted])
        parts.insert(0, (ids, bounds, first[wanted], begin, end))
    # Pieces and special tokens in the order of their places; an empty piece comes before the token at its place.
    at = np.concatenate([part[2] for part in parts])
    order = np.argsort(at, kind="stable")
    counts = np.concatenate([np.diff(part[1]) for part in parts])
    items, bounds = ragged_take(np.concatenate([[0], np.cumsum(counts)]), order)
    tokens, begin, end = (np.concatenate([part[k] for part in parts])[items] for k in (0, 3, 4))
    offsets = np.append(bounds[np.searchsorted(at[order], starts)], len(tokens))
    return tokens, offsets, _overlaps(begin, end, np.array(trained, dtype=np.int64).reshape(-1, 2))


def _encoded(
    tokenizer: Tokenizer, buffer: bytes, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of a buffer as tokens.

    Args:
        first, last: int64[n], in order and apart: the bytes [first, last) of each piece.

    Returns:
        (ids uint32[m], bounds int64[n + 1], begin and end int64[m]: the bytes that each token stands for).
    """
    edges = np.stack([first, last], axis=1).reshape(-1)
    everything = pa.LargeStringArray.from_buffers(
        max(0, len(edges) - 1), pa.py_buffer(np.ascontiguousarray(edges)), pa.py_buffer(buffer)
    )
    pieces = everything.take(int64_array(np.arange(len(first), dtype=np.int64) * 2))
    ids, bounds = tokenizer.encode(pieces)
    table = tokenizer.token_bytes
    widths = np.zeros(len(ids), dtype=np.int64) if table is None else table[ids].astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(widths)])
    shift = np.repeat(first - ends[bounds[:-1]], np.diff(bounds))
    end = ends[1:] + shift
    begin = end - widths
    unclear = (ends[bounds[1:]] - ends[bounds[:-1]] != last - first) | (table is None)
    for piece in np.flatnonzero(unclear & (np.diff(bounds) > 0)).tolist():
        low, high = int(bounds[piece]), int(bounds[piece + 1])
        text = pieces[piece].as_py()
        # The reference says of each token which characters it stands for; its ids are the same.
        _, spans = tokenizer.token_spans(text)
        if len(spans) != high - low:  # it was cut before it was tokenized, being of several MiB
            spans = [(0, len(text))] * (high - low)
        widths_of = np.cumsum([0, *(len(char.encode()) for char in text)])
        begin[low:high], end[low:high] = first[piece] + widths_of[np.array(spans, dtype=np.int64)].T
    return ids, bounds, begin, end


def _overlaps(begin: np.ndarray, end: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """bool[n]: which of the tokens [begin, end) overlap any of the spans int64[m, 2], which are in order and apart."""
    if not len(spans):
        return np.zeros(len(begin), dtype=bool)
    nearest = np.searchsorted(spans[:, 1], begin, side="right")
    # A token without characters of its own lies where it begins.
    return (nearest < len(spans)) & (np.maximum(end, begin + 1) > spans[np.minimum(nearest, len(spans) - 1), 0])


def _in_bytes(text: str, base: int, places: Sequence[int]) -> list[int]:
    """Where characters, ascending, lie in a buffer that holds the text as UTF-8 from `base` on."""
    if text.isascii():
        return [base + place for place in places]
    at, done, out = base, 0, []
    for place in places:
        at += len(text[done:place].encode())
        done = place
        out.append(at)
    return out
