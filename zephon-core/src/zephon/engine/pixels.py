"""Pixels of the records that are given out next, decoded ahead by workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zephon.columns.faults import RowFault
from zephon.columns.records import RecordBlock
from zephon.config.options import FaultPolicy
from zephon.engine.runners import Pending, Runner
from zephon.errors import DataError
from zephon.vision.geometry import Grid, VisionSettings
from zephon.vision.headers import BadImage
from zephon.vision.pixels import grey_patches, image_patches

OPERATOR = "tokenize_images"
_LEAST_JUDGED = 1000  # images


@dataclass(frozen=True, slots=True)
class PixelStage:
    """What decodes the images of records.

    Attributes:
        vision: how the model sees images.
        names: of the datasets.
        locate: shard and row within it, of a row of a dataset given by number.
        faults: the fate of images that cannot be decoded.
        lookahead_bytes: patches that may be decoded or under way beyond the next record.
    """

    vision: VisionSettings
    names: Sequence[str]
    locate: Callable[[int, int], tuple[str, int]]
    faults: FaultPolicy
    lookahead_bytes: int

    def decoded(self, record: RecordBlock) -> tuple[RecordBlock, list[RowFault]]:
        """A record with its pixels, and the rows with images that cannot be decoded.

        Such an image is grey, and no label of its document is trained on.
        """
        images = record.images
        if images is None:
            return record, []
        patches, is_grey, faults = [], np.zeros(len(images.grids), dtype=bool), []
        spans = np.repeat(np.arange(len(images)), np.diff(images.offsets)).tolist()
        for n, (span, file, sizes) in enumerate(
            zip(spans, images.files.to_pylist(), images.grids.tolist(), strict=True)
        ):
            grid = Grid(*sizes)
            try:
                patches.append(image_patches(file, grid, self.vision))
            except BadImage as error:
                patches.append(grey_patches(grid, self.vision))
                is_grey[n] = True
                dataset, row = int(record.span_dataset[span]), int(record.span_row[span])
                shard, in_shard = self.locate(dataset, row)
                faults.append(RowFault(OPERATOR, self.names[dataset], shard, in_shard, str(error), in_shard))
        size = 3 * self.vision.patch_size**2
        pixels = np.concatenate([np.zeros((0, size), dtype=np.uint8), *patches])
        record = replace(record, images=images.with_patches(pixels, is_grey))
        if faults:
            record.loss = self._without_grey(record, np.unique(np.array(spans)[is_grey]))
        return record, faults

    @staticmethod
    def _without_grey(record: RecordBlock, spans: np.ndarray) -> np.ndarray:
        loss = np.ones(record.tokens.shape, dtype=bool) if record.loss is None else record.loss.copy()
        lengths = record.span_lengths()
        for span in spans.tolist():
            start = int(record.span_start[span])
            loss[0, start : start + int(lengths[span])] = False
        return loss

    def ahead(
        self, blocks: Iterator[RecordBlock], runner: Runner, on_fault: Callable[[int, int, RowFault], None] | None
    ) -> Iterator[RecordBlock]:
        """The records of `blocks`, one at a time, with their pixels."""
        waiting: deque[tuple[Pending, int, int]] = deque()
        under_way, seen, failed = 0, 0, 0
        for block in blocks:
            for n in range(len(block)):
                record = block.slice(n, n + 1)
                count = 0 if record.images is None else int(record.images.patch_counts.sum())
                nbytes = count * 3 * self.vision.patch_size**2
                waiting.append((runner.submit("vision", self.decoded, record), nbytes, n))
                under_way += nbytes
                while len(waiting) > 1 and (under_way > self.lookahead_bytes or not runner.looks_ahead):
                    under_way -= waiting[0][1]
                    yield self._judged(waiting.popleft()[0], on_fault)
        while waiting:
            yield self._judged(waiting.popleft()[0], on_fault)

    def _judged(self, pending: Pending, on_fault: Callable[[int, int, RowFault], None] | None) -> RecordBlock:
        record: RecordBlock
        record, faults = pending.result()
        for fault in faults:
            if not self.faults.skips:
                raise DataError(f'{fault}; repair it, or train on grey in its place with on_error = "skip".')
            if on_fault is not None:
                on_fault(-1, -1, fault)
        return record
