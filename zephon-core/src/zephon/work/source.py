"""Work sources: which datasets a run reads, in which shares and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import RecipeError
from ..io import Dataset, OpenDataset
from .mixture import Curriculum, row_weights
from .order import DatasetOrder, OrderOptions
from .tokens import TokenEstimation

__all__ = ["MAX_CHUNK_SIZE", "StaticMixtureWorkSource"]

MAX_CHUNK_SIZE = 1 << 20


@dataclass(frozen=True)
class StaticMixtureWorkSource:
    """A mixture of datasets whose token shares stay the same for the whole run.

    Attributes:
        datasets: at least one, names all different.
        mixture: weight of each dataset by name, finite and positive; shares of tokens are weight / sum of weights.
            None gives every dataset the same weight.
        token_estimation: how tokens per row are measured; True as usual; None or False takes bytes of text instead.
        seed: keys every permutation.
        chunk_size: rows per chunk of a lane.
        shuffle_shards, shuffle_within_shard, shuffle_block_size: see `OrderOptions`.
        repeat: go round each dataset without end; else every row is used once and the run ends.

    Raises:
        RecipeError: a value is not usable.
    """

    datasets: Sequence[Dataset]
    mixture: Mapping[str, float] | None = None
    token_estimation: TokenEstimation | bool | None = TokenEstimation()
    seed: int = 0
    chunk_size: int = 16384
    shuffle_shards: bool = True
    shuffle_within_shard: bool = True
    shuffle_block_size: int | str = "auto"
    repeat: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.datasets, str | Dataset) or not isinstance(self.datasets, Iterable):
            raise RecipeError(f"datasets is {self.datasets!r}; a list of zephon.io.Dataset is needed.")
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
        if self.chunk_size > MAX_CHUNK_SIZE:
            raise RecipeError(f"chunk_size is {self.chunk_size}; chunks of at most {MAX_CHUNK_SIZE} rows are possible.")
        for name in ("shuffle_shards", "shuffle_within_shard", "repeat"):
            if not isinstance(getattr(self, name), bool):
                raise RecipeError(f"{name} is {getattr(self, name)!r}; True or False is needed.")
        if isinstance(self.token_estimation, bool):
            object.__setattr__(self, "token_estimation", TokenEstimation() if self.token_estimation else None)
        elif self.token_estimation is not None and not isinstance(self.token_estimation, TokenEstimation):
            raise RecipeError(
                f"token_estimation is {self.token_estimation!r}; a TokenEstimation, True, False or None is needed."
            )
        block = self.shuffle_block_size
        is_rows = isinstance(block, int) and not isinstance(block, bool) and block >= 1
        if not is_rows and not (isinstance(block, str) and block in ("auto", "global", "none")):
            raise RecipeError(
                f'shuffle_block_size is {block!r}; "auto", "global", "none" or a number of rows above 0 is needed.'
            )
        if self.mixture is not None and not isinstance(self.mixture, Mapping):
            raise RecipeError(f"mixture is {self.mixture!r}; weights by dataset name are needed.")
        weights: dict[str, float] = dict(self.mixture) if self.mixture is not None else dict.fromkeys(names, 1.0)
        for name, weight in weights.items():
            if name not in names:
                raise RecipeError(f'mixture names "{name}", which is not among the datasets {names}.')
            if not _is_weight(weight):
                raise RecipeError(
                    f'mixture weight of "{name}" is {str(weight)[:40]}; a finite number above 0 is needed.'
                )
        missing = [name for name in names if name not in weights]
        if missing:
            raise RecipeError(f"mixture has no weight for {missing}; every dataset needs one.")
        if not math.isfinite(sum(weights.values())):
            raise RecipeError(f"the mixture weights {weights} are too large to be added up; make them smaller.")
        object.__setattr__(self, "datasets", tuple(datasets))
        object.__setattr__(self, "mixture", {name: float(weights[name]) for name in names})

    def replace(self, **changes: Any) -> StaticMixtureWorkSource:
        """The same source with some attributes changed."""
        return replace(self, **changes)

    @property
    def estimation(self) -> TokenEstimation | None:
        """How tokens per row are measured, or None."""
        return self.token_estimation if isinstance(self.token_estimation, TokenEstimation) else None

    @property
    def shares(self) -> dict[str, float]:
        """Wanted share of tokens by dataset name; they add up to 1."""
        weights = self.relative_weights
        total = math.fsum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    @property
    def relative_weights(self) -> dict[str, float]:
        """Weights in units of the first dataset's, so that 3 to 1 and 0.75 to 0.25 are one and the same mixture."""
        assert self.mixture is not None
        first = next(iter(self.mixture.values()))
        return {name: weight / first for name, weight in self.mixture.items()}

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


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False
