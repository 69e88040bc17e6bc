"""From the description of a pipeline to something that runs: open, check, measure, plan.

This is where a misconfigured run fails, before its first batch.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from zephon.columns.faults import RowFault
from zephon.columns.lane_start import LaneStart
from zephon.config.keys import keys_of
from zephon.config.options import Options, default_lookahead, default_workers
from zephon.config.topology import Topology, resolve_feeds
from zephon.curriculum.source import WorkSource
from zephon.data.catalog import Catalog
from zephon.data.reader import OpenDataset
from zephon.engine.engine import Engine, EngineSetup
from zephon.engine.pixels import PixelStage
from zephon.engine.plan import Plan
from zephon.engine.processes.isolated import IsolatedEngine
from zephon.engine.start import start_engine
from zephon.errors import DataError, PipelineError
from zephon.ops.documents import DocumentWorker
from zephon.ops.encode import Encoder
from zephon.ops.images import TokenizeImages
from zephon.ops.media import vision_ids
from zephon.ops.needs import Needs
from zephon.ops.pack import PackFlat
from zephon.ops.rows import RowOperator
from zephon.ops.stateful import StatefulStage, StatefulTransform
from zephon.ops.tokenize import Tokenize
from zephon.ops.trial import Sample, check_operators
from zephon.ops.typing import Types, types_of
from zephon.run.fingerprint import Content, check_fingerprint, describe_growth, fingerprint_of
from zephon.run.inputs import Inputs, check_documents, measure_ratios, open_inputs
from zephon.run.operators import Operators
from zephon.run.state import Earlier, RunState
from zephon.tokenizer.specials import resolve_special_tokens
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings

_log = logging.getLogger("zephon")
_SpecialIds = tuple[int | None, int | None]
_Range = tuple[int, int]

# Rows cost something besides their text, which matters where they are tiny.
_LEAST_ROW_BYTES = 64.0
_PIXEL_BYTES = 256 << 20  # made ahead
# Reading from stores: threads that wait and decode, so that those that tokenize need not; and how much text all lanes
# together look ahead for what to fetch, about a second's worth of the fastest tokenizer.
_REMOTE_FETCHERS, _READAHEAD_BYTES = 4, 256 << 20


@dataclass(frozen=True)
class Compiled:
    """A pipeline ready to run: opened datasets, loaded tokenizer, measured ratios and the plan.

    Attributes:
        special: ids of BOS and EOS, or None.
        tokens_per_row: by dataset name.
        earlier: of the runs that this one took over from, the earliest first; none where that is still to come.
        history: as in `RunState`.
        fingerprint: everything that decides the data, by name, as JSON types.
        workers: threads by kind of work.
        contents: by dataset name.
        findings: what the check of the user's own operators found besides.
    """

    source: WorkSource
    operators: Operators
    options: Options
    topology: Topology
    datasets: tuple[OpenDataset, ...]
    contents: dict[str, Content]
    tokenizer: Tokenizer | None
    special: _SpecialIds
    tokens_per_row: dict[str, float]
    earlier: tuple[Earlier, ...]
    fingerprint: dict[str, Any]
    workers: dict[str, int]
    plan: Plan
    findings: tuple[str, ...]
    history: str = ""

    @property
    def digest(self) -> str:
        """One SHA-256 over the fingerprint, the measured ratios and the history."""
        return self.state({}, 0, {}, ()).data

    @property
    def vision(self) -> VisionSettings | None:
        """How the model sees images, where there are any."""
        return None if self.plan.pixels is None else self.plan.pixels.vision

    @property
    def image_id(self) -> int:
        """The placeholder of images; -1 where there are none."""
        if self.vision is None or self.tokenizer is None:
            return -1
        _, image_id, _ = vision_ids(self.vision, self.tokenizer)
        assert image_id is not None
        return image_id

    @property
    def digests_pixels(self) -> bool:
        """Whether digests are over pixels of images too."""
        return self.options.digest_pixels and self.vision is not None

    @property
    def lane_history(self) -> dict[int, int]:
        """For each feed of this group, a number for the places where it was taken over; 0 for none."""
        cuts = {feed: [run.cuts[feed] for run in self.earlier] for feed in self.topology.owned_feeds}
        return {feed: zlib.crc32(json.dumps(each).encode()) if each else 0 for feed, each in cuts.items()}

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a global batch, or None where steps are not counted."""
        return _tokens_per_step(self.operators, self.options)

    @property
    def record_bytes(self) -> int:
        """Bytes of the tokens of one record and, about, of the files of its images."""
        return self.plan.record_bytes

    @property
    def ready_records(self) -> int:
        """Finished records that may wait for the consumer."""
        return self.options.ready_records(self.operators.batch.microbatch_size, self.record_bytes)

    def engine(
        self,
        starts: Mapping[int, tuple[LaneStart, int]],
        passed: int = 0,
        on_window: Callable[[int, LaneStart], None] | None = None,
        on_fault: Callable[[int, int, RowFault], None] | None = None,
    ) -> Engine | IsolatedEngine:
        """A fresh engine with its lanes at `starts`; see `EngineSetup`."""
        options, batch = self.options, self.operators.batch.microbatch_size
        workers = options.runner, options.ray, self.workers
        setup = EngineSetup(self.plan, *workers, starts, passed, batch, self.ready_records, on_window, on_fault)
        return IsolatedEngine(setup) if self.options.isolate else start_engine(setup)

    def state(
        self, starts: dict[int, LaneStart], cursor: int, images: Mapping[int, _Range], skipped: tuple[_Range, ...]
    ) -> RunState:
        """The state of this group where its feeds start at `starts`, `cursor` of its records have been used, its lanes
        have had `images` (see `RunState`), and ranges of rounds are left out."""
        topology = self.topology
        rounds, extra = divmod(cursor, topology.width)
        batch = topology.global_batch or 1
        judges_images = self.vision is not None and self.options.faults.skips
        return RunState(
            fingerprint=self.fingerprint,
            tokens_per_row=self.tokens_per_row,
            lanes_total=topology.lanes,
            lanes={lane: starts[n] for lane in topology.owned if (n := lane // topology.lanes_per_feed) in starts},
            rounds=rounds,
            extra=extra,
            dp_degree=topology.dp_degree,
            dp_group_id=topology.dp_group_id,
            skipped=skipped,
            earlier=self.earlier,
            history=self.history,
            global_batch=batch if skipped and cursor * topology.dp_degree % batch else 0,
            images={lane: images.get(lane, (0, 0)) for lane in topology.owned} if judges_images else {},
        )

    def accepting(self, read: RunState, allow: Collection[str], remedy: str) -> tuple[RunState, Compiled]:
        """A state of this run, or of one that differs in what is allowed, and the pipeline to go on from it."""
        again = f"the rows of {read.repeated:,} records, used since lanes could be entered, come again."
        cost = f"No row is lost then, but what the new packing leaves out; {again} "
        where = "the state was taken with other data"
        # Weights before and after a schedule are not of one kind.
        told: dict[str, Any] = {"remedy": remedy, "cost": cost}
        if "schedule" not in {**read.fingerprint, **self.fingerprint}:
            told["explain"] = self.describe_growth
        accepted = check_fingerprint(read.fingerprint, self.fingerprint, allow=allow, where=where, **told)
        for change in accepted:
            _log.warning("the data differ from those of the state, as %s says: %s", remedy, change)
        if all(change.is_exact for change in accepted):
            return read, self
        _log.warning("%s", again)
        read = read.with_other_tokens(self.plan)
        return read, replace(self, history=read.history)

    def describe_growth(self, field: str, before: Any) -> str:
        """Words for a changed field of the fingerprint where a dataset has only new shards or a new weight, else ""."""
        name, written, weights = field.removeprefix("dataset "), self.source.mixture or {}, self.source.relative_weights
        if field == name or name not in self.contents:
            return ""
        if isinstance(before, dict) and {**before, "weight": weights[name]} == self.fingerprint[field]:
            first = next(other for other, weight in weights.items() if weight)
            now = f"{written[name]:g} to {written[first]:g}"
            return f"the weight to that of {first} is {now}, and was {before['weight']:g} to 1"
        catalog, column, _ = self.contents[name]
        return describe_growth(catalog, column, weights[name], before)


def compile_pipeline(
    source: WorkSource,
    operators: Operators,
    options: Options,
    tokens_per_row: Mapping[str, float] | None = None,
    earlier: Sequence[Earlier] = (),
) -> Compiled:
    """Open the datasets, load the tokenizer, measure the token ratios that are not given, and plan the run."""
    topology = Topology(options.lanes, options.dp_degree, options.dp_group_id, options.global_batch)
    names = source.names
    operators.check_datasets(names)
    if source.continues is not None and operators.stateful is not None:
        raise PipelineError(
            "a run that takes over from an earlier one (continue_from, continues) cannot have a stateful_transform: "
            "places in its lanes are counted in rows that the transform gave, which are no places in the data where "
            "another mixture could begin; leave out one of the two."
        )
    kinds = _kinds(operators.pack, source)
    for operator in operators.rows:
        operator.identity()  # what objects carry now, before they have worked
    inputs = open_inputs(source, operators, options)
    datasets, needs, tokenizer = inputs.datasets, inputs.needs, inputs.tokenizer
    topology = _with_feeds(topology, source, options, datasets)
    encoders, special = _encoders(operators, needs, tokenizer)
    locate = partial(_locate, [dataset.catalog for dataset in datasets])

    def worker(chains: Sequence[Sequence[RowOperator]]) -> DocumentWorker:
        return DocumentWorker(chains, encoders, names, locate, options.faults)

    whole = worker(inputs.chains)
    findings = _tried(whole, names, inputs.samples, options)
    contents = {
        name: Content(dataset.catalog, need.size_column, _details(need, chain, encoder, special))
        for name, dataset, need, chain, encoder in zip(names, datasets, needs, inputs.chains, encoders, strict=True)
    }
    details = [(special, contents[name].details) for name in names]
    check_documents(inputs, whole, details, options.cache.index_dir)
    ratios = measure_ratios(source, inputs, whole, tokens_per_row or {}, details, options.cache.index_dir)
    # Also of the runs before; while they are not known, no lane can be asked for, and any ratios will do.
    ratios_before = [run.tokens_per_row for run in earlier] or [ratios] * source.generations
    curriculum = source.curriculum(
        {dataset.name: dataset for dataset in datasets},
        [*ratios_before, ratios],
        lanes=topology.feeds,
        tokens_per_step=_tokens_per_step(operators, options),
        cuts=[run.cuts for run in earlier],
    )
    stateful = operators.stateful
    before, after, types = _around_stateful(inputs) if stateful else ([], inputs.chains, [])
    workers = {"tokenize": next((op.parallelism for op in operators.encode if op.parallelism), default_workers())}
    if packers := options.pack_parallelism or operators.pack.parallelism:
        workers["pack"] = packers
    remote = any(dataset.remote for dataset in datasets)
    if options.fetch_parallelism or remote:
        workers["fetch"] = options.fetch_parallelism or _REMOTE_FETCHERS
    vision = _vision_of(needs)
    if vision is not None:
        operators.pack.check_room(vision)
        workers["vision"] = workers["tokenize"]
    row_bytes = np.array([_row_bytes(inputs, whole, d) for d in range(len(names))])
    plan = Plan(
        topology=topology,
        curriculum=curriculum,
        window_chunks=options.flush_every_k_chunks,
        # Text that goes straight to the same encoder: which dataset a row is of makes no difference.
        fetch=inputs.fetch.joining(
            [
                id(encoder) if encoder.joins and not chain and stateful is None else d
                for d, (encoder, chain) in enumerate(zip(encoders, inputs.chains, strict=True))
            ]
        ),
        tokenize=worker(after),
        fetch_apart="fetch" in workers,
        pack_apart="pack" in workers,
        pack=operators.pack,
        shuffle=operators.shuffle,
        pad_token=special[1] or 0,
        finite=source.finite,
        pad_last=not operators.batch.drop_last,
        dataset_names=tuple(names),
        row_bytes=row_bytes,
        record_bytes=_record_bytes(source, operators, row_bytes, ratios),
        lookahead_bytes=options.prefetch_buffer_size
        or default_lookahead(workers["tokenize"], len(topology.owned_feeds)),
        readahead_bytes=(options.prefetch_buffer_size or _READAHEAD_BYTES) if remote else 0,
        # A stateful transform may leave out all but the first of a window, and gives rows again in the next one.
        barren_limit=10_000
        + 2 * sum(int(dataset.catalog.rows) for dataset in datasets)
        + (2 * source.chunk_size * options.flush_every_k_chunks if stateful else 0),
        mixture=operators.mixture,
        tokens_per_row=tuple(max(1, round(ratios[name] * 65536)) for name in names),
        kinds=kinds,
        faults=options.faults,
        stateful=None if stateful is None else StatefulStage(stateful, worker(before), names, types),
        pixels=None
        if vision is None
        else PixelStage(
            vision,
            names,
            locate,
            options.faults,
            options.prefetch_buffer_size or _PIXEL_BYTES,
            _placeholders(vision, tokenizer, operators.pack),
            workers=workers["vision"],
            batch=operators.batch.microbatch_size,
        ),
    )
    return Compiled(
        source=source,
        operators=operators,
        options=options,
        topology=topology,
        datasets=datasets,
        contents=contents,
        tokenizer=tokenizer,
        special=special,
        tokens_per_row=ratios,
        earlier=tuple(earlier),
        fingerprint=fingerprint_of(source, operators, options, topology, contents, tokenizer, special),
        workers=workers,
        plan=plan,
        findings=findings,
    )


def _with_feeds(topology: Topology, source: WorkSource, options: Options, datasets: Sequence[OpenDataset]) -> Topology:
    # A run that takes over from another keeps its feeds.
    first = source
    while first.continues is not None:
        first = first.continues
    nbytes = sum(int(each.catalog.bytes) for each in datasets if each.name in first.names) if first.finite else None
    feeds = resolve_feeds(options.feeds, lanes=topology.lanes, nbytes=nbytes)
    if source.finite and topology.dp_degree > 1 and feeds > 1 and options.combine_flag is None:
        raise PipelineError(
            f"the data ends (it does not repeat without end) and there are {topology.dp_degree} data-parallel groups, "
            "whose lanes end at different steps; pass options(combine_flag=...), a function that tells whether any "
            "rank called it with True."
        )
    return replace(topology, lanes_per_feed=topology.lanes // feeds)


def _tokens_per_step(operators: Operators, options: Options) -> int | None:
    return None if options.global_batch is None else options.global_batch * operators.pack.record_length


def _tried(
    worker: DocumentWorker, names: Sequence[str], samples: Mapping[int, Sample], options: Options
) -> tuple[str, ...]:
    """Try the row operators, and what comes out of them on those that make tokens of anything but text, whose types say
    little; gives findings for people."""
    sent_for = "isolate" if options.isolate else 'runner "process"' if options.runner == "process" else None
    compare = options.check_operators
    findings = check_operators(worker, names, samples, options.faults, compare=compare, sent_for=sent_for)
    for d, sample in samples.items():
        failed: list[tuple[int, str, str]] = []
        try:
            tokens = worker.count(d, sample.table, failed)
        except PipelineError as error:
            where = ", after its operators" if worker.chains[d] else ""
            raise PipelineError(f'dataset "{names[d]}"{where}: {error}') from error.__cause__
        if not tokens and 2 * len({place for place, _, _ in failed}) > len(sample.rows):
            (place, kind, reason), rows = failed[0], f"any of the {len(sample.rows):,} rows tried before the run"
            at = worker.describe(d, int(sample.rows[place]))
            raise DataError(f"{kind} cannot use {rows}; the first, {at}: {reason}; name another column or repair it.")
    return findings


def _row_bytes(inputs: Inputs, worker: DocumentWorker, number: int) -> float:
    """Bytes per row of all columns and files that are read: the catalog tells of one column, some rows of the rest."""
    dataset, need = inputs.datasets[number], inputs.needs[number]
    row_bytes = dataset.catalog.bytes / dataset.catalog.rows
    if others := [name for name, source in need.columns.items() if source != need.size_column]:
        table = inputs.sample(number).table
        row_bytes += table.select(others).nbytes / max(1, table.num_rows)
    files = worker.image_bytes(number, inputs.sample(number).table) if getattr(need.encode, "media_root", None) else 0.0
    return max(_LEAST_ROW_BYTES, row_bytes + files)


def _record_bytes(
    source: WorkSource, operators: Operators, row_bytes: np.ndarray, tokens_per_row: Mapping[str, float]
) -> int:
    """Bytes of the tokens of a record and, about, of the files of its images."""
    per_token = 4.0
    for (name, share), nbytes in zip(source.shares.items(), row_bytes.tolist(), strict=True):
        if getattr(operators.encode_for(name), "vision", None) is not None:
            per_token += share * nbytes / max(1.0, tokens_per_row[name])
    return int(operators.pack.record_length * per_token)


def _kinds(pack: PackFlat, source: WorkSource) -> np.ndarray:
    """int64[n_datasets]: which datasets may share a record, those of one number."""
    kinds = {
        "none": [("any", "")] * len(source.datasets),
        "full": [("dataset", dataset.name) for dataset in source.datasets],
        # A dataset without a group is one of its own.
        "group": [("group", each.group) if each.group else ("dataset", each.name) for each in source.datasets],
    }[pack.homogeneity]
    if pack.homogeneity == "group" and all(dataset.group is None for dataset in source.datasets):
        raise PipelineError(
            f'{pack.kind} homogeneity is "group", but no dataset has a group; give some of {", ".join(source.names)} '
            "one."
        )
    distinct = list(dict.fromkeys(kinds))
    if pack.has_bins and len(distinct) > pack.num_bins:
        raise PipelineError(
            f"{pack.kind} has num_bins {pack.num_bins}, and records of {len(distinct)} kinds (homogeneity "
            f'"{pack.homogeneity}"); at least one bin for each kind is needed, and several are better.'
        )
    return np.array([distinct.index(kind) for kind in kinds], dtype=np.int64)


def _locate(catalogs: Sequence[Catalog], dataset: int, row: int) -> tuple[str, int]:
    """Shard and row within it, of a row of a dataset given by number."""
    shard, row_in_shard = catalogs[dataset].locate(np.array([row], dtype=np.int64))
    return str(catalogs[dataset].shard_names[int(shard[0])]), int(row_in_shard[0])


def _encoders(
    operators: Operators, needs: Sequence[Needs], tokenizer: Tokenizer | None
) -> tuple[list[Encoder], _SpecialIds]:
    """The encoder of each dataset, one object where they are alike, and the BOS and EOS that are put in."""
    by_operator: dict[Any, Encoder] = {}
    ends: list[_SpecialIds] = []
    for encode in dict.fromkeys(need.encode for need in needs):
        policy = encode.special_tokens
        if policy == "auto" and not isinstance(encode, Tokenize | TokenizeImages):
            policy = "none"  # conversations and given tokens have their ends
        special = resolve_special_tokens(policy, tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
        by_operator[encode] = encode.encoder(tokenizer, *special)
        ends.append(special)
    bos, eos = (next((end[side] for end in ends if end[side] is not None), None) for side in (0, 1))
    if eos is None and tokenizer is not None and not all(isinstance(op, Tokenize) for op in operators.encode):
        eos = tokenizer.eos_id  # documents bring their own
    return [by_operator[need.encode] for need in needs], (bos, eos)


def _vision_of(needs: Sequence[Needs]) -> VisionSettings | None:
    """How the model sees images, where there are any."""
    settings = [getattr(need.encode, "vision", None) for need in needs]
    found = list(dict.fromkeys(each for each in settings if each is not None))
    if len(found) > 1:
        raise PipelineError("the operators have different vision settings for several datasets; a model has one.")
    return found[0] if found else None


def _placeholders(vision: VisionSettings, tokenizer: Tokenizer | None, pack: PackFlat) -> tuple[int, ...]:
    """The tokens of the image of always_image; the encoders have checked that the tokenizer has them."""
    if not pack.always_image:
        return ()
    assert tokenizer is not None
    ids = tuple(each for each in vision_ids(vision, tokenizer) if each is not None)
    if pack.max_length <= len(ids):
        raise PipelineError(
            f"{pack.kind} max_length is {pack.max_length}; expected more than the {len(ids)} tokens of always_image."
        )
    return ids


def _details(need: Needs, chain: Sequence[RowOperator], encoder: Encoder, special: _SpecialIds) -> dict[str, str]:
    """Resolved settings of what encodes a dataset, as far as the fingerprint has them nowhere else."""
    encode = need.encode
    if not isinstance(encode, Tokenize):
        return encoder.details()
    # Where it is read as it stands, the column is that of the dataset.
    is_read = need.columns.get(encode.field) == need.size_column and not any(op.function for op in chain)
    field = {} if is_read or encode.field == keys_of(Tokenize)["field"].default else {"field": encode.field}
    return encoder.details(special) | field


def _around_stateful(
    inputs: Inputs,
) -> tuple[list[Sequence[RowOperator]], list[Sequence[RowOperator]], list[Types]]:
    """Per dataset, the operators before a stateful transform and those after it, and the types of what it gives; where
    it is for other datasets, all are after.

    Rows come out of a stateful transform as Python values, those of datasets that only pass it by, too, and get the
    types back that they had.
    """
    before: list[Sequence[RowOperator]] = []
    after: list[Sequence[RowOperator]] = []
    types: list[Types] = []
    for d, chain in enumerate(inputs.chains):
        for n, operator in enumerate(chain):
            if isinstance(operator, StatefulTransform):
                before.append(chain[:n])
                after.append([*operator.workers(), *chain[n + 1 :]])
                types.append(operator.types)
                break
        else:
            before.append([])
            after.append(chain)
            types.append(types_of(inputs.sample(d).table))
    return before, after, types
