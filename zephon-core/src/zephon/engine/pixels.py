"""Pixels of the records that are given out next, decoded ahead by workers."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.faults import RowFault
from zephon.columns.images import Images, PixelsAhead, ReadyPixels
from zephon.columns.records import PER_SPAN, RecordBlock
from zephon.config.keys import MAX_INT64
from zephon.config.options import FaultPolicy
from zephon.engine.runners import Pending, Runner
from zephon.errors import DataError
from zephon.ops.pack import PackFlat
from zephon.vision.geometry import Grid, VisionSettings
from zephon.vision.headers import BadImage
from zephon.vision.pixels import decoding_bytes, grey_patches, image_patches, put, values_shape

OPERATOR = "tokenize_images"
JUDGED = 1000  # images of a lane
_AHEAD = 16  # microbatches whose pixels may be ready or in the making, or
_OF_WORKER = 4  # records for each worker, if that is more: an actor of Ray has two at a time
_LOGGED = 10
# One grey pixel.
_GREY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a4944415478da63a8070000"
    "8100807e1c29c70000000049454e44ae426082"
)
_log = logging.getLogger("zephon")


@dataclass(frozen=True, slots=True)
class PixelStage:
    """What decodes the images of records.

    Attributes:
        vision: how the model sees images.
        names: of the datasets.
        locate: shard and row within it, of a row of a dataset given by number.
        faults: the fate of images that cannot be decoded.
        lookahead_bytes: pixels that may be ready or in the making, beyond a record for each worker; tiny ones are
            bounded by `_AHEAD`.
        placeholders: the tokens of an image of one token, which records without images show in their padding; empty
            where they show nothing.
        workers: how many decode.
        batch: records of a microbatch, whose pixels are made side by side in one piece of memory.
        wanted: the form that they are made in; this process alone knows it.
        elsewhere: `decoded` in another process; None where this one decodes.
    """

    vision: VisionSettings
    names: Sequence[str]
    locate: Callable[[int, int], tuple[str, int]]
    faults: FaultPolicy
    lookahead_bytes: int
    placeholders: tuple[int, ...] = ()
    workers: int = 1
    batch: int = 1
    wanted: PixelsAhead = field(default_factory=PixelsAhead)
    elsewhere: Callable[[RecordBlock], RecordBlock] | None = None

    @property
    def reserved(self) -> int:
        """Places at the end of each record that are padding: the last token of a record is no input of the model."""
        return len(self.placeholders) + 1 if self.placeholders else 0

    def is_placeholder(self, images: Images, image: int) -> bool:
        """Whether an image is that of always_image."""
        return bool(self.placeholders) and images.files[image].as_py() == _GREY_PNG

    def memory_bytes(self, pack: PackFlat) -> tuple[int, int]:
        """Most bytes of pixels, as float32 and packed, that are ready or in the making, and of pictures in decoding."""
        patches = min(pack.max_patches or MAX_INT64, pack.record_length * self.vision.merge_size**2)
        record = patches * (self.vision.pixels_per_patch + 4 * self.vision.patch_dim)
        # Beside the look-ahead a microbatch that is begun, one that is given out, and memory for two to come.
        return max(self.lookahead_bytes, self.workers * record) + 4 * self.batch * record, decoding_bytes(self.workers)

    def filled(self, record: RecordBlock) -> RecordBlock:
        """A record with the image of `placeholders` where it has none and should show one."""
        shows = not self.placeholders or (record.images is not None and len(record.images.grids))
        return record if shows else self._with_grey_image(record)

    def made(self, record: RecordBlock, ready: ReadyPixels | None, at: tuple[int, int]) -> RecordBlock:
        """A record with its pixels, which are put into `ready` as well, behind so many images and patches."""
        record = (self.elsewhere or self.decoded)(record)
        images, first = record.images, at[1]
        if images is None or ready is None:
            return record
        for n, patches in enumerate(images.patches or ()):
            put(ready.values, ready.form, at[0] + n, first, patches, self.vision)
            first += len(patches)
        return replace(record, images=replace(images, ready=ready, ready_at=at[0]))

    def decoded(self, record: RecordBlock) -> RecordBlock:
        """A record with its pixels.

        An image that cannot be decoded is grey, and no label of its document is trained on.
        """
        images = record.images
        if images is None:
            return record
        patches, reasons = list[np.ndarray](), list[str | None]()
        for file, sizes in zip(images.files.to_pylist(), images.grids.tolist(), strict=True):
            grid = Grid(*sizes)
            try:
                patches.append(image_patches(file, grid, self.vision))
                reasons.append(None)
            except BadImage as error:
                patches.append(grey_patches(grid, self.vision))
                reasons.append(str(error))
        record = replace(record, images=images.decoded(patches, reasons))
        if any(reasons):
            record.loss = self._without_grey(record)
        return record

    def describe(self, record: RecordBlock) -> str:
        """The rows of a record, in words."""
        rows = zip(record.span_dataset.tolist(), record.span_row.tolist(), strict=True)
        located = [(self.names[dataset], *self.locate(dataset, row)) for dataset, row in rows]
        return ", ".join(f'dataset "{name}", shard {shard}, row {row}' for name, shard, row in located[:3])

    def _with_grey_image(self, record: RecordBlock) -> RecordBlock:
        """A record with an image of one token in its padding, of its last document; a filler gets an empty one."""
        side = self.vision.merge_size
        grid = [side, side, side * self.vision.patch_size, side * self.vision.patch_size]
        tokens, start = record.tokens.copy(), int(record.lengths[0])
        tokens[0, start : start + len(self.placeholders)] = self.placeholders
        record = replace(record, tokens=tokens)
        if not len(record.span_row):
            empty: dict[str, Any] = {name: np.zeros(1, dtype=kind) for name, kind in PER_SPAN.items()}
            record = replace(record, span_offsets=np.array([0, 1]), **empty)
        offsets = np.zeros(len(record.span_row) + 1, dtype=np.int64)
        offsets[-1] = 1
        files = pa.array([_GREY_PNG], pa.large_binary())
        return replace(record, images=Images(offsets, np.array([grid], dtype=np.int32), files))

    @staticmethod
    def _without_grey(record: RecordBlock) -> np.ndarray:
        assert record.images is not None
        loss = np.ones(record.tokens.shape, dtype=bool) if record.loss is None else record.loss.copy()
        lengths = record.span_lengths()
        for span in np.unique(record.images.documents[record.images.is_grey]).tolist():
            start = int(record.span_start[span])
            loss[0, start : start + int(lengths[span])] = False
        return loss

    def ahead(self, blocks: Iterator[RecordBlock], runner: Runner) -> Iterator[RecordBlock]:
        """The records of `blocks`, one at a time, with their pixels."""
        waiting: deque[tuple[Pending, int]] = deque()
        under_way, most = 0, max(_OF_WORKER * self.workers, _AHEAD * self.batch)
        records = (self.filled(block.slice(n, n + 1)) for block in blocks for n in range(len(block)))
        while batch := list(itertools.islice(records, self.batch)):
            for job, of_job in self._jobs(batch):
                waiting.append((runner.submit("vision", self.made, *job), of_job))
                under_way += of_job
                # Nothing is stored up before it is known in which form. At most one for one while there is room, so
                # that a slow consumer finds as many ready as there may be.
                room = 0 if self.wanted.form is None else self.lookahead_bytes
                is_due = waiting[0][0].done()
                while is_due or len(waiting) > (self.workers if under_way > room else most):
                    pending, nbytes = waiting.popleft()
                    under_way -= nbytes
                    is_due = False
                    yield pending.result()
        for pending, _ in waiting:
            yield pending.result()

    def _jobs(self, batch: Sequence[RecordBlock]) -> Iterator[tuple[tuple[Any, ...], int]]:
        """The arguments of `made` for each record of a microbatch, and bytes of its pixels."""
        counts = [[] if each.images is None else each.images.patch_counts.tolist() for each in batch]
        of_all, form = [count for some in counts for count in some], self.wanted.form
        ready = None
        if form is not None and of_all:
            memory = self.wanted.memory(values_shape(form, of_all, self.vision), form.dtype)
            ready = ReadyPixels(form, memory, len(of_all))
        shared = 0 if ready is None else ready.values.nbytes // len(batch)
        images = patches = 0
        for record, own in zip(batch, counts, strict=True):
            yield (record, ready, (images, patches)), sum(own) * self.vision.pixels_per_patch + shared
            images, patches = images + len(own), patches + sum(own)


class ImageBudget:
    """Counts the images of a group that cannot be decoded against the policy, for every `JUDGED` images of a lane.

    A lane has the same images on any topology, and its counts are part of the state: so is the verdict.

    Args:
        stage: what decoded them.
        lanes: number of lanes of the run.
        counts: by lane, its images since the last verdict, and how many of them are grey.
        on_grey: called with the lane, the record and the fault, for every grey image.
    """

    def __init__(
        self,
        stage: PixelStage,
        lanes: int,
        counts: Mapping[int, tuple[int, int]],
        on_grey: Callable[[int, int, RowFault], None] | None = None,
    ) -> None:
        self.counts = dict(counts)
        self._stage, self._lanes, self._on_grey = stage, lanes, on_grey
        self._logged: set[str] = set()

    def add(self, block: RecordBlock, numbers: np.ndarray) -> None:
        """Count the images of records with these sequence numbers, int64[n].

        Raises:
            DataError: the budget does not allow a grey image of them.
        """
        images, policy = block.images, self._stage.faults
        if images is None or not (policy.skips or images.is_grey.any()):
            return
        counts, is_grey = self.counts.copy(), images.is_grey
        for n, (first, last) in enumerate(itertools.pairwise(images.offsets[block.span_offsets].tolist())):
            number = int(numbers[n])
            lane = number % self._lanes
            seen, grey = counts.get(lane, (0, 0))
            for image in range(first, last):
                if seen == JUDGED:
                    seen = grey = 0
                seen += not self._stage.is_placeholder(images, image)
                if is_grey[image]:
                    grey += 1
                    self._judge(lane, number, self._fault(block, image), grey)
            counts[lane] = seen, grey
        self.counts = counts if policy.skips else self.counts

    def _judge(self, lane: int, number: int, fault: RowFault, grey: int) -> None:
        policy = self._stage.faults
        if not policy.skips:
            raise DataError(f'{fault}; repair it, or show grey in its place with on_error = "skip".')
        if self._on_grey is not None:
            self._on_grey(lane, number, fault)
        if grey > policy.allowed(JUDGED):
            raise DataError(
                f"{fault}. Images that cannot be decoded, of {JUDGED:,} in lane {lane}: {grey}; "
                f"{policy.described(JUDGED)}. Repair the data, or raise the budget."
            )
        if len(self._logged) < _LOGGED and str(fault) not in self._logged:
            self._logged.add(str(fault))
            _log.warning("grey in place of an image: %s", fault)

    def _fault(self, block: RecordBlock, image: int) -> RowFault:
        images, stage = block.images, self._stage
        assert images is not None and images.reasons is not None
        document = int(images.documents[image])
        dataset = int(block.span_dataset[document])
        shard, row = stage.locate(dataset, int(block.span_row[document]))
        file, content = images.files[image].as_py(), ""
        if stage.faults.keeps:
            content = f"{len(file):,} bytes, SHA-256 {hashlib.sha256(file).hexdigest()}"
        reason = f"image {image - int(images.offsets[document]) + 1}: {images.reasons[image].as_py()}"
        return RowFault(OPERATOR, stage.names[dataset], shard, row, reason, row, 1, content)
