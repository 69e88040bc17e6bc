"""From the description of a pipeline to something that runs: open, check, measure, plan.

This is where a misconfigured run fails, before its first batch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.batch import BatchInfo
from zephon.columns.faults import RowFault
from zephon.columns.lane_start import LaneStart
from zephon.config.options import CacheOptions, FaultPolicy, Options, default_lookahead, default_workers
from zephon.config.topology import Topology, resolve_lanes
from zephon.curriculum.continued import curriculum_of
from zephon.curriculum.mixture import Ending
from zephon.curriculum.source import ScheduledMixtureWorkSource, WorkSource
from zephon.curriculum.tokens import TokenEstimation
from zephon.data.cache import DecodeCache
from zephon.data.catalog import Catalog
from zephon.data.fetch import open_spans
from zephon.data.reader import OpenDataset
from zephon.engine.engine import Engine
from zephon.engine.plan import Fetcher, Plan
from zephon.engine.processes.isolated import IsolatedEngine
from zephon.engine.start import start_engine
from zephon.errors import DataError, PipelineError
from zephon.ops.batch import Batch
from zephon.ops.chat import TokenizeChat
from zephon.ops.documents import DocumentWorker, Encoder
from zephon.ops.filter import Filter
from zephon.ops.functions import MapBatches, MapTransform
from zephon.ops.mixture import EnsureMixture
from zephon.ops.needs import Needs, columns_needed
from zephon.ops.pack import PackFlat, PackSequences
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import RowOperator
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful import StatefulStage, StatefulTransform
from zephon.ops.text import DecodeText, TextTemplate
from zephon.ops.tokenize import Tokenize
from zephon.ops.trial import Finding, Sample, check_operators, probe
from zephon.ops.typing import Types, types_of
from zephon.run.state import STREAM_VERSION, Earlier
from zephon.tokenizer.specials import resolve_special_tokens
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Compiled", "Operators", "compile_pipeline"]

_log = logging.getLogger("zephon")

# Rows cost something besides their text, which matters where they are tiny.
_LEAST_ROW_BYTES = 64.0
# Reading from stores: threads that wait and decode, so that those that tokenize need not; and how much text all lanes
# together look ahead for what to fetch, about a second's worth of the fastest tokenizer.
REMOTE_FETCHERS = 4
READAHEAD_BYTES = 256 << 20
_SAMPLE_BYTES = 256 << 10
_LOST_TOLD = 10
_DATASETS_IN_DETAIL = 12  # with more of them a state would outgrow its 4 KB


_ROWS = (Filter, MapTransform, MapBatches, DecodeText, TextTemplate, StatefulTransform)
_ENCODE = (Tokenize, TokenizeChat, Pretokenized)
_NAMES: dict[type, str] = {
    EnsureMixture: "ensure_mixture",
    PackFlat: "pack_flat",
    PackSequences: "pack_sequences",
    Shuffle: "shuffle",
    Batch: "batch",
}
# The order of operators; of the first two kinds there may be several.
_ORDER: tuple[tuple[type, ...], ...] = (
    _ROWS,
    _ENCODE,
    (EnsureMixture,),
    (PackFlat, PackSequences),
    (Shuffle,),
    (Batch,),
)


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of a pipeline, each at its place.

    Attributes:
        rows: what happens to rows before they become tokens, in order.
        encode: what makes tokens of them; several only where each is for datasets of its own.

    Raises:
        PipelineError: one is missing, double or out of place.
    """

    rows: tuple[RowOperator, ...]
    encode: tuple[Tokenize | TokenizeChat | Pretokenized, ...]
    mixture: EnsureMixture | None
    pack: PackFlat
    shuffle: Shuffle | None
    batch: Batch

    @staticmethod
    def from_list(operators: Sequence[Any]) -> Operators:
        """Check the order: any on rows, tokenize, ensure_mixture or not, pack_flat, shuffle or not, batch.

        In the place of tokenize and pack_flat may be others of their kind.
        """
        names = [_NAMES.get(type(operator)) or operator.kind for operator in operators]
        described = ", ".join(names) or "none"
        stages = [next(n for n, kinds in enumerate(_ORDER) if isinstance(op, kinds)) for op in operators]
        by_stage: list[list[Any]] = [
            [operator for operator, at in zip(operators, stages, strict=True) if at == stage]
            for stage in range(len(_ORDER))
        ]
        for stage in range(1, len(_ORDER)):
            found = by_stage[stage]
            if len(found) > 1 and not (stage == 1 and all(operator.datasets for operator in found)):
                if stage == 1 and len({operator.kind for operator in found}) > 1:
                    raise PipelineError(
                        f"the pipeline makes tokens in several ways ({described}); say with datasets=[...] which "
                        "datasets each of them is for."
                    )
                name = names[stages.index(stage)]
                raise PipelineError(f"the pipeline has {name} twice (its operators: {described}); one is needed.")
        if stages != sorted(stages):
            rows = "row operators, " if by_stage[0] else ""
            mixed = "ensure_mixture, " if by_stage[2] else ""
            raise PipelineError(
                f"the operators come in the order {described}; they must come as {rows}tokenize, "
                f"{mixed}pack_flat, shuffle, batch."
            )
        if sum(isinstance(operator, StatefulTransform) for operator in by_stage[0]) > 1:
            raise PipelineError("the pipeline has stateful_transform twice; put both into one object.")
        for stage, name in ((1, "tokenize"), (3, "pack_flat"), (5, "batch")):
            if not by_stage[stage]:
                raise PipelineError(f"the pipeline lacks {name} (its operators: {described}); add .{name}(...).")
        mixture, shuffle = (by_stage[stage][0] if by_stage[stage] else None for stage in (2, 4))
        pack = by_stage[3][0]
        if mixture and pack.has_bins:
            raise PipelineError(
                f'ensure_mixture cuts the documents of each dataset into records as "wrap" does, but {pack.name} has '
                f"the algorithm {pack.algorithm!r}; take one or the other."
            )
        return Operators(tuple(by_stage[0]), tuple(by_stage[1]), mixture, pack, shuffle, by_stage[5][0])

    @property
    def is_plain(self) -> bool:
        """Whether text goes into the tokenizer as it is read, and no further."""
        first = self.encode[0]
        return not self.rows and len(self.encode) == 1 and isinstance(first, Tokenize) and first.max_length is None

    def encode_for(self, dataset: str) -> Any:
        """What makes tokens of a dataset's rows."""
        found = [operator for operator in self.encode if operator.datasets is None or dataset in operator.datasets]
        if len(found) != 1:
            how = "several operators make" if found else "no operator makes"
            raise PipelineError(f'{how} tokens of dataset "{dataset}"; exactly one has to name it in datasets=[...].')
        return found[0]

    def check_datasets(self, names: Sequence[str]) -> None:
        """Refuse operators for datasets that are not there."""
        for operator in (*self.rows, *self.encode):
            for name in operator.datasets or ():
                if name not in names:
                    raise PipelineError(
                        f'{operator.kind} is for dataset "{name}", which is not among {", ".join(names)}.'
                    )


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
    findings: tuple[Finding, ...]

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

    def engine(
        self,
        starts: Mapping[int, tuple[LaneStart, int]],
        on_window: Callable[[int, LaneStart], None] | None = None,
        on_fault: Callable[[int, int, RowFault], None] | None = None,
    ) -> Engine | IsolatedEngine:
        """A fresh engine with its lanes at `starts`; see `Engine`."""
        start = IsolatedEngine if self.options.isolate else start_engine
        return start(
            self.plan,
            self.options.runner,
            self.workers,
            starts,
            max(1, self.ready_records // 2),
            on_window,
            on_fault,
        )

    def explain_growth(self, name: str, was: Any) -> str:
        """Words for a change of a dataset that has only got new shards, else ""."""
        for dataset, needs, weight in zip(
            self.datasets, self.needs, self.source.relative_weights.values(), strict=True
        ):
            if name != f"dataset {dataset.name}":
                continue
            brief, catalog = isinstance(was, str), dataset.catalog
            told = was.split("/")[0] if isinstance(was, str) else was.get("shards") if isinstance(was, Mapping) else 0
            if not str(told).isdecimal() or not 0 < int(str(told)) < catalog.n_shards:
                continue
            before, now = int(str(told)), catalog.n_shards
            if _content(catalog, before, needs.size_column, weight, brief) == was:
                new = [str(shard) for shard in catalog.shard_names[before : before + 3]]
                rows = int(catalog.group_rows[catalog.group_shard < before].sum())
                more = ", ..." if now - before > 3 else ""
                return (
                    f"has grown from {before} shards ({rows} rows) to {now} ({catalog.rows} rows); "
                    f"new: {', '.join(new)}{more}"
                )
        return ""

    def explain(self) -> str:
        """The compiled plan, for people."""
        return _explain(self)


def compile_pipeline(
    source: WorkSource,
    operators: Operators,
    options: Options,
    tokens_per_row: Mapping[str, float] | None = None,
    earlier: Sequence[Earlier] = (),
) -> Compiled:
    """Open the datasets, load the tokenizer, measure the token ratios that are not given, and plan the run."""
    lanes = resolve_lanes(options.canonical_replicas, global_batch=options.global_batch, dp_degree=options.dp_degree)
    topology = Topology(lanes, options.dp_degree, options.dp_group_id, options.global_batch)
    if source.finite and topology.dp_degree > 1 and options.combine_flag is None:
        raise PipelineError(
            f"the data ends (it does not repeat without end) and there are {topology.dp_degree} data-parallel groups, "
            "whose lanes end at different steps; pass options(combine_flag=...), a function that tells whether any "
            "rank called it with True."
        )
    cache_options = CacheOptions.from_io_options(options.io_options)
    faults = options.faults
    cache, spans = DecodeCache(cache_options.memory_bytes), open_spans(cache_options)
    names = [dataset.name for dataset in source.datasets]
    operators.check_datasets(names)
    if source.continues is not None and any(isinstance(operator, StatefulTransform) for operator in operators.rows):
        raise PipelineError(
            "a run that takes over from an earlier one (continue_from, continues) cannot have a stateful_transform: "
            "places in its lanes are counted in rows that the transform gave, which are no places in the data where "
            "another mixture could begin; leave out one of the two."
        )
    for operator in operators.rows:
        operator.identity()  # what objects carry now, before they have worked
    chains = [[operator for operator in operators.rows if operator.is_for(name)] for name in names]
    needs = tuple(
        columns_needed(dataset, chain, operators.encode_for(dataset.name), cache_options.index_dir, faults.skips)
        for dataset, chain in zip(source.datasets, chains, strict=True)
    )
    # Most of what either side does is outside the interpreter lock, so they go side by side.
    with ThreadPoolExecutor(1, thread_name_prefix="zephon-start") as helper:
        loading = helper.submit(_load_tokenizer, operators.encode)
        datasets = tuple(
            dataset.open(
                list(dict.fromkeys([*need.columns.values(), need.size_column])),
                size_column=need.size_column,
                cache=cache,
                index_dir=cache_options.index_dir,
                is_text=need.is_text,
                optional=need.optional,
                spans=spans,
                skips=faults.skips,
            )
            for dataset, need in zip(source.datasets, needs, strict=True)
        )
        if spans is not None:
            spans.check_limit()
        for opened in datasets:
            _check_lost(opened, faults)
        fetch = Fetcher(datasets, [need.columns for need in needs])
        probed = [probe(chain, fetch.samples(d), names[d]) for d, chain in enumerate(chains)]
        tokenizer = loading.result()
    chains, samples = [list(found.operators) for found in probed], [found.sample for found in probed]
    for found in probed:
        if found.warning:
            _log.warning("%s", found.warning)
    encoders, (bos_id, eos_id) = _encoders(operators, needs, tokenizer)
    before, after, made = _around_stateful(chains, samples)
    locate = _Locator([dataset.catalog for dataset in datasets])
    whole = DocumentWorker(chains, encoders, names, locate, faults)
    findings: tuple[Finding, ...] = ()
    if operators.rows:
        everywhere = "isolate" if options.isolate else 'runner "process"' if options.runner == "process" else None
        findings = check_operators(whole, names, samples, faults, compare=options.check_operators, sent_for=everywhere)
    for d, sample in enumerate(samples):
        if chains[d]:
            _try_encoder(whole, d, names[d], sample)
    if tokenizer is not None:
        tokenizer.selfcheck(_sample_texts(whole, samples))
    tokens_per_row = _measure(source, datasets, needs, fetch, whole, tokens_per_row or {})
    tokens_per_step = options.global_batch * operators.pack.record_length if options.global_batch else None
    curriculum = curriculum_of(
        source,
        {dataset.name: dataset for dataset in datasets},
        [*_earlier_ratios(source, tokens_per_row, earlier), tokens_per_row],
        lanes=lanes,
        tokens_per_step=tokens_per_step,
        cuts=[run.cuts for run in earlier],
    )
    threads = default_workers()
    workers = {
        "tokenize": next((op.parallelism for op in operators.encode if op.parallelism), threads),
        "pack": options.pack_parallelism or operators.pack.parallelism or 1,
    }
    remote = any(dataset.remote for dataset in datasets)
    if options.fetch_parallelism or remote:
        workers["fetch"] = options.fetch_parallelism or REMOTE_FETCHERS
    stateful = next((op for op in operators.rows if isinstance(op, StatefulTransform)), None)
    stage = None
    if stateful is not None:
        stage = StatefulStage(stateful, DocumentWorker(before, encoders, names, locate, faults), names, made)
    plan = Plan(
        topology=topology,
        curriculum=curriculum,
        window_chunks=options.flush_every_k_chunks,
        fetch=fetch,
        tokenize=DocumentWorker(after, encoders, names, locate, faults),
        fetch_apart="fetch" in workers,
        pack=operators.pack,
        shuffle=operators.shuffle,
        pad_token=eos_id if eos_id is not None else 0,
        finite=source.finite,
        pad_last=not operators.batch.drop_last,
        dataset_names=tuple(dataset.name for dataset in datasets),
        row_bytes=np.array([_row_bytes(*of) for of in zip(datasets, needs, samples, strict=True)]),
        lookahead_bytes=options.prefetch_buffer_size or default_lookahead(workers["tokenize"], topology.width),
        readahead_bytes=(options.prefetch_buffer_size or READAHEAD_BYTES) if remote else 0,
        barren_limit=10_000 + 2 * sum(int(d.catalog.rows) for d in datasets),
        mixture=operators.mixture,
        tokens_per_row=tuple(max(1, round(tokens_per_row[dataset.name] * 65536)) for dataset in datasets),
        kinds=_kinds(operators.pack, source),
        faults=faults,
        stateful=stage,
        remedy=_remedy(operators, needs),
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
        earlier=tuple(earlier),
        fingerprint=_fingerprint(source, operators, options, topology, datasets, needs, tokenizer, (bos_id, eos_id)),
        workers=workers,
        plan=plan,
        info=BatchInfo(plan.dataset_names, tuple(d.catalog for d in datasets), eos_id),
        needs=needs,
        findings=findings,
    )


def _check_lost(dataset: OpenDataset, faults: FaultPolicy) -> None:
    """Refuse a dataset of which more shards are damaged than the budget allows, by the rows that they may have had."""
    if not dataset.lost:
        return
    catalog, lost = dataset.catalog, dataset.lost
    damaged = sum(shard.size for shard in lost)
    about = round(catalog.rows * damaged / max(1, int(catalog.shard_sizes.sum()) - damaged))
    rows = catalog.rows + about
    if about > faults.allowed(rows):
        raise DataError(
            f'dataset "{dataset.name}": {len(lost)} of {catalog.n_shards} shards cannot be read, by their size about '
            f"{about:,} of {rows:,} rows, and {faults.described(rows)}; repair them or raise the budget; the first: "
            f"{lost[0].reason}"
        )
    for shard in lost[:_LOST_TOLD]:
        _log.warning('dataset "%s": shard %s is left out: %s', dataset.name, shard.name, shard.reason)


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
    read = " or ".join(dict.fromkeys(f'{need.encode.kind} takes the column "{need.encode.field}"' for need in needs))
    if operators.rows:
        return f"look at what the operators leave of them: {read}"
    if all(isinstance(need.encode, Tokenize) for need in needs):
        columns = " or ".join(dict.fromkeys(f'"{need.size_column}"' for need in needs))
        return f"name a column with text (text_field) in place of {columns}"
    return f"name another column: {read}"


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


@dataclass(frozen=True)
class _Locator:
    """Shard and row within it, of a row of a dataset given by number."""

    catalogs: Sequence[Catalog]

    def __call__(self, dataset: int, row: int) -> tuple[str, int]:
        catalog = self.catalogs[dataset]
        shard, row_in_shard = catalog.locate(np.array([row], dtype=np.int64))
        return str(catalog.shard_names[int(shard[0])]), int(row_in_shard[0])


def _load_tokenizer(encode: Sequence[Any]) -> Tokenizer | None:
    """The one tokenizer that the operators name."""
    wanted = [op for op in encode if not (isinstance(op, Pretokenized) and op.tokenizer_id is None)]
    named = {str(operator.tokenizer_id): operator for operator in wanted}
    if len(named) > 1:
        raise PipelineError(f"the operators name several tokenizers ({', '.join(named)}); a model has one.")
    for operator in named.values():
        return load_tokenizer(operator.tokenizer_id, backend=operator.backend)
    return None


def _encoders(
    operators: Operators, needs: Sequence[Needs], tokenizer: Tokenizer | None
) -> tuple[list[Encoder], tuple[int | None, int | None]]:
    """The encoder of each dataset, one object where they are alike, and the BOS and EOS that are put in."""
    made: dict[Any, Encoder] = {}
    ends: list[tuple[int | None, int | None]] = []
    encoders = []
    for need in needs:
        if need.encode not in made:
            special: tuple[int | None, int | None] = (None, None)
            if tokenizer is not None:
                special = resolve_special_tokens(_policy(need.encode), tokenizer)
            made[need.encode] = need.encode.encoder(tokenizer, *special)
            ends.append(special)
        encoders.append(made[need.encode])
    bos = next((end[0] for end in ends if end[0] is not None), None)
    eos = next((end[1] for end in ends if end[1] is not None), None)
    if eos is None and tokenizer is not None and not all(isinstance(op, Tokenize) for op in operators.encode):
        eos = tokenizer.eos_id  # documents bring their own
    return encoders, (bos, eos)


def _policy(encode: Any) -> str:
    """Conversations and given tokens have their ends already, unless somebody asks for more."""
    policy = str(encode.special_tokens)
    return "none" if policy == "auto" and not isinstance(encode, Tokenize) else policy


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
    made: list[Types] = []
    places = [next((n for n, op in enumerate(chain) if isinstance(op, StatefulTransform)), None) for chain in chains]
    for chain, at, sample in zip(chains, places, samples, strict=True):
        before.append([] if at is None else list(chain[:at]))
        if at is None:
            made.append(types_of(sample.table))
            after.append(list(chain))
        else:
            stateful = chain[at]
            assert isinstance(stateful, StatefulTransform)
            made.append(stateful.types)
            after.append([*stateful.workers(), *chain[at + 1 :]])
    return before, after, made


def _sample_texts(worker: DocumentWorker, samples: Sequence[Sample]) -> list[str]:
    """Some documents of every dataset, for the tokenizer's self-check."""
    texts: list[str] = []
    for d, sample in enumerate(samples):
        budget = _SAMPLE_BYTES
        for text in worker.texts(d, sample.table):
            if budget > 0:
                texts.append(text[:budget])
                budget -= len(text)
    return texts


def _try_encoder(worker: DocumentWorker, number: int, name: str, sample: Sample) -> None:
    """Refuse columns that the operators have made of another type than can be encoded."""
    try:
        worker.count(number, sample.table)
    except PipelineError as error:
        raise PipelineError(f'dataset "{name}", after its operators: {error}') from error.__cause__


def _measure(
    source: WorkSource,
    datasets: Sequence[OpenDataset],
    needs: Sequence[Needs],
    fetch: Fetcher,
    worker: DocumentWorker,
    known: Mapping[str, float],
) -> dict[str, float]:
    """Tokens per row by dataset name, measured where they are not known.

    With one dataset and no schedule nothing depends on it, so nothing is measured.
    """
    if not source.counts_tokens:
        counted = dict(zip([d.name for d in datasets], TokenEstimation.bytes_per_row(datasets), strict=True))
        return {**counted, **known}
    estimation, seed = source.estimation, source.seed

    assert estimation is not None

    def measured(number: int) -> float:
        name = datasets[number].name
        if name in known:
            return known[name]

        def count(table: pa.Table) -> int:
            return worker.count(number, fetch.named(number, table))

        return estimation.tokens_per_row(datasets[number], needs[number].size_column, count, seed=seed)

    with ThreadPoolExecutor(default_workers(), thread_name_prefix="zephon-start") as pool:
        return dict(zip([d.name for d in datasets], pool.map(measured, range(len(datasets))), strict=True))


def _earlier_ratios(
    source: WorkSource, tokens_per_row: Mapping[str, float], earlier: Sequence[Earlier]
) -> list[Mapping[str, float]]:
    """Tokens per row in each source that `source` continues, the earliest first.

    Where they are not known yet, no lane can be asked for either, and any will do.
    """
    if earlier:
        return [run.tokens_per_row for run in earlier]
    made: list[Mapping[str, float]] = []
    while source.continues is not None:
        source = source.continues
        made.append(tokens_per_row)
    return made


def _fingerprint(
    source: WorkSource,
    operators: Operators,
    options: Options,
    topology: Topology,
    datasets: Sequence[OpenDataset],
    needs: Sequence[Needs],
    tokenizer: Tokenizer | None,
    special: tuple[int | None, int | None],
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "stream_version": STREAM_VERSION,
        "canonical_replicas": topology.lanes,
        "seq_len": operators.pack.max_length,
        "tokenizer": tokenizer.content_hash[:16] if tokenizer else "none",
        "tokenizer_backend": f"{tokenizer.backend} {tokenizer.backend_version}" if tokenizer else "none",
        "special_tokens": f"bos={special[0]} eos={special[1]}",
        "pack_algorithm": operators.pack.described(),
        "shuffle": f"buffer_size={operators.shuffle.buffer_size} seed={operators.shuffle.seed}"
        if operators.shuffle
        else "none",
        "seed": source.seed,
        "chunk_size": source.chunk_size,
        "flush_every_k_chunks": options.flush_every_k_chunks,
        "order": f"shards={source.shuffle_shards} rows={source.shuffle_within_shard} block={source.shuffle_block_size}",
        "end": f"drop_last={operators.batch.drop_last}" if source.finite else "repeat",
        "token_estimation": f"sample_bytes={source.estimation.sample_bytes}" if source.estimation else "none",
        "datasets": [dataset.name for dataset in datasets],
    }
    if operators.rows:
        made["row_operators"] = [_brief(operator.identity()) for operator in operators.rows]
    if not operators.is_plain:
        made["documents"] = [_brief(operator.identity()) for operator in operators.encode]
    brief = len(datasets) > _DATASETS_IN_DETAIL
    if operators.mixture:
        made["ensure_mixture"] = f"buffer_size={operators.mixture.buffer_size}"
    made |= _order_and_end(source)
    if isinstance(source, ScheduledMixtureWorkSource):
        made["schedule"] = _schedule(source, options, operators)
    if source.continues is not None:
        names = source.names
        places = [names.index(name) for name in source.continues.names]
        before = _fingerprint(
            source.continues,
            operators,
            options,
            topology,
            [datasets[i] for i in places],
            [needs[i] for i in places],
            tokenizer,
            special,
        )
        made["continues"] = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:16]
    if operators.pack.homogeneity == "group":
        groups = {dataset.name: dataset.group for dataset in source.datasets if dataset.group}
        made["groups"] = hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:10] if brief else groups
    for dataset, need, weight in zip(datasets, needs, source.relative_weights.values(), strict=True):
        content = _content(dataset.catalog, dataset.catalog.n_shards, need.size_column, weight, brief)
        made[f"dataset {dataset.name}"] = content
    return made


