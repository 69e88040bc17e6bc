"""Counts over the rows and tokens that went through the lanes of this process."""

from __future__ import annotations

import numpy as np

from zephon.columns.records import TokenBlock
from zephon.ops.base import PackCounts

__all__ = ["Totals"]


class Totals:
    """Counts per dataset.

    Attributes:
        rows: int64[n_datasets], rows read.
        skipped: int64[n_datasets], rows that were null, empty or only white space.
        dropped: int64[n_datasets], rows that operators left out on purpose.
        failed: int64[n_datasets], rows left out because they could not be used.
        tokens: int64[n_datasets], tokens made, special tokens included.
        windows: by lane, int64[n_datasets], the tokens of its last whole window.
        windows_ended: windows that have ended, over all lanes.
        left_out: tokens at the end of lanes that did not fill a record.
        packing: counts of the packers.
    """

    def __init__(self, n_datasets: int) -> None:
        self.rows, self.skipped, self.dropped, self.failed, self.tokens = np.zeros((5, n_datasets), dtype=np.int64)
        self.windows: dict[int, np.ndarray] = {}
        self.windows_ended = 0
        self.left_out = 0
        self.packing = PackCounts()

    def add(self, block: TokenBlock) -> np.ndarray:
        """Count one block; returns its tokens by dataset, int64[n_datasets]."""
        self.rows += block.rows_read
        self.skipped += block.rows_skipped
        if block.rows_dropped is not None:
            self.dropped += block.rows_dropped
        if block.rows_failed is not None:
            self.failed += block.rows_failed
        tokens = np.bincount(block.dataset, weights=np.diff(block.offsets), minlength=len(self.tokens)).astype(np.int64)
        self.tokens += tokens
        return tokens

    def end_window(self, lane: int, tokens: np.ndarray) -> None:
        """Record the end of a window of `lane`, with its tokens by dataset."""
        self.windows[lane] = tokens
        self.windows_ended += 1
