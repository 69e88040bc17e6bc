"""`zephon show`: what the model saw in a step."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from zephon.batch import SampleBatch
from zephon.cli.options import (
    FlushIndex,
    GlobalBatch,
    Lanes,
    Recipe,
    SeqLen,
    Tokenizer,
    Vision,
    open_pipeline,
    tokenizer_path,
)
from zephon.cli.output import plural, printable, writing
from zephon.cli.stream import read_states
from zephon.config.recipe import DataRecipe
from zephon.errors import CheckpointError, DataError, PipelineError
from zephon.run.ledger import Ledger, read_ledger
from zephon.run.state import RunState
from zephon.tokenizer.tokenizer import load_tokenizer


def show(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    step: Annotated[str, typer.Option("--step", metavar="N[-M]", help="A step or a range of them, counted from 1.")],
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="DIR", help="Ledger of the run, to compare with.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="PATH", help="State of the run, or a trainer's checkpoint, likewise."),
    ] = None,
    canonical_replicas: Lanes = None,
    vision: Vision = None,
    flush_index: FlushIndex = None,
    record: Annotated[
        int | None, typer.Option("--record", metavar="R", min=0, help="Only the record with this sequence number.")
    ] = None,
    chars: Annotated[
        int, typer.Option("--chars", metavar="C", min=0, help="Characters of text to print of each document.")
    ] = 200,
    full: Annotated[bool, typer.Option("--full", help="The whole text.")] = False,
    images: Annotated[
        Path | None, typer.Option("--images", metavar="DIR", help="Write the files of the images that are shown here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per record, with the whole text.")] = False,
) -> None:
    """Print what the model saw in a step: documents, origin, text.

    Steps count from 1, as trainers log them. With a ledger, rank and microbatch (from 0) are named.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,11})(?:-([1-9][0-9]{0,11}))?", step)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise PipelineError(f"--step is {step}; expected a step, counted from 1, or a range such as 17-20.")
    account = read_ledger(ledger) if ledger else None
    if flush_index is not None and not flush_index.is_dir():
        raise DataError(f"--flush-index is {flush_index}; expected the existing folder of the run's flush index.")
    run = SeenRun(recipe, tokenizer, seq_len, global_batch, account, state, canonical_replicas, vision, flush_index)
    begin, end = run.place_of(first, last, step)
    if record is not None and not begin <= record < end:
        raise PipelineError(f"--record is {record}; expected a record of step {step}, from {begin} to {end - 1}.")
    for number, batch, records in run.steps(range(first, last + 1)):
        if batch is None:
            print(f"step {number} is left out by the run", file=sys.stderr)
            continue
        for line in records:
            if record in (None, line["record"]):
                if images is not None:
                    _write_images(images, batch, line)
                print(json.dumps(line) if as_json else _text(line, None if full else chars, run.placeholder))


