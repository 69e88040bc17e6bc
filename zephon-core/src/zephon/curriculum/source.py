"""Work sources: which datasets a run reads, in which shares and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from zephon.config.keys import Weight, check, quote, refuse_unknown, seen, within
from zephon.config.settings import (
    DATASET_KEYS,
    END_KEYS,
    CurriculumSettings,
    OrderSettings,
    Stage,
    check_schedule,
    check_weights,
)
from zephon.curriculum.mixture import Curriculum, Ending, row_weights
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.curriculum.schedule import SHARE_ONE, shares_between, spans_of
from zephon.curriculum.tokens import TokenEstimation
from zephon.data.dataset import Dataset
from zephon.data.reader import OpenDataset
from zephon.errors import RecipeError

__all__ = ["ScheduledMixtureWorkSource", "StaticMixtureWorkSource", "WorkSource"]

_ORDER_KEYS = tuple(name for name in DATASET_KEYS if name not in END_KEYS)


@dataclass(frozen=True)
class WorkSource(CurriculumSettings):
    """The common part of all work sources: datasets, their order, and when they end.

    Seed, chunk size, order and repetition are keys of a recipe, see docs/recipe.md.

    Attributes:
        datasets: at least one, names all different.
        mixture: weights by dataset name; see `StaticMixtureWorkSource`.
        token_estimation: how tokens per row are measured; True for the defaults; None or False takes bytes of text
            instead.
        per_dataset: values of `DATASET_KEYS` for single datasets, by dataset name. A dataset with one of `END_KEYS` of
            its own has none of the source's.
        continues: the source of a run that this one takes over from; see `Pipeline.restore`. Its datasets that this
            one does not have are kept with weight 0.

    Raises:
        RecipeError: a value is not usable.
    """

    datasets: Sequence[Dataset]
    mixture: Mapping[str, float] | None = None
    token_estimation: TokenEstimation | bool | None = TokenEstimation()
    per_dataset: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    continues: WorkSource | None = field(default=None, kw_only=True)
    retired: tuple[str, ...] = field(default=(), init=False, compare=False)
    """Datasets that are only kept because the continued source has them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        datasets = list(self.datasets) if isinstance(self.datasets, Iterable) else []
        if not datasets or not all(isinstance(dataset, Dataset) for dataset in datasets):
            raise RecipeError(f"datasets is {seen(self.datasets)}; expected a list of at least one zephon.io.Dataset.")
        names = [dataset.name for dataset in datasets]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"two datasets are named {quote(name)}; expected a name of its own for each.")
        if isinstance(self.token_estimation, bool):
            object.__setattr__(self, "token_estimation", TokenEstimation() if self.token_estimation else None)
        elif self.token_estimation is not None and not isinstance(self.token_estimation, TokenEstimation):
            raise RecipeError(
                f"token_estimation is {seen(self.token_estimation)}; expected a TokenEstimation, true or false."
            )
        self._check_per_dataset(names)
        self._check_mixture(names)
        object.__setattr__(self, "datasets", tuple(datasets))
        self._take_over(names)

    def replace(self, **changes: Any) -> Self:
        """The same source with some attributes changed."""
        own = {dataset.name: dataset for dataset in self.datasets if dataset.name not in self.retired}
        given: dict[str, Any] = {"datasets": list(own.values())}
        given["per_dataset"] = {name: value for name, value in self.per_dataset.items() if name in own}
        if self.mixture is not None:
            given["mixture"] = {name: weight for name, weight in self.mixture.items() if name in own}
        return replace(self, **{**given, **changes})

    def _check_per_dataset(self, names: Sequence[str]) -> None:
        """Check the settings of single datasets, and put them into normal form."""
        checked: dict[str, dict[str, Any]] = {}
        refuse_unknown(self.per_dataset, names, "dataset in per_dataset")
        for name, settings in self.per_dataset.items():
            with within(f"per_dataset of {quote(name)}"):
                refuse_unknown(settings, DATASET_KEYS)
                normal = OrderSettings(**settings)
                checked[name] = {key: getattr(normal, key) for key, value in settings.items() if value is not None}
        object.__setattr__(self, "per_dataset", checked)

    def _check_mixture(self, names: Sequence[str]) -> None:
        """Check the weights, and put them in the order of the datasets."""
        if self.mixture is not None and not isinstance(self.mixture, Mapping):
            raise RecipeError(f"mixture is {seen(self.mixture)}; expected weights by dataset name.")
        weights = dict.fromkeys(names, 1.0) if self.mixture is None else dict(self.mixture)
        refuse_unknown(weights, names, "dataset in mixture")
        if missing := [name for name in names if name not in weights]:
            raise RecipeError(f"mixture has no weight for {missing}; expected a weight for every dataset.")
        weights = {name: check(Weight, weights[name], f"the mixture weight of {quote(name)}") for name in names}
        check_weights(weights)
        object.__setattr__(self, "mixture", weights)

    def _take_over(self, names: Sequence[str]) -> None:
        """Keep the datasets of the source that this one continues, with weight 0."""
        before = self.continues
        object.__setattr__(self, "retired", ())
        if before is None:
            return
        if not isinstance(before, WorkSource):
            raise RecipeError(f"continues is {seen(before)}; expected the work source of the run to take over from.")
        if before.seed != self.seed:
            raise RecipeError(
                f"seed is {self.seed}, and {before.seed} in the source that this one continues; a run keeps its seed, "
                "which says which rows have been used."
            )
        for name in names:
            if any(name == dataset.name for dataset in before.datasets) and (
                before.order_options(name) != self.order_options(name)
            ):
                raise RecipeError(
                    f"the order settings of {quote(name)} differ from those of the source that this one continues; "
                    "leave them as they were, or give the dataset another name."
                )
        retired = [dataset for dataset in before.datasets if dataset.name not in names]
        orders = {d.name: {key: before.setting(d.name, key) for key in _ORDER_KEYS} for d in retired}
        object.__setattr__(self, "per_dataset", {**self.per_dataset, **orders})
        object.__setattr__(self, "datasets", (*self.datasets, *retired))
        object.__setattr__(self, "retired", tuple(dataset.name for dataset in retired))
        if self.mixture is not None:
            object.__setattr__(self, "mixture", {**self.mixture, **{dataset.name: 0.0 for dataset in retired}})

    @property
    def names(self) -> list[str]:
        """Names of the datasets."""
        return [dataset.name for dataset in self.datasets]

    @property
    def generations(self) -> int:
        """How many sources this one continues, one after the other."""
        return 0 if self.continues is None else 1 + self.continues.generations

    @property
    def estimation(self) -> TokenEstimation | None:
        """How tokens per row are measured, or None."""
        return self.token_estimation if isinstance(self.token_estimation, TokenEstimation) else None

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens per row are measured; else bytes of text stand in for tokens."""
        return self.estimation is not None and len(self.datasets) > 1

    @property
    def shares(self) -> dict[str, float]:
        """Wanted share of tokens by dataset name, at the start of the run; they add up to 1."""
        assert self.mixture is not None
        weights = self.relative_weights
        total = math.fsum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    @property
    def final_shares(self) -> dict[str, float]:
        """Wanted share of tokens by dataset name, at the end of the run."""
        return self.shares

    @property
    def relative_weights(self) -> dict[str, float]:
        """Weights in units of the first dataset's, so that 3 to 1 and 0.75 to 0.25 are one and the same mixture."""
        assert self.mixture is not None
        first = next(iter(self.mixture.values()))
        return {name: weight / first for name, weight in self.mixture.items()}

    @property
    def in_steps(self) -> bool:
        """Whether it takes the number of tokens per step to know the mixture."""
        return False

    def shares_between(self, begin: int, end: int, tokens_per_step: int | None = None) -> dict[str, float]:
        """Wanted share by dataset name of the planned tokens from `begin` to `end` of the run."""
        return self.shares

    def setting(self, name: str, key: str) -> Any:
        """The value of one of `DATASET_KEYS` for a dataset."""
        own = self.per_dataset.get(name, {})
        if key in own:
            return own[key]
        return None if key in END_KEYS and any(other in own for other in END_KEYS) else getattr(self, key)

    def order_options(self, name: str) -> OrderOptions:
        """How the rows of a dataset are ordered."""
        return OrderOptions(
            shuffle_shards=self.setting(name, "shuffle_shards"),
            shuffle_within_shard=self.setting(name, "shuffle_within_shard"),
            block_size=self.setting(name, "shuffle_block_size"),
            reshuffle=self.setting(name, "reshuffle_on_repeat"),
        )

    def ending(self, name: str) -> Ending:
        """When a dataset ends."""
        own = any(key in self.per_dataset.get(name, {}) for key in END_KEYS)
        if self.setting(name, "exhausted_policy") == "stop" or (not self.repeat and not own):
            return Ending(1)
        if (passes := self.setting(name, "stop_after_passes")) is not None:
            return Ending(passes, ends_run=True)
        repeats = self.setting(name, "max_repeats")
        return Ending(None if repeats is None else repeats + 1)

    @property
    def finite(self) -> bool:
        """Whether the run ends."""
        endings = {name: self.ending(name) for name in self.names}
        last = [name for name, share in self.final_shares.items() if share]
        # What has left the mixture for good may never get to its end.
        return any(e.ends_run for e in endings.values()) or all(endings[name].passes is not None for name in last)

    def orders(self, opened: Sequence[OpenDataset], lanes: int) -> list[DatasetOrder]:
        """The order of each opened dataset."""
        return [
            DatasetOrder(each.name, each.catalog, lanes=lanes, seed=self.seed, options=self.order_options(each.name))
            for each in opened
        ]

    def curriculum(
        self,
        opened: Sequence[OpenDataset],
        tokens_per_row: Sequence[float],
        *,
        lanes: int,
        tokens_per_step: int | None = None,
        **more: Any,
    ) -> Curriculum:
        """The curriculum over the opened datasets, given how many tokens a row of each makes on average."""
        return Curriculum(
            self.orders(opened, lanes),
            row_weights(list(self.shares.values()), tokens_per_row),
            lanes=lanes,
            chunk_size=self.chunk_size,
            seed=self.seed,
            endings=[self.ending(each.name) for each in opened],
            tokens_per_row=tokens_per_row,
            **more,
        )


