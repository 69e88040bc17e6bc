"""What a run tells of itself: shares of tokens, packing, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zephon.columns.lane_start import LaneStart
from zephon.engine.totals import Totals
from zephon.run.compile import Compiled


@dataclass(frozen=True, kw_only=True)
class Account:
    """The place of a stream and its counts.

    Attributes:
        starts: by owned lane, where it would have to begin to go on after the last batch.
        cursor: records of this group handed out or left out on purpose since the start of the run.
        begun: the cursor at which the stream began.
        agreed: the last step's start at which `combine_flag` said that there is a step to come.
        finished: whether the data has ended.
        given: int64[n_datasets], tokens handed out.
        totals: counts of rows and tokens made.
        left_records: records that fill no microbatch at the end of the data.
        images: by owned lane, images since the last verdict on them, and how many of them are grey.
    """

    starts: dict[int, LaneStart]
    cursor: int
    begun: int
    agreed: int
    finished: bool
    given: np.ndarray
    totals: Totals
    left_records: int
    images: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @staticmethod
    def at(
        starts: dict[int, LaneStart], cursor: int, n_datasets: int, images: Mapping[int, tuple[int, int]]
    ) -> Account:
        """Of a stream that begins there."""
        return Account(
            starts=starts,
            cursor=cursor,
            begun=cursor,
            agreed=-1,
            finished=False,
            given=np.zeros(n_datasets, dtype=np.int64),
            totals=Totals(n_datasets),
            left_records=0,
            images=images,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
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
        passes: passes over the dataset since the start of the run.
    """

    target: float
    achieved: float
    given: int
    tokens: int
    rows: int
    skipped: int
    dropped: int = 0
    failed: int = 0
    passes: float = 0.0


def mixture_of(compiled: Compiled, account: Account) -> dict[str, Mixture]:
    """Target and achieved shares by dataset name."""
    names, totals, given = compiled.plan.dataset_names, account.totals, account.given
    # A group has its share of every round, so all groups together have had that many times as much.
    groups = compiled.topology.dp_degree
    start = account.begun * groups * compiled.operators.pack.record_length
    shares = compiled.source.shares_between(start, start + int(given.sum()) * groups, compiled.tokens_per_step)
    lane, place = next(iter(account.starts.items()))
    rows = compiled.plan.curriculum.rows_before(lane, place.chunk) if place.chunk else np.zeros_like(given)
    # The place lags behind by up to a shuffle buffer; the rows handed out here are known by their tokens.
    rows_here = given * totals.rows / np.maximum(1, totals.tokens) * groups
    rows_here = np.maximum(np.array(rows) * compiled.topology.feeds, rows_here)
    passes = rows_here / [max(1, d.catalog.rows) for d in compiled.datasets]
    return {
        name: Mixture(
            target=shares[name],
            achieved=float(given[d] / max(1, given.sum())),
            given=int(given[d]),
            tokens=int(totals.tokens[d]),
            rows=int(totals.rows[d]),
            skipped=int(totals.skipped[d]),
            dropped=int(totals.dropped[d]),
            failed=int(totals.failed[d]),
            passes=float(passes[d]),
        )
        for d, name in enumerate(names)
    }


def mixture_line(mixture: Mapping[str, Mixture], recent: np.ndarray) -> str:
    """Shares of all datasets in one line, for a log; `recent` has the tokens since the last line."""
    return ", ".join(
        f"{name} {each.achieved:.2%} of {each.target:.2%} (since the last line {share:.2%}; {each.passes:.2f} passes)"
        for (name, each), share in zip(mixture.items(), (recent / max(1, recent.sum())).tolist(), strict=True)
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