@dataclass
class SeenRun:
    """The steps of a run, read again: what its recipe gives, compared with its ledger or state.

    Attributes:
        account: its ledger.
        state: a state of it, or a checkpoint of a trainer.
        lanes: their number, where it is not that of the recipe or the ledger.
    """

    recipe: Path
    tokenizer: str
    seq_len: int
    global_batch: int
    account: Ledger | None
    state: Path | None = None
    lanes: int | None = None
    vision: str | None = None
    flush_index: Path | None = None
    placeholder: str = ""

    def place_of(self, first: int, last: int, said: str) -> tuple[int, int]:
        """The first record of a range of steps, and the first one behind it; `said` is what the user calls the range.

        Steps are as the trainer counted them: before a record `done` steps, of whatever global batch.
        """
        self._origin, self._done, size = (0, 0, self.global_batch)
        for change in self.account.steps if self.account else ():
            if change[1] < first:
                self._origin, self._done, size = change
            elif change[1] < last:
                raise PipelineError(
                    f"--step is {said}; expected a range in which the global batch, {size} up to step "
                    f"{change[1]}, stays: it is {change[2]} from there on."
                )
        if size != self.global_batch:
            name = self.account.name if self.account else ""
            raise PipelineError(
                f"--global-batch is {self.global_batch}; expected {size}, as in step {first} of {name}."
            )
        return self._first_of(first), self._first_of(last + 1)

    def _first_of(self, step: int) -> int:
        return self._origin + (step - 1 - self._done) * self.global_batch

    def steps(self, wanted: Sequence[int]) -> Iterator[tuple[int, SampleBatch | None, list[dict[str, Any]]]]:
        """Some steps, ascending: number, batch, and records as JSON types; no batch where the run has left it out.

        Raises:
            DataError: a record is not that of the ledger, or the data end before.
        """
        waiting = deque(wanted)
        begin, end = self.place_of(wanted[0], wanted[-1], f"{wanted[0]}-{wanted[-1]}")
        config, state, account = DataRecipe.from_toml(self.recipe), self.state, self.account
        lanes = self.lanes or (account.lanes if account else None)
        size = self.global_batch
        pipeline = open_pipeline(
            config,
            self.tokenizer,
            self.seq_len,
            size,
            self.vision,
            global_batch=size,
            canonical_replicas=lanes,
            digest_pixels=account.pixels if account else None,
        )
        # A pipeline with a flush index writes to it, which is not done here: so only the place is taken from it.
        place = pipeline.options(flush_index=self.flush_index)
        if state:
            try:
                states = [RunState.from_dict(each) if isinstance(each, dict) else each for each in read_states(state)]
                place.restore(states)
            except CheckpointError as error:
                if not error.changes:
                    raise DataError(f"{state} cannot be used: {error}") from None
                changes = "; ".join(map(str, error.changes))
                raise DataError(f"{state} is of a run with other data: {changes}.") from None
            if states[0].data != place.compiled.digest:
                raise DataError(
                    f"{state} is of the run that {self.recipe} takes over from; pass a state of a later step."
                )
        if place.awaits_state:
            raise PipelineError(
                f"{self.recipe} takes over from another run (continue_from); pass --state of a later step."
            )
        if state and not account and place.cursor < end:
            print(
                f"warning: {state} was taken before step {wanted[-1]} had ended, so it does not tell what was trained "
                "on later.",
                file=sys.stderr,
            )
        if not (state or account):
            print(
                "warning: this is what recipe, data and tokenizer give now. To be sure that a run was trained on it, "
                "pass --ledger or --state.",
                file=sys.stderr,
            )
        if not place.compiled.history:
            place.seek(sequence_number=begin)
        elif begin < place.cursor:
            raise DataError(
                f"{state} is of a run that accepted a change of its records, and was taken after step {wanted[0]}; "
                "expected a state before it. Pass an earlier one, with the recipe of that time, or name a later step."
            )
        pipeline.restore(place.checkpoint())
        decoder = load_tokenizer(tokenizer_path(self.tokenizer))
        settings, shown = pipeline.compiled.vision, wanted[0] - 1
        self.placeholder = settings.image_token if settings else ""
        for batch in pipeline:
            shown = (int(batch.sequence_numbers[0]) - self._origin) // size + self._done + 1
            while waiting and waiting[0] < shown:
                yield waiting.popleft(), None, []
            if waiting and waiting[0] == shown:
                lanes = pipeline.compiled.topology.lanes
                yield waiting.popleft(), batch, _records(batch, shown, lanes, decoder, account)
            if not waiting:
                break
            if self.flush_index is not None and waiting[0] > shown + 1:
                pipeline.restore(place.seek(sequence_number=self._first_of(waiting[0])).checkpoint())
        pipeline.close()
        if waiting:
            raise DataError(f"{config.origin}: the data ends before step {wanted[-1]}; the last step is {shown}.")


