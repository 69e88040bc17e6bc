"""Zephon as it is in this tree, in the environment of the project. Options: lanes, runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch  # noqa: F401  (a training process has it loaded)

import zephon  # noqa: F401
from benchmarks import common
from benchmarks.peers.protocol import Peer, serve


class ZephonHere(Peer):
    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job, options = self.job, {}
        if world > 1 or "global_batch" in job:
            options = {"dp_degree": world, "dp_group_id": rank, "global_batch": job["global_batch"]}
        rows = common.rows(job, runner=job.get("runner", "threads"), **options)
        self.pipeline = common.records(rows, job)
        if states:
            self.pipeline.restore(states)
        return (batch.to_training() for batch in self.pipeline)

    def state(self) -> Any:
        return self.pipeline.checkpoint()

    def records(self, batch: Any) -> np.ndarray:
        return np.concatenate([batch["input_ids"].numpy(), batch["labels"].numpy()[:, -1:]], axis=1)

    def close(self) -> None:
        self.pipeline.close()


if __name__ == "__main__":
    serve(ZephonHere)
