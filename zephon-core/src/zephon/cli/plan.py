"""`zephon plan`: the mixture over a run, and the passes over each source."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Annotated

import typer

from zephon.cli.options import GlobalBatch, Lanes, Recipe, SeqLen, Tokenizer, Vision, open_pipeline
from zephon.cli.output import count, print_table
from zephon.config.keys import Count, check
from zephon.config.recipe import DataRecipe
from zephon.config.topology import FEED_BYTES
from zephon.errors import RecipeError
from zephon.pipeline import Pipeline
from zephon.run.build import chain_of
from zephon.run.compile import Compiled

_COLUMNS = 60
_BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SAMPLE_TOKENS = 4 << 20
_DIGITS = " 123456789"


class Forecast:
    """The rows and shares that a run is planned to read up to any number of tokens.

    Args:
        compiled: a pipeline without `continue_from`.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._curriculum = curriculum = compiled.plan.curriculum
        self._lanes = compiled.topology.feeds
        self._ratios = list(compiled.tokens_per_row.values())
        self._chunks = curriculum.chunks_of(0)
        self._rows_in = cache(self._rows_in_chunk)
        self.tokens = None if self._chunks is None else int(self._tokens(self._rows_in(self._chunks)[0]))
        """Planned tokens after which the data ends, or None."""

    def rows(self, tokens: float) -> list[float]:
        """Rows of each dataset within the first `tokens` planned tokens, over all lanes."""

        def before(index: int) -> float:
            return self._tokens(self._rows_in(index)[0])

        high = 1
        while before(high) < tokens and (self._chunks is None or high < self._chunks):
            high *= 2
        index = max(1, bisect_left(range(high + 1), tokens, key=before)) - 1
        rows = self._rows_in(index)
        sums = [self._tokens(each) for each in rows]
        k = max(1, min(bisect_left(sums, tokens), len(sums) - 1))
        less, more = sums[k - 1], sums[k]
        part = min(1.0, max(0.0, (tokens - less) / (more - less))) if more > less else 1.0
        return [a + (b - a) * part for a, b in zip(rows[k - 1], rows[k], strict=True)]

    def shares(self, begin: float, end: float) -> list[float]:
        """Share of each dataset in the planned tokens from `begin` to `end`."""
        pairs = zip(self.rows(begin), self.rows(end), self._ratios, strict=True)
        tokens = [(after - before) * ratio for before, after, ratio in pairs]
        return [each / (sum(tokens) or 1.0) for each in tokens]

    def _rows_in_chunk(self, index: int) -> list[list[float]]:
        """Rows of each dataset in the course of chunk `index` of the lanes, over all lanes."""
        return [[rows * self._lanes / 2**16 for rows in due] for due in self._curriculum.due_through(0, index)]

    def _tokens(self, rows: Sequence[float]) -> float:
        return sum(count * ratio for count, ratio in zip(rows, self._ratios, strict=True))


def plan(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="Length of the run in tokens, as in 500m or 20b.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, max=1 << 40, help="Length of the run in steps.")
    ] = None,
    max_passes: Annotated[
        float, typer.Option("--max-passes", metavar="P", min=0, help="Warn of sources with more passes.")
    ] = 4.0,
    canonical_replicas: Lanes = None,
    vision: Vision = None,
) -> None:
    """Draw the share of each source over a run; print its passes."""
    if (tokens is None) == (steps is None):
        raise RecipeError("zephon plan needs the length of the run: pass either --tokens or --steps.")
    config = DataRecipe.from_toml(recipe)
    chain_of(config)  # refuses recipes that continue each other in a circle
    own = config.replace(continue_from=None)
    pipeline = open_pipeline(
        own, tokenizer, seq_len, global_batch, vision, global_batch=global_batch, canonical_replicas=canonical_replicas
    )
    total = steps * global_batch * (seq_len + 1) if steps is not None else int(check(Count, tokens, "--tokens"))
    _report(pipeline, total, max_passes, taken_over=config.continue_from is not None)


def _report(pipeline: Pipeline, total: int, max_passes: float, *, taken_over: bool) -> None:
    compiled = pipeline.compiled
    forecast = Forecast(compiled)
    names = list(compiled.plan.dataset_names)
    assert compiled.tokens_per_step
    steps, about = total // compiled.tokens_per_step, ""
    end, unit = _read(pipeline, steps)
    total = round(total / unit)
    if forecast.tokens is not None and (end is not None or forecast.tokens < total):
        if end is None:
            end, about = -(-round(forecast.tokens * unit) // compiled.tokens_per_step), "about "
        if end < steps:
            print(f"the data ends after {about}{end:,} of the {steps:,} steps")
        steps, total = end, min(total, forecast.tokens)
    print(f"{count(total * unit)} planned tokens, {about}{steps:,} steps" + ", from the takeover on" * taken_over)
    marks = _BARS if (sys.stdout.encoding or "").lower().startswith("utf") else _DIGITS
    columns = [forecast.shares(total * k / _COLUMNS, total * (k + 1) / _COLUMNS) for k in range(_COLUMNS)]
    width = max(map(len, names))
    for d, name in enumerate(names):
        shares = [column[d] for column in columns]
        line = "".join(_mark(share, marks) for share in shares)
        print(f"{name:{width}} |{line}| {shares[0]:.1%} to {shares[-1]:.1%}")
    rows = forecast.rows(total)
    whole = forecast.shares(0, total)
    lines = []
    for name, dataset, read, share in zip(names, compiled.datasets, rows, whole, strict=True):
        passes = read / dataset.catalog.rows
        planned = read * compiled.tokens_per_row[name] * unit
        lines.append([name, f"{share:.1%}", count(planned), f"{round(read):,}", f"{passes:.2f}"])
    print_table(["source", "share", "tokens", "rows", "passes"], lines, right="lrrrr")
    for name, *_, passed in lines:
        if float(passed) > max_passes:
            print(f"warning: {name} has {passed} passes, more than {max_passes:g} (--max-passes)")


def _read(pipeline: Pipeline, steps: int) -> tuple[int | None, float]:
    """The step with which the data ends, as read; None if it ends after `steps` or is too large to read for that. And
    the tokens that a planned one stands for, where planning counts bytes of text."""
    compiled = pipeline.compiled
    small = compiled.source.finite and sum(int(each.catalog.bytes) for each in compiled.datasets) <= FEED_BYTES
    if not small and compiled.source.counts_tokens:
        return None, 1.0
    most = steps + 1 if small else max(1, _SAMPLE_TOKENS // (compiled.tokens_per_step or 1))
    taken = sum(1 for _ in islice(pipeline, most))
    ended, mixture = pipeline.left_over is not None, pipeline.mixture()
    pipeline.close()
    if compiled.source.counts_tokens:
        return taken if ended else None, 1.0
    planned = sum(each.rows * compiled.tokens_per_row[name] for name, each in mixture.items())
    return taken if ended else None, sum(each.tokens for each in mixture.values()) / planned


def _mark(share: float, marks: str) -> str:
    """The bar for a share; any share above 0 is visible."""
    return marks[0] if share <= 0 else marks[max(1, min(len(marks) - 1, round(share * (len(marks) - 1))))]
