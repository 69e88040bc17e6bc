"""Pixels of the records that are given out next, decoded ahead by workers."""

from __future__ import annotations

import logging
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
_LOGGED = 10
_log = logging.getLogger("zephon")


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
        pixels = np.concatenate([np.zeros((0, self.vision.pixels_per_patch), dtype=np.uint8), *patches])
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
        waiting: deque[tuple[Pending, int]] = deque()
        under_way = 0
        judge = _Judge(self.faults, on_fault)
        for block in blocks:
            for n in range(len(block)):
                record = block.slice(n, n + 1)
                patches = 0 if record.images is None else int(record.images.patch_counts.sum())
                waiting.append((runner.submit("vision", self.decoded, record), patches * self.vision.pixels_per_patch))
                under_way += waiting[-1][1]
                while waiting and (under_way > self.lookahead_bytes or waiting[0][0].done()):
                    pending, nbytes = waiting.popleft()
                    under_way -= nbytes
                    yield judge.passed(*pending.result())
        for pending, _ in waiting:
            yield judge.passed(*pending.result())


class _Judge:
    """Holds the images that cannot be decoded against the policy, over all that this process has decoded."""

    def __init__(self, policy: FaultPolicy, on_fault: Callable[[int, int, RowFault], None] | None) -> None:
        self._policy, self._on_fault = policy, on_fault
        self._images = self._grey = 0

    def passed(self, record: RecordBlock, faults: Sequence[RowFault]) -> RecordBlock:
        """The record; raises DataError where an image is one too many."""
        self._images += 0 if record.images is None else len(record.images.grids)
        rows = max(self._images, _LEAST_JUDGED)
        for fault in faults:
            if not self._policy.skips:
                raise DataError(f'{fault}; repair it, or show grey in its place with on_error = "skip".')
            self._grey += 1
            if self._on_fault is not None:
                self._on_fault(-1, -1, fault)
            if self._grey > self._policy.allowed(rows):
                raise DataError(
                    f"{fault}. Images that cannot be decoded, of {self._images:,}: {self._grey}; "
                    f"{self._policy.described(rows)}. Repair the data, or raise the budget."
                )
            if self._grey <= _LOGGED:
                _log.warning("grey in place of an image: %s", fault)
        return record
