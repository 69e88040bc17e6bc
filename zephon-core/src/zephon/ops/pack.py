"""Packing: documents of tokens into records of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from zephon.columns.records import Pointer, RecordBlock, TokenBlock
from zephon.config.keys import Limit, Positive, Workers, check_keys, key, keys_of, seen, settings_of
from zephon.errors import PipelineError
from zephon.ops.base import Job, PackCounts
from zephon.ops.parts import Part, fill_columns
from zephon.vision.geometry import VisionSettings

_NAMED_APART = ("max_length", "algorithm")  # the settings that fingerprints have under names of their own
_RECENT = ("max_images", "max_patches", "always_image")  # those that fingerprints of earlier versions lack


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
    max_images: Positive | None = key(None, "Most images in a record; None is no limit.")
    max_patches: Positive | None = key(None, "Most patches of images in a record; None is no limit.")
    always_image: bool = key(
        False,
        "Show a grey image of one token in the padding of every record without images, so that the vision encoder "
        "of no rank is idle; records have room for it.",
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
            for each in ("max_documents_per_record", *_RECENT, "homogeneity", "oversized"):
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

    def check_room(self, vision: VisionSettings) -> None:
        """Refuse limits within which no record has room for an image, so that all of them would be left out."""
        fewest = vision.fewest_patches
        tokens = fewest // vision.merge_size**2 + sum(map(bool, (vision.vision_start_token, vision.vision_end_token)))
        for name, value, least in (("max_patches", self.max_patches, fewest), ("max_length", self.max_length, tokens)):
            if value is not None and value < least:
                raise PipelineError(
                    f"{self.kind} {name} is {value}; expected at least {least}, that of the smallest image by vision "
                    "min_pixels and patch_size, or no record has room for one. Raise it, or lower min_pixels."
                )

    def described(self) -> str:
        """Everything that decides the data besides `max_length`, in a few words."""
        if not self.has_bins:
            return self.algorithm
        settings = {name: value for name, value in settings_of(self).items() if name not in _NAMED_APART}
        unset = [name for name in _RECENT if not settings[name]]
        others = (f" {name}={value}" for name, value in settings.items() if name not in unset)
        return self.algorithm + "".join(others)


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


_PER_DOCUMENT = {
    "start": np.int64,
    "dataset": np.int32,
    "row": np.int64,
    "token": np.int64,
    "chunk": np.int64,
    "position": np.int64,
}


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
        self.held = 0
        # Of the documents held: "start", where each begins among the held tokens, and its first token that is held.
        self._documents = {name: np.empty(0, dtype=kind) for name, kind in _PER_DOCUMENT.items()}

    def push(self, block: TokenBlock) -> list[Job]:
        """Take documents; gives a job for the records that are now complete."""
        part = Part(block.tokens, block.loss, block.positions)
        begins, ends = block.offsets[:-1], block.offsets[1:]
        documents = {
            # Tokens are counted within their row, which may have made several documents.
            "token": np.zeros(len(begins), dtype=np.int64) if block.begin is None else block.begin.copy(),
            "dataset": block.dataset,
            "row": block.row,
            "chunk": np.full(len(begins), block.chunk, dtype=np.int64),
            "position": block.position,
        }
        if self._skip and len(begins):
            part, begins, ends = part.slice(self._skip, len(part)), begins - self._skip, ends - self._skip
            used = int(np.searchsorted(ends, 0, side="right"))  # documents that earlier records have used up
            begins, ends = begins[used:], ends[used:]
            documents = {name: column[used:] for name, column in documents.items()}
            documents["token"][0] -= begins[0]
            begins[0] = 0
            self._skip = 0
        filled = ends > begins
        self._counts.documents += int(filled.sum())
        self._counts.oversized += int((ends - begins > self._length).sum())
        documents["start"] = begins
        self._hold(part, {name: column[filled] for name, column in documents.items()})
        count = self.held // self._length
        return [self._cut(count)] if count else []

    def absorb(self, other: WrapPacker) -> list[Job]:
        """Take over the tokens that another packer holds; gives a job for a record that is now complete."""
        if not other.held:
            return []
        self._hold(Part.concat(other._parts), other._documents)
        other._keep_from(other.held)
        return [self._cut(1)] if self.held >= self._length else []

    def _hold(self, part: Part, documents: dict[str, np.ndarray]) -> None:
        """Add tokens to those held, and their documents, whose "start" is a place in `part`."""
        documents = {**documents, "start": self.held + documents["start"]}
        self._documents = {name: np.concatenate([column, documents[name]]) for name, column in self._documents.items()}
        self._parts.append(part)
        self.held += len(part)

    def flush(self) -> list[Job]:
        """Nothing: the carry goes over the end of a window."""
        return []

    def carry(self) -> Pointer | None:
        """Where the first held token lies in the lane."""
        if not self.held:
            return None
        chunk, position, token = (int(self._documents[name][0]) for name in ("chunk", "position", "token"))
        return Pointer(chunk, position, token)

    def finish(self) -> list[Job]:
        """Pad what is held to one record, or count it as left out."""
        if not self.held:
            return []
        if self._pad_token is None:
            self.tokens_left_out += self.held
            return []
        real = self.held
        self._parts.append(Part(np.full(self._length - real, self._pad_token, dtype=np.uint32)))
        return [self._cut(1, real)]

    def _cut(self, count: int, real: int | None = None) -> Job:
        """A job for the first `count` records of what is held, with `real` real tokens each; keeps the rest."""
        length, total = self._length, count * self._length
        # A span begins wherever a document or a record does.
        documents, start = self._documents, self._documents["start"]
        inside = start < total
        span = np.sort(np.concatenate([start[inside], np.arange(count, dtype=np.int64) * length]), kind="stable")
        span = span[np.diff(span, prepend=-1) > 0]
        owner = np.searchsorted(start, span, side="right") - 1
        block = RecordBlock(
            tokens=np.empty((0, length), dtype=np.uint32),
            lengths=np.full(count, length if real is None else real, dtype=np.int32),
            span_offsets=np.searchsorted(span, np.arange(count + 1, dtype=np.int64) * length),
            span_start=(span % length).astype(np.int32),
            span_dataset=documents["dataset"][owner],
            span_row=documents["row"][owner],
            span_token=documents["token"][owner] + (span - start[owner]),
        )
        firsts = block.span_offsets[:-1]
        chunks, positions = (documents[name][owner[firsts]] for name in ("chunk", "position"))
        origins = np.stack([chunks, positions, block.span_token[firsts]], axis=1)
        parts, counts = self._parts, self._counts
        counts.records += count
        counts.tokens += int(block.lengths.sum())
        # Documents of which an earlier record holds the head were counted with it.
        first, last = start[inside], np.append(start[1:], self.held)[inside] - 1
        counts.split += int(((first // length != last // length) & (documents["token"][inside] == 0)).sum())
        self._keep_from(total)
        self.records += count

        def run() -> RecordBlock:
            return fill_columns(block, Part.concat(parts).slice(0, total))

        return Job(run, total * 4, origins)

    def _keep_from(self, cut: int) -> None:
        """Hold only the tokens from place `cut` on; they all lie in the last part."""
        left = max(0, self.held - cut)
        # A copy, so that a few tokens do not keep a whole block alive.
        self._parts = [self._parts[-1].slice(len(self._parts[-1]) - left, len(self._parts[-1])).copy()] if left else []
        self.held = left
        start = self._documents["start"]
        first = int(np.searchsorted(start, cut, side="right")) - 1 if left else len(start)
        begun = max(0, cut - int(start[first])) if left else 0
        self._documents = {name: column[first:].copy() for name, column in self._documents.items()}
        self._documents["start"] = np.maximum(start[first:] - cut, 0)
        self._documents["token"][:1] += begun
