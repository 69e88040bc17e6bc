"""Packing into bins: whole documents side by side in records, the rest of a record padded.

A bin is a record in the making. A lane has up to `num_bins` of them open, and each document goes into one of those it
fits into. Only lengths decide, document by document; tokens are gathered a block at a time, by any worker.

From time to time, and at the end of every window, a lane is drained: what its open bins hold is packed anew, largest
documents first, and given out. So there are places in a window where nothing is held and a lane can be entered, at most
about twice `stretch` records apart, and a state needs no bins. Draining waits for a moment at which it costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from zephon.columns.images import Images
from zephon.columns.records import Pointer, RecordBlock, TokenBlock
from zephon.ops.base import Job, PackCounts
from zephon.ops.parts import Part, fill_columns

_room = attrgetter("room")
_NOWHERE = (-1, -1, -1)
_NO_LIMIT = 1 << 62
_WASTE = 16
"""Draining is tried where its padding could be less than this part of a record ..."""
_TRIALS = 32
"""... and about so many times before it is done in any case."""

# A document, or a part of one, on its way into a record: number of the document, its first token here, how many
# tokens, where they lie (part and place in it), dataset, row, the tokens of the row before the document, its images,
# and how many images and patches it has; None for both in blocks of text alone.
_Piece = tuple[int, int, int, Part, int, int, int, int, Images | None, tuple[int, int] | None]
_in_order = itemgetter(0, 1)


@dataclass(slots=True, eq=False)
class _Bin:
    """A record in the making."""

    room: int
    pieces: list[_Piece] = field(default_factory=list)
    images: int = 0
    patches: int = 0

    def put(self, piece: _Piece) -> None:
        self.room -= piece[2]
        self.pieces.append(piece)
        if (show := piece[9]) is not None:
            self.images += show[0]
            self.patches += show[1]


class BinPacker:
    """The accumulator of "first_fit", "best_fit" and "best_fit_wrap" for one lane.

    A document goes into the fullest open bin that has room for it (with "first_fit", into the one opened first). Where
    none has, a bin is opened; where `num_bins` are open, the fullest is closed for it: padded, or, with
    "best_fit_wrap", filled up with the head of the document, whose rest goes on looking for a place. A bin is closed at
    once when it is full or holds `max_documents` documents. A document longer than a record first gives whole records
    of its own.

    What it holds between blocks is the tokens in the open bins, less than `num_bins` records.

    Args:
        record_length: tokens per record.
        algorithm: one of the three.
        num_bins: most bins that are open.
        max_documents: most documents, or parts of them, in a record; None is no limit.
        split: whether documents longer than a record are split; else they are left out and counted.
        kinds: int64[n_datasets], the kind of each dataset; a record holds documents of one kind.
        stretch: records after which the lane is to be drained.
        pad_token: what padding holds.
        counts: where to count.
        max_images, max_patches: most images and patches in a record; None is no limit. A document that has more of them
            is left out, and so is one with images that is longer than a record.
        reserved: places at the end of each record that are always padding.
    """

    def __init__(
        self,
        record_length: int,
        *,
        algorithm: str,
        num_bins: int,
        max_documents: int | None,
        split: bool,
        kinds: np.ndarray,
        stretch: int,
        pad_token: int,
        counts: PackCounts | None = None,
        max_images: int | None = None,
        max_patches: int | None = None,
        reserved: int = 0,
    ) -> None:
        self.records = 0
        self.tokens_left_out = 0
        self._length = record_length - reserved
        self._record_length = record_length
        self._limits = _Limits(max_documents or _NO_LIMIT, max_images or _NO_LIMIT, max_patches or _NO_LIMIT)
        self._first_fit = algorithm == "first_fit"
        self._cut = algorithm == "best_fit_wrap"
        self._num_bins, self._split = num_bins, split
        self._kinds = kinds
        self._stretch = stretch
        self._pad_token = pad_token
        self._counts = PackCounts() if counts is None else counts
        # By kind: the open bins, by room (with "first_fit" by age), and the tokens in them.
        self._open: dict[int, list[_Bin]] = {}
        self._held: dict[int, int] = {}
        self._count = 0  # bins open
        self._closed: list[list[_Piece]] = []  # records to give out
        self._documents = 0  # number of the next document
        self._since = 0  # records closed since nothing was held
        self._try_at = stretch  # the value of `_since` from which draining is worth a try
        self._origin: tuple[int, int, int] | None = None  # of the next record, where nothing was held before it

    def push(self, block: TokenBlock) -> list[Job]:
        """Take documents; gives jobs for the records that are closed."""
        part = Part(block.tokens, block.loss, block.positions)
        lengths = np.diff(block.offsets)
        long = lengths > self._length
        dropped = np.zeros_like(long) if self._split else long
        shows: Iterable[tuple[int, int] | None] = repeat(None)
        if block.images is not None:
            images, patches = _counts_of(block.images)
            dropped = dropped | (images > self._limits.images) | (patches > self._limits.patches) | long & (images > 0)
            shows = zip(images.tolist(), patches.tolist(), strict=True)
        self._counts.documents += int((lengths > 0).sum())
        self._counts.oversized += int(long.sum())
        if dropped.any():
            self._counts.dropped += int(dropped.sum())
            self._counts.dropped_tokens += int(lengths[dropped].sum())
            lengths = np.where(dropped, 0, lengths)
        jobs: list[Job] = []
        last = -1
        before = np.zeros_like(lengths) if block.begin is None else block.begin
        columns = (lengths, block.offsets, block.dataset, block.row, before, self._kinds[block.dataset], block.position)
        for n, (length, begin, dataset, row, earlier, kind, position, show) in enumerate(
            zip(*(column.tolist() for column in columns), shows, strict=False)
        ):
            # A lane is entered at a row, which may be several documents.
            if position != last:
                if self._since >= self._try_at and (plan := self._good_moment()) is not None:
                    jobs += self._drain(plan)
                if not self._count and not self._closed and not self._since:
                    self._origin = block.chunk, position, 0
                last = position
            if length:
                own = block.images.slice(n, n + 1) if block.images is not None else None
                self._add((self._documents, 0, length, part, begin, dataset, row, earlier, own, show), kind)
                self._documents += 1
        if self._closed:
            jobs.append(self._job())
        self._let_go_of(part)
        return jobs

    def flush(self) -> list[Job]:
        """Drain: no bin goes over the end of a window."""
        return self._drain(self._repacked())

    def carry(self) -> Pointer | None:
        """None, as bins do not go over the end of a window."""
        return None

    def finish(self) -> list[Job]:
        """Drain; incomplete records are padded as ever, and no token is left out."""
        return self.flush()

    def _add(self, piece: _Piece, kind: int) -> None:
        """Put a document into the bins."""
        whole = piece
        while piece[2] > self._length:
            self._close([_head(piece, self._length)])
            piece = _tail(piece, self._length)
        bins = self._open.setdefault(kind, [])
        self._held.setdefault(kind, 0)
        while (at := self._find(bins, piece)) == len(bins) and self._count == self._num_bins:
            if self._cut and bins:
                full = bins[0]
                full.pieces.append(_head(piece, full.room))
                piece = _tail(piece, full.room)
                self._close_bin(kind, 0)
            else:
                fullest = min((k for k in self._open if self._open[k]), key=self._least_room)
                self._close_bin(fullest, self._fullest(self._open[fullest]))
        if at == len(bins):
            target = _Bin(self._length)
            self._count += 1
            bins.append(target)
        else:
            target = bins[at]
        self._counts.split += piece is not whole
        target.put(piece)
        self._held[kind] += piece[2]
        if self._limits.fill(target):
            self._close_bin(kind, at)
        elif not self._first_fit:
            del bins[at]
            insort(bins, target, key=_room)

    def _fullest(self, bins: list[_Bin]) -> int:
        """The bin with the least room, of several the first."""
        return min(range(len(bins)), key=lambda i: bins[i].room) if self._first_fit else 0

    def _least_room(self, kind: int) -> int:
        bins = self._open[kind]
        return bins[self._fullest(bins)].room

    def _find(self, bins: list[_Bin], piece: _Piece) -> int:
        """The bin to put a piece into, or `len(bins)` where none has room."""
        if self._first_fit:
            fits = (i for i, held in enumerate(bins) if held.room >= piece[2] and self._limits.admit(held, piece))
            return next(fits, len(bins))
        return self._limits.fullest(bins, piece)

    def _close(self, pieces: list[_Piece]) -> None:
        self._closed.append(pieces)
        self._since += 1

    def _close_bin(self, kind: int, at: int) -> None:
        """Close bin number `at` of those open for a kind."""
        full = self._open[kind].pop(at)
        self._held[kind] -= self._length - full.room
        self._count -= 1
        self._close(full.pieces)

    def _good_moment(self) -> list[list[_Piece]] | None:
        """How to drain, where it costs next to nothing or has been put off for long enough."""
        overdue = self._since >= 2 * self._stretch
        least = sum(-(-held // self._length) for held in self._held.values())
        if overdue or (least * self._length - sum(self._held.values())) * _WASTE <= self._length:
            plan = self._repacked()
            if overdue or len(plan) == least:
                return plan
            # Packing anew in vain is cheap, but not for every document.
            self._try_at = self._since + max(1, self._stretch // _TRIALS)
        return None

    def _repacked(self) -> list[list[_Piece]]:
        """What the open bins hold, as records: largest first, each into the fullest record that has room for it."""
        records: list[list[_Piece]] = []
        for kind, bins in self._open.items():
            pieces = sorted((p for one in bins for p in one.pieces), key=lambda p: (-p[2], p[0], p[1]))
            least = -(-self._held[kind] // self._length)
            new = _packed(pieces, self._length, self._limits, least if self._cut else None)
            # Packing anew is better nearly always, but not by a law.
            records += new if len(new) <= len(bins) else [one.pieces for one in bins]
        for record in records:
            record.sort(key=_in_order)
        return sorted(records, key=lambda record: _in_order(record[0]))

    def _drain(self, plan: list[list[_Piece]]) -> list[Job]:
        """A job for the records closed so far and those of `plan`; then nothing is held."""
        if self._cut:
            self._counts.split += _newly_split(plan)
        self._closed += plan
        self._open, self._held, self._count = {}, {}, 0
        jobs = [self._job()] if self._closed else []
        self._since, self._try_at, self._origin = 0, self._stretch, None
        return jobs

    def _job(self) -> Job:
        """A job for the closed records."""
        records, self._closed = self._closed, []
        count = len(records)
        length, pad_token = self._record_length, self._pad_token
        ends = np.cumsum([len(record) for record in records])
        pieces = [piece for record in records for piece in record]
        sizes = np.array([piece[2] for piece in pieces], dtype=np.int64)
        before = np.cumsum(sizes) - sizes
        offsets = np.concatenate([[0], ends])
        firsts = before[offsets[:-1]]
        lengths = np.diff(firsts, append=sizes.sum())
        block = RecordBlock(
            tokens=np.empty((0, length), dtype=np.uint32),
            lengths=lengths.astype(np.int32),
            span_offsets=offsets,
            span_start=(before - np.repeat(firsts, np.diff(offsets))).astype(np.int32),
            span_dataset=np.array([piece[5] for piece in pieces], dtype=np.int32),
            span_row=np.array([piece[6] for piece in pieces], dtype=np.int64),
            span_token=np.array([piece[1] + piece[7] for piece in pieces], dtype=np.int64),
        )
        origins = np.full((count, 3), _NOWHERE, dtype=np.int64)
        fresh = self._origin is not None
        if self._origin is not None:
            origins[0] = self._origin
            self._origin = None
        self.records += count
        self._counts.records += count
        self._counts.tokens += int(sizes.sum())

        def run() -> RecordBlock:
            block.images = Images.concat([piece[8] for piece in pieces], [1] * len(pieces))
            return fill_columns(block, _gathered(records, length, pad_token))

        return Job(run, count * length * 4, origins, fresh)

    def _let_go_of(self, part: Part) -> None:
        """Copy what is held of a block, so that a few tokens do not keep all of it alive."""
        for bins in self._open.values():
            for one in bins:
                pieces = one.pieces
                for i in range(len(pieces) - 1, -1, -1):
                    number, token, size, home, begin, dataset, row, earlier, images, show = pieces[i]
                    if home is not part:
                        break
                    own = None if images is None else images.take(np.zeros(1, dtype=np.int64))
                    home = home.slice(begin, begin + size).copy()
                    pieces[i] = (number, token, size, home, 0, dataset, row, earlier, own, show)


class _Limits(NamedTuple):
    """Most documents, images and patches of a record."""

    documents: int
    images: int
    patches: int

    def admit(self, held: _Bin, piece: _Piece) -> bool:
        """Whether a bin can show the images of a piece besides its own."""
        if piece[9] is None:
            return True
        images, patches = piece[9]
        return held.images + images <= self.images and held.patches + patches <= self.patches

    def fullest(self, bins: Sequence[_Bin], piece: _Piece) -> int:
        """Of bins by room, the first with room for a piece; their number where none has."""
        at = bisect_left(bins, piece[2], key=_room)
        while piece[9] is not None and at < len(bins) and not self.admit(bins[at], piece):
            at += 1
        return at

    def fill(self, held: _Bin) -> bool:
        """Whether a bin takes no more."""
        return not held.room or len(held.pieces) == self.documents


def _counts_of(images: Images) -> tuple[np.ndarray, np.ndarray]:
    """int64[n_docs] each: images and patches of each document."""
    patches = np.concatenate([[0], np.cumsum(images.patch_counts)])
    return np.diff(images.offsets), np.diff(patches[images.offsets])


def _head(piece: _Piece, size: int) -> _Piece:
    return (*piece[:2], size, *piece[3:])


def _tail(piece: _Piece, begun: int) -> _Piece:
    number, token, size, part, begin = piece[:5]
    return number, token + begun, size - begun, part, begin + begun, *piece[5:]


def _packed(pieces: Sequence[_Piece], length: int, limits: _Limits, limit: int | None) -> list[list[_Piece]]:
    """The pieces as records, each put into the fullest that has room for it.

    Args:
        limit: so many records are to do, and pieces are cut for it; None cuts nothing.
    """
    records: list[list[_Piece]] = []
    bins: list[_Bin] = []  # those that can take more, by room
    for whole in pieces:
        piece = whole
        while (at := limits.fullest(bins, piece)) == len(bins):
            if limit is None or len(records) < limit or not bins:
                bins.append(_Bin(length))
                records.append(bins[-1].pieces)
                continue
            full = bins.pop(0)
            full.pieces.append(_head(piece, full.room))
            piece = _tail(piece, full.room)
        target = bins.pop(at)
        target.put(piece)
        if not limits.fill(target):
            insort(bins, target, key=_room)
    return records


def _newly_split(records: Sequence[Sequence[_Piece]]) -> int:
    """Documents whose parts in `records` are several and were none before, by their first tokens."""
    parts: dict[int, list[int]] = {}
    for record in records:
        for piece in record:
            parts.setdefault(piece[0], []).append(piece[1])
    return sum(len(tokens) > 1 and min(tokens) == 0 for tokens in parts.values())


def _gathered(records: Sequence[Sequence[_Piece]], length: int, pad_token: int) -> Part:
    """The tokens of the records, each padded to `length`."""
    padding = Part(np.full(length, pad_token, dtype=np.uint32))
    slices = []
    for record in records:
        room = length
        for _, _, size, part, begin, *_ in record:
            slices.append((part, begin, begin + size))
            room -= size
        if room:
            slices.append((padding, 0, room))
    if all(part.loss is None and part.positions is None for part, _, _ in slices):  # a third faster
        return Part(np.concatenate([part.tokens[start:stop] for part, start, stop in slices]))
    return Part.concat([part.slice(start, stop) for part, start, stop in slices])
