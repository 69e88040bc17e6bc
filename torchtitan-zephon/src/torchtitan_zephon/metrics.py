"""Metrics of the data loader among TorchTitan's own: TensorBoard, Weights & Biases and the structured log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.utils import device_type

from torchtitan_zephon.loader import ZephonDataLoader, training_loader
from zephon.loader import Progress, is_distributed, job_metrics


def loader_metrics(loader: ZephonDataLoader, since: Progress) -> dict[str, float]:
    """See `zephon.loader.job_metrics`; the wait is per step. Every rank must call it."""
    mixture = loader.mixture()
    return job_metrics(
        loader.progress,
        since,
        cursor=loader.cursor,
        mixture=mixture,
        names=list(mixture),
        share=loader.dp_degree / dist.get_world_size() if is_distributed() else 1.0,
        batches_per_step=loader.batches_per_step,
        device=device_type,
    )


class ZephonMetricsProcessor(MetricsProcessor):
    """TorchTitan's metrics and those of the data loader; set it as `config.metrics`.

    They are reduced over ranks at logged steps only.
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
