"""What the commands share: a pipeline from a recipe and options, and counts of what it gave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from zephon.batch import SampleBatch
from zephon.config.recipe import DataRecipe
from zephon.config.topology import divisors
from zephon.errors import TopologyError
from zephon.pipeline import Pipeline

__all__ = ["Consumed", "check_step_share", "count", "open_pipeline", "percent", "plural", "tokenizer_id"]


def open_pipeline(
    recipe: DataRecipe | str | os.PathLike[str],
    *,
    tokenizer: str,
    seq_len: int,
    microbatch_size: int,
    **options: Any,
) -> Pipeline:
    """The pipeline of a recipe; options that are None are left to it."""
    given = {name: value for name, value in options.items() if value is not None}
    return Pipeline.from_recipe(
        recipe, tokenizer=tokenizer_id(tokenizer), seq_len=seq_len, microbatch_size=microbatch_size, **given
    )


def tokenizer_id(given: str) -> str | Path:
    """An existing path as a path, so that nothing is looked up elsewhere; any other text as it is."""
    return Path(given) if os.path.exists(given) else given


def check_step_share(global_batch: int, dp_degree: int, microbatch_size: int) -> int:
    """Microbatches per step of one group.

    Raises:
        TopologyError: the group's share of a global batch is not made of whole microbatches.
    """
    share, rest = divmod(global_batch, dp_degree)
    if rest:
        raise TopologyError(
            f"a global batch of {global_batch} records does not divide among {dp_degree} groups (dp_degree); "
            f"dp_degree can be {', '.join(map(str, divisors(global_batch)[:8]))}."
        )
    if share % microbatch_size:
        raise TopologyError(
            f"a step has {share} records for each of {plural(dp_degree, 'group')}, which are not whole microbatches of "
            f"{microbatch_size}; --microbatch-size can be {', '.join(map(str, divisors(share)[-8:]))}."
        )
    return share // microbatch_size


class Consumed:
    """What was handed out so far, padding not counted.

    Attributes:
        names: of the datasets.
        tokens: int64[n_datasets].
        records: records.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._compiled = pipeline.compiled
        self._span: tuple[int, int] | None = None  # first and last sequence number
        self.names = list(self._compiled.plan.dataset_names)
        self.tokens = np.zeros(len(self.names), dtype=np.int64)
        self.records = 0

    def add(self, batch: SampleBatch) -> None:
        """Count a batch."""
        block = batch.block
        counts = np.bincount(block.span_dataset, weights=block.span_lengths(), minlength=len(self.names))
        self.tokens += counts.astype(np.int64)
        self.records += len(batch)
        numbers = batch.sequence_numbers
        self._span = (int(numbers[0]) if self._span is None else self._span[0]), int(numbers[-1])

    @property
    def total(self) -> int:
        """Tokens of all datasets."""
        return int(self.tokens.sum())

    def shares(self) -> list[tuple[str, float, float]]:
        """Name, target and achieved share of tokens of each dataset, the target that of what was consumed."""
        total, length = max(1, self.total), self._compiled.operators.pack.record_length
        first, last = self._span or (0, 0)
        targets = self._compiled.source.shares_between(
            first * length, (last + 1) * length, self._compiled.tokens_per_step
        )
        return [(n, targets[n], int(t) / total) for n, t in zip(self.names, self.tokens.tolist(), strict=True)]

    def line(self, seconds: float) -> str:
        """Tokens, tokens per second, and the mixture, as one line."""
        mixture = ", ".join(f"{name} {made:.1%} of {target:.0%}" for name, target, made in self.shares())
        return f"{count(self.total)} tokens, {count(self.total / max(seconds, 1e-9))} tokens/s, {mixture}"


def count(number: float) -> str:
    """A number of things, short: 950, 12.3k, 4.56M, 7.89G."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.0f}T"


def percent(share: float) -> str:
    """A share of one."""
    return f"{share:.1%}"


def plural(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
