"""Work sources: which datasets a run reads, in which shares and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from zephon.curriculum.mixture import Curriculum, Cuts, Ending
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.curriculum.rates import CurveFrom, constant_curve, row_weights, scheduled_curve
from zephon.curriculum.schedule import SHARE_ONE, shares_between, spans_of
from zephon.curriculum.tokens import TokenEstimation
from zephon.data.dataset import Dataset
from zephon.data.reader import OpenDataset
from zephon.errors import RecipeError

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
    schedule: Sequence[Stage] = field(default=(), init=False)
    """See `ScheduledMixtureWorkSource`."""
    retired: tuple[str, ...] = field(default=(), init=False, compare=False)
    """Datasets that are only kept because the continued source has them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        datasets = tuple(self.datasets) if isinstance(self.datasets, Iterable) else ()
        if not datasets or not all(isinstance(dataset, Dataset) for dataset in datasets):
            raise RecipeError(f"datasets is {seen(self.datasets)}; expected a list of at least one zephon.io.Dataset.")
        self._set(datasets=datasets)
        for name in self.names:
            if self.names.count(name) > 1:
                raise RecipeError(f"two datasets are named {quote(name)}; expected a name of its own for each.")
        if isinstance(self.token_estimation, bool):
            self._set(token_estimation=TokenEstimation() if self.token_estimation else None)
        elif self.token_estimation is not None and not isinstance(self.token_estimation, TokenEstimation):
            raise RecipeError(
                f"token_estimation is {seen(self.token_estimation)}; expected a TokenEstimation, true or false."
            )
        self._check_per_dataset()
        self._check_mixture()
        if self.continues is not None:
            self._take_over(self.continues)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_per_dataset(self) -> None:
        """Check the settings of single datasets, and put them into normal form."""
        checked: dict[str, dict[str, Any]] = {}
        refuse_unknown(self.per_dataset, self.names, "dataset in per_dataset")
        for name, settings in self.per_dataset.items():
            with within(f"per_dataset of {quote(name)}"):
                refuse_unknown(settings, DATASET_KEYS)
                normal = OrderSettings(**settings)
                checked[name] = {key: getattr(normal, key) for key, value in settings.items() if value is not None}
        self._set(per_dataset=checked)

    def _check_mixture(self) -> None:
        """Check the weights, and put them in the order of the datasets."""
        weights = dict.fromkeys(self.names, 1.0) if self.mixture is None else self.mixture
        if not isinstance(weights, Mapping):
            raise RecipeError(f"mixture is {seen(weights)}; expected weights by dataset name.")
        refuse_unknown(weights, self.names, "dataset in mixture")
        if missing := [name for name in self.names if name not in weights]:
            raise RecipeError(f"mixture has no weight for {missing}; expected a weight for every dataset.")
        weights = {name: check(Weight, weights[name], f"the mixture weight of {quote(name)}") for name in self.names}
        check_weights(weights)
        self._set(mixture=weights)

    def _take_over(self, before: WorkSource) -> None:
        """Keep the datasets of the source that this one continues, with weight 0."""
        if not isinstance(before, WorkSource):
            raise RecipeError(f"continues is {seen(before)}; expected the work source of the run to take over from.")
        if before.seed != self.seed:
            raise RecipeError(
                f"seed is {self.seed}, and {before.seed} in the source that this one continues; a run keeps its seed, "
                "which says which rows have been used."
            )
        retired = [dataset for dataset in before.datasets if dataset.name not in self.names]
        orders = {d.name: {key: before.setting(d.name, key) for key in _ORDER_KEYS} for d in retired}
        self._set(
            datasets=(*self.datasets, *retired),
            retired=tuple(orders),
            per_dataset={**self.per_dataset, **orders},
        )
        if self.mixture is not None:
            self._set(mixture={**self.mixture, **dict.fromkeys(orders, 0.0)})
        for name in before.names:
            if before.order_options(name) != self.order_options(name):
                raise RecipeError(
                    f"the order settings of {quote(name)} differ from those of the source that this one continues; "
                    "leave them as they were, or give the dataset another name."
                )

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
        return self.estimation is not None and (len(self.datasets) > 1 or bool(self.schedule))

    @property
    def relative_weights(self) -> dict[str, float]:
        """Weights in units of the first one above 0, so that 3 to 1 and 0.75 to 0.25 are one and the same mixture.

        Under a schedule, which has the weights, 1 for every dataset but those that are only kept.
        """
        if self.schedule:
            return {name: 0.0 if name in self.retired else 1.0 for name in self.names}
        assert self.mixture is not None
        first = next(filter(None, self.mixture.values()))
        return {name: weight / first for name, weight in self.mixture.items()}

    @property
    def shares(self) -> dict[str, float]:
        """Wanted share of tokens by dataset name, at the start of the run; they add up to 1."""
        weights = self.schedule[0].mixture if self.schedule else self.relative_weights
        total = math.fsum(weights.values())
        return {name: weights.get(name, 0.0) / total for name in self.names}

    def shares_between(self, begin: int, end: int, tokens_per_step: int | None = None) -> dict[str, float]:
        """Wanted share by dataset name of the planned tokens from `begin` to `end` of the run."""
        if not self.schedule:
            return self.shares
        means = shares_between(spans_of(self.schedule, self.names, tokens_per_step or 1), begin, end)
        return {name: share / SHARE_ONE for name, share in zip(self.names, means, strict=True)}

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
        # A dataset that has left the mixture for good may never get to its end.
        last = self.schedule[-1].mixture if self.schedule else self.relative_weights
        lasting = [ending for name, ending in endings.items() if last.get(name)]
        return any(e.ends_run for e in endings.values()) or all(e.passes is not None for e in lasting)

    def orders(self, opened: Sequence[OpenDataset], lanes: int) -> list[DatasetOrder]:
        """The order of each opened dataset."""
        return [
            DatasetOrder(each.name, each.catalog, lanes=lanes, seed=self.seed, options=self.order_options(each.name))
            for each in opened
        ]

    def curriculum(
        self,
        opened: Mapping[str, OpenDataset],
        tokens_per_row: Sequence[Mapping[str, float]],
        *,
        lanes: int,
        tokens_per_step: int | None,
        cuts: Sequence[Cuts] = (),
    ) -> Curriculum:
        """The curriculum over the opened datasets, through all the sources that this one continues.

        Args:
            opened: open datasets by name.
            tokens_per_row: by dataset name, for each of the sources, the earliest first.
            lanes: L.
            tokens_per_step: for schedules in steps.
            cuts: for each of the sources that are continued, the earliest first.
        """
        if tokens_per_step is None and any(stage.in_steps for stage in self.schedule):
            raise RecipeError(
                "the schedule counts in steps, so it needs the number of records per step: give the pipeline the "
                "option global_batch, or count in tokens."
            )
        ratios = [tokens_per_row[-1][name] for name in self.names]
        stretches: list[CurveFrom]
        if self.schedule:
            spans = spans_of(self.schedule, self.names, tokens_per_step or 1)
            stretches = [partial(scheduled_curve, span, ratios, lanes, self.chunk_size) for span in spans]
        else:
            stretches = [partial(constant_curve, row_weights(list(self.shares.values()), ratios), self.chunk_size)]
        before = None
        if self.continues is not None:
            before = self.continues.curriculum(
                opened, tokens_per_row[:-1], lanes=lanes, tokens_per_step=tokens_per_step, cuts=cuts[:-1]
            )
        return Curriculum(
            self.orders([opened[name] for name in self.names], lanes),
            stretches,
            lanes=lanes,
            seed=self.seed,
            endings=[self.ending(name) for name in self.names],
            before=before,
            place=[self.names.index(name) for name in self.continues.names] if self.continues else (),
            cuts=cuts[-1] if cuts else None,
        )


@dataclass(frozen=True)
class StaticMixtureWorkSource(WorkSource):
    """A mixture of datasets whose token shares stay the same for the whole run.

    `mixture` has the weight of each dataset by name, at least 0; shares of tokens are weight / sum of weights.
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

    def _check_mixture(self) -> None:
        if self.mixture is not None:
            raise RecipeError(
                "the source has both a mixture and a schedule; remove the mixture, which the stages have."
            )
        self._set(schedule=tuple(self.schedule))
        check_schedule(self.schedule, self.names)
        if not any(stage.in_steps for stage in self.schedule):
            spans_of(self.schedule, self.names, 1)
