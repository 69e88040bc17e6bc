"""What every dataset was to give and has given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zephon.engine.lane import Totals
from zephon.run.compile import Compiled

__all__ = ["Mixture", "mixture_line", "mixture_of"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """What one dataset was to give and has given, in this process since its stream was last begun.

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


def mixture_of(compiled: Compiled, totals: Totals, given: np.ndarray, begun: int) -> dict[str, Mixture]:
    """Targets and what was achieved by dataset name.

    Args:
        compiled: the pipeline.
        totals: counts of this group.
        given: int64[n_datasets], tokens that it has handed out.
        begun: records of this group that were used before.
    """
    made = int(given.sum())
    # A group has its share of every round, so what all groups have had is so many times as much.
    start = begun * compiled.topology.dp_degree * compiled.operators.pack.record_length
    end = start + made * compiled.topology.dp_degree
    shares = compiled.source.shares_between(start, end, compiled.tokens_per_step)
    window = sum(list(totals.windows.values()), np.zeros_like(totals.tokens))
    whole = int(window.sum())
    mixture = {}
    for d, name in enumerate(compiled.plan.dataset_names):
        achieved = int(given[d]) / made if made else 0.0
        last = int(window[d])
        mixture[name] = Mixture(
            target=shares[name],
            achieved=achieved,
            given=int(given[d]),
            tokens=int(totals.tokens[d]),
            rows=int(totals.rows[d]),
            skipped=int(totals.skipped[d]),
            dropped=int(totals.dropped[d]),
            failed=int(totals.failed[d]),
            window=last / whole if whole else achieved,
            window_tokens=last,
        )
    return mixture


def mixture_line(mixture: dict[str, Mixture]) -> str:
    """Shares of all datasets in one line, for a log."""
    return ", ".join(
        f"{name} {each.achieved:.2%} of {each.target:.2%} (last window {each.window:.2%})"
        for name, each in mixture.items()
    )
