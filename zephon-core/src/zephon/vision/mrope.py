"""Positions in three dimensions for models of the Qwen family (M-RoPE)."""

from __future__ import annotations

import numpy as np


def mrope_positions(
    tokens: np.ndarray, starts: tuple[np.ndarray, np.ndarray], image_id: int, grids: np.ndarray
) -> np.ndarray:
    """Time, row and column of each token: int64[3, n, width].

    All three count from 0 at each of `starts`. The tokens of an image have the row and column of their place in it,
    added to the position of its first token; the token after an image goes on behind its longer side.

    Args:
        tokens: uint32[n, width], the records.
        starts: see `RecordBlock.starts`.
        image_id: the placeholder.
        grids: integers[n_images, 2], tokens high and wide of the images of all records, in order.
    """
    high, wide = grids.astype(np.int64).T
    counts = high * wide
    places = np.flatnonzero(tokens == image_id)
    first = np.cumsum(counts) - counts  # among the placeholders
    within = np.arange(len(places)) - np.repeat(first, counts)
    # How far each token moves the next one: an image as a whole, at its first token.
    steps = np.ones(tokens.size, dtype=np.int64)
    steps[places] = 0
    steps[places[first]] = np.maximum(high, wide)
    position = np.cumsum(steps) - steps
    position[places] = np.repeat(position[places[first]], counts)
    begin = starts[0] * tokens.shape[1] + starts[1]
    position -= np.repeat(position[begin], np.diff(begin, append=tokens.size))
    out = np.tile(position, (3, 1))
    row, column = np.divmod(within, np.repeat(wide, counts))
    out[1, places] += row
    out[2, places] += column
    return out.reshape(3, *tokens.shape)
