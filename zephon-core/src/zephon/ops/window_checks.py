"""Whether a transform with a memory keeps windows apart: what it remembers must lie in the state and nowhere else.

Every lane has a window of its own open, in one process or in several. So two windows are run side by side, a row of one
and a row of the other in turn, and must give what each gives alone; and what `init_state` makes is looked into for
objects that an earlier state has too.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.faults import reason_of
from zephon.ops.rows import Rows
from zephon.ops.stateful import StatefulTransform

__all__ = ["rows_changed_late", "shared_state", "windows_mixed"]

_MOST_OBJECTS = 10_000
_STATELESS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def shared_state(operator: StatefulTransform) -> str | None:
    """What two states of `init_state` have in common that can be changed, in words; None where nothing is.

    Raises:
        PipelineError: init_state failed.
    """
    states = operator.begin(), operator.begin()
    first, second = ({id(value): (value, path) for value, path in _changeable(state, operator)} for state in states)
    for key, (value, path) in second.items():
        if key in first:
            return f"{path} is the same {type(value).__name__} in two windows"
    return None


def windows_mixed(operator: StatefulTransform, table: pa.Table) -> int | None:
    """The row at which two windows over rows of `table`, at least one, differ when they are run side by side: -1 at
    their end; None where they do not."""
    forth = list(range(table.num_rows))
    back = forth[::-1][: (len(forth) + 1) // 2]  # ends while the other goes on
    alone = [_Window(operator, table, order).whole() for order in (forth, back)]
    together = [_Window(operator, table, order) for order in (forth, back)]
    going = True
    while going:
        going = max(window.go_on() for window in together)
    for wanted, got in zip(alone, together, strict=True):
        for row, one, other in zip([*wanted.order, None], wanted.given, got.given, strict=True):
            if one != other:
                return -1 if row is None else row
    return None


def rows_changed_late(operator: StatefulTransform, table: pa.Table) -> int | None:
    """The first row after which a row that was given has been changed, which shows or not by how blocks are cut: -1 at
    the end of the window; None where there is none."""
    window = _Window(operator, table, range(table.num_rows)).whole()
    for at, (made, told) in enumerate(zip(window.rows, window.given, strict=True)):
        if made is not None and _told(made) != told:
            return at if at < table.num_rows else -1
    return None


class _Window:
    """A window of some rows, row by row: `given` is what came of each and of the end, in words, `rows` itself."""

    def __init__(self, operator: StatefulTransform, table: pa.Table, order: Sequence[int]) -> None:
        rows = Rows(table, np.arange(table.num_rows, dtype=np.int64)).as_dicts(operator.columns)
        self.order = list(order)
        self.given: list[Any] = []
        self.rows: list[list[dict[str, Any]] | None] = []
        self._operator, self._state = operator, operator.begin()
        self._left = deque(rows[at] for at in self.order)

    def whole(self) -> _Window:
        """Itself, gone through to its end."""
        while self.go_on():
            pass
        return self

    def go_on(self) -> bool:
        """Push the next row, or flush; False where that has been done."""
        if len(self.given) > len(self.order):
            return False
        try:
            if self._left:
                made = self._operator.pushed(self._state, self._left.popleft())
            else:
                made = self._operator.flushed(self._state)
        except Exception as error:
            self.given.append(reason_of(error))
            self.rows.append(None)
        else:
            self.given.append(_told(made))
            self.rows.append(list(made))
        return True


def _told(rows: list[dict[str, Any]]) -> str:
    return repr([sorted(row.items()) for row in rows])


def _changeable(state: Any, operator: StatefulTransform) -> Iterator[tuple[Any, str]]:
    """Objects in a state that can be changed, the outermost first, and the way to each in words."""
    waiting: deque[tuple[Any, str]] = deque([(state, "state")])
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        value, path = waiting.popleft()
        kind: Any = type(value)
        if isinstance(value, _STATELESS) or id(value) in seen:
            continue
        if value is operator.transform and path != "state":  # where what is only read belongs
            continue
        if kind.__module__.startswith("pyarrow"):  # whose columns cannot be changed
            continue
        seen.add(id(value))
        by_value = kind.__hash__ is not None and kind.__hash__ is not object.__hash__
        if not by_value and not (isinstance(value, np.ndarray) and not value.flags.writeable):
            yield value, path
        if isinstance(value, dict):
            waiting += [(item, f"{path}[{key!r:.40}]") for key, item in value.items()]
        elif isinstance(value, list | tuple | deque):
            waiting += [(item, f"{path}[{n}]") for n, item in enumerate(value)]
        elif not by_value or is_dataclass(value):
            waiting += [(item, f"{path}.{name}") for name, item in getattr(value, "__dict__", {}).items()]
