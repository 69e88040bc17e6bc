"""What is read before the first batch: datasets, tokenizer, some rows, and how many tokens rows have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from zephon.columns.arrow import choose_allocator
from zephon.columns.progress import progress_of
from zephon.config.options import FaultPolicy, Options, default_workers
from zephon.curriculum.source import WorkSource
from zephon.data.cache import DecodeCache
from zephon.data.fetch import open_spans
from zephon.data.index import kept_result
from zephon.data.reader import OpenDataset
from zephon.engine.plan import Fetcher
from zephon.errors import DataError, PipelineError
from zephon.ops.documents import DocumentWorker
from zephon.ops.needs import Needs, columns_needed
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import RowOperator
from zephon.ops.tokenize import Tokenize
from zephon.ops.trial import Sample, probe
from zephon.run.operators import Operators
from zephon.tokenizer.tokenizer import SAMPLE_BYTES, Tokenizer, load_tokenizer

_log = logging.getLogger("zephon")
_LEAST_SAMPLE_BYTES = 8 << 10
_LOST_LOGGED = 10


@dataclass(frozen=True)
class Inputs:
    """Datasets, tokenizer and samples.

    Attributes:
        datasets, needs: by dataset, the opened dataset and the columns read of it.
        chains: by dataset, the row operators with their types.
        samples: those that have been read, by dataset.
        fetch: what reads rows.
        tokenizer: None where no operator needs one.
    """

    datasets: tuple[OpenDataset, ...]
    needs: list[Needs]
    chains: list[Sequence[RowOperator]]
    samples: dict[int, Sample]
    fetch: Fetcher
    tokenizer: Tokenizer | None

    def sample(self, number: int) -> Sample:
        """Some rows of a dataset that go through its operators; read when asked for, since it takes a whole group."""
        if number not in self.samples:
            self.samples[number] = next(self.fetch.samples(number))
        return self.samples[number]

    def kept(
        self, what: str, index_dir: Path | None, details: Mapping[int, object], compute: Callable[[int], Any]
    ) -> dict[int, Any]:
        """`compute(number)` of the datasets in `details`, kept in `index_dir` by these, files, tokenizer and operators.

        What depends on functions of the user's is not kept, since their source does not tell all that they do.
        """
        release, encoder = version("zephon-core"), self.tokenizer
        library = (encoder.content_hash, encoder.backend, encoder.backend_version) if encoder else ()

        def result(number: int) -> Any:
            need, chain, dataset = self.needs[number], self.chains[number], self.datasets[number]
            identity = [
                *(what, release, *library, details[number], dataset.name, dataset.catalog.fmt),
                *(dataset.catalog.fingerprint, need.columns, need.size_column),
                *(operator.identity() for operator in (*chain, need.encode)),
            ]
            is_plain = not any(operator.function for operator in chain)
            return kept_result(index_dir if is_plain else None, identity, partial(compute, number))

        results: dict[int, Any] = {}
        with (
            ThreadPoolExecutor(default_workers(), thread_name_prefix="zephon-start") as pool,
            progress_of(lambda: f"{what}: {len(results)} of {len(details)} datasets done"),
        ):
            for number, each in zip(details, pool.map(result, details), strict=True):
                results[number] = each
        return results


def open_inputs(source: WorkSource, operators: Operators, options: Options) -> Inputs:
    """Open the datasets and load the tokenizer, side by side: both mostly run outside the interpreter lock."""
    choose_allocator()
    index_dir, skips = options.cache.index_dir, options.faults.skips
    cache, spans = DecodeCache(options.cache.memory_bytes, options.cache.decoded_limit_bytes), open_spans(options.cache)
    needs: list[Needs] = []
    datasets: list[OpenDataset] = []
    with (
        ThreadPoolExecutor(1, thread_name_prefix="zephon-start") as helper,
        progress_of(lambda: f"opening data: {len(datasets)} of {len(source.names)} datasets open"),
    ):
        loading = helper.submit(_load_tokenizer, operators.encode, index_dir)
        for dataset in source.datasets:
            chain = [operator for operator in operators.rows if operator.is_for(dataset.name)]
            encode = operators.encode_for(dataset.name)
            needs.append(columns_needed(dataset, chain, encode, index_dir, skips, spans))
        for dataset, need in zip(source.datasets, needs, strict=True):
            opened = dataset.open(
                list(dict.fromkeys([*need.columns.values(), need.size_column])),
                size_column=need.size_column,
                cache=cache,
                index_dir=index_dir,
                is_text=need.is_text,
                optional=need.optional,
                encoded=need.encoded,
                spans=spans,
                skips=skips,
            )
            datasets.append(opened)
        if spans is not None:
            spans.check_limit()
        for opened in datasets:
            _check_lost(opened, options.faults)
        fetch = Fetcher(datasets, [need.columns for need in needs])
        chains: list[Sequence[RowOperator]] = []
        samples: dict[int, Sample] = {}
        for d, need in enumerate(needs):
            chains.append(need.operators)
            if need.operators or not isinstance(need.encode, Tokenize):
                chains[d], samples[d], warning = probe(need.operators, fetch.samples(d), source.names[d])
                if warning:
                    _log.warning("%s", warning)
        return Inputs(tuple(datasets), needs, chains, samples, fetch, loading.result())


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
    for shard in lost[:_LOST_LOGGED]:
        _log.warning('dataset "%s": shard %s is left out: %s', dataset.name, shard.name, shard.reason)


def _load_tokenizer(encode: Sequence[Any], index_dir: Path | None) -> Tokenizer | None:
    """The one tokenizer that the operators name."""
    wanted = [op for op in encode if not (isinstance(op, Pretokenized) and op.tokenizer_id is None)]
    named = {str(operator.tokenizer_id): operator for operator in wanted}
    if len(named) > 1:
        raise PipelineError(f"the operators name several tokenizers ({', '.join(named)}); a model has one.")
    for operator in named.values():
        return load_tokenizer(operator.tokenizer_id, backend=operator.backend, index_dir=index_dir)
    return None


def check_documents(inputs: Inputs, worker: DocumentWorker, details: Sequence[object], index_dir: Path | None) -> None:
    """Read some rows of every dataset and compare the library that encodes with `tokenizers` on their documents.

    Once: what a later start would find is kept.
    """
    tokenizer = inputs.tokenizer
    share = max(_LEAST_SAMPLE_BYTES, SAMPLE_BYTES // len(inputs.datasets))

    def agrees(number: int) -> bool | None:
        table = inputs.sample(number).table
        return tokenizer is None or tokenizer.selfcheck(worker.texts(number, table), share) or None

    inputs.kept("checking documents", index_dir, {d: (worker.skips, of) for d, of in enumerate(details)}, agrees)


def measure_ratios(
    source: WorkSource,
    inputs: Inputs,
    worker: DocumentWorker,
    known: Mapping[str, float],
    details: Sequence[object],
    index_dir: Path | None,
) -> dict[str, float]:
    """Tokens per row by dataset name, measured where they are not known, and kept in `index_dir`.

    With one dataset and no schedule nothing depends on it, so nothing is measured.

    Args:
        details: for each dataset, what decides its documents, besides files, columns, operators and tokenizer.
    """
    datasets, estimation = inputs.datasets, source.estimation
    if not source.counts_tokens or estimation is None:
        return {d.name: known.get(d.name, max(1.0, d.catalog.bytes / d.catalog.rows)) for d in datasets}

    def measure(number: int) -> float:
        failures: list[tuple[int, str, str]] = []

        def count(table: pa.Table) -> int:
            return worker.count(number, inputs.fetch.named(number, table), failures)

        size_column = inputs.needs[number].size_column
        return estimation.tokens_per_row(datasets[number], size_column, count, seed=source.seed, failures=failures)

    settings = source.seed, estimation.sample_bytes, worker.skips
    unknown = {d: (*settings, details[d]) for d, name in enumerate(source.names) if name not in known}
    ratios = inputs.kept("measuring tokens per row", index_dir, unknown, measure)
    return {name: known.get(name) or ratios[d] for d, name in enumerate(source.names)}