def _schedule(source: ScheduledMixtureWorkSource, options: Options, operators: Operators) -> list[list[Any]]:
    """The stages of a source: start in planned tokens, kind of change, end or None, and shares by dataset."""
    per_step = options.global_batch * operators.pack.record_length if options.global_batch else 1
    return [stage.to_plain(per_step) for stage in source.schedule]


def _own_settings(source: WorkSource, name: str) -> str:
    """What a source says of one dataset's order and end, for people."""
    own = {key: value for key, value in source.per_dataset.get(name, {}).items() if name not in source.retired}
    return ", ".join(f"{key} {value}" for key, value in own.items())


def _order_and_end(source: WorkSource) -> dict[str, Any]:
    """What a source says of order and repetition besides what every source says."""
    made: dict[str, Any] = {}
    if not source.reshuffle_on_repeat:
        made["reshuffle_on_repeat"] = False
    endings = {name: source.ending(name) for name in source.names}
    if any(ending != Ending(1 if source.finite else None) for ending in endings.values()):
        made["endings"] = {name: [ending.passes, ending.ends_run] for name, ending in endings.items()}
    own = {name: asdict(source.order_options(name)) for name in source.names}
    own = {name: order for name, order in own.items() if name in source.per_dataset}
    if own:
        made["orders"] = own
    return made


