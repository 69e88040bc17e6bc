"""`zephon show`: what the model saw in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zephon.batch import SampleBatch
from zephon.cli.console import make_console, printable
from zephon.cli.source import open_pipeline, plural, tokenizer_id
from zephon.config.recipe import DataRecipe
from zephon.config.topology import resolve_lanes
from zephon.errors import DataError, PipelineError
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["describe_records", "show"]


def show(
    recipe: Path,
    *,
    tokenizer: str,
    seq_len: int,
    global_batch: int,
    step: int,
    canonical_replicas: int | None,
    flush_index: Path | None,
    record: int | None,
    chars: int,
) -> None:
    """Print the records of one step, or one of them."""
    first = step * global_batch
    if record is not None and not first <= record < first + global_batch:
        raise PipelineError(
            f"record {record} is not in step {step}, which holds records {first} to {first + global_batch - 1}; "
            f"it is in step {record // global_batch}."
        )
    if flush_index is not None and not flush_index.is_dir():
        raise DataError(f"{flush_index}: there is no such folder; name the one that the run wrote its flush index to.")
    read = DataRecipe.from_toml(recipe)
    pipeline = open_pipeline(
        read,
        tokenizer=tokenizer,
        seq_len=seq_len,
        microbatch_size=global_batch,
        global_batch=global_batch,
        canonical_replicas=canonical_replicas,
    )
    if flush_index is None:
        pipeline.seek(step=step)
    else:
        # A pipeline with a flush index adds to it, and looking is not to write: so only its place is taken over.
        pipeline.restore(pipeline.options(flush_index=flush_index).seek(step=step).checkpoint())
    batch = next(iter(pipeline), None)
    pipeline.close()
    if batch is None:
        raise DataError(f"{read.origin}: the data ends before step {step}; name an earlier one.")
    given = canonical_replicas or read.canonical_replicas
    lanes = resolve_lanes(given, global_batch=global_batch, dp_degree=1)
    console = make_console()
    decoder = load_tokenizer(tokenizer_id(tokenizer))
    wanted = range(len(batch)) if record is None else [record - first]
    for line in describe_records(batch, wanted, lanes, decoder, chars):
        console.print(line)


def describe_records(
    batch: SampleBatch, indices: Iterable[int], lanes: int, tokenizer: Tokenizer, chars: int
) -> Iterator[str]:
    """Where the tokens of records came from, and their text, cut to `chars` characters a document."""
    provenance, edges, width = batch.provenance(), batch.block.span_offsets.tolist(), batch.tokens.shape[1]
    for index in indices:
        number, length = int(batch.sequence_numbers[index]), int(batch.lengths[index])
        documents: list[dict[str, Any]] = provenance.slice(edges[index], edges[index + 1] - edges[index]).to_pylist()
        padding = f", {width - length} of padding" if length < width else ""
        yield (
            f"record {number}, lane {number % lanes}: {length} tokens of {plural(len(documents), 'document')}{padding}"
        )
        for document in documents:
            begin, end, start = document["token_begin"], document["token_end"], document["start"]
            yield printable(
                f"  {document['dataset']}, {document['shard']}, row {document['row']}, tokens {begin} to {end - 1}"
            )
            if chars:
                text = tokenizer.decode(batch.tokens[index, start : start + end - begin])
                more = f" [{plural(len(text) - chars, 'more character')}]" if len(text) > chars else ""
                for line in (printable(text[:chars], lines=True) + more).split("\n"):
                    yield f"    | {line}".rstrip()
