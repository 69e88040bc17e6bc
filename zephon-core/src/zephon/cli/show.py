"""`zephon show`: what the model saw in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from zephon.batch import SampleBatch
from zephon.cli.options import FlushIndex, GlobalBatch, Lanes, Recipe, SeqLen, Tokenizer, open_pipeline, tokenizer_path
from zephon.cli.output import plural, printable
from zephon.config.recipe import DataRecipe
from zephon.errors import DataError, PipelineError
from zephon.tokenizer.tokenizer import Tokenizer as TextTokenizer
from zephon.tokenizer.tokenizer import load_tokenizer

__all__ = ["describe_records", "show"]


def show(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, max=1 << 40, help="The step, counted from 0.")],
    canonical_replicas: Lanes = None,
    flush_index: FlushIndex = None,
    record: Annotated[
        int | None, typer.Option("--record", metavar="R", min=0, help="Only the record with this sequence number.")
    ] = None,
    chars: Annotated[
        int, typer.Option("--chars", metavar="C", min=0, help="Characters of text to print of each document.")
    ] = 200,
) -> None:
    """Print what the model saw in a step: documents, where they came from, and their text."""
    first = step * global_batch
    if record is not None and not first <= record < first + global_batch:
        raise PipelineError(
            f"record {record} is not in step {step}, which holds records {first} to {first + global_batch - 1}; "
            f"it is in step {record // global_batch}."
        )
    if flush_index is not None and not flush_index.is_dir():
        raise DataError(f"--flush-index is {flush_index}; expected the existing folder of the run's flush index.")
    config = DataRecipe.from_toml(recipe)
    pipeline = open_pipeline(
        config, tokenizer, seq_len, global_batch, global_batch=global_batch, canonical_replicas=canonical_replicas
    )
    if flush_index is None:
        pipeline.seek(step=step)
    else:
        # A pipeline with a flush index writes to it, which `show` must not: so only the place is taken from it.
        pipeline.restore(pipeline.options(flush_index=flush_index).seek(step=step).checkpoint())
    batch = next(iter(pipeline), None)
    pipeline.close()
    if batch is None:
        raise DataError(f"{config.origin}: the data ends before step {step}; name an earlier one.")
    decoder = load_tokenizer(tokenizer_path(tokenizer))
    indices = range(len(batch)) if record is None else [record - first]
    for line in describe_records(batch, indices, pipeline.compiled.topology.lanes, decoder, chars):
        print(line)


def describe_records(
    batch: SampleBatch, indices: Iterable[int], lanes: int, tokenizer: TextTokenizer, chars: int
) -> Iterator[str]:
    """Origin and text of the tokens of records, at most `chars` characters per document."""
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
