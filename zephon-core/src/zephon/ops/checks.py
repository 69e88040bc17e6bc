"""Looking at operators of the user's own before the run: what would make a stream depend on who runs it.

An operator that gives another result the next time, remembers earlier rows, or looks at its neighbours gives a stream
that changes with the number of workers, the size of blocks and every restart. Such things are found by trying it on a
few rows of each dataset: twice, in blocks cut otherwise, and in another order of blocks. One with a memory is tried in
two windows side by side, see `zephon.ops.window_checks`.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from zephon.columns.faults import reason_of
from zephon.config.options import FaultPolicy
from zephon.errors import DataError, PipelineError
from zephon.ops.documents import DocumentWorker
from zephon.ops.probe import Sample
from zephon.ops.rows import RowFailure, RowOperator, Rows, apply_all
from zephon.ops.stateful import StatefulTransform
from zephon.ops.window_checks import rows_changed_late, shared_state, windows_mixed

__all__ = ["Finding", "check_operators"]

_SINGLE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about an operator that a user should know.

    Attributes:
        operator: as `explain()` names it.
        problem: "pickle" (it cannot go to other processes), "deterministic" (another result at the next call), "state"
            (what it gives depends on what it was called with before), "blocks" (it depends on which rows are put
            together), "shared" (windows share a state), "windows" (one window shows in another) or "late" (a row is
            changed after it was given).
        where: dataset and row on which it showed, or what cannot be pickled.
    """

    operator: str
    problem: str
    where: str

    def __str__(self) -> str:
        return f"{self.operator} {_WORDS[self.problem]}: {self.where}"


_WORDS = {
    "pickle": "cannot be sent to worker processes",
    "deterministic": "gives another result when it is called again",
    "state": "gives results that depend on what it was called with before",
    "blocks": "gives results that depend on which rows are put together",
    "shared": "has an init_state that gives windows of different lanes a state in common",
    "windows": "gives other rows while a window of another lane is open, so it remembers something beside its state",
    "late": "changes a row after it has given it",
}
_OF_ROWS = "Make it a function of the row alone"
_REMEDIES = {
    "shared": "Make all of the state anew in init_state, and keep what is only read on the object",
    "windows": "Keep what it remembers in the state, and nothing on the object, its class or a global",
    "late": "Give a copy, or keep one",
}


def check_operators(
    worker: DocumentWorker,
    names: Sequence[str],
    samples: Sequence[Sample],
    faults: FaultPolicy,
    *,
    compare: bool,
    sent_for: str | None = None,
) -> tuple[Finding, ...]:
    """Try the row operators on the first rows of every dataset.

    Args:
        worker: holds the operators.
        names, samples: of the datasets, and some rows of each.
        faults: what happens to rows that cannot be used.
        compare: try the user's own functions several times; else once, for what is plainly wrong.
        sent_for: what sends operators to other processes, unless one of them is to stay; None where it is only those
            that ask for it.

    Returns:
        Findings that do not touch the data: what cannot be pickled.

    Raises:
        DataError: a row cannot be used, and such rows end the run.
        PipelineError: an operator does not fit the columns, cannot be sent to the process that it is for, or its result
            would depend on how it is run.
    """
    found: dict[tuple[str, str], Finding] = {}
    for d, (name, sample) in enumerate(zip(names, samples, strict=True)):
        table, at = sample.table, sample.rows
        for operator in worker.operators_of(d):
            given = table
            try:
                rows = _applied(operator, given, faults.skips)
            except RowFailure as failure:
                first = worker.describe(d, int(at[failure.place]))
                raise DataError(
                    f"{first}: {failure.operator} failed: {failure.reason}; repair it, or "
                    'leave such rows out with on_error = "skip".'
                ) from failure.__cause__
            except PipelineError as error:
                raise PipelineError(f'dataset "{name}": {error}') from error.__cause__
            table, of, at = rows.table, at, at[rows.places]
            if operator.function is None:
                continue
            problems = [("pickle", _why_not_pickled(operator))]
            _refuse_unsent(operator, problems[0][1], sent_for)
            if compare and given.num_rows:
                problems += _compared(operator, given, name, of)
            for problem, where in problems:
                if where is not None:
                    found.setdefault((operator.label, problem), Finding(operator.label, problem, where))
    fatal = [finding for finding in found.values() if finding.problem != "pickle"]
    if fatal:
        remedies = dict.fromkeys(_REMEDIES.get(finding.problem, _OF_ROWS) for finding in fatal)
        raise PipelineError(
            "the stream would depend on how it is run, since "
            + "; ".join(map(str, fatal))
            + f". {'. '.join(remedies)} (options(check_operators=False) leaves out this check)."
        )
    return tuple(found.values())


