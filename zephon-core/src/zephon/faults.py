"""Rows that could not be used: what is told of them, and how many are too many.

Whatever fails over one row (a user's function, a chat template, a value of the wrong shape) becomes a `RowFault`. The
policy says whether the first one ends the run or whether such rows are left out. A row is left out because of what it
holds and of nothing else, so a run gives the same records after any restart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import DataError, PipelineError

__all__ = ["FaultBudget", "FaultPolicy", "RowFault", "reason_of"]

_log = logging.getLogger("zephon")
_MOST_REASON = 300
_FAULTS_LOGGED = 10


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that an operator could not use.

    Attributes:
        operator: as `explain()` names it.
        dataset, shard: names.
        row: number of the row within its shard.
        reason: what went wrong, one line.
    """

    operator: str
    dataset: str
    shard: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f'{self.operator} failed on dataset "{self.dataset}", shard {self.shard}, row {self.row}: {self.reason}'


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """What happens to rows that cannot be used.

    Attributes:
        on_error: "raise" ends the run at the first one, "skip" leaves them out.
        budget: share of the rows of a chunk that may be left out, rounded up; more end the run.
    """

    on_error: str = "raise"
    budget: float = 0.01

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise PipelineError(f'on_error is {self.on_error!r}; "raise" or "skip" is needed.')
        budget = self.budget
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            raise PipelineError(f"error_budget is {budget!r}; a share of rows from 0 to 1 is needed.")

    @property
    def skips(self) -> bool:
        """Whether rows are left out rather than ending the run."""
        return self.on_error == "skip"


class FaultBudget:
    """Counts the faults of one lane against the policy, chunk by chunk.

    A chunk is judged by itself: what earlier ones have lost does not count, so the verdict is the same wherever the
    lane was entered.
    """

    def __init__(self, policy: FaultPolicy) -> None:
        self._policy = policy
        self._chunk = -1
        self._in_chunk = 0
        self._logged = 0

    def add(self, chunk: int, rows: int, faults: Iterable[RowFault]) -> None:
        """Count the faults of some rows of a chunk of `rows` rows.

        Raises:
            DataError: they are more than the budget allows.
        """
        if chunk != self._chunk:
            self._chunk, self._in_chunk = chunk, 0
        allowed = math.ceil(self._policy.budget * rows)
        for fault in faults:
            self._in_chunk += 1
            if self._in_chunk > allowed:
                raise DataError(
                    f"{fault}. That is row {self._in_chunk} left out of a chunk of {rows}, and error_budget "
                    f"{self._policy.budget} allows {allowed}; repair the data or the function, or raise the budget."
                )
            if self._logged < _FAULTS_LOGGED:
                self._logged += 1
                more = " (further ones of this lane are only counted)" if self._logged == _FAULTS_LOGGED else ""
                _log.warning("row left out: %s%s", fault, more)


def reason_of(error: BaseException) -> str:
    """One line that says what an exception said."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    text = f"{kind}: {text}" if text else kind
    return text if len(text) <= _MOST_REASON else f"{text[: _MOST_REASON - 3]}..."
