"""The trial of row operators before the run, on some rows of each dataset.

`probe` finds the types of what functions give, once, the same in every process of the run. It takes more rows where the
first ones do not tell: where a filter lets none of them through, where a column is nothing but null, where structs may
have more fields. A column that is null in all of these rows has the type that it had before, and a new one is text. An
operator that no row gets to is not tried; a map that is not may make only columns whose types it is told.

An operator that gives another result the next time, remembers earlier rows, or looks at its neighbours gives a stream
that changes with the number of workers, the size of blocks and every restart. So `check_operators` calls functions
twice, then over the same rows cut otherwise and in another order; transforms with a memory in two windows side by side.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array, one_chunk
from zephon.columns.faults import reason_of
from zephon.config.options import FaultPolicy
from zephon.errors import DataError, PipelineError
from zephon.ops.documents import DocumentWorker
from zephon.ops.functions import MapBatches, MapTransform
from zephon.ops.rows import RowFailure, RowOperator, Rows, apply_all
from zephon.ops.stateful import StatefulTransform
from zephon.ops.typing import types_of, wanting

__all__ = ["Sample", "check_operators", "probe"]

_KEPT = 64
_SINGLE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a dataset.

    Attributes:
        rows: int64[n], which they are.
        table: their columns, as operators know them.
    """

    rows: np.ndarray
    table: pa.Table

    def take(self, indices: np.ndarray) -> Sample:
        """Those at `indices` int64[k]."""
        return Sample(self.rows[indices], self.table.take(int64_array(indices)))

    @staticmethod
    def joined(samples: Sequence[Sample]) -> Sample:
        """All of them as one."""
        if len(samples) == 1:
            return samples[0]
        table = pa.concat_tables([sample.table for sample in samples], promote_options="permissive")
        return Sample(np.concatenate([sample.rows for sample in samples]), table.combine_chunks())


def probe(
    operators: Sequence[RowOperator], samples: Iterable[Sample], name: str
) -> tuple[tuple[RowOperator, ...], Sample, str | None]:
    """Find the types of what `operators` make of the rows of a dataset.

    Args:
        operators: those for the dataset, in order.
        samples: the first rows; then more of them, each asked for only where those before do not tell enough: one for
            fields that may be missing, any number for columns of null and where no row is left.
        name: of the dataset.

    Returns:
        (the operators with their types, rows to look closer at, a warning of what was not tried or None). The rows are
        the first ones, and where none of those come through all operators, some besides that do, or get furthest.

    Raises:
        PipelineError: an operator does not fit the columns.
    """
    taken: list[Sample] = []
    first = None
    for sample in samples:
        if sample.table.num_rows or not taken:
            taken.append(sample)
        whole = Sample.joined(taken)
        first = first or whole
        try:
            typed, reached, emptied, wanted = _tried(operators, whole.table)
        except PipelineError as error:
            raise PipelineError(f'dataset "{name}": {error}') from error.__cause__
        if emptied is None and (not wanted or (wanted == 1 and len(taken) > 1)):
            break
    assert first is not None
    seen = len(whole.rows)
    if not (reached < len(first.rows)).any():
        first = Sample.joined([first, whole.take(np.unique(reached)[:_KEPT])])
    warning = None
    if emptied is not None:
        warning = (
            f'dataset "{name}": {emptied} leaves none of the {seen:,} rows that were tried before the run, so what '
            "comes after it is not checked"
        )
    return typed, first, warning


def _tried(
    operators: Sequence[RowOperator], table: pa.Table
) -> tuple[tuple[RowOperator, ...], np.ndarray, str | None, int]:
    """The operators with types, which rows got furthest, which operator left none of them, and whether more rows could
    tell more, as in `wanting`."""
    rows = Rows(table, np.arange(table.num_rows, dtype=np.int64), skips=True)
    made: list[RowOperator] = []
    reached, emptied, wanted = rows.places, None, 0
    for operator in operators:
        if rows.table.num_rows:
            reached = rows.places
            typed, more = _typed(operator, rows)
            wanted = max(wanted, more)
            emptied = None if rows.table.num_rows else operator.label
        else:
            typed = operator
        if not rows.table.num_rows:
            typed = replace(operator, probed=True) if isinstance(operator, MapTransform) else operator
        made.append(typed)
    return tuple(made), reached if emptied else rows.places, emptied, wanted


