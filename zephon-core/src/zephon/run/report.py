"""What a run tells of itself: shares of tokens, packing, what is left over, and the metrics of a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zephon.batch import SampleBatch
from zephon.columns.lane_start import LaneStart
from zephon.engine.totals import Totals
from zephon.run.compile import Compiled

__all__ = [
    "Account",
    "LeftOver",
    "Mixture",
    "Progress",
    "loader_metrics",
    "mixture_line",
    "mixture_of",
]


@dataclass(frozen=True)
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


def mixture_of(compiled: Compiled, account: Account | None) -> dict[str, Mixture]:
    """Target and achieved shares by dataset name, before the first batch where there is no account."""
    names = compiled.plan.dataset_names
    zeros = np.zeros(len(names), dtype=np.int64)
    totals, given, begun = (account.totals, account.given, account.begun) if account else (Totals(len(names)), zeros, 0)
    # A group has its share of every round, so all groups together have had that many times as much.
    groups = compiled.topology.dp_degree
    start = begun * groups * compiled.operators.pack.record_length
    shares = compiled.source.shares_between(start, start + int(given.sum()) * groups, compiled.tokens_per_step)
    window = sum(list(totals.windows.values()), zeros)
    achieved = given / max(1, given.sum())
    of_window = window / window.sum() if window.any() else achieved
    counts = (given, totals.tokens, totals.rows, totals.skipped, totals.dropped, totals.failed)
    columns = [column.tolist() for column in (achieved, *counts, of_window)]
    return {name: Mixture(shares[name], *values) for name, *values in zip(names, *columns, strict=True)}


def mixture_line(mixture: Mapping[str, Mixture]) -> str:
    """Shares of all datasets in one line, for a log."""
    return ", ".join(
        f"{name} {each.achieved:.2%} of {each.target:.2%} (last window {each.window:.2%})"
        for name, each in mixture.items()
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


@dataclass(slots=True)
class Progress:
    """What a loader has done since it was built.

    Attributes:
        batches: microbatches handed out.
        wait: seconds that the trainer waited for them, the making of tensors included.
        places: places for tokens in them.
        padding: places without a real token.
        tokens: int64[n_datasets], the real tokens by dataset; 0 before the first batch.
    """

    batches: int = 0
    wait: float = 0.0
    places: int = 0
    padding: int = 0
    tokens: np.ndarray | int = 0

    def add(self, batch: SampleBatch, wait: float) -> None:
        """Count a microbatch for which the trainer waited `wait` seconds."""
        places, tokens = batch.tokens.size, batch.tokens_by_dataset()
        self.batches += 1
        self.wait += wait
        self.places += places
        self.padding += places - int(tokens.sum())
        self.tokens = self.tokens + tokens

    def counts(self, since: Progress, mixture: Mapping[str, Mixture]) -> np.ndarray:
        """float64[4 + 3 * n_datasets], for `loader_metrics`, to be added up over ranks.

        Batches, seconds of wait, places and padding since then; by dataset, since the loader was built, tokens used,
        rows skipped and rows failed.
        """
        now, then = ((each.batches, each.wait, each.places, each.padding) for each in (self, since))
        rows = [(part.skipped, part.failed) for part in mixture.values()]
        by_dataset = np.column_stack([np.broadcast_to(self.tokens, len(rows)), np.reshape(rows, (-1, 2))])
        return np.concatenate([np.subtract(now, then), by_dataset.reshape(-1)])


def loader_metrics(counts: np.ndarray, targets: Mapping[str, float], cursor: int) -> dict[str, float]:
    """Metrics of a training loop.

    zephon/data_wait(s)
        Mean time that the trainer waited for each of the batches, which an integration may set to the steps instead.
    zephon/padding(%)
        Share of places that hold no real token.
    zephon/cursor
        Records that all ranks have used since the start of the run.
    zephon/tokens/SOURCE, zephon/mixture/SOURCE, zephon/mixture_target/SOURCE
        Tokens used since the process started; their share of all; the share wanted.
    zephon/skipped_rows/SOURCE, zephon/failed_rows/SOURCE
        Rows that were null, empty or only white space; rows left out because they could not be used. Those read ahead
        are included.

    Args:
        counts: sum of `Progress.counts` over the ranks that read different data.
        targets: wanted share of tokens by dataset name.
        cursor: records that all ranks have used since the start of the run.
    """
    batches, wait, places, padding = counts[:4].tolist()
    by_dataset = counts[4:].reshape(-1, 3)
    total = max(1.0, float(by_dataset[:, 0].sum()))
    metrics = {
        "zephon/data_wait(s)": wait / max(1, batches),
        "zephon/padding(%)": 100 * padding / max(1, places),
        "zephon/cursor": float(cursor),
    }
    for (name, target), (tokens, skipped, failed) in zip(targets.items(), by_dataset.tolist(), strict=True):
        metrics[f"zephon/tokens/{name}"] = tokens
        metrics[f"zephon/mixture/{name}"] = tokens / total
        metrics[f"zephon/mixture_target/{name}"] = target
        metrics[f"zephon/skipped_rows/{name}"] = skipped
        metrics[f"zephon/failed_rows/{name}"] = failed
    return metrics
