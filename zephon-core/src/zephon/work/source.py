"""Work sources: which datasets a run reads, in which shares and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import RecipeError
from ..io import Dataset, OpenDataset
from .mixture import Curriculum, row_weights
from .order import DatasetOrder, OrderOptions
from .tokens import TokenEstimation

__all__ = ["StaticMixtureWorkSource"]


@dataclass(frozen=True)
class StaticMixtureWorkSource:
    """A mixture of datasets whose token shares stay the same for the whole run.

    Attributes:
        datasets: at least one, names all different.
        mixture: weight of each dataset by name, finite and positive; shares of tokens are weight / sum of weights.
            None gives every dataset the same weight.
        token_estimation: how tokens per row are measured; None takes bytes of text instead.
        seed: keys every permutation.
        chunk_size: rows per chunk of a lane.
        shuffle_shards, shuffle_within_shard, shuffle_block_size: see `OrderOptions`.
        repeat: go round each dataset without end; else every row is used once and the run ends.

    Raises:
        RecipeError: a value is not usable.
    """

    datasets: Sequence[Dataset]
    mixture: Mapping[str, float] | None = None
    token_estimation: TokenEstimation | None = TokenEstimation()
    seed: int = 0
    chunk_size: int = 16384
    shuffle_shards: bool = True
    shuffle_within_shard: bool = True
    shuffle_block_size: int | str = "auto"
    repeat: bool = True

    def __post_init__(self) -> None:
        datasets = list(self.datasets)
        if not datasets:
            raise RecipeError("a work source needs at least one dataset; none is given.")
        for dataset in datasets:
            if not isinstance(dataset, Dataset):
                raise RecipeError(f"datasets holds {dataset!r}; a zephon.io.Dataset is needed.")
        names = [dataset.name for dataset in datasets]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f'two datasets are named "{name}"; every dataset needs a name of its own.')
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise RecipeError(f"seed is {self.seed!r}; a whole number is needed.")
        if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise RecipeError(f"chunk_size is {self.chunk_size!r}; a whole number of at least 1 is needed.")
        block = self.shuffle_block_size
        if block not in ("auto", "global", "none") and (isinstance(block, bool | str) or block < 1):
            raise RecipeError(
                f'shuffle_block_size is {block!r}; "auto", "global", "none" or a number of rows above 0 is needed.'
            )
        weights = dict(self.mixture) if self.mixture is not None else dict.fromkeys(names, 1.0)
        for name, weight in weights.items():
            if name not in names:
                raise RecipeError(f'mixture names "{name}", which is not among the datasets {names}.')
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not math.isfinite(weight)
                or weight <= 0
            ):
                raise RecipeError(f'mixture weight of "{name}" is {weight!r}; a finite number above 0 is needed.')
        missing = [name for name in names if name not in weights]
        if missing:
            raise RecipeError(f"mixture has no weight for {missing}; every dataset needs one.")
        object.__setattr__(self, "datasets", tuple(datasets))
        object.__setattr__(self, "mixture", {name: float(weights[name]) for name in names})

    def replace(self, **changes: Any) -> StaticMixtureWorkSource:
        """The same source with some attributes changed."""
        return replace(self, **changes)

    @property
    def shares(self) -> dict[str, float]:
        """Wanted share of tokens by dataset name; they add up to 1."""
        assert self.mixture is not None
        total = math.fsum(self.mixture.values())
        return {name: weight / total for name, weight in self.mixture.items()}

    def curriculum(self, opened: Sequence[OpenDataset], tokens_per_row: Sequence[float], *, lanes: int) -> Curriculum:
        """The curriculum over the opened datasets, given how many tokens a row of each makes on average."""
        options = OrderOptions(
            shuffle_shards=self.shuffle_shards,
            shuffle_within_shard=self.shuffle_within_shard,
            block_size=self.shuffle_block_size,  # type: ignore[arg-type]
        )
        orders = [
            DatasetOrder(dataset.name, dataset.catalog, lanes=lanes, seed=self.seed, options=options)
            for dataset in opened
        ]
        weights = row_weights(list(self.shares.values()), tokens_per_row)
        return Curriculum(orders, weights, lanes=lanes, chunk_size=self.chunk_size, seed=self.seed, repeat=self.repeat)
