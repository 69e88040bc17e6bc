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
from zephon.curriculum.permute import derive_key, mix_key, shuffled_indices, shuffled_rows
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
        """Take records; gives one job for all buffers that they fill."""
        jobs = [self._emit(self._held, [self._origin])] if fresh and self._held else []
        missing = self._size - self._held
        if len(block) >= missing:
            first, used = len(block) - (len(block) - missing) % self._size, self._held
            begins = [self._origin] if used else []
            begins += [origins[n : n + 1] for n in range(missing if used else 0, first, self._size)]
            self._parts.append(block.slice(0, first))
            self._held += first
            jobs.append(self._emit(self._size, begins))
            block, origins = block.slice(first, len(block)), origins[first:]
        if len(block):
            if not self._held:
                self._origin = origins[:1]
            self._parts.append(block)
            self._held += len(block)
        return jobs

    def flush(self) -> list[Ordered]:
        """Give out an incomplete buffer; the next window starts."""
        jobs = [self._emit(self._held, [self._origin])] if self._held else []
        self._window += 1
        self._buffer = 0
        return jobs

    def _emit(self, size: int, origins: Sequence[np.ndarray]) -> Ordered:
        """The records held, which are buffers of `size` that begin at these origins."""
        parts, count = self._parts, self._held
        numbers = range(self._buffer, self._buffer + count // size)
        made = Ordered(
            run=partial(self._shuffled, parts, [mix_key(self._key, self._window, n) for n in numbers], size),
            nbytes=count * parts[0].tokens.shape[1] * 4,
            records=count,
            begins=_begins(range(0, count, size), numbers, origins),
        )
        self._parts, self._held = [], 0
        self._buffer = numbers.stop
        return made

    def _shuffled(self, parts: list[RecordBlock], keys: list[int], size: int) -> RecordBlock:
        if self._keys is None:
            order = shuffled_rows(np.array(keys, dtype=np.uint64), size)
        else:
            datasets = np.concatenate([part.span_dataset[part.span_offsets[:-1]] for part in parts]).reshape(-1, size)
            order = np.stack([_order_of_datasets(*each, self._keys) for each in zip(datasets, keys, strict=True)])
        order += np.arange(0, order.size, size)[:, None]
        return RecordBlock.arrange(parts, order.reshape(-1))


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
        """Give the records on."""
        if fresh and self._into:
            self._into, self._buffer = 0, self._buffer + 1
        firsts = range(-self._into % self._size, len(block), self._size)
        numbers = range(self._buffer + (self._into > 0), self._buffer + (self._into > 0) + len(firsts))
        begins = _begins(firsts, numbers, [origins[n : n + 1] for n in firsts])
        ended, self._into = divmod(self._into + len(block), self._size)
        self._buffer += ended
        return [Ordered(lambda: block, nbytes=0, records=len(block), begins=begins)] if len(block) else []

    def flush(self) -> list[Ordered]:
        """The next window starts."""
        self._into, self._buffer = 0, 0
        return []


def _order_of_datasets(datasets: np.ndarray, key: int, keys: Sequence[int]) -> np.ndarray:
    """A random order int64[n] of records of some datasets in which each place keeps the dataset of its record."""
    order = np.empty(len(datasets), dtype=np.int64)
    for d in np.unique(datasets).tolist():
        places = np.flatnonzero(datasets == d)
        order[places] = places[shuffled_indices(mix_key(key, keys[d]), len(places))]
    return order


def _begins(records: range, buffers: range, origins: Sequence[np.ndarray]) -> list[tuple[int, int, list[int]]]:
    """What `Ordered.begins` wants, without those whose origin names no place."""
    return [
        (record, buffer, origin[0].tolist())
        for record, buffer, origin in zip(records, buffers, origins, strict=True)
        if len(origin) and origin[0, 0] >= 0
    ]
