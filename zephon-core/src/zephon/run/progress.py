"""What a training loop got from its data loader, and the metrics that integrations log of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zephon.batch import SampleBatch
from zephon.pipeline import Mixture

__all__ = ["Progress", "loader_metrics"]


@dataclass(slots=True)
class Progress:
    """What a loader has done since it was built.

    Attributes:
        batches: microbatches handed out.
        wait: seconds that the trainer waited for them, the making of tensors included.
        places: tokens that fit into them.
        padding: those of them that are no real tokens.
        tokens: int64[n_datasets], the real tokens by dataset; 0 before the first batch.
    """

    batches: int = 0
    wait: float = 0.0
    places: int = 0
    padding: int = 0
    tokens: np.ndarray | int = 0

    def add(self, batch: SampleBatch, wait: float) -> None:
        """Count a microbatch for which the trainer waited `wait` seconds."""
        places, tokens = batch.tokens.size, batch.tokens_by_dataset()
        self.batches += 1
        self.wait += wait
        self.places += places
        self.padding += places - int(tokens.sum())
        self.tokens = self.tokens + tokens


def loader_metrics(now: Progress, since: Progress, *, cursor: int, mixture: Mapping[str, Mixture]) -> dict[str, float]:
    """What was done since `since`, and where the run is.

    zephon/data_wait(s)
        Mean time that the trainer waited for each of `batches`, which an integration may set to the steps instead.
    zephon/padding(%)
        Share of places that hold no real token.
    zephon/cursor
        Records that all ranks have used since the start of the run.
    zephon/tokens/SOURCE, zephon/mixture/SOURCE, zephon/mixture_target/SOURCE
        Tokens used since the process started; their share of all; the share wanted.
    zephon/skipped_rows/SOURCE, zephon/failed_rows/SOURCE
        Rows that were null, empty or only white space; rows left out because they could not be used. Those read ahead
        are included.
    """
    batches, places = now.batches - since.batches, now.places - since.places
    metrics = {
        "zephon/data_wait(s)": (now.wait - since.wait) / max(1, batches),
        "zephon/padding(%)": 100 * (now.padding - since.padding) / max(1, places),
        "zephon/cursor": float(cursor),
    }
    for name, part in mixture.items():
        metrics[f"zephon/tokens/{name}"] = float(part.tokens)
        metrics[f"zephon/mixture/{name}"] = part.achieved
        metrics[f"zephon/mixture_target/{name}"] = part.target
        metrics[f"zephon/skipped_rows/{name}"] = float(part.skipped)
        metrics[f"zephon/failed_rows/{name}"] = float(part.failed)
    return metrics
