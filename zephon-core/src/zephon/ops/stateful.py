"""A transform with a memory: the user's own accumulator over the rows of a lane.

Neighbouring rows can be joined, deduplicated against each other, or held back. A lane's rows pass one by one, in order,
through `push`, which may give any number of rows, now or later; a window starts with a fresh state and ends with
`flush`. So nothing is kept across windows, and a lane is entered again by replaying the window: rows are pushed again,
and what had been used of what they give is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from zephon.columns.faults import reason_of
from zephon.columns.records import RowBlock, RowPart
from zephon.errors import PipelineError
from zephon.ops.documents import DocumentWorker, Emitted
from zephon.ops.expression import missing_column
from zephon.ops.identity import name_of
from zephon.ops.rows import (
    ROW_COLUMN,
    MapTransform,
    RowOperator,
    Rows,
    Types,
    apply_all,
    check_names,
    check_runner,
    columns_from,
)

__all__ = ["GivenFault", "Stateful", "StatefulStage", "StatefulTransform", "Window"]


class GivenFault(Exception):
    """What a transform gave cannot be used; says what it is. Never leaves this package."""


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
class StatefulTransform(RowOperator):
    """A `Stateful` in the pipeline.

    Attributes:
        transform: the object; methods named as those of `Stateful` are enough.
        columns: what `push` gets of a row; None gives it all columns of the dataset. What it gives has no other columns
            than those it names.
        datasets: names of the datasets whose rows are pushed, or None for all; others pass by, in their place.
        runner: where `transform` runs; see `RowOperator`.
        types, made: names and types of the columns of what push gives, and of what transform makes of it, as found
            before the run (see `zephon.ops.probe`).
    """

    kind: ClassVar[str] = "stateful_transform"
    transform: Any
    columns: Sequence[str] | None = None
    datasets: Sequence[str] | None = None
    runner: str | None = None
    types: Types = ()
    made: Types = ()

    def __post_init__(self) -> None:
        for name in ("init_state", "push", "flush"):
            if not callable(getattr(self.transform, name, None)):
                raise PipelineError(
                    f"stateful_transform takes an object with init_state, push and flush, and "
                    f"{name_of(self.transform)} has no {name}; build it on zephon.ops.Stateful."
                )
        for what in ("columns", "datasets"):
            object.__setattr__(self, what, check_names(self.kind, what, getattr(self, what)))
        check_runner(self.kind, self.runner)

    @property
    def makes(self) -> None:
        return None

    @property
    def label(self) -> str:
        return f"stateful_transform({name_of(self.transform)})"

    @property
    def function(self) -> Any:
        return self.transform

    def identity(self) -> str:
        return f"stateful_transform {self.code.text} {self.columns} {self.datasets}"

    def workers(self) -> list[RowOperator]:
        """Its stateless half, as an operator of its own."""
        function = getattr(self.transform, "transform", None)
        if function is None or getattr(type(self.transform), "transform", None) is Stateful.transform:
            return []
        own = MapTransform(
            function, datasets=self.datasets, runner=self.runner, types=self.made, probed=bool(self.made)
        )
        return [own]

    def begin(self, where: str = "") -> Any:
        """The state of a window that starts.

        Args:
            where: the window in words, for a message.

        Raises:
            PipelineError: init_state failed.
        """
        try:
            return self.transform.init_state()
        except MemoryError:
            raise
        except Exception as error:
            raise PipelineError(
                f"{self.label}: init_state failed{where} ({reason_of(error)}); without a state no window can start."
            ) from error

    def pushed(self, state: Any, row: dict[str, Any]) -> list[dict[str, Any]]:
        """What the transform gives for a row.

        Raises:
            GivenFault: that cannot be used.
            Exception: whatever push raises.
        """
        return _given(self.transform.push(state, row))

    def flushed(self, state: Any, where: str = "") -> list[dict[str, Any]]:
        """What is left at the end of a window.

        Raises:
            PipelineError: flush failed, or what it gives cannot be used.
        """
        try:
            return _given(self.transform.flush(state))
        except MemoryError:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, GivenFault) else reason_of(error)
            raise PipelineError(
                f"{self.label}: flush failed{where} ({reason}); it is of no single row, so that none can be left out."
            ) from error

    def require(self, rows: Rows) -> None:
        """Refuse rows without the columns that push is to get."""
        for name in self.columns or ():
            if name not in rows.table.column_names:
                raise PipelineError(f"{self.label} {missing_column(name, rows.table.column_names)}")

    def apply(self, rows: Rows) -> None:
        """The given rows as a window of their own: how tokens are estimated and operators tried."""
        if not len(rows.places):
            return
        self.window_of(rows)
        apply_all(self.workers(), rows)

    def window_of(self, rows: Rows) -> None:
        """The given rows as a window of their own, without what workers make of them."""
        self.require(rows)
        state, results, indices = self.begin(), [], []
        for index, row in enumerate(rows.as_dicts(self.columns)):
            try:
                made = self.pushed(state, row)
            except MemoryError:
                raise
            except Exception as error:
                rows.fail(index, self.label, str(error) if isinstance(error, GivenFault) else error)
                continue
            results += made
            indices += [index] * len(made)
        left = self.flushed(state)
        last = len(rows.places) - 1
        indices += [last] * len(left)
        try:
            rows.table = columns_from(self.label, [*results, *left], dict(self.types))
        except PipelineError:
            faults = [(index, self.why_unusable(row, self.types)) for index, row in zip(indices, results, strict=False)]
            for index, why in faults:
                if why is not None:
                    rows.fail(index, self.label, why)
            kept = [n for n, (_, why) in enumerate(faults) if why is None]
            results, indices = [results[n] for n in kept], [*(indices[n] for n in kept), *([last] * len(left))]
            rows.table = columns_from(self.label, [*results, *left], dict(self.types))
        rows.places = rows.places[np.array(indices, dtype=np.int64)]

    def why_unusable(self, row: dict[str, Any], types: Types) -> str | None:
        """Why a row that was given makes no table of these types, even alone; None where it does."""
        try:
            columns_from(self.label, [row], dict(types))
        except PipelineError as error:
            return str(error).removeprefix(self.label).lstrip(": ").rstrip(".")
        return None


def _given(result: Any) -> list[dict[str, Any]]:
    made = [] if result is None else result if isinstance(result, list) else [result]
    for row in made:
        if not isinstance(row, dict):
            raise GivenFault(f"it gave {type(row).__name__}; a dict, a list of dicts or None is needed")
        for name in row:
            if not isinstance(name, str) or name == ROW_COLUMN:
                raise GivenFault(
                    f"it gives a column named {str(name)[:40]!r} ({type(name).__name__}); a text other than "
                    f"{ROW_COLUMN!r} is needed"
                )
    return made


_Given = tuple[dict[str, Any], int, int, int]
"""A row on its way on: itself, the dataset and row it counts as made of, and the place of that in its block."""


@dataclass(slots=True)
class Window:
    """What a lane's stage remembers of the window it is in.

    Attributes:
        state: the user's.
        emitted: rows given so far.
        last: dataset and row of the last row pushed; None before the first.
    """

    state: Any
    emitted: int = 0
    last: tuple[int, int] | None = None


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
        self._spec = spec
        self._before = before
        self._names, self._types = list(names), list(types)
        self._pushed = [spec.is_for(name) for name in names]

    @property
    def before(self) -> DocumentWorker:
        """Runs the operators that come before it."""
        return self._before

    def running(self, before: DocumentWorker) -> StatefulStage:
        """The same with another worker before it, which does the same."""
        return StatefulStage(self._spec, before, self._names, self._types)

    def begin(self, lane: int, number: int) -> Window:
        """Window `number` of `lane` starts.

        Raises:
            PipelineError: init_state failed.
        """
        return Window(self._spec.begin(f" for window {number} of lane {lane}"))

    def prepare(self, block: RowBlock) -> tuple[RowBlock, list[list[dict[str, Any]]], Emitted]:
        """The stateless half before it: rows as Python values, by part, and their account."""
        parts, emitted = self._before.prepared(block)
        values = []
        for dataset, rows in parts:
            if self._pushed[dataset] and rows.table.num_rows:
                self._spec.require(rows)
            names = self._spec.columns if self._pushed[dataset] and rows.table.num_rows else None
            values.append(rows.as_dicts(names))
        return replace_parts(block, parts), values, emitted

    def push(
        self, window: Window, prepared: tuple[RowBlock, list[list[dict[str, Any]]], Emitted], first: int
    ) -> Emitted:
        """The rows that come of a block's, `first` being the first chunk of the window.

        Raises:
            DataError: a row cannot be used, and such rows end the run.
        """
        block, values, emitted = prepared
        order = [
            (int(place), part.dataset, row)
            for part, rows in zip(block.parts, values, strict=True)
            for place, row in zip(part.places, rows, strict=True)
        ]
        order.sort(key=lambda item: item[0])
        out: list[_Given] = []
        failed: list[tuple[int, str, str]] = []

        def fail(place: int, reason: str, error: Exception) -> None:
            if not self._before.skips:
                self._before.blame(block, place, self._spec.label, reason, error)
            failed.append((place, self._spec.label, reason))

        for place, dataset, row in order:
            number = int(block.row[place])
            if not self._pushed[dataset]:
                out.append((row, dataset, number, place))
                continue
            window.last = dataset, number
            try:
                made = self._spec.pushed(window.state, row)
            except MemoryError:  # which no row is to blame for
                raise
            except Exception as error:
                fail(place, str(error) if isinstance(error, GivenFault) else reason_of(error), error)
                continue
            out += [(item, dataset, number, place) for item in made]
        try:
            emitted.rows = self._block(window, out, first)
        except PipelineError as error:
            reasons = [self._spec.why_unusable(row, self._types[dataset]) for row, dataset, _, _ in out]
            for (_, _, _, place), reason in zip(out, reasons, strict=True):
                if reason is not None:
                    fail(place, reason, error)
            kept = [item for item, reason in zip(out, reasons, strict=True) if reason is None]
            emitted.rows = self._block(window, kept, first)
        failed = sorted((item for item in failed if item[0] not in emitted.failed), key=lambda item: item[0])
        if failed:
            at = block.dataset[sorted({place for place, _, _ in failed})]
            emitted.rows_failed = emitted.rows_failed + np.bincount(at, minlength=len(self._names))
            emitted.faults = (*emitted.faults, *self._before.faults_of(block, failed))
        return emitted

    def flush(self, window: Window, first: int, lane: int, number: int) -> Emitted:
        """Window `number` of `lane` ends.

        Raises:
            PipelineError: flush failed.
        """
        out: list[_Given] = []
        where = f" at the end of window {number} of lane {lane}"
        if window.last is not None:
            out = [(row, *window.last, -1) for row in self._spec.flushed(window.state, where)]
        zero = np.zeros(len(self._names), dtype=np.int64)
        try:
            return Emitted(self._block(window, out, first), zero, zero, zero)
        except PipelineError as error:
            raise PipelineError(f"{error} It came from flush{where}.") from error.__cause__

    def _block(self, window: Window, out: list[_Given], first: int) -> RowBlock:
        dataset = np.array([item[1] for item in out], dtype=np.int32)
        parts = []
        for number in np.unique(dataset).tolist():
            places = np.flatnonzero(dataset == number)
            made = [out[place][0] for place in places.tolist()]
            table = columns_from(self._spec.label, made, dict(self._types[number]))
            parts.append(RowPart(number, table, places))
        position = np.arange(window.emitted, window.emitted + len(out), dtype=np.int64)
        window.emitted += len(out)
        row = np.array([item[2] for item in out], dtype=np.int64)
        return RowBlock(parts=parts, dataset=dataset, row=row, chunk=first, position=position)


def replace_parts(block: RowBlock, parts: Sequence[tuple[int, Rows]]) -> RowBlock:
    """The block with other rows in it."""
    return replace(block, parts=[RowPart(dataset, rows.table, rows.places) for dataset, rows in parts])
