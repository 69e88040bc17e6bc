"""Images on their way through the engine: compressed until the records that show them are given out."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import byte_lengths, int64_array, ragged_take

_KEPT = 2  # pieces of memory that wait for their next use, at most


class PixelForm(NamedTuple):
    """How a batch gives its pixels; see `SampleBatch.to_training`."""

    layout: Literal["packed", "padded"] = "packed"
    dtype: Literal["float32", "uint8"] = "float32"


class PixelsAhead:
    """The form that the last batch was asked for, in which workers make the pixels of the next ones, and their memory.

    Memory is used again once nothing refers to it: the pages of a new piece of 100 MB take as long as its values.
    """

    def __init__(self) -> None:
        self.form: PixelForm | None = None
        self._free: list[np.ndarray] = []
        self._taking = threading.Lock()  # of the thread of a stream that ends, and of the next one's

    def __reduce__(self) -> tuple[Any, ...]:
        return PixelsAhead, ()

    def memory(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """An array without values."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._taking:  # finalizers add at the end alone, at any moment
            fitting = [n for n, block in enumerate(self._free) if nbytes <= block.nbytes <= 2 * nbytes]
            block = self._free.pop(fitting[-1]) if fitting else np.empty(nbytes + nbytes // 4, dtype=np.uint8)
            del self._free[:-_KEPT]
        whole = np.frombuffer(memoryview(block), dtype=np.uint8)  # a new object, finalized with its last view
        weakref.finalize(whole, self._free.append, block).atexit = False
        return whole[:nbytes].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyPixels:
    """The pixels of the images of neighbouring records as a trainer takes them.

    Attributes:
        form: what `values` are.
        values: [patches, values], or with "padded" [images, most patches, values].
        images: how many.
    """

    form: PixelForm
    values: np.ndarray
    images: int


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of n documents, or parts of records, in the order of their tokens.

    Attributes:
        offsets: int64[n + 1], the images of document i being `offsets[i]:offsets[i + 1]`.
        grids: int32[n_images, 4]: patches high and wide, and the pixels high and wide that they are cut from.
        files: the image files, large_binary[n_images].
        patches: of each image uint8[n_patches, 3 * patch_size**2]; None before decoding.
        reasons: string[n_images], why an image is grey, null for those that were decoded; None before decoding.
        ready: the pixels of these images, and perhaps of others, made ahead; None where they are not.
        ready_at: the place of the first image among those.
    """

    offsets: np.ndarray
    grids: np.ndarray
    files: pa.LargeBinaryArray
    patches: tuple[np.ndarray, ...] | None = None
    reasons: pa.StringArray | None = None
    ready: ReadyPixels | None = field(default=None, repr=False)
    ready_at: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the files and patches."""
        return int(byte_lengths(self.files).sum()) + sum(each.nbytes for each in self.patches or ())

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
        return Images(
            self.offsets[start : stop + 1] - low,
            self.grids[low:high],
            self.files.slice(low, high - low),
            None if self.patches is None else self.patches[low:high],
            None if self.reasons is None else self.reasons.slice(low, high - low),
            self.ready,
            self.ready_at + low,
        )

    def take(self, documents: np.ndarray) -> Images:
        """Those of some documents, int64[m], in their order and in memory of their own; before decoding."""
        items, offsets = ragged_take(self.offsets, documents)
        return Images(offsets, self.grids[items], self.files.take(int64_array(items)))

    def ready_values(self, form: PixelForm) -> np.ndarray | None:
        """The pixels in that form, if they have been made ahead for just these images."""
        ready = self.ready
        if ready is None or (ready.form, ready.images, 0) != (form, len(self.grids), self.ready_at):
            return None
        return ready.values

    def decoded(self, patches: Sequence[np.ndarray], reasons: Sequence[str | None]) -> Images:
        """The same with their pixels, and why some are grey."""
        # Files in memory of their own: a slice would keep, and hand to other processes, those of the whole block.
        files = self.files.take(int64_array(np.arange(len(self.files))))
        return replace(self, files=files, patches=tuple(patches), reasons=pa.array(reasons, pa.string()))

    def digests(self, *, pixels: bool = False) -> list[bytes]:
        """For each document, the grids as little-endian int32, the SHA-256 of each file and, with `pixels`, that of its
        patches; empty without images."""
        edges = self.offsets.tolist()
        files = [hashlib.sha256(file).digest() for file in self.files.to_pylist()]
        if pixels and self.patches is not None:
            files = [file + hashlib.sha256(patches).digest() for file, patches in zip(files, self.patches, strict=True)]
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
        patches = [part.patches for part in decoded if part.patches is not None]
        has_patches = bool(decoded) and len(patches) == len(decoded)
        first = decoded[0] if decoded else some[0]
        place, follow = first.ready_at, first.ready is not None
        for part in decoded:
            follow, place = follow and part.ready is first.ready and part.ready_at == place, place + len(part.grids)
        return Images(
            np.concatenate([[0], *(part.offsets[1:] + end for part, end in zip(some, ends, strict=False))]),
            np.concatenate([part.grids for part in some]),
            pa.concat_arrays([part.files for part in some]),
            tuple(itertools.chain(*patches)) if has_patches else None,
            pa.concat_arrays([part.reasons for part in decoded]) if has_patches else None,
            first.ready if follow else None,
            first.ready_at,
        )
