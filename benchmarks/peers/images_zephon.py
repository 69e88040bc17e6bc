"""Zephon on photographs with captions, in the environment of the project. Options: workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.images import pipeline_of
from benchmarks.peers.protocol import Peer, serve


class ImagesZephon(Peer):
    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        torch.set_num_threads(1)
        self.pipeline = pipeline_of(self.job)
        return ((int(batch.lengths.sum()), batch.to_training()) for batch in self.pipeline)

    def tokens(self, batch: Any) -> int:
        return batch[0]

    def close(self) -> None:
        self.pipeline.close()


if __name__ == "__main__":
    serve(ImagesZephon)
