"""Work sources: which datasets a run reads, in which shares and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from zephon.curriculum.mixture import Curriculum, Ending, row_weights
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.curriculum.schedule import SHARE_ONE, Stage, check_stages, shares_between, spans_of
from zephon.curriculum.tokens import TokenEstimation
from zephon.data.dataset import Dataset
from zephon.data.reader import OpenDataset
from zephon.errors import RecipeError

__all__ = ["DATASET_KEYS", "MAX_CHUNK_SIZE", "ScheduledMixtureWorkSource", "StaticMixtureWorkSource", "WorkSource"]

MAX_CHUNK_SIZE = 1 << 20
_MOST_PASSES = 1 << 31
_ORDER_KEYS = ("shuffle_shards", "shuffle_within_shard", "shuffle_block_size", "reshuffle_on_repeat")
_END_KEYS = ("exhausted_policy", "stop_after_passes", "max_repeats")
DATASET_KEYS = (*_ORDER_KEYS, *_END_KEYS)
"""What `per_dataset` may say of a dataset."""


@dataclass(frozen=True)
class WorkSource:
    """What all work sources have in common: datasets, their order, and when they end.

    Attributes:
        datasets: at least one, names all different.
        mixture: weights by dataset name; see `StaticMixtureWorkSource`.
        token_estimation: how tokens per row are measured; True as usual; None or False takes bytes of text instead.
        seed: keys every permutation.
        chunk_size: rows per chunk of a lane.
        shuffle_shards, shuffle_within_shard, shuffle_block_size: see `OrderOptions`.
        repeat: False is short for exhausted_policy "stop".
        reshuffle_on_repeat: every pass over a dataset has an order of its own.
        exhausted_policy: what a dataset does when all of its rows have been used: "repeat" (another pass; None is the
            same) or "stop" (it leaves its share to the others; the run ends when all have stopped).
        max_repeats: passes after the first one, after which a dataset stops.
        stop_after_passes: the run ends as soon as a dataset has had so many passes.
        per_dataset: other values of the seven settings above, by dataset name. A dataset that has one of the last three
            of its own has none of the source's.
        continues: the source of a run that this one takes over from; see `Pipeline.restore`. Its datasets that this
            one does not have are kept with weight 0.

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
    reshuffle_on_repeat: bool = True
    exhausted_policy: str | None = None
    stop_after_passes: int | None = None
    max_repeats: int | None = None
    per_dataset: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    continues: WorkSource | None = None
    retired: tuple[str, ...] = field(default=(), init=False, compare=False)
    """Datasets that are only there because the continued source has them."""

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
        if not isinstance(self.repeat, bool):
            raise RecipeError(f"repeat is {self.repeat!r}; True or False is needed.")
        if isinstance(self.token_estimation, bool):
            object.__setattr__(self, "token_estimation", TokenEstimation() if self.token_estimation else None)
        elif self.token_estimation is not None and not isinstance(self.token_estimation, TokenEstimation):
            raise RecipeError(
                f"token_estimation is {self.token_estimation!r}; a TokenEstimation, True, False or None is needed."
            )
        _check_settings({key: getattr(self, key) for key in DATASET_KEYS}, "")
        if not self.repeat and (self.exhausted_policy == "repeat" or self.max_repeats or self.stop_after_passes):
            told = next(key for key in _END_KEYS if getattr(self, key))
            raise RecipeError(
                f"repeat is False and {told} is {getattr(self, told)!r}, which contradict each other; remove one of "
                "them."
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
        if not isinstance(self.per_dataset, Mapping):
            raise RecipeError(f"per_dataset is {self.per_dataset!r}; settings by dataset name are needed.")
        for name, settings in self.per_dataset.items():
            if name not in names:
                raise RecipeError(f'per_dataset names "{name}", which is not among the datasets {list(names)}.')
            if not isinstance(settings, Mapping) or not set(settings) <= set(DATASET_KEYS):
                raise RecipeError(
                    f'per_dataset says {settings!r} of "{name}"; values for some of {", ".join(DATASET_KEYS)} are '
                    "needed."
                )
            _check_settings({**{key: getattr(self, key) for key in _ORDER_KEYS}, **settings}, f' of "{name}"')

    def _check_mixture(self, names: Sequence[str]) -> None:
        """Check the weights, and put them in order."""
        if self.mixture is not None and not isinstance(self.mixture, Mapping):
            raise RecipeError(f"mixture is {self.mixture!r}; weights by dataset name are needed.")
        weights: dict[str, float] = dict(self.mixture) if self.mixture is not None else dict.fromkeys(names, 1.0)
        for name, weight in weights.items():
            if name not in names:
                raise RecipeError(f'mixture names "{name}", which is not among the datasets {list(names)}.')
            if not _is_weight(weight):
                raise RecipeError(
                    f'mixture weight of "{name}" is {str(weight)[:40]}; a finite number above 0 is needed.'
                )
        missing = [name for name in names if name not in weights]
        if missing:
            raise RecipeError(f"mixture has no weight for {missing}; every dataset needs one.")
        if not math.isfinite(sum(weights.values())):
            raise RecipeError(f"the mixture weights {weights} are too large to be added up; make them smaller.")
        object.__setattr__(self, "mixture", {name: float(weights[name]) for name in names})

    def _take_over(self, names: Sequence[str]) -> None:
        """Keep the datasets of the source that this one continues, with weight 0."""
        before = self.continues
        object.__setattr__(self, "retired", ())
        if before is None:
            return
        if not isinstance(before, WorkSource):
            raise RecipeError(f"continues is {before!r}; the work source of the run to take over from is needed.")
        if before.seed != self.seed:
            raise RecipeError(
                f"seed is {self.seed}, and {before.seed} in the source that this one continues; a run keeps its seed, "
                "since rows that were used could not be told otherwise."
            )
        for name in names:
            if any(name == dataset.name for dataset in before.datasets) and (
                before.order_options(name) != self.order_options(name)
            ):
                raise RecipeError(
                    f'the order settings of "{name}" are not those of the source that this one continues; a dataset '
                    "that stays keeps its order, so leave them as they were, or give the dataset another name."
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
        return None if key in _END_KEYS and any(other in own for other in _END_KEYS) else getattr(self, key)

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
        own = any(key in self.per_dataset.get(name, {}) for key in _END_KEYS)
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

    schedule: Sequence[Stage] = ()

    def _check_mixture(self, names: Sequence[str]) -> None:
        if self.mixture is not None:
            raise RecipeError(
                "a scheduled source has both a mixture and a schedule; the stages say the mixture, so leave it out."
            )
        if isinstance(self.schedule, Stage | str) or not isinstance(self.schedule, Iterable):
            raise RecipeError(f"schedule is {self.schedule!r}; a list of zephon.work.Stage is needed.")
        object.__setattr__(self, "schedule", tuple(self.schedule))
        check_stages(self.schedule, names)

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


def _check_settings(settings: Mapping[str, Any], whose: str) -> None:
    """Refuse settings of a dataset, or of all, that are unusable or contradict each other."""
    for key in ("shuffle_shards", "shuffle_within_shard", "reshuffle_on_repeat"):
        if not isinstance(settings[key], bool):
            raise RecipeError(f"{key}{whose} is {settings[key]!r}; True or False is needed.")
    block = settings["shuffle_block_size"]
    is_rows = isinstance(block, int) and not isinstance(block, bool) and block >= 1
    if not is_rows and not (isinstance(block, str) and block in ("auto", "global", "none")):
        raise RecipeError(
            f'shuffle_block_size{whose} is {block!r}; "auto", "global", "none" or a number of rows above 0 is needed.'
        )
    policy = settings.get("exhausted_policy")
    if policy not in (None, "repeat", "stop"):
        raise RecipeError(f'exhausted_policy{whose} is {policy!r}; "repeat" or "stop" is needed.')
    for key, least in (("stop_after_passes", 1), ("max_repeats", 0)):
        value = settings.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST_PASSES
        ):
            raise RecipeError(f"{key}{whose} is {value!r}; a whole number of at least {least} is needed.")
    given = [key for key in ("stop_after_passes", "max_repeats") if settings.get(key) is not None]
    if policy == "stop" and given:
        raise RecipeError(
            f'exhausted_policy{whose} is "stop", which is one pass, and {given[0]} is {settings[given[0]]}; they '
            "contradict each other, so remove one of them."
        )
    if len(given) > 1:
        raise RecipeError(
            f"both stop_after_passes ({settings[given[0]]}) and max_repeats ({settings[given[1]]}){whose} say when the "
            "data ends; keep the first for the run to end there, the second for the others to go on."
        )


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False
