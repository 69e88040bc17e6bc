"""Metrics of the data loader among TorchTitan's own: TensorBoard, Weights & Biases and the structured log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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
    now, mixture = loader.progress, loader.mixture()
    sources = list(mixture.values())
    used = np.broadcast_to(now.tokens, len(sources))
    steps = max(1, round((now.batches - since.batches) / loader.batches_per_step))
    wait, places, padding = now.wait - since.wait, now.places - since.places, now.padding - since.padding
    read = [[part.rows, part.skipped, part.failed] for part in sources]
    # Peers of a data-parallel rank count the same: shares are right as they are, counts are divided.
    sums, maxima = sums_and_maxima(
        [wait, places, padding, 1.0, *used, *(count for counts in zip(*read, strict=True) for count in counts)]
    )
    _, places, padding, ranks, *counts = sums.tolist()
    used, rows, skipped, failed = np.array(counts).reshape(4, -1) * loader.dp_degree / ranks
    return face.loader_metrics(
        Progress(batches=steps, wait=float(maxima[0]), places=round(places), padding=round(padding)),
        Progress(),
        cursor=loader.cursor,
        mixture={
            name: replace(
                part,
                achieved=float(used[i] / max(1, used.sum())),
                tokens=round(used[i]),
                rows=round(rows[i]),
                skipped=round(skipped[i]),
                failed=round(failed[i]),
            )
            for i, (name, part) in enumerate(mixture.items())
        },
    )


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