def _brief(identity: str) -> str:
    """An operator's identity in a few words; a state has room for no more."""
    if len(identity) <= 80:
        return identity
    return f"{identity[:60]}... {hashlib.sha256(identity.encode()).hexdigest()[:12]}"


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
    in_bins = operators.pack.num_bins * compiled.record_bytes * topology.width if operators.pack.has_bins else 0
    bound = cache.memory_bytes + 2 * plan.lookahead_bytes + 2 * (ready + buffered) + in_bins
    if plan.readahead_bytes:
        bound += cache.memory_bytes // 2
    lines = ["data"]
    for dataset, share in zip(compiled.datasets, source.shares.values(), strict=True):
        catalog = dataset.catalog
        lines.append(
            f"  {dataset.name}: {share:.2%} of tokens, {catalog.fmt}, {len(catalog.shard_names):,} shards, "
            f"{catalog.rows:,} rows, {_size(catalog.bytes)}, about {compiled.tokens_per_row[dataset.name]:,.0f} "
            f"{'tokens' if source.counts_tokens else 'bytes'} per row"
        )
        if dataset.lost:
            lines.append(f"    left out as damaged: {len(dataset.lost):,} of the shards, see options(error_report=...)")
    lines += [
        f"order: seed {source.seed}, shuffle_shards {source.shuffle_shards}, shuffle_within_shard "
        f"{source.shuffle_within_shard}, block {source.shuffle_block_size}, "
        f"{'ends' if source.finite else 'repeats without end'}",
        *(f"  {name}: {told}" for name in source.names if (told := _own_settings(source, name))),
    ]
    if isinstance(source, ScheduledMixtureWorkSource):
        lines.append("schedule, in planned tokens: see zephon plan")
        for start, change, end, shares in _schedule(source, options, operators):
            told = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
            lines.append(f"  from {start:,} {change}{f' until {end:,}' if end else ''}: {told}")
    lines += [
        "operators",
        *(f"  {operator.label}{_for(operator)}{_where(operator)}" for operator in operators.rows),
        *(f"  {_described(compiled, operator)}{_for(operator)}{_where(operator)}" for operator in operators.encode),
        f"  {operators.pack.name}: {operators.pack.described()}, records of {operators.pack.record_length:,} tokens",
    ]
    if operators.mixture:
        lines.append("    ensure_mixture: records of one dataset each, in turn; each lane holds a stock")
    if operators.pack.has_bins:
        lines.append(
            f"    {operators.pack.num_bins} bins per lane ({_size(in_bins)} over the lanes of this group), drained "
            f"every {plan.stretch:,} to {2 * plan.stretch:,} records and at the end of every window"
        )
    if operators.shuffle:
        lines.append(
            f"  shuffle: buffer of {operators.shuffle.buffer_size:,} records, "
            f"{max(1, operators.shuffle.buffer_size // topology.lanes):,} per lane"
        )
    lines += [
        f"  batch: {operators.batch.microbatch_size} records",
        f"workers: runner {options.runner}"
        + (", " + ", ".join(f"{kind} {count}" for kind, count in compiled.workers.items()))
        * (options.runner != "inline")
        + ", in a process of their own" * options.isolate,
        f"lanes: {topology.lanes}, of which group {topology.dp_group_id} of {topology.dp_degree} owns "
        f"{topology.owned.start} to {topology.owned.stop - 1}",
        f"window: {plan.window_chunks} chunk(s) of {source.chunk_size:,} rows per lane",
        f"look-ahead: {_size(plan.lookahead_bytes)} of text, {compiled.ready_records:,} records ready ({_size(ready)})",
        f"memory bound: {_size(bound)} besides the libraries, of which {_size(cache.memory_bytes)} for decoded data",
        *(f"note: {finding}" for finding in compiled.findings),
    ]
    return "\n".join(lines)


def _described(compiled: Compiled, encode: Any) -> str:
    tokenizer = compiled.tokenizer
    with_what = (
        f"{encode.tokenizer_id}, {tokenizer.backend} {tokenizer.backend_version}" if tokenizer else "no tokenizer"
    )
    limit = f", at most {encode.max_length:,} tokens" if encode.max_length else ""
    return f"{encode.kind}: {with_what}, BOS {compiled.bos_id}, EOS {compiled.eos_id}, column {encode.field}{limit}"


def _for(operator: Any) -> str:
    return f" for {', '.join(operator.datasets)}" if operator.datasets else ""


def _where(operator: Any) -> str:
    return {None: "", "process": ", in processes", "threads": ", in this process"}[getattr(operator, "runner", None)]


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
