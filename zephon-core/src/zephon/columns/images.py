"""Images on their way through the engine: compressed until the records that show them are given out."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import byte_lengths, int64_array, ragged_take


@dataclass(frozen=True, slots=True)
class Images:
    """The images of n documents, or parts of records, in the order of their tokens.

    Attributes:
        offsets: int64[n + 1], the images of document i being `offsets[i]:offsets[i + 1]`.
        grids: int32[n_images, 4]: patches high and wide, and the pixels high and wide that they are cut from.
        files: the image files, large_binary[n_images].
        patches: uint8[n_patches, 3 * patch_size**2], those of all images one after the other; None before decoding.
        reasons: string[n_images], why an image is grey, null for those that were decoded; None before decoding.
    """

    offsets: np.ndarray
    grids: np.ndarray
    files: pa.LargeBinaryArray
    patches: np.ndarray | None = None
    reasons: pa.StringArray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the files and patches."""
        return int(byte_lengths(self.files).sum()) + (0 if self.patches is None else self.patches.nbytes)

    @property
    def documents(self) -> np.ndarray:
        """int64[n_images]: the document of each image."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def is_grey(self) -> np.ndarray:
        """bool[n_images]: images that could not be decoded."""
        grey: np.ndarray = np.zeros(len(self.grids), dtype=bool)
        if self.reasons is not None and self.reasons.null_count < len(grey):
            grey = self.reasons.is_valid().to_numpy(zero_copy_only=False)
        return grey

    @property
    def patch_counts(self) -> np.ndarray:
        """int64[n_images]: patches of each image."""
        return self.grids[:, 0].astype(np.int64) * self.grids[:, 1]

    def slice(self, start: int, stop: int) -> Images:
        """Those of documents `start:stop`, as views."""
        low, high = int(self.offsets[start]), int(self.offsets[stop])
        patches = self.patches
        if patches is not None:
            counts = self.patch_counts
            first = int(counts[:low].sum())
            patches = patches[first : first + int(counts[low:high].sum())]
        return Images(
            self.offsets[start : stop + 1] - low,
            self.grids[low:high],
            self.files.slice(low, high - low),
            patches,
            None if self.reasons is None else self.reasons.slice(low, high - low),
        )

    def take(self, documents: np.ndarray) -> Images:
        """Those of some documents, int64[m], in their order and in memory of their own; before decoding."""
        items, offsets = ragged_take(self.offsets, documents)
        return Images(offsets, self.grids[items], self.files.take(int64_array(items)))

    def decoded(self, patches: np.ndarray, reasons: Sequence[str | None]) -> Images:
        """The same with their pixels, and why some are grey."""
        # Files in memory of their own: a slice would keep, and hand to other processes, those of the whole block.
        files = self.files.take(int64_array(np.arange(len(self.files))))
        return replace(self, files=files, patches=patches, reasons=pa.array(reasons, pa.string()))

    def digests(self, *, pixels: bool = False) -> list[bytes]:
        """For each document, the grids as little-endian int32, the SHA-256 of each file and, with `pixels`, that of its
        patches; empty without images."""
        edges = self.offsets.tolist()
        files = [hashlib.sha256(file).digest() for file in self.files.to_pylist()]
        if pixels and self.patches is not None:
            each = np.split(self.patches, np.cumsum(self.patch_counts)[:-1])
            files = [file + hashlib.sha256(patches).digest() for file, patches in zip(files, each, strict=False)]
        grids = self.grids.astype("<i4")
        return [grids[a:b].tobytes() + b"".join(files[a:b]) for a, b in itertools.pairwise(edges)]

    @staticmethod
    def none(documents: int) -> Images:
        """No images of so many documents."""
        files = pa.array([], pa.large_binary())
        return Images(np.zeros(documents + 1, dtype=np.int64), np.zeros((0, 4), dtype=np.int32), files)

    @staticmethod
    def concat(parts: Sequence[Images | None], counts: Sequence[int]) -> Images | None:
        """The images of all parts, which have so many documents each; None where no part has any."""
        if all(part is None for part in parts):
            return None
        some = [part or Images.none(count) for part, count in zip(parts, counts, strict=True)]
        ends = np.cumsum([0, *(part.offsets[-1] for part in some)])
        decoded = [part for part in some if len(part.grids)]
        has_patches = bool(decoded) and all(part.patches is not None for part in decoded)
        return Images(
            np.concatenate([[0], *(part.offsets[1:] + end for part, end in zip(some, ends, strict=False))]),
            np.concatenate([part.grids for part in some]),
            pa.concat_arrays([part.files for part in some]),
            np.concatenate([part.patches for part in decoded]) if has_patches else None,
            pa.concat_arrays([part.reasons for part in decoded]) if has_patches else None,
        )