def _records(batch: SampleBatch, step: int, lanes: int, decoder: Any, account: Ledger | None) -> list[dict[str, Any]]:
    """The records of a step as JSON types; one that differs from that in the ledger is refused."""
    spans, edges, digests = batch.provenance().to_pylist(), batch.block.span_offsets.tolist(), batch.digests
    records = []
    changed = (
        " It changed them on the way: give the recipe of that step, and a --state."
        if account and account.changed
        else ""
    )
    for i, (number, length) in enumerate(zip(batch.sequence_numbers.tolist(), batch.lengths.tolist(), strict=True)):
        line: dict[str, Any] = {"step": step, "record": number, "lane": number % lanes}
        if account:
            at = int(np.searchsorted(account.sequence, number))
            line["trained"] = bool((account.sequence[at : at + 1] == number).any())
        if account and line["trained"]:
            if account.digests[at].tobytes() != digests[i]:
                raise DataError(
                    f"record {number} of step {step} is not what {account.name} has: recipe, data, tokenizer or "
                    f"--seq-len are others than those of the run, which had {account.documents(number)}.{changed}"
                )
            groups, size = account.groups[at].tolist()
            line["rank"], inner = divmod(number % lanes, lanes // groups)
            line["microbatch"] = (i // lanes * (lanes // groups) + inner) // size if size else None
        line |= {"tokens": length, "padding": batch.tokens.shape[1] - length, "documents": []}
        for span in spans[edges[i] : edges[i + 1]]:
            tokens = batch.tokens[i, span["start"] : span["start"] + span["token_end"] - span["token_begin"]]
            line["documents"].append({**span, "text": decoder.decode(tokens)})
        records.append(line)
    return records


def _write_images(folder: Path, batch: SampleBatch, line: dict[str, Any]) -> None:
    """Write the image files of a record, and note their names in its line."""
    block = batch.block
    record = batch.sequence_numbers.tolist().index(line["record"])
    first, last = block.span_offsets[record : record + 2].tolist()
    own = block.images.slice(first, last) if block.images is not None else None
    for n, image in enumerate(image for document in line["documents"] for image in document.get("images", ())):
        path = folder / f"step-{line['step']}-record-{line['record']}-image-{n}.{image['format']}"
        with writing(path, "image"):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(own.files[n].as_py() if own else b"")
        image["file"] = str(path)


def _image_text(number: int, image: dict[str, Any]) -> str:
    size = f"{image['format']} of {image['width']} x {image['height']} pixels, {image['bytes']:,} bytes"
    text = f"    image {number}: {size}, {image['patches_wide']} x {image['patches_high']} patches"
    text += ", grey, since it cannot be decoded" * image["grey"]
    return f"{text}: {image['file']}" if "file" in image else text


def _text(line: dict[str, Any], chars: int | None, placeholder: str = "") -> str:
    """A record in lines for people, with at most `chars` characters of each document; of the run of placeholders of an
    image they have the first."""
    named = [f"{name} {line[name]}" for name in ("step", "record", "lane", "rank", "microbatch") if name in line]
    lines = [f"{', '.join(named)}: {line['tokens']} tokens of {plural(len(line['documents']), 'document')}"]
    lines[0] += f", {line['padding']} of padding" if line["padding"] else ""
    lines[0] += "" if line.get("trained", True) else ", not in the ledger"
    for each in line["documents"]:
        place = f"  {each['dataset']}, {each['shard']}, row {each['row']}"
        lines.append(printable(f"{place}, tokens {each['token_begin']} to {each['token_end'] - 1}"))
        lines += [_image_text(n, image) for n, image in enumerate(each.get("images", ()))]
        if placeholder:
            each["text"] = re.sub(f"({re.escape(placeholder)})+", r"\1", each["text"])
        if chars != 0:
            rest = len(each["text"][:0] if chars is None else each["text"][chars:])
            text = printable(each["text"][:chars], lines=True)
            text += f" [{plural(rest, 'more character')}]" if rest else ""
            lines += [f"    | {part}".rstrip() for part in text.split("\n")]
    return "\n".join(lines)
