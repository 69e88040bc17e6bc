"""The trial of row operators before the run, on some rows of each dataset.

`probe` finds the types of what functions give, once, the same in every process of the run. It takes more rows where the
first ones do not tell: where a filter lets none of them through, where a column is nothing but null, where structs may
have more fields. A column that is null in all of these rows has the type that it had before, and a new one is text. An
operator that no row gets to is not tried; a map that is not may make only columns whose types are declared.

An operator that remembers earlier calls, or looks at its neighbours, gives a stream that changes with the number of
workers, the size of blocks and every restart. So `check_operators` calls functions again over the same rows cut
otherwise and in another order; transforms with a memory in two windows side by side.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array, one_chunk
from zephon.columns.faults import reason_of
from zephon.config.options import FaultPolicy
from zephon.errors import DataError, PipelineError
from zephon.ops.documents import DocumentWorker
from zephon.ops.functions import MapTransform
from zephon.ops.rows import RowFailure, RowOperator, Rows, UserOperator, apply_all
from zephon.ops.stateful import StatefulTransform
from zephon.ops.typing import types_of, wanting

_KEPT = 64
_SINGLE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a dataset: their numbers int64[n], and their columns as operators know them."""

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
    tried: list[Sample] = []
    for sample in samples:
        if sample.table.num_rows or not tried:
            tried.append(sample)
        whole = Sample.joined(tried)
        try:
            typed, reached, emptied, wanted = _typed_chain(operators, whole.table)
        except PipelineError as error:
            raise PipelineError(f'dataset "{name}": {error}') from error.__cause__
        if emptied is None and (not wanted or (wanted == 1 and len(tried) > 1)):
            break
    first = tried[0]
    if not (reached < len(first.rows)).any():
        first = Sample.joined([first, whole.take(np.unique(reached)[:_KEPT])])
    if emptied is None:
        return typed, first, None
    rows = f"the {len(whole.rows):,} rows that were tried before the run"
    warning = f'dataset "{name}": {emptied} leaves none of {rows}, so what comes after it is not checked'
    return typed, first, warning


def _typed_chain(
    operators: Sequence[RowOperator], table: pa.Table
) -> tuple[tuple[RowOperator, ...], np.ndarray, str | None, int]:
    """(operators with types, which rows got furthest, the operator that left no row, as in `wanting` for all)."""
    rows = Rows(table, np.arange(table.num_rows, dtype=np.int64), skips=True)
    chain: list[RowOperator] = []
    reached, emptied, wanted = rows.places, None, 0
    for operator in operators:
        typed = operator
        if rows.table.num_rows:
            reached = rows.places
            typed, more = _typed(operator, rows)
            wanted = max(wanted, more)
            emptied = None if rows.table.num_rows else operator.label
        if not rows.table.num_rows and isinstance(operator, MapTransform):
            typed = replace(operator, probed=True)
        chain.append(typed)
    return tuple(chain), reached if emptied else rows.places, emptied, wanted


def _typed(operator: RowOperator, rows: Rows) -> tuple[RowOperator, int]:
    """Apply `operator`, and give it with the types of the result; the number is as in `wanting`."""
    before = dict(types_of(rows.table))
    if isinstance(operator, StatefulTransform):
        operator.window_of(rows)
    else:
        operator.apply(rows)
    if not rows.table.num_rows or not isinstance(operator, UserOperator):
        return operator, 0
    declared = dict(operator.types) if isinstance(operator, MapTransform) else {}
    wanted = 0
    for name, kind in types_of(rows.table):
        if name not in declared and before.get(name) != kind:
            wanted = max(wanted, wanting(kind))
        if pa.types.is_null(kind) and name not in {**before, **declared}:
            rows.set_column(name, one_chunk(rows.table.column(name)).cast(pa.large_string()))
    options: dict[str, Any] = {"types": types_of(rows.table)}
    if isinstance(operator, MapTransform):
        options["probed"] = True
    elif isinstance(operator, StatefulTransform):
        for worker in operator.workers():
            wanted = max(wanted, _typed(worker, rows)[1])
        options["made"] = types_of(rows.table)
    return replace(operator, **options), wanted


_OF_ROWS = (
    "gives another result when it is called again, or with other rows beside it",
    "Make it a function of the row alone",
)
_OF_STATE = (
    "gives other rows when it is called again, or while a window of another lane is open",
    "Make all of the state anew in init_state, and keep nothing on the object or in a global",
)


