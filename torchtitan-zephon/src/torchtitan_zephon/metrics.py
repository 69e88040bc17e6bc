"""Metrics of the data loader among TorchTitan's own: TensorBoard, Weights & Biases and the structured log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.observability import structured_logger as sl

from .loader import Progress, ZephonDataLoader, training_loader

__all__ = ["ZephonMetricsProcessor", "loader_metrics"]


def loader_metrics(loader: ZephonDataLoader, since: Progress) -> dict[str, float]:
    """What this rank's loader did since `since`, and where it is.

    zephon/data_wait(s)
        Mean time that the trainer waited for a microbatch.
    zephon/padding(%)
        Share of places that hold no real token.
    zephon/cursor
        Records that all ranks have used since the start of the run.
    zephon/tokens/SOURCE, zephon/mixture/SOURCE, zephon/mixture_target/SOURCE, zephon/skipped_rows/SOURCE
        Tokens made since the process started, those ahead of the trainer included; their share of all; the share
        wanted; rows that were null, empty or only white space.
    """
    now = loader.progress
    batches, places = now.batches - since.batches, now.places - since.places
    metrics = {
        "zephon/data_wait(s)": (now.wait - since.wait) / max(1, batches),
        "zephon/padding(%)": 100 * (now.padding - since.padding) / max(1, places),
        "zephon/cursor": float(loader.cursor),
    }
    for name, mixture in loader.mixture().items():
        metrics[f"zephon/tokens/{name}"] = float(mixture.tokens)
        metrics[f"zephon/mixture/{name}"] = mixture.achieved
        metrics[f"zephon/mixture_target/{name}"] = mixture.target
        metrics[f"zephon/skipped_rows/{name}"] = float(mixture.skipped)
    return metrics


class ZephonMetricsProcessor(MetricsProcessor):
    """TorchTitan's metrics with those of the data loader; set it as `config.metrics`.

    They are put together at the steps that are logged, from counters that the loader keeps anyway.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._logged = Progress()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """See `MetricsProcessor.log`."""
        loader = training_loader()
        if loader is not None:
            metrics = loader_metrics(loader, self._logged)
            self._logged = replace(loader.progress)
            sl.log_trace_scalar(metrics)
            extra_metrics = {**(extra_metrics or {}), **metrics}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
