"""From the description of a pipeline to something that runs: open, check, measure, plan.

This is where a misconfigured run fails, before its first batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from .batch import BatchInfo
from .engine import Engine, Fetcher, Plan, Runner, make_runner
from .errors import PipelineError
from .io import Catalog, DecodeCache, OpenDataset
from .ops import Batch, PackFlat, Shuffle, Tokenize, TokenizeWorker
from .options import CacheOptions, Options, default_lookahead, default_workers
from .state import STREAM_VERSION, LaneStart
from .tokenizer import Tokenizer, load_tokenizer, resolve_special_tokens
from .topology import Topology, resolve_lanes
from .work import StaticMixtureWorkSource, TokenEstimation

__all__ = ["Compiled", "Operators", "compile_pipeline"]

# Rows cost something besides their text, which matters where they are tiny.
_LEAST_ROW_BYTES = 64.0
_SAMPLE_ROWS = 64
# Reading from stores: threads that wait and decode, so that those that tokenize need not; and how much text all lanes
# together look ahead for what to fetch, about a second's worth of the fastest tokenizer.
REMOTE_FETCHERS = 4
READAHEAD_BYTES = 256 << 20
_SAMPLE_BYTES = 256 << 10
_DATASETS_IN_DETAIL = 12  # with more of them a state would outgrow its 4 KB


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of a pipeline, each at its place.

    Raises:
        PipelineError: one is missing, double or out of place.
    """

    tokenize: Tokenize
    pack: PackFlat
    shuffle: Shuffle | None
    batch: Batch

    @staticmethod
    def from_list(operators: Sequence[Any]) -> Operators:
        """Check the order tokenize, pack_flat, shuffle (optional), batch."""
        names = {Tokenize: "tokenize", PackFlat: "pack_flat", Shuffle: "shuffle", Batch: "batch"}
        order = list(names)
        seen = [type(operator) for operator in operators]
        described = ", ".join(names[kind] for kind in seen) or "none"
        for kind in order:
            if seen.count(kind) > 1:
                raise PipelineError(
                    f"the pipeline has {names[kind]} twice (its operators: {described}); one is needed."
                )
        if [order.index(kind) for kind in seen] != sorted(order.index(kind) for kind in seen):
            raise PipelineError(
                f"the operators come in the order {described}; they must come as tokenize, pack_flat, shuffle, batch."
            )
        for kind in (Tokenize, PackFlat, Batch):
            if kind not in seen:
                raise PipelineError(
                    f"the pipeline lacks {names[kind]} (its operators: {described}); add .{names[kind]}(...)."
                )
        by_kind = dict(zip(seen, operators, strict=True))
        return Operators(by_kind[Tokenize], by_kind[PackFlat], by_kind.get(Shuffle), by_kind[Batch])


