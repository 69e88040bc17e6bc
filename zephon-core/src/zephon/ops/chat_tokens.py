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

from zephon.columns.arrow import int64_array, ragged_take
from zephon.ops.chat_specials import SpellableTokens
from zephon.tokenizer.tokenizer import Tokenizer

_APART = b"\xff"  # between the texts of a buffer; in no UTF-8, so nothing is found across it


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered conversation, also as UTF-8; the characters [begin, end) that are trained on, in order and apart; and
    those at which no special token begins.
    """

    text: str
    data: bytes
    trained: list[tuple[int, int]]
    said: frozenset[int]


def tokens_of(
    texts: list[ChatText], tokenizer: Tokenizer, special: SpellableTokens
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens uint32[n], offsets int64[n_docs + 1] and loss bool[n] of rendered conversations."""
    buffer = _APART.join([each.data for each in texts])
    lengths = np.array([len(each.data) for each in texts], dtype=np.int64)
    ends = np.cumsum(lengths + 1) - 1
    starts = ends - lengths
    trained: list[int] = []
    said: list[int] = []
    for each, base in zip(texts, starts.tolist(), strict=True):
        trained += _in_bytes(each.text, base, [edge for span in each.trained for edge in span])
        said += _in_bytes(each.text, base, sorted(each.said))
    cuts, special_ids = special.find(buffer, frozenset(said))
    # Pieces of text lie between the cuts and the bounds of texts, which are paired when both are in order.
    first = np.sort(np.concatenate([starts, cuts[:, 1]]))
    last = np.sort(np.concatenate([ends, cuts[:, 0]]))
    leads = np.isin(first, starts)
    # Of each part: ids, tokens per piece, where pieces begin, and the bytes [begin, end) that each token stands for.
    parts = [(special_ids, np.ones(len(cuts), dtype=np.int64), cuts[:, 0], cuts[:, 0], cuts[:, 1])]
    inner = tokenizer.inner
    everything = np.ones(len(first), dtype=bool)
    for encoder, wanted in [(inner, everything)] if inner is tokenizer else [(tokenizer, leads), (inner, ~leads)]:
        parts.insert(0, _encoded(encoder, buffer, first[wanted], last[wanted]))
    # Pieces and special tokens in the order of their places; an empty piece comes before the token at its place.
    ids, counts, at, begin, end = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(at, kind="stable")
    items, bounds = ragged_take(np.concatenate([[0], np.cumsum(counts)]), order)
    offsets = np.append(bounds[np.searchsorted(at[order], starts)], len(items))
    spans = np.array(trained, dtype=np.int64).reshape(-1, 2)
    return ids[items], offsets, _overlaps(begin[items], end[items], spans)


def _encoded(
    tokenizer: Tokenizer, buffer: bytes, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pieces [first, last) of a buffer, in order and apart, as tokens.

    Gives ids uint32[m], counts int64[n], first, and begin and end int64[m], the bytes that each token stands for.
    """
    edges = np.ascontiguousarray(np.stack([first, last], axis=1).reshape(-1))
    everything = pa.LargeStringArray.from_buffers(max(0, len(edges) - 1), pa.py_buffer(edges), pa.py_buffer(buffer))
    pieces = everything.take(int64_array(np.arange(len(first), dtype=np.int64) * 2))
    ids, bounds = tokenizer.encode(pieces)
    counts, table = np.diff(bounds), tokenizer.token_bytes
    widths = np.zeros(len(ids), dtype=np.int64) if table is None else table[ids].astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(widths)])
    end = ends[1:] + np.repeat(first - ends[bounds[:-1]], counts)
    begin = end - widths
    unclear = (ends[bounds[1:]] - ends[bounds[:-1]] != last - first) | (table is None)
    for piece in np.flatnonzero(unclear & (counts > 0)).tolist():
        low, high = int(bounds[piece]), int(bounds[piece + 1])
        text = pieces[piece].as_py()
        # The reference says of each token which characters it stands for; its ids are the same.
        _, spans = tokenizer.token_spans(text)
        if len(spans) != high - low:  # it was cut before it was tokenized, being of several MiB
            spans = [(0, len(text))] * (high - low)
        places = np.array(_in_bytes(text, int(first[piece]), range(len(text) + 1)), dtype=np.int64)
        begin[low:high], end[low:high] = places[np.array(spans, dtype=np.int64)].T
    return ids, counts, first, begin, end


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
