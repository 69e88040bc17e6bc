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

from ..errors import PipelineError
from ..records import RowBlock, RowPart
from .documents import DocumentWorker, Emitted
from .rows import (
    ColumnTypes,
    MapTransform,
    RowOperator,
    Rows,
    Types,
    apply_all,
    check_names,
    check_runner,
    columns_from,
    identity_of,
    name_of,
)

__all__ = ["Stateful", "StatefulStage", "StatefulTransform", "Window"]


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
        version = getattr(self.transform, "version", "")
        return f"stateful_transform {identity_of(self.transform)} {version} {self.columns} {self.datasets}"

    def workers(self) -> list[RowOperator]:
        """Its stateless half, as an operator of its own."""
        function = getattr(self.transform, "transform", None)
        types: list[RowOperator] = [ColumnTypes(self.types, self.label)] if self.types else []
        if function is None or getattr(type(self.transform), "transform", None) is Stateful.transform:
            return types
        own = MapTransform(
            function, datasets=self.datasets, runner=self.runner, types=self.made, probed=bool(self.made)
        )
        return [*types, own]

    def apply(self, rows: Rows) -> None:
        """The given rows as a window of their own: how tokens are estimated and operators tried."""
        state, results, places = self.transform.init_state(), [], []
        for index, row in enumerate(rows.as_dicts(self.columns)):
            for made in _given(self, self.transform.push(state, row)):
                results.append(made)
                places.append(rows.places[index])
        if len(rows.places):
            for made in _given(self, self.transform.flush(state)):
                results.append(made)
                places.append(rows.places[-1])
        rows.table = columns_from(self.label, results)
        rows.places = np.array(places, dtype=np.int64)
        apply_all(self.workers(), rows)


def _given(operator: StatefulTransform, result: Any) -> list[dict[str, Any]]:
    made = [] if result is None else result if isinstance(result, list) else [result]
    for row in made:
        if not isinstance(row, dict):
            raise PipelineError(
                f"{operator.label} gave {type(row).__name__}; a dict, a list of dicts or None is needed."
            )
    return made


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
    """

    def __init__(self, spec: StatefulTransform, before: DocumentWorker, names: Sequence[str]) -> None:
        self._spec = spec
        self._before = before
        self._names = list(names)
        self._pushed = [spec.is_for(name) for name in names]

    @property
    def before(self) -> DocumentWorker:
        """Runs the operators that come before it."""
        return self._before

    def running(self, before: DocumentWorker) -> StatefulStage:
        """The same with another worker before it, which does the same."""
        return StatefulStage(self._spec, before, self._names)

    def begin(self) -> Window:
        """A window starts."""
        return Window(self._spec.transform.init_state())

    def prepare(self, block: RowBlock) -> tuple[RowBlock, list[list[dict[str, Any]]], Emitted]:
        """The stateless half before it: rows as Python values, by part, and their account."""
        parts, emitted = self._before.prepared(block)
        columns = self._spec.columns
        values = [rows.as_dicts(columns if self._pushed[dataset] else None) for dataset, rows in parts]
        ready = replace_parts(block, parts)
        return ready, values, emitted

    def push(
        self, window: Window, prepared: tuple[RowBlock, list[list[dict[str, Any]]], Emitted], first: int
    ) -> Emitted:
        """The rows that come of a block's, `first` being the first chunk of the window."""
        block, values, emitted = prepared
        order = [
            (int(place), part.dataset, row)
            for part, rows in zip(block.parts, values, strict=True)
            for place, row in zip(part.places, rows, strict=True)
        ]
        order.sort(key=lambda item: item[0])
        out: list[tuple[dict[str, Any], int, int]] = []
        transform = self._spec.transform
        for place, dataset, row in order:
            number = int(block.row[place])
            if not self._pushed[dataset]:
                out.append((row, dataset, number))
                continue
            window.last = dataset, number
            try:
                made = _given(self._spec, transform.push(window.state, row))
            except PipelineError:
                raise
            except Exception as error:
                self._before.blame(block, place, self._spec.label, error)
            out += [(item, dataset, number) for item in made]
        emitted.rows = self._block(window, out, first)
        return emitted

    def flush(self, window: Window, first: int) -> Emitted:
        """The window ends."""
        out: list[tuple[dict[str, Any], int, int]] = []
        if window.last is not None:
            out = [(row, *window.last) for row in _given(self._spec, self._spec.transform.flush(window.state))]
        zero = np.zeros(len(self._names), dtype=np.int64)
        return Emitted(self._block(window, out, first), zero, zero, zero)

    def _block(self, window: Window, out: list[tuple[dict[str, Any], int, int]], first: int) -> RowBlock:
        dataset = np.array([item[1] for item in out], dtype=np.int32)
        parts = []
        for number in np.unique(dataset).tolist():
            places = np.flatnonzero(dataset == number)
            table = columns_from(self._spec.label, [out[place][0] for place in places.tolist()])
            parts.append(RowPart(number, table, places))
        position = np.arange(window.emitted, window.emitted + len(out), dtype=np.int64)
        window.emitted += len(out)
        row = np.array([item[2] for item in out], dtype=np.int64)
        return RowBlock(parts=parts, dataset=dataset, row=row, chunk=first, position=position)


def replace_parts(block: RowBlock, parts: Sequence[tuple[int, Rows]]) -> RowBlock:
    """The block with other rows in it."""
    return replace(block, parts=[RowPart(dataset, rows.table, rows.places) for dataset, rows in parts])
