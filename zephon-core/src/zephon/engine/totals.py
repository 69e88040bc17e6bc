"""Counts over the rows and tokens that went through the lanes of this process."""

from __future__ import annotations

import numpy as np

from zephon.columns.records import TokenBlock
from zephon.ops.base import PackCounts


class Totals:
    """Counts per dataset.

    Attributes:
        rows: int64[n_datasets], rows read.
        skipped: int64[n_datasets], rows that were null, empty or only white space.
        dropped: int64[n_datasets], rows that operators left out on purpose.
        failed: int64[n_datasets], rows left out because they could not be used.
        tokens: int64[n_datasets], tokens made, special tokens included.
        left_out: tokens at the end of lanes that did not fill a record.
        packing: counts of the packers.
    """

    def __init__(self, n_datasets: int) -> None:
        self.rows, self.skipped, self.dropped, self.failed, self.tokens = np.zeros((5, n_datasets), dtype=np.int64)
        self.left_out = 0
        self.packing = PackCounts()

    def add(self, block: TokenBlock) -> None:
        """Count one block."""
        self.rows += block.rows_read
        self.skipped += block.rows_skipped
        if block.rows_dropped is not None:
            self.dropped += block.rows_dropped
        if block.rows_failed is not None:
            self.failed += block.rows_failed
        lengths = np.diff(block.offsets)
        self.tokens += np.bincount(block.dataset, weights=lengths, minlength=len(self.tokens)).astype(np.int64)
