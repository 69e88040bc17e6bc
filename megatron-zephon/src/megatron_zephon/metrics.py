"""Metrics of the loader in Megatron's log line, TensorBoard and Weights & Biases.

Megatron has no hook for them, so `install` wraps its `training_log`, which every rank calls at the end of every
iteration. Only ranks that save lanes are counted, and every rank gets the sums: the rank that logs may have no loader.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from megatron_zephon.loaders import TrainLoader
from zephon.loader import Progress, any_rank, job_metrics

_IN_LINE = ("zephon/data_wait(s)", "zephon/padding(%)", "zephon/cursor", "zephon/tokens/")
_loader: TrainLoader | None = None
_sources: list[str] = []
_since: dict[str, Progress] = {}
"""The progress when metrics were last gathered, for the log line and for the writers."""


def watch(loader: TrainLoader | None, sources: Sequence[str]) -> None:
    """Set this rank's training loader; None on a rank, or for a virtual stage, that has none."""
    global _loader, _sources
    _sources = list(sources)
    if loader is not None and loader.saves:
        _loader = loader
        _since.clear()


def gathered_metrics(reader: str) -> dict[str, float]:
    """`zephon.loader.job_metrics` since the last call for `reader`. Every rank must call it."""
    since, device = _since.get(reader, Progress()), torch.cuda.current_device()
    if _loader is None:
        return job_metrics(None, since, mixture={}, names=_sources, device=device)
    now = _since[reader] = replace(_loader.progress)
    pipeline = _loader.pipeline
    return job_metrics(now, since, cursor=pipeline.cursor, mixture=pipeline.mixture(), names=_sources, device=device)


@cache
def _any_rank_writes(here: bool) -> bool:
    """Whether any rank has a writer of TensorBoard or Weights & Biases; reduced once."""
    return any_rank(here, device=torch.cuda.current_device())


def install() -> None:
    """Have Megatron's training loop log the metrics, in this process."""
    from megatron.training import training

    if not getattr(training.training_log, "with_zephon", False):
        training.training_log = _with_zephon(training.training_log)


def _with_zephon(stock: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    signature = inspect.signature(stock)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        values = call.arguments
        iteration, totals = values["iteration"], values["total_loss_dict"]
        options = get_args()
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if iteration % options.tensorboard_log_interval == 0 and _any_rank_writes(bool(writer or wandb)):
            metrics = gathered_metrics("writers")
            for name, value in metrics.items() if writer else ():
                writer.add_scalar(name, value, iteration)
            if wandb:
                wandb.log(metrics, iteration)
        shown: dict[str, torch.Tensor] = {}
        if iteration % options.log_interval == 0 or values["is_first_iteration"]:
            # Megatron prints, for each total, its mean over the iterations that made progress.
            progress = max(1, totals.get("advanced iterations", 0) + (not values["skipped_iter"]))
            device = torch.cuda.current_device()
            shown = {
                name: torch.tensor([value * progress], device=device)
                for name, value in gathered_metrics("line").items()
                if name.startswith(_IN_LINE)
            }
        totals.update(shown)
        try:
            return stock(*args, **kwargs)
        finally:
            for name in shown:
                totals.pop(name, None)

    training_log.with_zephon = True  # type: ignore[attr-defined]
    return training_log