@dataclass(frozen=True)
class StaticMixtureWorkSource(WorkSource):
    """A mixture of datasets whose token shares stay the same for the whole run.

    `mixture` has the weight of each dataset by name, finite and positive; shares of tokens are weight / sum of weights.
    None gives every dataset the same weight. All else is as in `WorkSource`.
    """


@dataclass(frozen=True)
class ScheduledMixtureWorkSource(WorkSource):
    """A mixture of datasets whose token shares change in the course of the run.

    All else is as in `WorkSource`; the stages take the place of `mixture`.

    Attributes:
        schedule: the stages, in the order of their starts; see `Stage`.
    """

    schedule: Sequence[Stage] = field(default=(), kw_only=True)

    def _check_mixture(self, names: Sequence[str]) -> None:
        if self.mixture is not None:
            raise RecipeError(
                "the source has both a mixture and a schedule; remove the mixture, which the stages have."
            )
        object.__setattr__(self, "schedule", tuple(self.schedule))
        check_schedule(self.schedule, names)
        if not self.in_steps:
            spans_of(self.schedule, names, 1)

    @property
    def shares(self) -> dict[str, float]:
        """Wanted share of tokens by dataset name, at the start of the run; they add up to 1."""
        return self._shares_of(self.schedule[0])

    @property
    def final_shares(self) -> dict[str, float]:
        """Wanted share of tokens by dataset name, at the end of the run."""
        return self._shares_of(self.schedule[-1])

    def _shares_of(self, stage: Stage) -> dict[str, float]:
        total = math.fsum(stage.mixture.values())
        return {name: stage.mixture.get(name, 0.0) / total for name in self.names}

    @property
    def relative_weights(self) -> dict[str, float]:
        """1 for every dataset that some stage names, since it is the schedule that has the weights."""
        return {name: 0.0 if name in self.retired else 1.0 for name in self.names}

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens per row are measured; else bytes of text stand in for tokens."""
        return self.estimation is not None

    @property
    def in_steps(self) -> bool:
        """Whether it takes the number of tokens per step to know the mixture."""
        return any(stage.in_steps for stage in self.schedule)

    def shares_between(self, begin: int, end: int, tokens_per_step: int | None = None) -> dict[str, float]:
        """Wanted share by dataset name of the planned tokens from `begin` to `end` of the run."""
        made = shares_between(spans_of(self.schedule, self.names, tokens_per_step or 1), begin, end)
        return {name: share / SHARE_ONE for name, share in zip(self.names, made, strict=True)}

    def curriculum(
        self,
        opened: Sequence[OpenDataset],
        tokens_per_row: Sequence[float],
        *,
        lanes: int,
        tokens_per_step: int | None = None,
        **more: Any,
    ) -> Curriculum:
        """The curriculum over the opened datasets, given how many tokens a row of each makes on average."""
        if self.in_steps and tokens_per_step is None:
            raise RecipeError(
                "the schedule counts in steps, so it needs the number of records per step: give the pipeline the "
                "option global_batch, or count in tokens."
            )
        spans = spans_of(self.schedule, self.names, tokens_per_step or 1)
        return super().curriculum(opened, tokens_per_row, lanes=lanes, spans=spans, **more)