def check_operators(
    worker: DocumentWorker,
    names: Sequence[str],
    samples: Mapping[int, Sample],
    faults: FaultPolicy,
    *,
    compare: bool,
    sent_for: str | None = None,
) -> tuple[str, ...]:
    """Try the row operators on the first rows of every dataset.

    Args:
        worker: holds the operators.
        names, samples: of the datasets, and some rows of those with operators.
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
    for d, sample in samples.items():
        name, table, numbers = names[d], sample.table, sample.rows
        for operator in worker.chains[d]:
            try:
                rows = _applied(operator, table, faults.skips)
            except RowFailure as failure:
                raise DataError(
                    f"{worker.describe(d, int(numbers[failure.place]))}: {failure.operator} failed: {failure.reason}; "
                    'repair it, or leave such rows out with on_error = "skip".'
                ) from failure.__cause__
            except PipelineError as error:
                raise PipelineError(f'dataset "{name}": {error}') from error.__cause__
            if operator.function is not None:
                if (why := _why_not_pickled(operator)) is not None:
                    _refuse_unsent(operator, why, sent_for)
                    notes[operator.label] = f"{operator.label} cannot be sent to worker processes: {why}"
                if compare and table.num_rows and (difference := _difference(operator, table)):
                    (problem, remedy), row = difference
                    where = f"row {numbers[row]}" if row < len(numbers) else "at the end of the window"
                    raise PipelineError(
                        f"the stream would depend on how it is run, since {operator.label} {problem}: dataset "
                        f'"{name}", {where}. {remedy} (options(check_operators=False) leaves out this check).'
                    )
            table, numbers = rows.table, numbers[rows.places]
        if worker.chains[d] and table.num_rows:
            worker.encoders[d].check_used(table.column_names, name)
    return tuple(notes.values())


def _applied(operator: RowOperator, table: pa.Table, skips: bool = True, start: int = 0) -> Rows:
    rows = Rows(table, np.arange(start, start + table.num_rows, dtype=np.int64), skips)
    apply_all([operator], rows)
    return rows


def _why_not_pickled(operator: RowOperator) -> str | None:
    try:
        content = pickle.dumps(operator)
    except Exception as error:
        return reason_of(error)
    script = sys.modules["__main__"]
    if b"__main__" in content and not (getattr(script, "__file__", None) or getattr(script, "__spec__", None)):
        return "it is defined in a notebook or at a prompt, where no other process finds it"
    return None


def _refuse_unsent(operator: RowOperator, why: str, sent_for: str | None) -> None:
    """PipelineError for an operator that cannot be sent to the process that it is for."""
    if operator.runner == "threads" and sent_for != "isolate":
        return
    wanted = sent_for if operator.runner is None or sent_for == "isolate" else 'its runner "process"'
    if wanted is not None:
        raise PipelineError(
            f"{operator.label} cannot be sent to another process, as {wanted} needs ({why}); define it at the top of a "
            "module (no lambda, no function inside a function), or let it run in this process, with runner "
            '"threads" and without isolate.'
        )


def _difference(operator: RowOperator, table: pa.Table) -> tuple[tuple[str, str], int] | None:
    """((problem, remedy), row of `table` on which it shows) where calls that ought to be alike are not."""
    if isinstance(operator, StatefulTransform):
        return _difference_of_windows(operator, table)
    # In pieces, the last one first: whoever counts calls or rows, or looks at other rows, gives something else.
    edges = [*range(min(_SINGLE_ROWS, table.num_rows)), table.num_rows]
    pieces = [_applied(operator, table.slice(a, b - a), start=a) for a, b in reversed(list(pairwise(edges)))]
    row = _first_difference(_outcome([_applied(operator, table)]), _outcome(pieces))
    return None if row is None else (_OF_ROWS, row)


def _difference_of_windows(operator: StatefulTransform, table: pa.Table) -> tuple[tuple[str, str], int] | None:
    """The same for one with a memory, which may look at neighbours: windows are whole, and run side by side.

    Every lane has a window of its own open, so two of them, a row of one and a row of the other in turn, must give what
    each gives alone. A row of table.num_rows stands for the end of a window.
    """
    forth = list(range(table.num_rows))
    orders = [forth, forth[::-1][: (len(forth) + 1) // 2]]  # one ends while the other goes on
    alone = [_windows(operator, table, [order])[0] for order in orders]
    for one, other in zip(alone, _windows(operator, table, orders), strict=True):
        row = _first_difference(one, other)
        if row is not None:
            return _OF_STATE, row
    rows = Rows(table, np.arange(table.num_rows), skips=True)
    operator.window_of(rows)
    for worker in operator.workers() if rows.table.num_rows else ():
        difference = _difference(worker, rows.table)
        if difference is not None:
            return difference[0], int(rows.places[difference[1]])
    return None


_Outcome = dict[int, list[str]]
"""What became of each row, in words."""


def _windows(operator: StatefulTransform, table: pa.Table, orders: Sequence[Sequence[int]]) -> list[_Outcome]:
    """The outcomes of windows side by side, each over rows of `table` in an order of its own."""
    end = table.num_rows
    windows = [(Rows(table, np.arange(end)).as_dicts(operator.columns), operator.begin(), _Outcome()) for _ in orders]
    for turn in zip_longest(*([*order, end] for order in orders)):
        for row, (values, state, outcome) in zip(turn, windows, strict=True):
            if row is None:
                continue
            try:
                given = operator.pushed(state, values[row]) if row < end else operator.flushed(state)
                outcome[row] = [_words(each) for each in given]
            except Exception as error:
                outcome[row] = [reason_of(error)]
    return [outcome for _, _, outcome in windows]


def _outcome(parts: Iterable[Rows]) -> _Outcome:
    outcome: _Outcome = {}
    for rows in parts:
        outcome |= {place: [f"failed {reason}"] for place, _, reason in rows.failed}
        for place, values in zip(rows.places.tolist(), rows.as_dicts(), strict=True):
            outcome.setdefault(place, []).append(_words(values))
    return outcome


def _words(row: dict[str, Any]) -> str:
    """A row in words; a column that another row of the block has brought in says nothing about this one."""
    return repr([(name, row[name]) for name in sorted(row) if row[name] is not None])


def _first_difference(one: _Outcome, other: _Outcome) -> int | None:
    return next((place for place in sorted({*one, *other}) if one.get(place) != other.get(place)), None)