@dataclass(frozen=True)
class Compiled:
    """A pipeline ready to run: opened datasets, loaded tokenizer, measured ratios and the plan.

    Attributes:
        fingerprint: everything that decides the data, by name, as JSON types.
        tokens_per_row: by dataset name.
        workers: threads by kind of work.
    """

    source: StaticMixtureWorkSource
    operators: Operators
    options: Options
    topology: Topology
    datasets: tuple[OpenDataset, ...]
    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None
    tokens_per_row: dict[str, float]
    fingerprint: dict[str, Any]
    workers: dict[str, int]
    plan: Plan
    info: BatchInfo

    @property
    def digest(self) -> str:
        """One SHA-256 over the fingerprint and the measured ratios."""
        text = json.dumps([self.fingerprint, self.tokens_per_row], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def record_bytes(self) -> int:
        """Bytes of the tokens of one record."""
        return self.operators.pack.record_length * 4

    @property
    def ready_records(self) -> int:
        """How many finished records may wait for the consumer."""
        return self.options.ready_records(self.operators.batch.microbatch_size, self.record_bytes)

    def runner(self) -> Runner:
        """A fresh runner."""
        return make_runner(self.options.runner, **self.workers)

    def engine(
        self,
        starts: Mapping[int, tuple[LaneStart, int]],
        on_window: Callable[[int, LaneStart], None] | None = None,
    ) -> Engine:
        """A fresh engine with its lanes at `starts`; see `Engine`."""
        return Engine(self.plan, self.runner(), starts, max(1, self.ready_records // 2), on_window)

    def explain_growth(self, name: str, was: Any) -> str | None:
        """What to say of a difference in a fingerprint where a dataset has only got new shards, else None."""
        column = self.operators.tokenize.field
        for dataset, given, weight in zip(
            self.datasets, self.source.datasets, self.source.relative_weights.values(), strict=True
        ):
            if name != f"dataset {dataset.name}":
                continue
            brief, catalog = isinstance(was, str), dataset.catalog
            told = was.split("/")[0] if isinstance(was, str) else was.get("shards") if isinstance(was, Mapping) else 0
            if not str(told).isdecimal() or not 0 < int(str(told)) < catalog.n_shards:
                continue
            before, now = int(str(told)), catalog.n_shards
            if _content(catalog, before, given.text_field or column, weight, brief) == was:
                new = [str(shard) for shard in catalog.shard_names[before : before + 3]]
                rows = int(catalog.group_rows[catalog.group_shard < before].sum())
                more = ", ..." if now - before > 3 else ""
                return (
                    f"has grown from {before} shards ({rows} rows) to {now} ({catalog.rows} rows); "
                    f"new: {', '.join(new)}{more}"
                )
        return None

    def explain(self) -> str:
        """The compiled plan, for people."""
        return _explain(self)


def compile_pipeline(
    source: StaticMixtureWorkSource,
    operators: Operators,
    options: Options,
    tokens_per_row: Mapping[str, float] | None = None,
) -> Compiled:
    """Open the datasets, load the tokenizer, measure token ratios (unless given) and plan the run."""
    lanes = resolve_lanes(options.canonical_replicas, global_batch=options.global_batch, dp_degree=options.dp_degree)
    topology = Topology(lanes, options.dp_degree, options.dp_group_id, options.global_batch)
    if not source.repeat and topology.dp_degree > 1 and options.combine_flag is None:
        raise PipelineError(
            f"the data ends (repeat is off) and there are {topology.dp_degree} data-parallel groups, whose lanes end "
            "at different steps; pass options(combine_flag=...), a function that tells whether any rank called it "
            "with True."
        )
    cache_options = CacheOptions.from_io_options(options.io_options)
    cache, spans = DecodeCache(cache_options.memory_bytes), cache_options.spans()
    field = operators.tokenize.field
    columns = [dataset.text_field or field for dataset in source.datasets]
    # Most of what either side does is outside the interpreter lock, so they go side by side.
    with ThreadPoolExecutor(1, thread_name_prefix="zephon-start") as helper:
        loading = helper.submit(load_tokenizer, operators.tokenize.tokenizer_id, backend=operators.tokenize.backend)
        datasets = tuple(
            dataset.open([column], size_column=column, cache=cache, index_dir=cache_options.index_dir, spans=spans)
            for dataset, column in zip(source.datasets, columns, strict=True)
        )
        sample = _sample_texts(datasets, columns)
        tokenizer = loading.result()
    bos_id, eos_id = resolve_special_tokens(operators.tokenize.special_tokens, tokenizer)
    tokenizer.selfcheck(sample)
    worker = TokenizeWorker(tokenizer, field, bos_id, eos_id, len(datasets))
    if tokens_per_row is None:
        tokens_per_row = _measure(source, datasets, columns, field, worker)
    ratios = [tokens_per_row[dataset.name] for dataset in datasets]
    curriculum = source.curriculum(datasets, ratios, lanes=lanes)
    threads = default_workers()
    workers = {
        "tokenize": operators.tokenize.parallelism or threads,
        "pack": options.pack_parallelism or operators.pack.parallelism or 1,
    }
    remote = any(dataset.remote for dataset in datasets)
    if options.fetch_parallelism or remote:
        workers["fetch"] = options.fetch_parallelism or REMOTE_FETCHERS
    plan = Plan(
        topology=topology,
        curriculum=curriculum,
        window_chunks=options.flush_every_k_chunks,
        fetch=Fetcher(datasets, columns, field),
        tokenize=worker,
        fetch_apart="fetch" in workers,
        pack=operators.pack,
        shuffle=operators.shuffle,
        pad_token=eos_id if eos_id is not None else 0,
        finite=not source.repeat,
        pad_last=not operators.batch.drop_last,
        dataset_names=tuple(dataset.name for dataset in datasets),
        row_bytes=np.array([max(_LEAST_ROW_BYTES, d.catalog.bytes / d.catalog.rows) for d in datasets]),
        lookahead_bytes=options.prefetch_buffer_size or default_lookahead(workers["tokenize"], topology.width),
        readahead_bytes=(options.prefetch_buffer_size or READAHEAD_BYTES) if remote else 0,
        barren_limit=10_000 + 2 * sum(int(d.catalog.rows) for d in datasets),
    )
    return Compiled(
        source=source,
        operators=operators,
        options=options,
        topology=topology,
        datasets=datasets,
        tokenizer=tokenizer,
        bos_id=bos_id,
        eos_id=eos_id,
        tokens_per_row=dict(tokens_per_row),
        fingerprint=_fingerprint(source, operators, options, topology, datasets, columns, tokenizer, (bos_id, eos_id)),
        workers=workers,
        plan=plan,
        info=BatchInfo(plan.dataset_names, tuple(d.catalog for d in datasets), eos_id),
    )


def _sample_texts(datasets: Sequence[OpenDataset], columns: Sequence[str]) -> list[str]:
    """Some documents of every dataset, for the tokenizer's self-check."""
    texts: list[str] = []
    for dataset, column in zip(datasets, columns, strict=True):
        rows = np.arange(min(_SAMPLE_ROWS, dataset.catalog.rows), dtype=np.int64)
        budget = _SAMPLE_BYTES
        for text in dataset.take(rows).column(column).to_pylist():
            if text and budget > 0:
                texts.append(text[:budget])
                budget -= len(text)
    return texts


def _measure(
    source: StaticMixtureWorkSource,
    datasets: Sequence[OpenDataset],
    columns: Sequence[str],
    field: str,
    worker: TokenizeWorker,
) -> dict[str, float]:
    """Tokens per row by dataset name; with one dataset nothing depends on it, so nothing is measured."""
    if source.estimation is None or len(datasets) == 1:
        return dict(zip([d.name for d in datasets], TokenEstimation.bytes_per_row(datasets), strict=True))
    estimation, seed = source.estimation, source.seed

    def measured(dataset: OpenDataset, column: str) -> float:
        def count(table: pa.Table) -> int:
            return worker.count(pa.table({field: table.column(column)}))

        return estimation.tokens_per_row(dataset, column, count, seed=seed)

    with ThreadPoolExecutor(default_workers(), thread_name_prefix="zephon-start") as pool:
        return dict(zip([d.name for d in datasets], pool.map(measured, datasets, columns), strict=True))


def _fingerprint(
    source: StaticMixtureWorkSource,
    operators: Operators,
    options: Options,
    topology: Topology,
    datasets: Sequence[OpenDataset],
    columns: Sequence[str],
    tokenizer: Tokenizer,
    special: tuple[int | None, int | None],
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "stream_version": STREAM_VERSION,
        "canonical_replicas": topology.lanes,
        "seq_len": operators.pack.max_length,
        "tokenizer": tokenizer.content_hash[:16],
        "tokenizer_backend": f"{tokenizer.backend} {tokenizer.backend_version}",
        "special_tokens": f"bos={special[0]} eos={special[1]}",
        "pack_algorithm": operators.pack.algorithm,
        "shuffle": f"buffer_size={operators.shuffle.buffer_size} seed={operators.shuffle.seed}"
        if operators.shuffle
        else "none",
        "seed": source.seed,
        "chunk_size": source.chunk_size,
        "flush_every_k_chunks": options.flush_every_k_chunks,
        "order": f"shards={source.shuffle_shards} rows={source.shuffle_within_shard} block={source.shuffle_block_size}",
        "end": "repeat" if source.repeat else f"drop_last={operators.batch.drop_last}",
        "token_estimation": f"sample_bytes={source.estimation.sample_bytes}" if source.estimation else "none",
        "datasets": [dataset.name for dataset in datasets],
    }
    brief = len(datasets) > _DATASETS_IN_DETAIL
    for dataset, column, weight in zip(datasets, columns, source.relative_weights.values(), strict=True):
        made[f"dataset {dataset.name}"] = _content(dataset.catalog, dataset.catalog.n_shards, column, weight, brief)
    return made


def _content(catalog: Catalog, n_shards: int, column: str, weight: float, brief: bool) -> dict[str, Any] | str:
    """A dataset as a fingerprint has it, with its first `n_shards` shards; in one word where it is to be brief."""
    content = {
        "shards": n_shards,
        "rows": int(catalog.group_rows[catalog.group_shard < n_shards].sum()),
        "content": catalog.fingerprint_of(n_shards)[:16],
        "text_field": column,
        "weight": weight,
    }
    if catalog.pin:
        content["revision"] = catalog.pin
    if not brief:
        return content
    return f"{n_shards}/{content['rows']}/{weight:.6g}/{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:10]}"


def _explain(compiled: Compiled) -> str:
    plan, topology, options = compiled.plan, compiled.topology, compiled.options
    operators, source = compiled.operators, compiled.source
    cache = CacheOptions.from_io_options(options.io_options)
    ready = compiled.ready_records * compiled.record_bytes
    buffered = operators.shuffle.buffer_size * compiled.record_bytes if operators.shuffle else 0
    # Text under way and the tokens made of it; records ready, cut and in the shuffle buffers, twice while gathered.
    bound = cache.memory_bytes + 2 * plan.lookahead_bytes + 2 * (ready + buffered)
    if plan.readahead_bytes:
        bound += cache.memory_bytes // 2
    lines = ["data"]
    for dataset, share in zip(compiled.datasets, source.shares.values(), strict=True):
        catalog = dataset.catalog
        lines.append(
            f"  {dataset.name}: {share:.2%} of tokens, {catalog.fmt}, {len(catalog.shard_names):,} shards, "
            f"{catalog.rows:,} rows, {_size(catalog.bytes)}, about {compiled.tokens_per_row[dataset.name]:,.0f} "
            f"{'tokens' if source.estimation and len(compiled.datasets) > 1 else 'bytes'} per row"
        )
    lines += [
        f"order: seed {source.seed}, shuffle_shards {source.shuffle_shards}, shuffle_within_shard "
        f"{source.shuffle_within_shard}, block {source.shuffle_block_size}, repeat {source.repeat}",
        "operators",
        f"  tokenize: {operators.tokenize.tokenizer_id}, {compiled.tokenizer.backend} "
        f"{compiled.tokenizer.backend_version}, BOS {compiled.bos_id}, EOS {compiled.eos_id}, "
        f"column {operators.tokenize.field}",
        f"  pack_flat: {operators.pack.algorithm}, records of {operators.pack.record_length:,} tokens",
    ]
    if operators.shuffle:
        lines.append(
            f"  shuffle: buffer of {operators.shuffle.buffer_size:,} records, "
            f"{max(1, operators.shuffle.buffer_size // topology.lanes):,} per lane"
        )
    lines += [
        f"  batch: {operators.batch.microbatch_size} records",
        f"workers: runner {options.runner}"
        + (", " + ", ".join(f"{kind} {count}" for kind, count in compiled.workers.items()))
        * (options.runner == "threads"),
        f"lanes: {topology.lanes}, of which group {topology.dp_group_id} of {topology.dp_degree} owns "
        f"{topology.owned.start} to {topology.owned.stop - 1}",
        f"window: {plan.window_chunks} chunk(s) of {source.chunk_size:,} rows per lane",
        f"look-ahead: {_size(plan.lookahead_bytes)} of text, {compiled.ready_records:,} records ready ({_size(ready)})",
        f"memory bound: {_size(bound)} besides the libraries, of which {_size(cache.memory_bytes)} for decoded data",
    ]
    return "\n".join(lines)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
