"""Metrics of the loader where Megatron's own are: in its log line, TensorBoard and Weights & Biases.

Megatron's `training_log` is called on every rank at the end of every iteration; `install` puts a function in its place
that adds to the iterations which are logged. The ranks that speak for lanes add up what they know, so that the rank
that logs, which may hold no loader, can tell of all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zephon.loader import Progress, loader_metrics

from .loaders import TrainLoader

__all__ = ["gathered_metrics", "install", "watch"]

_IN_LINE = ("zephon/data_wait(s)", "zephon/padding(%)", "zephon/cursor", "zephon/tokens/")
_loader: TrainLoader | None = None
_sources: list[str] = []
_since: dict[str, Progress] = {}
"""What had been done when metrics were last gathered, for the log line and for the writers."""


def watch(loader: TrainLoader | None, sources: Sequence[str]) -> None:
    """Tell of this rank's training loader; None on a rank, or for a virtual stage, that has none."""
    global _loader, _sources
    _sources = list(sources)
    if loader is not None and loader.saves:
        _loader = loader
        _since.clear()


def gathered_metrics(reader: str) -> dict[str, float]:
    """Metrics of all ranks since this was last called for `reader`; all ranks must call it.

    See `zephon.loader.loader_metrics`.
    """
    counts, same = np.zeros(4 + 3 * len(_sources)), np.zeros(1 + len(_sources))
    if _loader is not None:
        mixture = _loader.mixture()
        counts = _loader.progress.counts(_since.get(reader, Progress()), mixture)
        # The same on all ranks that know them.
        same[:] = _loader.cursor, *(part.target for part in mixture.values())
        _since[reader] = replace(_loader.progress)
    device = torch.cuda.current_device()
    sums, maxima = torch.from_numpy(counts).to(device), torch.from_numpy(same).to(device)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    cursor, *targets = maxima.tolist()
    return loader_metrics(sums.cpu().numpy(), dict(zip(_sources, targets, strict=True)), int(cursor))


@cache
def _any_rank_writes(here: bool) -> bool:
    """Whether some rank has a writer of TensorBoard or Weights & Biases; asked once, of all ranks at a time."""
    flag = torch.tensor([int(here)], device=torch.cuda.current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def install() -> None:
    """Have Megatron's training loop log the metrics, in this process."""
    from megatron.training import training

    if not getattr(training.training_log, "with_zephon", False):
        training.training_log = _with_zephon(training.training_log)


def _with_zephon(stock: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    signature = inspect.signature(stock)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        called = signature.bind(*args, **kwargs)
        called.apply_defaults()
        given = called.arguments
        iteration, totals = given["iteration"], given["total_loss_dict"]
        options = get_args()
        in_line = iteration % options.log_interval == 0 or given["is_first_iteration"]
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        written = iteration % options.tensorboard_log_interval == 0 and _any_rank_writes(bool(writer or wandb))
        if written:
            metrics = gathered_metrics("writers")
            for name, value in metrics.items() if writer else ():
                writer.add_scalar(name, value, iteration)
            if wandb:
                wandb.log(metrics, iteration)
        # Megatron prints, for each total, its mean over the iterations that made progress.
        progress = totals.get("advanced iterations", 0) + (not given["skipped_iter"])
        metrics = gathered_metrics("line") if in_line else {}
        shown = {name: value for name, value in metrics.items() if name.startswith(_IN_LINE)}
        device = torch.cuda.current_device()
        totals.update({name: torch.tensor([value * max(1, progress)], device=device) for name, value in shown.items()})
        try:
            return stock(*args, **kwargs)
        finally:
            for name in shown:
                totals.pop(name, None)

    training_log.with_zephon = True  # type: ignore[attr-defined]
    return training_log
