"""Metrics of the data loader among TorchTitan's own: TensorBoard, Weights & Biases and the structured log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.observability import structured_logger as sl

from zephon import loader as face
from zephon.loader import Progress

from .loader import ZephonDataLoader, training_loader
from .ranks import sums_and_maxima

__all__ = ["ZephonMetricsProcessor", "loader_metrics"]


def loader_metrics(loader: ZephonDataLoader, since: Progress) -> dict[str, float]:
    """What the loaders of all ranks did since `since`, and where the run is. All ranks must call it.

    See `zephon.loader.loader_metrics`; the wait is per step, of the rank that waited longest over all steps.
    """
    mixture = loader.mixture()
    sums, maxima = sums_and_maxima([1.0, *loader.progress.counts(since, mixture)])
    # Ranks that share a data-parallel place count the same.
    counts = sums[1:] * loader.dp_degree / sums[0]
    counts[0] = max(1, round((loader.progress.batches - since.batches) / loader.batches_per_step))
    counts[1] = maxima[2]
    return face.loader_metrics(counts, {name: part.target for name, part in mixture.items()}, loader.cursor)


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
