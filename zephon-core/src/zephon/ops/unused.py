"""Rows with a column that belongs to documents and is not used, where only the rows tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zephon.ops.rows import RowOperator, Rows

_NOTHING: tuple[Any, ...] = (None, "", "[]", "{}", [], {})


@dataclass(frozen=True)
class RefuseUnused(RowOperator):
    """Rows that have anything in one of these columns cannot be used by the operator `wanted_by`, for a reason each."""

    kind: ClassVar[str] = "refuse_unused"
    columns: tuple[str, ...]
    reasons: tuple[str, ...]
    wanted_by: str

    def apply(self, rows: Rows) -> None:
        table, bad = rows.table, np.zeros(len(rows.places), dtype=bool)
        rows.table = table.drop_columns(list(self.columns))
        for name, reason in zip(self.columns, self.reasons, strict=True):
            column = table.column(name)
            for index, value in enumerate(column.to_pylist() if column.null_count < len(column) else ()):
                if value not in _NOTHING and not bad[index]:
                    bad[index] = True
                    rows.fail(index, self.wanted_by, reason)
        rows.keep(~bad)