def _typed(operator: RowOperator, rows: Rows) -> tuple[RowOperator, int]:
    """Apply `operator`, and give it with the types of the result; the number is as in `wanting`."""
    before = dict(types_of(rows.table))
    if isinstance(operator, StatefulTransform):
        operator.window_of(rows)
    else:
        operator.apply(rows)
    if not rows.table.num_rows or not isinstance(operator, MapTransform | MapBatches | StatefulTransform):
        return operator, 0
    told = dict(operator.types) if isinstance(operator, MapTransform) else {}
    wanted = 0
    for name, kind in types_of(rows.table):
        if name not in told and before.get(name) != kind:
            wanted = max(wanted, wanting(kind))
        if pa.types.is_null(kind) and name not in {**before, **told}:
            rows.set_column(name, one_chunk(rows.table.column(name)).cast(pa.large_string()))
    types = types_of(rows.table)
    if isinstance(operator, MapTransform):
        return replace(operator, types=types, probed=True), wanted
    if isinstance(operator, MapBatches):
        return replace(operator, types=types), wanted
    for worker in operator.workers():
        wanted = max(wanted, _typed(worker, rows)[1])
    return replace(operator, types=types, made=types_of(rows.table)), wanted


_IMPURE = "gives another result when it is called again"
_MIXING = "gives results that depend on earlier calls or on which rows are put together"
_SHARING = "gives other rows while a window of another lane is open, so it remembers something beside its state"
_OF_ROWS = "Make it a function of the row alone"
_OF_STATE = "Make all of the state anew in init_state, and keep nothing on the object or in a global"


def check_operators(
    worker: DocumentWorker,
    names: Sequence[str],
    samples: Sequence[Sample],
    faults: FaultPolicy,
    *,
    compare: bool,
    sent_for: str | None = None,
) -> tuple[str, ...]:
    """Try the row operators on the first rows of every dataset.

    Args:
        worker: holds the operators.
        names, samples: of the datasets, and some rows of each.
        faults: what happens to rows that cannot be used.
        compare: call the user's own functions several times; else once, for what is plainly wrong.
        sent_for: what sends operators to other processes, unless one of them is to stay; None where it is only those
            that ask for it.

    Returns:
        Notes for people that do not touch the data: operators that cannot be pickled.

    Raises:
        DataError: a row cannot be used, and such rows end the run.
        PipelineError: an operator does not fit the columns, cannot be sent to the process that it is for, or its result
            would depend on how it is run.
    """
    notes: dict[str, str] = {}
    wrong: dict[tuple[str, str], str] = {}
    for d, (name, sample) in enumerate(zip(names, samples, strict=True)):
        table, at = sample.table, sample.rows
        for operator in worker.chains[d]:
            given, of = table, at
            try:
                rows = _applied(operator, given, faults.skips)
            except RowFailure as failure:
                raise DataError(
                    f"{worker.describe(d, int(at[failure.place]))}: {failure.operator} failed: {failure.reason}; "
                    'repair it, or leave such rows out with on_error = "skip".'
                ) from failure.__cause__
            except PipelineError as error:
                raise PipelineError(f'dataset "{name}": {error}') from error.__cause__
            table, at = rows.table, at[rows.places]
            if operator.function is None:
                continue
            why = _why_not_pickled(operator)
            if why is not None:
                _refuse_unsent(operator, why, sent_for)
                notes[operator.label] = f"{operator.label} cannot be sent to worker processes: {why}"
            difference = _difference(operator, given) if compare and given.num_rows else None
            if difference is not None:
                problem, row = difference
                where = f"row {of[row]}" if row < len(of) else "at the end of the window"
                wrong.setdefault((operator.label, problem), f'dataset "{name}", {where}')
    if wrong:
        found = "; ".join(f"{label} {problem}: {where}" for (label, problem), where in wrong.items())
        remedies = dict.fromkeys(_OF_STATE if problem == _SHARING else _OF_ROWS for _, problem in wrong)
        raise PipelineError(
            f"the stream would depend on how it is run, since {found}. {'. '.join(remedies)} "
            "(options(check_operators=False) leaves out this check)."
        )
    return tuple(notes.values())


def _applied(operator: RowOperator, table: pa.Table, skips: bool = True, start: int = 0) -> Rows:
    rows = Rows(table, np.arange(start, start + table.num_rows, dtype=np.int64), skips)
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


