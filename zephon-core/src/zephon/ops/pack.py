"""Packing: documents of tokens into records of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from zephon.columns.records import Pointer, RecordBlock, TokenBlock
from zephon.config.keys import Limit, Positive, Workers, check_keys, key, keys_of, seen
from zephon.errors import PipelineError
from zephon.ops.base import Job, PackCounts
from zephon.ops.parts import Part, fill_columns

__all__ = ["PackFlat", "PackSequences", "WrapPacker"]


@dataclass(frozen=True)
class PackFlat:
    """Put the documents of a lane end to end in records of `max_length + 1` tokens, and note where each starts.

    The extra token is the label of the last input, so a record trains `max_length` positions. Documents stand in a
    record in the order of the lane.

    "wrap"
        A record starts with the token after the last one of the record before: every token is in exactly one record, a
        document may go on in the next record, and no place is padded.
    "first_fit", "best_fit"
        A document that fits a record is never cut: it goes into the bin opened first, or the fullest one, of those that
        have room; what stays free is padded. See `zephon.ops.bins`.
    "best_fit_wrap"
        As "best_fit", but rather than being padded a bin is filled up with the head of the next document.
    """

    kind: ClassVar[str] = "pack_flat"

    max_length: Positive = key(doc="The sequence length that the model sees, in tokens.")
    algorithm: Literal["wrap", "first_fit", "best_fit", "best_fit_wrap"] = key("wrap", "One of the above.")
    parallelism: Workers | None = key(None, "Worker threads that assemble records.", decides_data=False)
    num_bins: Limit = key(64, 'Records that each lane has in the making; "wrap" has no bins.')
    max_documents_per_record: Positive | None = key(
        None, "Most documents, or parts of them, in a record; None is no limit."
    )
    homogeneity: Literal["none", "group", "full"] = key(
        "none", '"full": a record holds documents of one dataset; "group": of datasets of one group; "none": of any.'
    )
    oversized: Literal["split", "drop"] = key(
        "split", 'Documents longer than a record: "split", or "drop" (left out, and counted).'
    )

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, f"{self.kind} ")
        if self.algorithm == "wrap":
            for each in ("max_documents_per_record", "homogeneity", "oversized"):
                if (value := getattr(self, each)) != keys_of(type(self))[each].default:
                    raise PipelineError(
                        f'{self.kind} {each} is {seen(value)}, but algorithm "wrap" fills every record with whatever '
                        'comes next; take "best_fit_wrap", "best_fit" or "first_fit" with it.'
                    )

    @property
    def record_length(self) -> int:
        """Tokens per record."""
        return self.max_length + 1

    @property
    def has_bins(self) -> bool:
        """Whether records are made side by side, and not one after the other."""
        return self.algorithm != "wrap"

    def described(self) -> str:
        """Everything that decides the data besides `max_length`, in a few words."""
        if not self.has_bins:
            return self.algorithm
        return (
            f"{self.algorithm} num_bins={self.num_bins} max_documents_per_record={self.max_documents_per_record} "
            f"homogeneity={self.homogeneity} oversized={self.oversized}"
        )


@dataclass(frozen=True)
class PackSequences(PackFlat):
    """Put whole sequences (conversations, samples) side by side in padded records; never cut one.

    As `PackFlat` with "first_fit" or "best_fit", but a sequence that is longer than a record is always left out and
    counted, since half of a conversation is not a shorter one. One sequence per record is `max_documents_per_record=1`.
    """

    kind: ClassVar[str] = "pack_sequences"

    algorithm: Annotated[
        Literal["first_fit", "best_fit"],
        Meta(title='"first_fit" or "best_fit", as sequences are never cut (pack_flat cuts)'),
    ] = key("best_fit", "Which bin a sequence goes into; see `PackFlat`.")
    oversized: Annotated[Literal["drop"], Meta(title='"drop", as sequences are never cut (pack_flat cuts)')] = key(
        "drop", "Sequences are never cut; shorten long ones when they are tokenized."
    )

    def described(self) -> str:
        """Everything that decides the data besides `max_length`, in a few words."""
        return f"sequences {PackFlat.described(self)}"


class WrapPacker:
    """The accumulator of "wrap" for one lane.

    What it holds between blocks is less than one record of tokens, and where their documents lie.

    Args:
        record_length: tokens per record.
        pad_token: fills up the last record of a run that ends, or None to leave incomplete records out.
        skip: tokens at the head of the first document that earlier records have used.
        counts: where to count.
    """

    def __init__(
        self,
        record_length: int,
        *,
        pad_token: int | None = None,
        skip: int = 0,
        counts: PackCounts | None = None,
    ) -> None:
        self.records = 0
        self._counts = PackCounts() if counts is None else counts
        self.tokens_left_out = 0
        self._length = record_length
        self._pad_token = pad_token
        self._skip = skip
        self._parts: list[Part] = []  # tokens held, in order
        self._held = 0
        self._start = np.empty(0, dtype=np.int64)  # where each held document begins among the held tokens
        self._dataset = np.empty(0, dtype=np.int32)
        self._row = np.empty(0, dtype=np.int64)
        self._token = np.empty(0, dtype=np.int64)  # the first token of the document that is held
        self._chunk = np.empty(0, dtype=np.int64)
        self._position = np.empty(0, dtype=np.int64)

    def push(self, block: TokenBlock) -> list[Job]:
        """Take documents; gives a job for the records that are now complete."""
        part = Part(block.tokens, block.loss, block.positions)
        begins, ends = block.offsets[:-1], block.offsets[1:]
        # Tokens are counted within their row, which may have made several documents.
        first_token = np.zeros(len(begins), dtype=np.int64) if block.begin is None else block.begin.copy()
        dataset, row, position = block.dataset, block.row, block.position
        if self._skip and len(begins):
            part, begins, ends = part.slice(self._skip, len(part)), begins - self._skip, ends - self._skip
            used = int(np.searchsorted(ends, 0, side="right"))  # documents that earlier records have used up
            begins, ends, first_token = begins[used:], ends[used:], first_token[used:]
            dataset, row, position = dataset[used:], row[used:], position[used:]
            first_token[0] -= begins[0]
            begins[0] = 0
            self._skip = 0
        filled = ends > begins
        self._counts.documents += int(filled.sum())
        self._counts.oversized += int((ends - begins > self._length).sum())
        self._start = np.concatenate([self._start, self._held + begins[filled]])
        self._dataset = np.concatenate([self._dataset, dataset[filled]])
        self._row = np.concatenate([self._row, row[filled]])
        self._token = np.concatenate([self._token, first_token[filled]])
        self._chunk = np.concatenate([self._chunk, np.full(int(filled.sum()), block.chunk, dtype=np.int64)])
        self._position = np.concatenate([self._position, position[filled]])
        self._parts.append(part)
        self._held += len(part)
        count = self._held // self._length
        return [self._cut(count)] if count else []

    @property
    def held(self) -> int:
        """Tokens not yet in a record."""
        return self._held

    def absorb(self, other: WrapPacker) -> list[Job]:
        """Take over the tokens that another packer holds; gives a job for a record that is now complete."""
        if not other._held:
            return []
        self._start = np.concatenate([self._start, self._held + other._start])
        for name in ("_dataset", "_row", "_token", "_chunk", "_position"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self._parts.append(Part.concat(other._parts))
        self._held += other._held
        other._keep_from(other._held)
        return [self._cut(1)] if self._held >= self._length else []

    def flush(self) -> list[Job]:
        """Nothing: the carry goes over the end of a window."""
        return []

    def carry(self) -> Pointer | None:
        """Where the first held token lies in the lane."""
        if not self._held:
            return None
        return Pointer(int(self._chunk[0]), int(self._position[0]), int(self._token[0]))

    def finish(self) -> list[Job]:
        """Pad what is held to one record, or count it as left out."""
        if not self._held:
            return []
        if self._pad_token is None:
            self.tokens_left_out += self._held
            return []
        real = self._held
        self._parts.append(Part(np.full(self._length - real, self._pad_token, dtype=np.uint32)))
        return [self._cut(1, real)]

    def _cut(self, count: int, real: int | None = None) -> Job:
        """A job for the first `count` records of what is held, with `real` real tokens each; keeps the rest."""
        length, total = self._length, count * self._length
        # A span begins wherever a document or a record does.
        inside = self._start < total
        span = np.union1d(self._start[inside], np.arange(count, dtype=np.int64) * length)
        owner = np.searchsorted(self._start, span, side="right") - 1
        block = RecordBlock(
            tokens=np.empty((0, length), dtype=np.uint32),
            lengths=np.full(count, length if real is None else real, dtype=np.int32),
            span_offsets=np.searchsorted(span, np.arange(count + 1, dtype=np.int64) * length),
            span_start=(span % length).astype(np.int32),
            span_dataset=self._dataset[owner],
            span_row=self._row[owner],
            span_token=self._token[owner] + (span - self._start[owner]),
        )
        firsts = block.span_offsets[:-1]
        origins = np.stack(
            [self._chunk[owner[firsts]], self._position[owner[firsts]], block.span_token[firsts]], axis=1
        )
        parts = self._parts
        counts = self._counts
        counts.records += count
        counts.tokens += int(block.lengths.sum())
        # Documents of which an earlier record holds the head were counted with it.
        first, last = self._start[inside], np.append(self._start[1:], self._held)[inside] - 1
        counts.split += int(((first // length != last // length) & (self._token[inside] == 0)).sum())
        self._keep_from(total)
        self.records += count

        def run() -> RecordBlock:
            return fill_columns(block, Part.concat(parts).slice(0, total))

        return Job(run, total * 4, origins)

    def _keep_from(self, cut: int) -> None:
        """Hold only the tokens from place `cut` on; they all lie in the last part."""
        left = max(0, self._held - cut)
        # A copy, so that a few tokens do not keep a whole block alive.
        self._parts = [self._parts[-1].slice(len(self._parts[-1]) - left, len(self._parts[-1])).copy()] if left else []
        self._held = left
        first = int(np.searchsorted(self._start, cut, side="right")) - 1 if left else len(self._start)
        begun = max(0, cut - int(self._start[first])) if left else 0
        self._start = np.maximum(self._start[first:] - cut, 0)
        self._dataset, self._row = self._dataset[first:], self._row[first:]
        self._chunk, self._position = self._chunk[first:], self._position[first:]
        self._token = self._token[first:].copy()
        if left:
            self._token[0] += begun
