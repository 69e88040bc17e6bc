"""Mixture: how many rows of each dataset a lane has had by any chunk, and in which order they stand in it.

Targets are kept as whole numbers, so every quota is exact and the same on every platform. For dataset d with row
weight a_d (of M = sum of all a), lane l and chunks of C rows, the rows taken before chunk i are

    floor(i * C * a_d / M + phase(d, l)),    phase(d, l) = p / L, p a permutation of the lanes keyed by d

which is monotone, never more than one row from the target, and needs no history. The phases make the lanes take
their fractional rows in turn: over all lanes together the count is floor(L * i * C * a_d / M) (Hermite's identity),
so a dataset of weight 1e-6 comes in at its share of the run and not in every lane at once.

Without repetition a dataset that ends leaves its share to the others: the rates change at the chunk in which it ends,
so there is one set of rates per stage and the same closed form inside each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import RecipeError
from .order import DatasetOrder
from .permute import derive_key, hash64, mix_key, shuffled_indices

__all__ = ["Chunk", "Curriculum", "row_weights"]

_WEIGHT_ONE = 1 << 48
_FRACTION_BITS = 40


def row_weights(token_weights: Sequence[float], tokens_per_row: Sequence[float]) -> list[int]:
    """Whole-number row weights that give the wanted shares of tokens, one per dataset, each at least 1."""
    rates = [w / t for w, t in zip(token_weights, tokens_per_row, strict=True)]
    total = math.fsum(rates)  # exact on every Python; sum() of floats rounds otherwise before 3.12 than after
    return [max(1, round(rate / total * _WEIGHT_ONE)) for rate in rates]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Row pointers of one lane, in order.

    Attributes:
        dataset: int32[n], index of the dataset.
        row: int64[n], row within the dataset.
    """

    dataset: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class _Stage:
    """From chunk `first` on, dataset d advances by `rate[d] / total` rows per row of time, starting at `base[d]`."""

    first: int
    base: tuple[int, ...]  # rows << _FRACTION_BITS
    rate: tuple[int, ...]
    total: int


class Curriculum:
    """`chunk(lane, index)`: the whole curriculum of a run, as a pure function.

    Args:
        orders: one per dataset.
        weights: whole-number row weights, one per dataset (see `row_weights`).
        lanes: L.
        chunk_size: rows per chunk.
        seed: seed of the run.
        repeat: go through every dataset again and again; else each row is used once and the lanes end.
    """

    def __init__(
        self,
        orders: Sequence[DatasetOrder],
        weights: Sequence[int],
        *,
        lanes: int,
        chunk_size: int,
        seed: int,
        repeat: bool,
    ) -> None:
        if chunk_size < 1:
            raise RecipeError(f"chunk_size is {chunk_size}; a whole number of at least 1 is needed.")
        self._orders = list(orders)
        self._lanes = lanes
        self._size = chunk_size
        self._repeat = repeat
        self._key = derive_key("mixture", seed)
        self._phases = [shuffled_indices(mix_key(self._key, 1, d), lanes).tolist() for d in range(len(orders))]
        self._stages = self._plan(list(weights))
        self.chunks: int | None = None if repeat else self._stages.pop().first

    def chunk(self, lane: int, index: int) -> Chunk | None:
        """Chunk `index` of `lane`, or None past the end of a run that does not repeat."""
        if self.chunks is not None and index >= self.chunks:
            return None
        begin, end = self.rows_before(lane, index), self.rows_before(lane, index + 1)
        stage = self._stage(index)
        datasets, rows, keys = [], [], []
        for d, order in enumerate(self._orders):
            count = end[d] - begin[d]
            if not count:
                continue
            # Each dataset's rows stand evenly over the chunk, one at a random place in each of `wanted` equal parts;
            # a dataset that ends in this chunk stops early rather than being thinned out.
            wanted = max(count, self._target(stage, lane, d, index + 1) - self._target(stage, lane, d, index))
            nth = np.arange(count, dtype=np.uint64)
            jitter = hash64(mix_key(self._key, 2, lane, index, d), nth) >> np.uint64(32)
            keys.append(((nth << np.uint64(32)) + jitter) // np.uint64(wanted))
            datasets.append(np.full(count, d, dtype=np.int32))
            rows.append(order.rows(lane, begin[d], end[d]))
        if not rows:
            return Chunk(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
        if len(rows) == 1:
            return Chunk(datasets[0], rows[0])
        place = np.argsort(np.concatenate(keys), kind="stable")
        return Chunk(np.concatenate(datasets)[place], np.concatenate(rows)[place])

    def rows_before(self, lane: int, index: int) -> list[int]:
        """Rows of each dataset that `lane` has taken before chunk `index`."""
        if self.chunks is not None and index >= self.chunks:
            return [order.rows_of_lane(lane) for order in self._orders]
        stage = self._stage(index)
        targets = [self._target(stage, lane, d, index) for d in range(len(self._orders))]
        if self._repeat:
            return targets
        limits = [order.rows_of_lane(lane) for order in self._orders]
        return [
            min(target, limit) if rate else limit
            for target, limit, rate in zip(targets, limits, stage.rate, strict=True)
        ]

    def _stage(self, index: int) -> _Stage:
        return next(stage for stage in reversed(self._stages) if stage.first <= index)

    def _target(self, stage: _Stage, lane: int, d: int, index: int) -> int:
        """Rows of dataset `d` due before chunk `index`, by the rates of `stage`."""
        due = ((index - stage.first) * self._size * stage.rate[d] << _FRACTION_BITS) // stage.total
        phase = (self._phases[d][lane] << _FRACTION_BITS) // self._lanes
        return (stage.base[d] + due + phase) >> _FRACTION_BITS

    def _plan(self, weights: list[int]) -> list[_Stage]:
        """The stages of a run; without repetition the last of them is only the end."""
        stage = _Stage(0, (0,) * len(weights), tuple(weights), sum(weights))
        if self._repeat:
            return [stage]
        # What a lane gets of each dataset, as a fixed-point number of rows, rounded up so that none is cut short.
        share = [-((-order.rows_total << _FRACTION_BITS) // self._lanes) for order in self._orders]
        stages = [stage]
        while any(stage.rate):
            left = [
                -((base - share[d]) * stage.total // (self._size * rate << _FRACTION_BITS))
                for d, (base, rate) in enumerate(zip(stage.base, stage.rate, strict=True))
                if rate
            ]
            chunks = max(1, min(left))
            base = tuple(
                min(share[d], stage.base[d] + (chunks * self._size * rate << _FRACTION_BITS) // stage.total)
                for d, rate in enumerate(stage.rate)
            )
            rate = tuple(r if base[d] < share[d] else 0 for d, r in enumerate(stage.rate))
            stage = _Stage(stage.first + chunks, base, rate, max(1, sum(rate)))
            stages.append(stage)
        return stages
