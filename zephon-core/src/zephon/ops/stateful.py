"""A transform with a memory: the user's own accumulator over the rows of a lane.

A lane's rows pass one by one, in order, through `push`, which may give any number of rows, now or later; a window
starts with a fresh state and ends with `flush`. So nothing is kept across windows, and a lane is entered again by
replaying the window: its rows are pushed again, and rows given that were used before are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.columns.faults import reason_of
from zephon.columns.records import RowBlock, RowPart
from zephon.config.keys import key
from zephon.errors import PipelineError
from zephon.ops.documents import DocumentWorker, Emitted
from zephon.ops.functions import MapTransform, rows_given
from zephon.ops.identity import name_of
from zephon.ops.rows import RowFailure, RowOperator, Rows, UserOperator, apply_all, require_columns
from zephon.ops.typing import Types, columns_of


class Stateful:
    """Base of transforms with a memory.

    All four run on plain rows, dicts of Python values, and may depend on nothing but what they are given.
    """

    version: str = ""
    """Part of the run's fingerprint, like that of `zephon.ops.Operator`."""

    def init_state(self) -> Any:
        """The state in which a window starts."""
        return None

    def push(self, state: Any, row: dict[str, Any]) -> list[dict[str, Any]] | dict[str, Any] | None:
        """Take the next row of the lane, change `state` in place, and give the rows that are finished."""
        raise NotImplementedError

    def flush(self, state: Any) -> list[dict[str, Any]] | dict[str, Any] | None:
        """The window ends: give what is left."""
        return None

    def transform(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """What to make of a row that was given; runs in the workers, without the state."""
        return row


@dataclass(frozen=True)
class StatefulTransform(UserOperator):
    """A `Stateful` in the pipeline, or any object with methods named as those of `Stateful`.

    Rows of datasets that it is not for pass by, in their place. Rows that it gives have no other columns than those
    that it names.

    Attributes:
        types, made: names and types of the columns of what push gives, and of what transform makes of it, as found
            before the run (see `zephon.ops.trial`).
    """

    kind: ClassVar[str] = "stateful_transform"
    types: Types = key((), decides_data=False)
    made: Types = key((), decides_data=False)

    def __post_init__(self) -> None:
        for name in ("init_state", "push", "flush"):
            if not callable(getattr(self.transform, name, None)):
                raise PipelineError(
                    f"stateful_transform takes an object with init_state, push and flush; {name_of(self.transform)} "
                    f"has no {name}. Build it on zephon.ops.Stateful."
                )
        super().__post_init__()

    def workers(self) -> list[RowOperator]:
        """Its stateless half, as an operator of its own."""
        function = getattr(self.transform, "transform", None)
        if function is None or getattr(type(self.transform), "transform", None) is Stateful.transform:
            return []
        options: dict[str, Any] = {"datasets": self.datasets, "runner": self.runner}
        return [MapTransform(function, types=self.made, probed=bool(self.made), **options)]

    def begin(self, where: str = "") -> Any:
        """The state of a window that starts; `where` names the window in messages."""
        try:
            return self.transform.init_state()
        except MemoryError:
            raise
        except Exception as error:
            raise PipelineError(
                f"{self.label}: init_state failed{where} ({reason_of(error)}); without a state no window can start."
            ) from error

    def pushed(self, state: Any, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows given for a row; raises what push raises, and TypeError where it gives no rows."""
        return [dict(each) for each in rows_given(self.transform.push(state, row))]

    def flushed(self, state: Any, where: str = "") -> list[dict[str, Any]]:
        """The rows left at the end of a window."""
        try:
            return [dict(each) for each in rows_given(self.transform.flush(state))]
        except MemoryError:
            raise
        except Exception as error:
            raise PipelineError(
                f"{self.label}: flush failed{where} ({reason_of(error)}); it is of no single row, so that none can be "
                "left out."
            ) from error

    def table_of(
        self, given: Sequence[dict[str, Any]], types: Types, fail: Callable[[int, str], None]
    ) -> tuple[pa.Table, np.ndarray]:
        """(table of the given rows that fit the types, int64[k] their numbers); `fail` is called for the others."""
        unfit: dict[int, str] = {}
        table = pa.table(columns_of(given, dict(types), unfit.__setitem__, complete=bool(types)))
        for number in sorted(unfit):
            fail(number, unfit[number])
        kept = np.delete(np.arange(len(given), dtype=np.int64), list(unfit))
        return table.take(int64_array(kept)) if unfit else table, kept

    def apply(self, rows: Rows) -> None:
        """The rows as a window of their own: how tokens are estimated and operators tried."""
        if rows.table.num_rows:
            self.window_of(rows)
            apply_all(self.workers(), rows)

    def window_of(self, rows: Rows) -> None:
        """The rows as a window of their own, without what workers make of them."""
        require_columns(rows.table, self.columns, self.label)
        state = self.begin()
        given: list[dict[str, Any]] = []
        source: list[int] = []
        for index, row in enumerate(rows.as_dicts(self.columns)):
            try:
                given += self.pushed(state, row)
            except MemoryError:
                raise
            except Exception as error:
                rows.fail(index, self.label, error)
            source += [index] * (len(given) - len(source))
        of_rows = len(given)
        given += self.flushed(state)
        source += [len(rows.places) - 1] * (len(given) - of_rows)

        def fail(number: int, reason: str) -> None:
            if number >= of_rows:
                raise PipelineError(f"{self.label}: {reason}. It came from flush.")
            rows.fail(source[number], self.label, reason)

        rows.table, kept = self.table_of(given, self.types, fail)
        rows.places = rows.places[np.array(source, dtype=np.int64)[kept]]


_Given = tuple[dict[str, Any], int, int, int]
"""A row that was given: itself, the dataset and row it counts as made of, and the place of that in its block."""
_Prepared = tuple[RowBlock, list[list[dict[str, Any]]], Emitted]


@dataclass(slots=True)
class Window:
    """What a lane's stage remembers of the window it is in."""

    state: Any  # the user's
    emitted: int = 0  # rows given so far
    last: tuple[int, int] | None = None  # dataset and row of the last row pushed


class StatefulStage:
    """The accumulator half of `StatefulTransform`, for any lane: all it remembers is in the `Window` it is given.

    Args:
        spec: the description.
        before: runs the operators that come before it.
        names: of the datasets.
        types: of the columns of what comes out, by dataset, as far as they are known.
    """

    def __init__(
        self, spec: StatefulTransform, before: DocumentWorker, names: Sequence[str], types: Sequence[Types]
    ) -> None:
        self._spec, self.before = spec, before
        self._names, self._types = list(names), list(types)
        self._pushed = [spec.is_for(name) for name in names]

    def running(self, before: DocumentWorker) -> StatefulStage:
        """The same with another worker before it, which does the same."""
        return StatefulStage(self._spec, before, self._names, self._types)

    def begin(self, lane: int, number: int) -> Window:
        """Window `number` of `lane` starts."""
        return Window(self._spec.begin(f" for window {number} of lane {lane}"))

    def prepare(self, block: RowBlock) -> _Prepared:
        """The stateless half before it: the block's rows, also as Python values by part, and their account."""
        parts, emitted = self.before.prepared(block)
        values = []
        for dataset, rows in parts:
            is_pushed = self._pushed[dataset] and rows.table.num_rows
            if is_pushed:
                require_columns(rows.table, self._spec.columns, self._spec.label)
            values.append(rows.as_dicts(self._spec.columns if is_pushed else None))
        block = replace(block, parts=[RowPart(dataset, rows.table, rows.places) for dataset, rows in parts])
        return block, values, emitted

    def push(self, window: Window, prepared: _Prepared, first: int) -> Emitted:
        """The rows that come of a block's, `first` being the first chunk of the window."""
        block, values, emitted = prepared
        rows = [
            (int(place), part.dataset, row)
            for part, some in zip(block.parts, values, strict=True)
            for place, row in zip(part.places, some, strict=True)
        ]
        given: list[_Given] = []
        failed: list[tuple[int, str, str]] = []

        def fail(place: int, reason: str, error: Exception | None = None) -> None:
            if not self.before.skips:
                raise self.before.error(block, RowFailure(place, self._spec.label, reason)) from error
            if place not in emitted.failed:
                failed.append((place, self._spec.label, reason))

        for place, dataset, row in sorted(rows, key=itemgetter(0)):
            number = int(block.row[place])
            items = [row]
            if self._pushed[dataset]:
                window.last = dataset, number
                try:
                    items = self._spec.pushed(window.state, row)
                except MemoryError:  # which no row is to blame for
                    raise
                except Exception as error:
                    fail(place, reason_of(error), error)
                    continue
            given += [(item, dataset, number, place) for item in items]
        emitted.rows = self._block(window, given, first, lambda item, reason: fail(item[3], reason))
        if failed:
            failed.sort(key=itemgetter(0))
            at = block.dataset[sorted({place for place, _, _ in failed})]
            emitted.rows_failed = emitted.rows_failed + np.bincount(at, minlength=len(self._names))
            emitted.faults = (*emitted.faults, *self.before.faults_of(replace(block, lost=()), failed))
        return emitted

    def flush(self, window: Window, first: int, lane: int, number: int) -> Emitted:
        """Window `number` of `lane` ends."""
        where = f" at the end of window {number} of lane {lane}"
        given: list[_Given] = []
        if window.last is not None:
            given = [(row, *window.last, -1) for row in self._spec.flushed(window.state, where)]

        def fail(item: _Given, reason: str) -> None:
            raise PipelineError(f"{self._spec.label}: {reason}. It came from flush{where}.")

        zero = np.zeros(len(self._names), dtype=np.int64)
        return Emitted(self._block(window, given, first, fail), zero, zero, zero)

    def _block(self, window: Window, given: list[_Given], first: int, fail: Callable[[_Given, str], None]) -> RowBlock:
        """Given rows as columns; `fail` is called for those that do not fit their types, in order."""
        of = np.array([item[1] for item in given], dtype=np.int32)
        reasons: dict[int, str] = {}
        tables: list[tuple[int, pa.Table, np.ndarray]] = []
        for dataset in np.unique(of).tolist():
            places = np.flatnonzero(of == dataset)
            unfit: dict[int, str] = {}
            rows = [given[place][0] for place in places.tolist()]
            table, kept = self._spec.table_of(rows, self._types[dataset], unfit.__setitem__)
            reasons |= {int(places[n]): reason for n, reason in unfit.items()}
            tables.append((dataset, table, places[kept]))
        for place in sorted(reasons):
            fail(given[place], reasons[place])
        sound = np.delete(np.arange(len(given), dtype=np.int64), list(reasons))
        position = np.arange(window.emitted, window.emitted + len(sound), dtype=np.int64)
        window.emitted += len(sound)
        return RowBlock(
            parts=[RowPart(dataset, table, np.searchsorted(sound, places)) for dataset, table, places in tables],
            dataset=of[sound],
            row=np.array([given[n][2] for n in sound.tolist()], dtype=np.int64),
            chunk=first,
            position=position,
        )
