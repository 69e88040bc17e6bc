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

from zephon.columns.faults import RowFault
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import RowBlock, TokenBlock
from zephon.engine.engine import Engine
from zephon.engine.plan import Plan
from zephon.engine.processes.pool import SEATS, WorkerPool
from zephon.engine.runners import InlineRunner, Runner, ThreadsRunner
from zephon.ops.documents import Documents, DocumentWorker, Encoder
from zephon.ops.rows import RowOperator, Rows, apply_all

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
    pool = None
    if functions:
        pool = WorkerPool(functions, 1 if runner == "inline" else workers["tokenize"])
        plan = placed(pool)
        # A thread for each call that may be under way: it reads rows, then waits for a worker.
        workers = {**workers, "tokenize": SEATS * workers["tokenize"]}
    made: Runner = InlineRunner() if runner == "inline" else ThreadsRunner(**workers)
    try:
        return Engine(plan, made, starts, block_records, on_window, on_fault, pool)
    except BaseException:  # a user's init_state runs here
        made.close()
        if pool:
            pool.close()
        raise


_Functions = dict[str, Callable[..., Any]]


def _placed(plan: Plan, *, everything: bool) -> tuple[Callable[[WorkerPool], Plan], _Functions]:
    """The plan with work in processes, given these, and the functions that they run."""
    functions: _Functions = {}
    default = "process" if everything else "threads"
    before = (
        None if plan.stateful is None else _split(plan.stateful.before, default, "before", functions, encodes=False)
    )
    work = [*(op for chain in plan.tokenize.chains for op in chain), *plan.tokenize.encoders]
    stays = any(getattr(each, "runner", None) == "threads" for each in work)
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
    worker: DocumentWorker, default: str, prefix: str, functions: _Functions, *, encodes: bool = True
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
    # Those that encode text and given tokens leave the interpreter lock alone, and have no runner.
    encoders = worker.encoders if encodes else []
    away = {id(each): each for each in encoders if (getattr(each, "runner", "threads") or default) == "process"}
    names = {key: f"{prefix} encode {n}" for n, key in enumerate(away)}
    functions.update({names[key]: _Encode(encoder) for key, encoder in away.items()})

    def placed(pool: WorkerPool) -> DocumentWorker:
        remote = {key: _RemoteEncoder(pool, name, away[key]) for key, name in names.items()}
        return worker.running(
            [[_RemoteRows(pool, item) if isinstance(item, str) else item for item in chain] for chain in chains],
            [remote.get(id(encoder), encoder) for encoder in worker.encoders],
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


class _Encode:
    """In a worker: an encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __call__(
        self, table: pa.Table, places: np.ndarray, skips: bool
    ) -> tuple[Documents, list[tuple[int, str, str]]]:
        rows = Rows(table, places, skips)
        return self._encoder.encode(rows), rows.failed


class _RemoteEncoder:
    """Here: an encoder that is in the workers."""

    def __init__(self, pool: WorkerPool, name: str, encoder: Encoder) -> None:
        self.columns, self.joins = encoder.columns, encoder.joins
        self._pool, self._name, self._encoder = pool, name, encoder

    def alike(self, table: pa.Table) -> pa.Table:
        return self._encoder.alike(table)

    def texts(self, rows: Rows) -> list[str]:
        return self._encoder.texts(rows)

    def encode(self, rows: Rows) -> Documents:
        def about() -> str:
            return f"{len(rows.places):,} rows"

        documents: Documents
        documents, failed = self._pool.call(self._name, rows.table, rows.places, rows.skips, about=about)
        rows.failed += failed
        return documents


class _RemoteTokenize:
    """Here: a `DocumentWorker` that is in the workers."""

    def __init__(self, pool: WorkerPool, worker: DocumentWorker) -> None:
        self._pool, self._worker = pool, worker

    def __call__(self, block: RowBlock) -> TokenBlock:
        made: TokenBlock = self._pool.call("tokenize", block, about=lambda: self._worker.spoken(block))
        return made
