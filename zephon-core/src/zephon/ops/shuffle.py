"""Shuffling records inside a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from zephon.columns.records import RecordBlock
from zephon.config.keys import Positive, check_keys, key
from zephon.curriculum.permute import derive_key, mix_key, shuffled_indices
from zephon.errors import PipelineError
from zephon.ops.base import Ordered

_NO_ORIGIN = np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True)
class Shuffle:
    """Collect records in a buffer and give them out in random order; see the fields."""

    kind: ClassVar[str] = "shuffle"

    buffer_size: Positive = key(doc="Records over all lanes together; each lane gets buffer_size / L, at least one.")
    seed: Annotated[int, Meta(title="an integer")] = key(0, "Keys the order.")

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, "shuffle ")


class Shuffler:
    """The accumulator of `Shuffle` for one lane.

    A full buffer is given out whole, in an order keyed by seed, lane, window and the number of the buffer in its
    window; so every buffer can be made again from its first record, and nothing is held across the end of a window.

    With `keep_datasets`, the names of the datasets, a place of the buffer keeps the dataset of its record, so that an
    order which holds the mixture locally is not lost; each dataset's records are shuffled among their places.
    """

    def __init__(
        self,
        spec: Shuffle,
        *,
        lane: int,
        lanes: int,
        window: int,
        buffer: int = 0,
        keep_datasets: Sequence[str] | None = None,
    ) -> None:
        self._keys = None if keep_datasets is None else [derive_key("shuffle", name) for name in keep_datasets]
        self._buffer = buffer
        self._size = max(1, spec.buffer_size // lanes)
        self._key = mix_key(derive_key("shuffle", spec.seed), lane)
        self._window = window
        self._parts: list[RecordBlock] = []
        self._held = 0
        self._origin = _NO_ORIGIN

    def push(self, block: RecordBlock, origins: np.ndarray, fresh: bool = False) -> list[Ordered]:
        """Take records; gives a job per full buffer."""
        jobs = [self._emit()] if fresh and self._held else []
        start = 0
        while start < len(block):
            if not self._held:
                self._origin = _known(origins[start : start + 1])
            stop = min(len(block), start + self._size - self._held)
            self._parts.append(block.slice(start, stop))
            self._held += stop - start
            start = stop
            if self._held == self._size:
                jobs.append(self._emit())
        return jobs

    def flush(self) -> list[Ordered]:
        """Give out an incomplete buffer; the next window starts."""
        jobs = [self._emit()] if self._held else []
        self._window += 1
        self._buffer = 0
        return jobs

    def _emit(self) -> Ordered:
        parts, count, keys = self._parts, self._held, self._keys
        key = mix_key(self._key, self._window, self._buffer)
        made = Ordered(
            run=lambda: RecordBlock.arrange(
                parts, shuffled_indices(key, count) if keys is None else _order_of_datasets(parts, key, keys)
            ),
            nbytes=count * parts[0].tokens.shape[1] * 4,
            records=count,
            origin=self._origin,
            buffer=self._buffer,
        )
        self._parts, self._held = [], 0
        self._buffer += 1
        return made


class Passer:
    """What stands in the place of a `Shuffler` where records keep their order.

    Records go through at once; every `size` of them, counted from the start of the window, begin a buffer that the
    lane can be started from.
    """

    def __init__(self, *, size: int, buffer: int = 0) -> None:
        self._buffer = buffer
        self._size = size
        self._into = 0

    def push(self, block: RecordBlock, origins: np.ndarray, fresh: bool = False) -> list[Ordered]:
        """Give the records on, cut where buffers begin."""
        jobs = []
        if fresh and self._into:
            self._into, self._buffer = 0, self._buffer + 1
        start = 0
        while start < len(block):
            stop = min(len(block), start + self._size - self._into)
            origin = _NO_ORIGIN if self._into else _known(origins[start : start + 1])
            run = partial(block.slice, start, stop)
            jobs.append(Ordered(run, nbytes=0, records=stop - start, origin=origin, buffer=self._buffer))
            self._into = (self._into + stop - start) % self._size
            self._buffer += self._into == 0
            start = stop
        return jobs

    def flush(self) -> list[Ordered]:
        """The next window starts."""
        self._into, self._buffer = 0, 0
        return []


def _order_of_datasets(parts: list[RecordBlock], key: int, keys: Sequence[int]) -> np.ndarray:
    """A random order int64[n] of the records of some blocks in which each place keeps the dataset of its record."""
    datasets = np.concatenate([part.span_dataset[part.span_offsets[:-1]] for part in parts])
    order = np.empty(len(datasets), dtype=np.int64)
    for d in np.unique(datasets).tolist():
        places = np.flatnonzero(datasets == d)
        order[places] = places[shuffled_indices(mix_key(key, keys[d]), len(places))]
    return order


def _known(origin: np.ndarray) -> np.ndarray:
    """The line, or none where it names no place."""
    return origin if origin[0, 0] >= 0 else _NO_ORIGIN
