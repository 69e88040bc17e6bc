"""From a plan to an engine that runs: which work goes to worker processes, and how.

With the runner "process" everything between reading and packing runs in workers, a block of rows at a time: rows go
there as they were read, tokens come back. Where single operators are for processes (or for none, beside that runner),
only these and their neighbours go, and come back as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from ..faults import RowFault
from ..ops import DocumentWorker, RowOperator
from ..ops.rows import Rows, apply_all
from ..records import RowBlock, TokenBlock
from ..state import LaneStart
from .engine import Engine
from .plan import Plan
from .processes.pool import SEATS, WorkerPool
from .runners import make_runner

__all__ = ["start_engine"]


def start_engine(
    plan: Plan,
    runner: str,
    workers: Mapping[str, int],
    starts: Mapping[int, tuple[LaneStart, int]],
    block_records: int,
    on_window: Callable[[int, LaneStart], None] | None = None,
    on_fault: Callable[[int, int, RowFault], None] | None = None,
) -> Engine:
    """A fresh engine.

    Args:
        plan: the compiled pipeline.
        runner: name of the runner.
        workers: by kind of work; those that tokenize are processes where work goes to some.
        starts, block_records, on_window, on_fault: as for `Engine`.
    """
    placed, functions = _placed(plan, everything=runner == "process")
    if not functions:
        here = "threads" if runner == "process" else runner
        return Engine(plan, make_runner(here, **workers), starts, block_records, on_window, on_fault)
    pool = WorkerPool(functions, 1 if runner == "inline" else workers["tokenize"])
    # A thread for each call that may be under way: it reads rows, then waits for a worker.
    threads = {**workers, "tokenize": SEATS * workers["tokenize"]}
    made = make_runner("inline" if runner == "inline" else "process", **threads)
    return Engine(placed(pool), made, starts, block_records, on_window, on_fault, pool)


_Functions = dict[str, Callable[..., Any]]


def _placed(plan: Plan, *, everything: bool) -> tuple[Callable[[WorkerPool], Plan], _Functions]:
    """The plan with work in processes, given these, and the functions that they run."""
    functions: _Functions = {}
    default = "process" if everything else "threads"
    before = None if plan.stateful is None else _split(plan.stateful.before, default, "before", functions)
    stays = any(op.runner == "threads" for chain in plan.tokenize.chains for op in chain)
    after = None
    if everything and not stays:
        functions["tokenize"] = plan.tokenize
    else:
        after = _split(plan.tokenize, default, "rows", functions)

    def placed(pool: WorkerPool) -> Plan:
        tokenize: Any = after(pool) if after else _RemoteTokenize(pool, plan.tokenize)
        stateful = plan.stateful.running(before(pool)) if plan.stateful and before else None
        return replace(plan, tokenize=tokenize, stateful=stateful)

    return placed, functions


def _split(
    worker: DocumentWorker, default: str, prefix: str, functions: _Functions
) -> Callable[[WorkerPool], DocumentWorker]:
    """The worker with the operators that are for processes there; notes in `functions` what runs there."""
    chains: list[list[RowOperator | str]] = []
    for number, chain in enumerate(worker.chains):
        made: list[RowOperator | str] = []
        for away, group in groupby(chain, lambda op: (op.runner or default) == "process"):
            if away:
                name = f"{prefix} {number} {len(made)}"
                functions[name] = _Chain(tuple(group))
                made.append(name)
            else:
                made += group
        chains.append(made)

    def placed(pool: WorkerPool) -> DocumentWorker:
        return worker.running(
            [[_RemoteRows(pool, item) if isinstance(item, str) else item for item in chain] for chain in chains]
        )

    return placed


class _Chain:
    """In a worker: operators, one after the other."""

    def __init__(self, operators: Sequence[RowOperator]) -> None:
        self._operators = operators

    def __call__(
        self, table: pa.Table, places: np.ndarray, skips: bool
    ) -> tuple[pa.Table, np.ndarray, list[tuple[int, str, str]]]:
        rows = Rows(table, places, skips)
        apply_all(self._operators, rows)
        return rows.table, rows.places, rows.failed


class _RemoteRows(RowOperator):
    """Here: the operators of a `_Chain`."""

    kind = "process"

    def __init__(self, pool: WorkerPool, name: str) -> None:
        self._pool, self._name = pool, name

    def apply(self, rows: Rows) -> None:
        def about() -> str:
            return f"{len(rows.places):,} rows"

        rows.table, rows.places, failed = self._pool.call(self._name, rows.table, rows.places, rows.skips, about=about)
        rows.failed += failed


class _RemoteTokenize:
    """Here: a `DocumentWorker` that is in the workers."""

    def __init__(self, pool: WorkerPool, worker: DocumentWorker) -> None:
        self._pool, self._worker = pool, worker

    def __call__(self, block: RowBlock) -> TokenBlock:
        made: TokenBlock = self._pool.call("tokenize", block, about=lambda: self._worker.spoken(block))
        return made
