"""From the description of a pipeline to something that runs: open, check, measure, plan.

This is where a misconfigured run fails, before its first batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zephon.batch import BatchInfo
from zephon.columns.faults import RowFault
from zephon.columns.lane_start import LaneStart
from zephon.config.options import CacheOptions, Options, default_lookahead, default_workers
from zephon.config.topology import Topology, resolve_lanes
from zephon.curriculum.continued import curriculum_of
from zephon.curriculum.source import WorkSource
from zephon.data.catalog import Catalog
from zephon.data.reader import OpenDataset
from zephon.engine.engine import Engine, EngineSetup
from zephon.engine.plan import Plan
from zephon.engine.processes.isolated import IsolatedEngine
from zephon.engine.start import start_engine
from zephon.errors import PipelineError
from zephon.ops.documents import DocumentWorker
from zephon.ops.encode import Encoder
from zephon.ops.needs import Needs
from zephon.ops.pack import PackFlat
from zephon.ops.rows import RowOperator
from zephon.ops.stateful import StatefulStage, StatefulTransform
from zephon.ops.tokenize import Tokenize
from zephon.ops.trial import Sample, check_operators
from zephon.ops.typing import Types, types_of
from zephon.run.fingerprint import describe_growth, fingerprint_of
from zephon.run.inputs import measure_ratios, open_inputs, sample_texts
from zephon.run.operators import Operators
from zephon.run.state import Earlier, RunState
from zephon.tokenizer.specials import resolve_special_tokens
from zephon.tokenizer.tokenizer import Tokenizer

__all__ = ["Compiled", "compile_pipeline"]


# Rows cost something besides their text, which matters where they are tiny.
_LEAST_ROW_BYTES = 64.0
# Reading from stores: threads that wait and decode, so that those that tokenize need not; and how much text all lanes
# together look ahead for what to fetch, about a second's worth of the fastest tokenizer.
REMOTE_FETCHERS = 4
READAHEAD_BYTES = 256 << 20


@dataclass(frozen=True)
class Compiled:
    """A pipeline ready to run: opened datasets, loaded tokenizer, measured ratios and the plan.

    Attributes:
        fingerprint: everything that decides the data, by name, as JSON types.
        tokens_per_row: by dataset name.
        earlier: of the runs that this one took over from, the earliest first; none where that is still to come.
        workers: threads by kind of work.
        needs: by dataset, what is read of it.
        findings: what the check of the user's own operators found besides.
    """

    source: WorkSource
    operators: Operators
    options: Options
    topology: Topology
    datasets: tuple[OpenDataset, ...]
    tokenizer: Tokenizer | None
    bos_id: int | None
    eos_id: int | None
    tokens_per_row: dict[str, float]
    earlier: tuple[Earlier, ...]
    fingerprint: dict[str, Any]
    workers: dict[str, int]
    plan: Plan
    info: BatchInfo
    needs: tuple[Needs, ...]
    findings: tuple[str, ...]

    @property
    def digest(self) -> str:
        """One SHA-256 over the fingerprint and the measured ratios."""
        text = json.dumps(
            [self.fingerprint, self.tokens_per_row, *(dict(run.tokens_per_row) for run in self.earlier)], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a global batch, or None where steps are not counted."""
        batch = self.options.global_batch
        return None if batch is None else batch * self.operators.pack.record_length

    @property
    def record_bytes(self) -> int:
        """Bytes of the tokens of one record."""
        return self.operators.pack.record_length * 4

    @property
    def ready_records(self) -> int:
        """How many finished records may wait for the consumer."""
        return self.options.ready_records(self.operators.batch.microbatch_size, self.record_bytes)

    @property
    def cache_options(self) -> CacheOptions:
        """What is kept on disk and in memory."""
        return CacheOptions.from_io_options(self.options.io_options)

    @property
    def bin_bytes(self) -> int:
        """Bytes of the records being filled side by side, over the lanes of this group."""
        pack = self.operators.pack
        return pack.num_bins * self.record_bytes * self.topology.width if pack.has_bins else 0

    @property
    def memory_bound(self) -> int:
        """Most bytes of data in memory: decoded, under way as text and tokens, and records ready, cut or shuffled
        (twice while they are gathered)."""
        cache, plan, shuffle = self.cache_options.memory_bytes, self.plan, self.operators.shuffle
        records = self.ready_records + (shuffle.buffer_size if shuffle else 0)
        remote = cache // 2 if plan.readahead_bytes else 0
        return cache + 2 * plan.lookahead_bytes + 2 * records * self.record_bytes + self.bin_bytes + remote

    def engine(
        self,
        starts: Mapping[int, tuple[LaneStart, int]],
        on_window: Callable[[int, LaneStart], None] | None = None,
        on_fault: Callable[[int, int, RowFault], None] | None = None,
    ) -> Engine | IsolatedEngine:
        """A fresh engine with its lanes at `starts`; see `Engine`."""
        block_records = max(1, self.ready_records // 2)
        setup = EngineSetup(self.plan, self.options.runner, self.workers, starts, block_records, on_window, on_fault)
        return IsolatedEngine(setup) if self.options.isolate else start_engine(setup)

    def state(self, starts: Mapping[int, LaneStart], cursor: int, skipped: Sequence[tuple[int, int]]) -> RunState:
        """The state of this group where its lanes start at `starts`, `cursor` of its records have been used, and
        ranges of rounds are left out."""
        rounds, extra = divmod(cursor, self.topology.width)
        return RunState(
            fingerprint=self.fingerprint,
            tokens_per_row=self.tokens_per_row,
            lanes_total=self.topology.lanes,
            lanes=starts,
            rounds=rounds,
            extra=extra,
            dp_degree=self.topology.dp_degree,
            dp_group_id=self.topology.dp_group_id,
            skipped=skipped,
            earlier=self.earlier,
        )

    def describe_growth(self, field: str, before: Any) -> str:
        """Words for a changed field of the fingerprint where a dataset has only got new shards, else ""."""
        for dataset, need in zip(self.datasets, self.needs, strict=True):
            if field == f"dataset {dataset.name}":
                weight = self.source.relative_weights[dataset.name]
                return describe_growth(dataset.catalog, need.size_column, weight, before)
        return ""


def compile_pipeline(
    source: WorkSource,
    operators: Operators,
    options: Options,
    tokens_per_row: Mapping[str, float] | None = None,
    earlier: Sequence[Earlier] = (),
) -> Compiled:
    """Open the datasets, load the tokenizer, measure the token ratios that are not given, and plan the run.

    Raises:
        ZephonError: the run is misconfigured, or its data cannot be read.
    """
    topology = _topology(source, options)
    names = source.names
    operators.check_datasets(names)
    if source.continues is not None and operators.stateful is not None:
        raise PipelineError(
            "a run that takes over from an earlier one (continue_from, continues) cannot have a stateful_transform: "
            "places in its lanes are counted in rows that the transform gave, which are no places in the data where "
            "another mixture could begin; leave out one of the two."
        )
    for operator in operators.rows:
        operator.identity()  # what objects carry now, before they have worked
    faults = options.faults
    inputs = open_inputs(source, operators, options)
    datasets, needs, samples, tokenizer = inputs.datasets, inputs.needs, inputs.samples, inputs.tokenizer
    encoders, special = _encoders(operators, needs, tokenizer)
    locate = partial(_locate, [dataset.catalog for dataset in datasets])

    def worker(chains: Sequence[Sequence[RowOperator]]) -> DocumentWorker:
        return DocumentWorker(chains, encoders, names, locate, faults)

    whole = worker(inputs.chains)
    findings: tuple[str, ...] = ()
    if operators.rows:
        everywhere = "isolate" if options.isolate else 'runner "process"' if options.runner == "process" else None
        findings = check_operators(whole, names, samples, faults, compare=options.check_operators, sent_for=everywhere)
    for d, sample in enumerate(samples):
        if inputs.chains[d]:
            _try_encoder(whole, d, names[d], sample)
    if tokenizer is not None:
        tokenizer.selfcheck(sample_texts(whole, samples))
    ratios = measure_ratios(source, inputs, whole, tokens_per_row or {})
    curriculum = curriculum_of(
        source,
        {dataset.name: dataset for dataset in datasets},
        # Of the runs before, too; while they are not known, no lane can be asked for, and any will do.
        [*([run.tokens_per_row for run in earlier] or [ratios] * source.generations), ratios],
        lanes=topology.lanes,
        tokens_per_step=options.global_batch * operators.pack.record_length if options.global_batch else None,
        cuts=[run.cuts for run in earlier],
    )
    before, after, types = _around_stateful(inputs.chains, samples)
    stateful = operators.stateful
    workers = {
        "tokenize": next((op.parallelism for op in operators.encode if op.parallelism), default_workers()),
        "pack": options.pack_parallelism or operators.pack.parallelism or 1,
    }
    remote = any(dataset.remote for dataset in datasets)
    if options.fetch_parallelism or remote:
        workers["fetch"] = options.fetch_parallelism or REMOTE_FETCHERS
    eos_id = special[1]
    plan = Plan(
        topology=topology,
        curriculum=curriculum,
        window_chunks=options.flush_every_k_chunks,
        fetch=inputs.fetch,
        tokenize=worker(after),
        fetch_apart="fetch" in workers,
        pack=operators.pack,
        shuffle=operators.shuffle,
        pad_token=eos_id if eos_id is not None else 0,
        finite=source.finite,
        pad_last=not operators.batch.drop_last,
        dataset_names=tuple(names),
        row_bytes=np.array([_row_bytes(*of) for of in zip(datasets, needs, samples, strict=True)]),
        lookahead_bytes=options.prefetch_buffer_size or default_lookahead(workers["tokenize"], topology.width),
        readahead_bytes=(options.prefetch_buffer_size or READAHEAD_BYTES) if remote else 0,
        barren_limit=10_000 + 2 * sum(int(d.catalog.rows) for d in datasets),
        mixture=operators.mixture,
        tokens_per_row=tuple(max(1, round(ratios[name] * 65536)) for name in names),
        kinds=_kinds(operators.pack, source),
        faults=faults,
        stateful=None if stateful is None else StatefulStage(stateful, worker(before), names, types),
        remedy=_remedy(operators, needs),
    )
    return Compiled(
        source=source,
        operators=operators,
        options=options,
        topology=topology,
        datasets=datasets,
        tokenizer=tokenizer,
        bos_id=special[0],
        eos_id=eos_id,
        tokens_per_row=ratios,
        earlier=tuple(earlier),
        fingerprint=fingerprint_of(
            source,
            operators,
            options,
            topology.lanes,
            {dataset.name: dataset.catalog for dataset in datasets},
            {name: need.size_column for name, need in zip(names, needs, strict=True)},
            tokenizer,
            special,
        ),
        workers=workers,
        plan=plan,
        info=BatchInfo(plan.dataset_names, tuple(d.catalog for d in datasets), eos_id),
        needs=needs,
        findings=findings,
    )


def _topology(source: WorkSource, options: Options) -> Topology:
    lanes = resolve_lanes(options.canonical_replicas, global_batch=options.global_batch, dp_degree=options.dp_degree)
    topology = Topology(lanes, options.dp_degree, options.dp_group_id, options.global_batch)
    if source.finite and topology.dp_degree > 1 and options.combine_flag is None:
        raise PipelineError(
            f"the data ends (it does not repeat without end) and there are {topology.dp_degree} data-parallel groups, "
            "whose lanes end at different steps; pass options(combine_flag=...), a function that tells whether any "
            "rank called it with True."
        )
    return topology


def _row_bytes(dataset: OpenDataset, need: Needs, sample: Sample) -> float:
    """Bytes per row of all columns that are read: the catalog tells of one, the format or some rows of the others."""
    row_bytes = dataset.catalog.bytes / dataset.catalog.rows
    others = [name for name, source in need.columns.items() if source != need.size_column]
    if others:
        sampled = sample.table.select(others).nbytes / max(1, sample.table.num_rows)
        row_bytes = max(row_bytes + sampled, dataset.row_bytes)
    return max(_LEAST_ROW_BYTES, row_bytes)


def _remedy(operators: Operators, needs: Sequence[Needs]) -> str:
    """What helps where no row has anything to train on."""
    columns = [(need.encode.kind, need.encode.field if operators.rows else need.size_column) for need in needs]
    read = " or ".join(dict.fromkeys(f'{kind} takes the column "{column}"' for kind, column in columns))
    if operators.rows:
        return f"look at what the operators leave of them: {read}"
    return f"name another column (text_field, say): {read}"


def _kinds(pack: PackFlat, source: WorkSource) -> np.ndarray:
    """int64[n_datasets]: which datasets may share a record, those of one number."""
    names = {
        "none": [""] * len(source.datasets),
        "full": [dataset.name for dataset in source.datasets],
        # A dataset without a group is one of its own.
        "group": [f"group {d.group}" if d.group else f"dataset {d.name}" for d in source.datasets],
    }[pack.homogeneity]
    if pack.homogeneity == "group" and all(dataset.group is None for dataset in source.datasets):
        raise PipelineError(
            f'{pack.name} homogeneity is "group", but no dataset has a group; give some of '
            f"{', '.join(dataset.name for dataset in source.datasets)} one."
        )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    kinds = [numbers[name] for name in names]
    if pack.has_bins and len(set(kinds)) > pack.num_bins:
        raise PipelineError(
            f"{pack.name} has num_bins {pack.num_bins}, and records of {len(set(kinds))} kinds (homogeneity "
            f'"{pack.homogeneity}"); at least one bin for each kind is needed, and several are better.'
        )
    return np.array(kinds, dtype=np.int64)


def _locate(catalogs: Sequence[Catalog], dataset: int, row: int) -> tuple[str, int]:
    """Shard and row within it, of a row of a dataset given by number."""
    shard, row_in_shard = catalogs[dataset].locate(np.array([row], dtype=np.int64))
    return str(catalogs[dataset].shard_names[int(shard[0])]), int(row_in_shard[0])


def _encoders(
    operators: Operators, needs: Sequence[Needs], tokenizer: Tokenizer | None
) -> tuple[list[Encoder], tuple[int | None, int | None]]:
    """The encoder of each dataset, one object where they are alike, and the BOS and EOS that are put in."""
    by_operator: dict[Any, Encoder] = {}
    ends: list[tuple[int | None, int | None]] = []
    for encode in dict.fromkeys(need.encode for need in needs):
        policy = encode.special_tokens
        if policy == "auto" and not isinstance(encode, Tokenize):
            policy = "none"  # conversations and given tokens have their ends
        special = resolve_special_tokens(policy, tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
        by_operator[encode] = encode.encoder(tokenizer, *special)
        ends.append(special)
    encoders = [by_operator[need.encode] for need in needs]
    bos = next((end[0] for end in ends if end[0] is not None), None)
    eos = next((end[1] for end in ends if end[1] is not None), None)
    if eos is None and tokenizer is not None and not all(isinstance(op, Tokenize) for op in operators.encode):
        eos = tokenizer.eos_id  # documents bring their own
    return encoders, (bos, eos)


def _around_stateful(
    chains: Sequence[Sequence[RowOperator]], samples: Sequence[Sample]
) -> tuple[list[list[RowOperator]], list[list[RowOperator]], list[Types]]:
    """Per dataset, the operators before a stateful transform and those after it, and the types of what it gives; where
    there is none, all are after.

    Rows come out of a stateful transform as Python values, those of datasets that only pass it by too, and get the
    types back that they had.
    """
    before: list[list[RowOperator]] = []
    after: list[list[RowOperator]] = []
    types: list[Types] = []
    for chain, sample in zip(chains, samples, strict=True):
        at = next((n for n, operator in enumerate(chain) if isinstance(operator, StatefulTransform)), None)
        if at is None:
            before.append([])
            after.append(list(chain))
            types.append(types_of(sample.table))
        else:
            stateful = chain[at]
            assert isinstance(stateful, StatefulTransform)
            before.append(list(chain[:at]))
            after.append([*stateful.workers(), *chain[at + 1 :]])
            types.append(stateful.types)
    return before, after, types


def _try_encoder(worker: DocumentWorker, number: int, name: str, sample: Sample) -> None:
    """Refuse columns that the operators have made of another type than can be encoded."""
    try:
        worker.count(number, sample.table)
    except PipelineError as error:
        raise PipelineError(f'dataset "{name}", after its operators: {error}') from error.__cause__
