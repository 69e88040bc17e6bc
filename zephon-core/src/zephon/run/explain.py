"""The compiled plan of a pipeline, for people."""

from __future__ import annotations

from typing import Any

from zephon.config.topology import divisors
from zephon.curriculum.source import ScheduledMixtureWorkSource
from zephon.run.compile import Compiled
from zephon.run.fingerprint import schedule_of
from zephon.vision.headers import MAX_PIXELS


def explain(compiled: Compiled) -> str:
    """Data, order, operators, workers, lanes, window, look-ahead and memory bound, one line each."""
    return "\n".join(
        [
            *_data_lines(compiled),
            *_order_lines(compiled),
            *_operator_lines(compiled),
            *_engine_lines(compiled),
            *(f"note: {finding}" for finding in compiled.findings),
        ]
    )


def _data_lines(compiled: Compiled) -> list[str]:
    source, lines = compiled.source, ["data"]
    unit = "tokens" if source.counts_tokens else "bytes"
    weights = {} if source.schedule else source.mixture or {}
    for dataset, share in zip(compiled.datasets, source.shares.values(), strict=True):
        catalog, name = dataset.catalog, dataset.name
        weight = f"weight {weights[name]:g}, " if name in weights else ""
        # What the run reads of all datasets in the time of one pass over this one.
        during = catalog.rows * compiled.tokens_per_row[name] / share if share else 0
        every = f", a pass every {during:,.0f} {unit} of the run" if share else ""
        lines.append(
            f"  {name}: {weight}{share:.2%} of tokens, {catalog.fmt}, {len(catalog.shard_names):,} shards, "
            f"{catalog.rows:,} rows, {_size(catalog.bytes)}, about {compiled.tokens_per_row[name]:,.0f} {unit} per row"
            f"{every}"
        )
        if dataset.lost:
            lines.append(f"    left out as damaged: {len(dataset.lost):,} of the shards, see options(error_report=...)")
    return lines


def _order_lines(compiled: Compiled) -> list[str]:
    source = compiled.source
    lines = [
        f"order: seed {source.seed}, shuffle_shards {source.shuffle_shards}, shuffle_within_shard "
        f"{source.shuffle_within_shard}, block {source.shuffle_block_size}, "
        f"{'ends' if source.finite else 'repeats without end'}"
    ]
    for name, settings in source.per_dataset.items():
        if name not in source.retired:
            lines.append(f"  {name}: {', '.join(f'{key} {value}' for key, value in settings.items())}")
    if isinstance(source, ScheduledMixtureWorkSource):
        lines.append("schedule, in planned tokens: see zephon plan")
        for start, change, end, shares in schedule_of(source, compiled.options, compiled.operators):
            described = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
            lines.append(f"  from {start:,} {change}{f' until {end:,}' if end else ''}: {described}")
    return lines


def _operator_lines(compiled: Compiled) -> list[str]:
    operators, plan, tokenizer = compiled.operators, compiled.plan, compiled.tokenizer
    pack, shuffle = operators.pack, operators.shuffle
    lines = ["operators"]
    lines += [f"  {operator.label}{_scope(operator)}" for operator in operators.rows]
    for encode in operators.encode:
        by = f"{encode.tokenizer_id}, {tokenizer.backend} {tokenizer.backend_version}" if tokenizer else "no tokenizer"
        limit = f", at most {encode.max_length:,} tokens" if encode.max_length else ""
        ends = f"BOS {compiled.special[0]}, EOS {compiled.special[1]}"
        lines.append(f"  {encode.kind}: {by}, {ends}, column {encode.field}{limit}{_scope(encode)}")
    lines.append(f"  {pack.kind}: {pack.described()}, records of {pack.record_length:,} tokens")
    if operators.mixture:
        lines.append("    ensure_mixture: records of one dataset each, in turn; each lane holds a stock")
    if pack.has_bins:
        lines.append(
            f"    {pack.num_bins} bins per lane ({_size(_bin_bytes(compiled))} over the lanes of this group), drained "
            f"every {plan.stretch:,} to {2 * plan.stretch:,} records and at the end of every window"
        )
    if shuffle:
        per_lane = max(1, shuffle.buffer_size // compiled.topology.feeds)
        lines.append(f"  shuffle: buffer of {shuffle.buffer_size:,} records, {per_lane:,} per lane")
    return [*lines, f"  batch: {operators.batch.microbatch_size} records"]


def _engine_lines(compiled: Compiled) -> list[str]:
    plan, topology, options = compiled.plan, compiled.topology, compiled.options
    cache, disk = options.cache.memory_bytes, options.cache.decoded_limit_bytes
    shuffle, ready = plan.shuffle, compiled.ready_records
    workers = "".join(f", {kind} {count}" for kind, count in compiled.workers.items())
    # Decoded data, text and tokens under way, and records ready, cut or shuffled (twice while they are gathered).
    records = 2 * (ready + (shuffle.buffer_size if shuffle else 0)) * compiled.record_bytes
    bound = cache + 2 * plan.lookahead_bytes + records + _bin_bytes(compiled)
    bound += cache // 2 if plan.readahead_bytes else 0
    made, decoding = plan.pixels.memory_bytes(plan.pack) if plan.pixels else (0, 0)
    bound += made + decoding
    pixels = f", {_size(made)} of pixels ready or in the making" if made else ""
    largest = f" and {_size(decoding)} while {MAX_PIXELS / 1e6:.0f} megapixels, the most, are decoded" if made else ""
    return [
        f"workers: runner {options.runner}{workers if options.runner != 'inline' else ''}"
        f"{', in a process of their own' if options.isolate else ''}",
        f"lanes: {topology.lanes}, of which group {topology.dp_group_id} of {topology.dp_degree} owns "
        f"{topology.owned.start} to {topology.owned.stop - 1}; the run can go on with so many data-parallel groups: "
        + ", ".join(map(str, divisors(topology.lanes)))
        + (f"; from {topology.feeds} feed(s)" if topology.lanes_per_feed > 1 else ""),
        f"window: {plan.window_chunks} chunk(s) of {compiled.source.chunk_size:,} rows per lane",
        f"look-ahead: {_size(plan.lookahead_bytes)} of text, {ready:,} records ready "
        f"({_size(ready * compiled.record_bytes)}{', with the files of images' if pixels else ''}){pixels}",
        f"memory bound: {_size(bound)} besides the libraries, of which {_size(cache)} for decoded data{largest}"
        f"{f'; beyond that up to {_size(disk)} on disk' if disk else ''}",
    ]


def _bin_bytes(compiled: Compiled) -> int:
    """Bytes of the records being filled side by side, over the lanes of this group."""
    pack = compiled.operators.pack
    return pack.num_bins * compiled.record_bytes * len(compiled.topology.owned_feeds) if pack.has_bins else 0


def _scope(operator: Any) -> str:
    """Which datasets an operator is for, and where it runs."""
    datasets = f" for {', '.join(operator.datasets)}" if operator.datasets else ""
    runner = getattr(operator, "runner", None)
    return datasets + {None: "", "process": ", in processes", "threads": ", in this process"}[runner]


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