def _refuse_unsent(operator: RowOperator, why: str, sent_for: str | None) -> None:
    """PipelineError for an operator that cannot be sent to the process that it is for."""
    stays = operator.runner == "threads" and sent_for != "isolate"
    wanted = sent_for if operator.runner is None or sent_for == "isolate" else 'its runner "process"'
    if stays or wanted is None:
        return
    raise PipelineError(
        f"{operator.label} cannot be sent to another process, as {wanted} needs ({why}); define it at the top of a "
        'module (no lambda, no function inside a function), or let it run in this process with runner "threads"'
        f"{' and without isolate' if sent_for == 'isolate' else ''}."
    )


def _difference(operator: RowOperator, table: pa.Table) -> tuple[str, int] | None:
    """(problem, row of `table` on which it shows) where calls that ought to be alike are not."""
    if isinstance(operator, StatefulTransform):
        return _difference_of_windows(operator, table)
    wanted = _outcome([_applied(operator, table)])
    row = _first_difference(wanted, _outcome([_applied(operator, table)]))
    if row is not None:
        return _IMPURE, row
    # In pieces, the last one first: whoever counts calls or rows, or looks at other rows, gives something else.
    starts = sorted({*range(min(_SINGLE_ROWS, table.num_rows)), min(_SINGLE_ROWS, table.num_rows // 2)})
    ends = [*starts[1:], table.num_rows]
    pieces = [(start, end) for start, end in zip(starts, ends, strict=True)]
    parts = [_applied(operator, table.slice(start, end - start), start=start) for start, end in reversed(pieces)]
    row = _first_difference(wanted, _outcome(parts))
    return None if row is None else (_MIXING, row)


def _difference_of_windows(operator: StatefulTransform, table: pa.Table) -> tuple[str, int] | None:
    """The same for one with a memory, which may look at neighbours: windows are whole, and run side by side.

    Every lane has a window of its own open, so two of them, a row of one and a row of the other in turn, must give what
    each gives alone. A row of table.num_rows stands for the end of a window.
    """
    forth = list(range(table.num_rows))
    orders = [forth, forth[::-1][: (len(forth) + 1) // 2]]  # one ends while the other goes on
    alone = [_windows(operator, table, [order])[0] for order in orders]
    again = _windows(operator, table, [forth])
    for problem, wanted, got in ((_IMPURE, alone[:1], again), (_SHARING, alone, _windows(operator, table, orders))):
        for one, other in zip(wanted, got, strict=True):
            row = _first_difference(one, other)
            if row is not None:
                return problem, row
    given = Rows(table, np.arange(table.num_rows), skips=True)
    operator.window_of(given)
    for worker in operator.workers() if given.table.num_rows else ():
        difference = _difference(worker, given.table)
        if difference is not None:
            return difference[0], int(given.places[difference[1]])
    return None


_Outcome = dict[int, list[str]]
"""What became of each row, in words."""


def _windows(operator: StatefulTransform, table: pa.Table, orders: Sequence[Sequence[int]]) -> list[_Outcome]:
    """The outcomes of windows side by side, each over rows of `table` in an order of its own."""
    values = [Rows(table, np.arange(table.num_rows)).as_dicts(operator.columns) for _ in orders]
    windows = [(order, rows, operator.begin(), _Outcome()) for order, rows in zip(orders, values, strict=True)]
    for turn in range(table.num_rows + 1):
        for order, rows, state, outcome in windows:
            if turn > len(order):
                continue
            row = order[turn] if turn < len(order) else table.num_rows
            try:
                made = operator.pushed(state, rows[row]) if row < table.num_rows else operator.flushed(state)
                outcome[row] = [_told(each) for each in made]
            except Exception as error:
                outcome[row] = [reason_of(error)]
    return [outcome for _, _, _, outcome in windows]


def _outcome(parts: Iterable[Rows]) -> _Outcome:
    outcome: _Outcome = {}
    for rows in parts:
        outcome |= {place: [f"failed {reason}"] for place, _, reason in rows.failed}
        for place, values in zip(rows.places.tolist(), rows.as_dicts(), strict=True):
            outcome.setdefault(place, []).append(_told(values))
    return outcome


def _told(row: Mapping[str, Any]) -> str:
    """A row in words; a column that another row of the block has brought in says nothing about this one."""
    return repr([(name, row[name]) for name in sorted(row) if row[name] is not None])


def _first_difference(one: _Outcome, other: _Outcome) -> int | None:
    return next((place for place in sorted({*one, *other}) if one.get(place) != other.get(place)), None)
