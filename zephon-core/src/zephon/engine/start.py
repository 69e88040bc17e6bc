"""Starts an engine for a plan, and decides which work goes to worker processes.

With the runner "process" everything between reading and packing runs in workers, a block of rows at a time: workers get
rows as read and return tokens. Where operators have a runner of their own, only those with "process" run in workers,
adjacent ones in one call, and return rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from zephon.columns.arrow import choose_allocator
from zephon.columns.records import RowBlock, TokenBlock
from zephon.engine.engine import Engine, EngineSetup
from zephon.engine.plan import Plan
from zephon.engine.processes.pool import SEATS, WorkerPool
from zephon.engine.runners import InlineRunner, Runner, ThreadsRunner
from zephon.ops.documents import DocumentWorker
from zephon.ops.encode import Documents, Encoder
from zephon.ops.rows import RowOperator, Rows, apply_all


def start_engine(setup: EngineSetup) -> Engine:
    """Start an engine."""
    choose_allocator()
    inline, workers = setup.runner == "inline", dict(setup.workers)
    pool = WorkerPool(1 if inline else workers["tokenize"])
    setup = replace(setup, plan=_with_processes(setup.plan, pool, everything=setup.runner == "process"))
    if pool.functions:
        # One thread for each call in progress: it reads rows, then waits for a worker.
        workers["tokenize"] *= SEATS
    pool.start()
    runner: Runner = InlineRunner() if inline else ThreadsRunner(**workers)
    try:
        return Engine(setup, runner, pool)
    except BaseException:  # a user's init_state runs here
        runner.close()
        pool.close()
        raise


def _with_processes(plan: Plan, pool: WorkerPool, *, everything: bool) -> Plan:
    """The plan, with its process operators replaced by calls to `pool`."""
    default = "process" if everything else "threads"
    stateful, tokenize = plan.stateful, plan.tokenize
    if stateful:
        stateful = stateful.running(_split(stateful.before, pool, default, encodes=False))
    operators = [*(operator for chain in tokenize.chains for operator in chain), *tokenize.encoders]
    stays = any(getattr(operator, "runner", None) == "threads" for operator in operators)
    remote: Any = _RemoteTokenize(pool, tokenize) if everything and not stays else _split(tokenize, pool, default)
    return replace(plan, tokenize=remote, stateful=stateful)


def _split(worker: DocumentWorker, pool: WorkerPool, default: str, *, encodes: bool = True) -> DocumentWorker:
    """The worker, with its process operators replaced by calls to `pool`, adjacent ones by one call."""
    chains: list[list[RowOperator]] = []
    for chain in worker.chains:
        chains.append([])
        for is_remote, group in groupby(chain, lambda operator: (operator.runner or default) == "process"):
            operators = list(group)
            chains[-1] += [_RemoteRows(pool, operators)] if is_remote else operators
    # Encoders of text and of token ids release the interpreter lock, and have no runner.
    remote = {
        id(encoder): _RemoteEncoder(pool, encoder)
        for encoder in worker.encoders
        if encodes and (getattr(encoder, "runner", "threads") or default) == "process"
    }
    return worker.running(chains, [remote.get(id(encoder), encoder) for encoder in worker.encoders])


def _apply(operators: Sequence[RowOperator], rows: Rows) -> Rows:
    """Runs in a worker."""
    apply_all(operators, rows)
    return rows


def _encode(encoder: Encoder, rows: Rows) -> tuple[Documents, Rows]:
    """Runs in a worker; of the rows only the failed ones are returned."""
    return encoder.encode(rows), Rows(rows.table.slice(0, 0), rows.places[:0], failed=rows.failed)


class _RemoteCall:
    """A function of rows that runs in the workers."""

    def __init__(self, pool: WorkerPool, function: Callable[[Rows], Any]) -> None:
        self._pool, self._number = pool, pool.add(function)

    def __call__(self, rows: Rows) -> Any:
        sent = Rows(rows.table, rows.places, rows.skips)
        return self._pool.call(self._number, sent, about=lambda: f"{len(sent.places):,} rows")


class _RemoteRows(RowOperator):
    """Operators, one after the other, in the workers."""

    kind = "process"

    def __init__(self, pool: WorkerPool, operators: Sequence[RowOperator]) -> None:
        self._call = _RemoteCall(pool, partial(_apply, operators))

    def apply(self, rows: Rows) -> None:
        result: Rows = self._call(rows)
        rows.table, rows.places = result.table, result.places
        rows.failed += result.failed


class _RemoteEncoder(Encoder):
    """An encoder in the workers."""

    def __init__(self, pool: WorkerPool, encoder: Encoder) -> None:
        self.joins = encoder.joins
        self._encoder, self._call = encoder, _RemoteCall(pool, partial(_encode, encoder))

    def alike(self, rows: Rows) -> Rows:
        return self._encoder.alike(rows)

    def texts(self, rows: Rows) -> list[str]:
        return self._encoder.texts(rows)

    def encode(self, rows: Rows) -> Documents:
        documents: Documents
        documents, result = self._call(rows)
        rows.failed += result.failed
        return documents


class _RemoteTokenize:
    """A `DocumentWorker` in the workers."""

    def __init__(self, pool: WorkerPool, worker: DocumentWorker) -> None:
        self._pool, self._worker, self._number = pool, worker, pool.add(worker)

    def __call__(self, block: RowBlock) -> TokenBlock:
        tokens: TokenBlock = self._pool.call(self._number, block, about=lambda: self._worker.describe_block(block))
        return tokens