def _applied(operator: RowOperator, table: pa.Table, skips: bool = True) -> Rows:
    rows = Rows(table, np.arange(table.num_rows, dtype=np.int64), skips)
    apply_all([operator], rows)
    return rows


def _why_not_pickled(operator: RowOperator) -> str | None:
    try:
        made = pickle.dumps(operator)
    except Exception as error:
        return reason_of(error)
    script = sys.modules["__main__"]
    if b"__main__" in made and not (getattr(script, "__file__", None) or getattr(script, "__spec__", None)):
        return "it is defined in a notebook or at a prompt, where no other process finds it"
    return None


def _refuse_unsent(operator: RowOperator, why: str | None, sent_for: str | None) -> None:
    """Refuse an operator that cannot be sent to the process that it is for."""
    stays = operator.runner == "threads" and sent_for != "isolate"
    wanted = sent_for if operator.runner is None or sent_for == "isolate" else 'its runner "process"'
    if why is None or stays or wanted is None:
        return
    raise PipelineError(
        f"{operator.label} cannot be sent to another process, as {wanted} needs ({why}); define it at the top of a "
        'module (no lambda, no function inside a function), or let it run in this process with runner "threads"'
        f"{' and without isolate' if sent_for == 'isolate' else ''}."
    )


def _compared(operator: RowOperator, table: pa.Table, dataset: str, of: np.ndarray) -> list[tuple[str, str | None]]:
    """What differs between calls that ought to be alike; `of` int64[n] says which rows of the dataset they are."""
    if isinstance(operator, StatefulTransform) and (shared := shared_state(operator)) is not None:
        return [("shared", shared)]
    wanted = _outcome(_applied(operator, table))
    again = _outcome(_applied(operator, table))
    row = _first_difference(wanted, again)
    if row is not None:
        return [("deterministic", f'dataset "{dataset}", row {of[row]}')]
    if isinstance(operator, StatefulTransform):
        return _compared_windows(operator, table, dataset, of)
    single: dict[int, list[str]] = {}
    for start in range(min(_SINGLE_ROWS, table.num_rows)):
        for place, values in _outcome(_applied(operator, table.slice(start, 1))).items():
            single[place + start] = values
    first = {place: values for place, values in wanted.items() if place < _SINGLE_ROWS}
    row = _first_difference(first, single)
    if row is not None:
        # The same rows, put together as before: if that has changed too, it is the calls that matter.
        late = _first_difference(wanted, _outcome(_applied(operator, table)))
        return [("blocks" if late is None else "state", f'dataset "{dataset}", row {of[row]}')]
    half = table.num_rows // 2
    if half:
        # The second half first: whoever counts calls or rows gives something else.
        later = _outcome(_applied(operator, table.slice(half)))
        parts = {place + half: values for place, values in later.items()}
        parts.update(_outcome(_applied(operator, table.slice(0, half))))
        row = _first_difference(wanted, parts)
        if row is not None:
            return [("blocks", f'dataset "{dataset}", row {of[row]}')]
    return []


def _compared_windows(
    operator: StatefulTransform, table: pa.Table, dataset: str, of: np.ndarray
) -> list[tuple[str, str | None]]:
    """The same for one with a memory, which may look at neighbours: a window is always whole."""
    for problem, where in (
        ("windows", windows_mixed(operator, table)),
        ("late", rows_changed_late(operator, table)),
    ):
        if where is not None:
            told = "at the end of the window" if where < 0 else f"row {of[where]}"
            return [(problem, f'dataset "{dataset}", {told}')]
    given = Rows(table, np.arange(table.num_rows, dtype=np.int64), skips=True)
    operator.window_of(given)
    for worker in operator.workers() if given.table.num_rows else ():
        made = np.arange(given.table.num_rows)
        found = [item for item in _compared(worker, given.table, dataset, made) if item[1] is not None]
        if found:  # rows are those that push gave
            return [(problem, f"{where} of those that push gave") for problem, where in found]
    return []


def _outcome(rows: Rows) -> dict[int, list[str]]:
    """What became of each row, in words."""
    outcome: dict[int, list[str]] = {place: [f"failed {reason}"] for place, _, reason in rows.failed}
    for place, values in zip(rows.places.tolist(), rows.as_dicts(), strict=True):
        # A column that another row of the block has brought in says nothing about this one.
        told = [(name, values[name]) for name in sorted(values) if values[name] is not None]
        outcome.setdefault(place, []).append(repr(told))
    return outcome


def _first_difference(one: dict[int, list[str]], other: dict[int, list[str]]) -> int | None:
    return next((place for place in sorted({*one, *other}) if one.get(place) != other.get(place)), None)
