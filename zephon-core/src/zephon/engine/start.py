"""Starts an engine for a plan, and decides which work goes to workers in other processes.

With the runner "process" everything between reading and packing runs in workers, a block of rows at a time: workers get
rows as read and return tokens. With the runner "ray" workers read, too: they get the numbers of rows. Where operators
have a runner of their own, only those with "process" run in workers, adjacent ones in one call, and return rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from zephon.columns.arrow import choose_allocator
from zephon.columns.records import RecordBlock, RowBlock, TokenBlock
from zephon.engine.engine import Engine, EngineSetup
from zephon.engine.pixels import PixelStage
from zephon.engine.plan import Fetcher, Piece, Plan
from zephon.engine.processes.actors import Probe, RayWorkers, own_version
from zephon.engine.processes.children import ChildWorkers
from zephon.engine.processes.pool import SEATS, WorkerPool, Workers
from zephon.engine.runners import InlineRunner, Runner, ThreadsRunner
from zephon.ops.documents import DocumentWorker
from zephon.ops.encode import Documents, Encoder
from zephon.ops.rows import RowOperator, Rows, apply_all
from zephon.vision.probes import image_pixels


def start_engine(setup: EngineSetup) -> Engine:
    """Start an engine."""
    choose_allocator()
    inline, workers = setup.runner == "inline", dict(setup.workers)
    ray = setup.runner == "ray"
    start: Workers = RayWorkers(setup.ray, _probes(setup.plan)) if ray else ChildWorkers()
    pool = WorkerPool(1 if inline else workers["tokenize"], start)
    everything = ray or setup.runner == "process"
    setup = replace(setup, plan=_with_workers(setup.plan, pool, everything=everything, reading=ray))
    if pool.functions:
        # One thread for each call in progress: it reads rows, then waits for a worker.
        workers["tokenize"] *= SEATS
        if ray and "vision" in workers:
            workers["vision"] *= SEATS
    pool.start()
    runner: Runner = InlineRunner() if inline else ThreadsRunner(**workers)
    try:
        return Engine(setup, runner, pool)
    except BaseException:  # a user's init_state runs here
        runner.close()
        pool.close()
        raise


def _probes(plan: Plan) -> list[Probe]:
    """What the data depend on besides the recipe, and may differ between machines."""
    encoders = {id(encoder): encoder for encoder in plan.tokenize.encoders}.values()
    probes = [Probe("version of zephon-core", own_version)]
    probes += [Probe("tokens of the probe texts", encoder.probe) for encoder in encoders]
    return [*probes, Probe("pixels of the probe images", image_pixels)] if plan.pixels else probes


def _with_workers(plan: Plan, pool: WorkerPool, *, everything: bool, reading: bool) -> Plan:
    """The plan, with what is for workers replaced by calls to `pool`."""
    default = "process" if everything else "threads"
    stateful, tokenize = plan.stateful, plan.tokenize
    first = stateful.before if stateful else tokenize
    if reading and plan.pixels:
        plan = replace(plan, pixels=replace(plan.pixels, elsewhere=_RemotePixels(pool, plan.pixels)))
    reading = reading and not _stays(first)
    if reading:
        work = stateful.prepare if stateful else tokenize
        plan = replace(plan, chain=_RemoteChain(pool, plan.fetch, work, first), readahead_bytes=0)
    elif stateful:
        stateful = stateful.running(_split(stateful.before, pool, default, encodes=False))
    remote: Any = tokenize
    if (stateful or not reading) and everything and not _stays(tokenize):
        remote = _RemoteTokenize(pool, tokenize)
    elif stateful or not reading:
        remote = _split(tokenize, pool, default)
    return replace(plan, tokenize=remote, stateful=stateful)


def _stays(worker: DocumentWorker) -> bool:
    """Whether a part of it is to stay in this process."""
    operators = [*(operator for chain in worker.chains for operator in chain), *worker.encoders]
    return any(getattr(operator, "runner", None) == "threads" for operator in operators)


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


class _Chain:
    """Reading and what comes after it, as a worker runs it. One call reads while another works."""

    def __init__(self, fetch: Fetcher, work: Callable[[RowBlock], Any]) -> None:
        self._fetch, self._work = fetch, work

    def __call__(self, piece: Piece) -> Any:
        block = self._fetch(*piece)
        with _working:
            return self._work(block)


_working = threading.Lock()


class _RemoteChain:
    """Reading and what comes after it in the workers."""

    def __init__(
        self, pool: WorkerPool, fetch: Fetcher, work: Callable[[RowBlock], Any], describes: DocumentWorker
    ) -> None:
        self._pool, self._number, self._describes = pool, pool.add(_Chain(fetch, work)), describes

    def __call__(self, lane: int, piece: Piece) -> Any:
        return self._pool.call(self._number, piece, about=lambda: self._describes.describe_rows(*piece[:2]), near=lane)


class _RemotePixels:
    """`PixelStage.decoded` in the workers."""

    def __init__(self, pool: WorkerPool, pixels: PixelStage) -> None:
        self._pool, self._number, self._pixels = pool, pool.add(pixels.decoded), pixels

    def __call__(self, record: RecordBlock) -> RecordBlock:
        decoded: RecordBlock = self._pool.call(self._number, record, about=lambda: self._pixels.describe(record))
        return decoded
