"""What a run tells of itself: shares of tokens, packing, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zephon.columns.lane_start import LaneStart
from zephon.engine.totals import Totals
from zephon.ops.base import PackCounts
from zephon.run.compile import Compiled

__all__ = [
    "Account",
    "LeftOver",
    "Mixture",
    "Packing",
    "mixture_line",
    "mixture_of",
    "packing_of",
]


@dataclass(frozen=True)
class Account:
    """The place of a stream and what it has counted.

    Attributes:
        starts: by owned lane, where it would have to begin to go on after the last batch.
        cursor: records of this group handed out or left out on purpose since the start of the run.
        begun: the cursor at which the stream began.
        agreed: the last step's start at which `combine_flag` said that there is a step to come.
        finished: whether the data has ended.
        given: int64[n_datasets], tokens handed out.
        totals: counts of rows and tokens made.
        left_records: records that fill no microbatch at the end of the data.
    """

    starts: dict[int, LaneStart]
    cursor: int
    begun: int
    agreed: int
    finished: bool
    given: np.ndarray
    totals: Totals
    left_records: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """Tokens of one dataset, in this process since its stream was last begun.

    Attributes:
        target: wanted share of tokens; under a schedule, of those handed out so far.
        achieved: share of the tokens handed out so far; 0 before the first.
        given: tokens handed out.
        tokens: tokens made, those ahead of the consumer included.
        rows: rows read, those ahead included.
        skipped: rows that were null, empty or only white space.
        dropped: rows that operators left out on purpose, such as a filter.
        failed: rows left out because they could not be used, see `options(on_error="skip")`.
        window: share of the tokens of each lane's last whole window; as `achieved` before the first has ended.
        window_tokens: tokens of those windows; 0 before the first has ended.
    """

    target: float
    achieved: float
    given: int
    tokens: int
    rows: int
    skipped: int
    dropped: int = 0
    failed: int = 0
    window: float = 0.0
    window_tokens: int = 0


def mixture_of(compiled: Compiled, account: Account | None) -> dict[str, Mixture]:
    """Target and achieved shares by dataset name, before the first batch where there is no account."""
    names, topology = compiled.plan.dataset_names, compiled.topology
    totals = account.totals if account else Totals(len(names))
    given = account.given if account else np.zeros(len(names), dtype=np.int64)
    handed_out = int(given.sum())
    # A group has its share of every round, so all groups together have had that many times as much.
    start = account.begun * topology.dp_degree * compiled.operators.pack.record_length if account else 0
    end = start + handed_out * topology.dp_degree
    shares = compiled.source.shares_between(start, end, compiled.tokens_per_step)
    window = sum(list(totals.windows.values()), np.zeros_like(totals.tokens))
    window_tokens = int(window.sum())
    mixture = {}
    for d, name in enumerate(names):
        achieved = int(given[d]) / handed_out if handed_out else 0.0
        mixture[name] = Mixture(
            target=shares[name],
            achieved=achieved,
            given=int(given[d]),
            tokens=int(totals.tokens[d]),
            rows=int(totals.rows[d]),
            skipped=int(totals.skipped[d]),
            dropped=int(totals.dropped[d]),
            failed=int(totals.failed[d]),
            window=int(window[d]) / window_tokens if window_tokens else achieved,
            window_tokens=int(window[d]),
        )
    return mixture


def mixture_line(mixture: Mapping[str, Mixture]) -> str:
    """Shares of all datasets in one line, for a log."""
    return ", ".join(
        f"{name} {each.achieved:.2%} of {each.target:.2%} (last window {each.window:.2%})"
        for name, each in mixture.items()
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents were packed, in this process since its stream was last begun.

    Records ahead of the consumer are counted, and so are those made again after a restore.

    Attributes:
        records: records made.
        slots: places for tokens in them.
        tokens: real tokens in them; the other places are padding.
        documents: documents that had tokens.
        oversized: documents longer than a record.
        split: documents that are in more than one record.
        dropped: documents left out because they are longer than a record.
        dropped_tokens: tokens of the dropped ones.
    """

    records: int
    slots: int
    tokens: int
    documents: int
    oversized: int
    split: int
    dropped: int
    dropped_tokens: int

    @property
    def efficiency(self) -> float:
        """Real tokens per place; 1 before the first record."""
        return self.tokens / self.slots if self.slots else 1.0

    @property
    def padding(self) -> float:
        """Share of places that are padded."""
        return 1.0 - self.efficiency


def packing_of(counts: PackCounts, record_length: int) -> Packing:
    """The counts of a stream, for people."""
    return Packing(
        records=counts.records,
        slots=counts.records * record_length,
        tokens=counts.tokens,
        documents=counts.documents,
        oversized=counts.oversized,
        split=counts.split,
        dropped=counts.dropped,
        dropped_tokens=counts.dropped_tokens,
    )


@dataclass(frozen=True, slots=True)
class LeftOver:
    """Data of a finite run that no batch holds.

    Attributes:
        tokens: tokens that fill no record, over the lanes of this group.
        records: records that fill no microbatch.
    """

    tokens: int
    records: int
