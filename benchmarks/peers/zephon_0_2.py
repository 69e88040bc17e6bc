"""The package `zephon` of the index, version 0.2.0; it has the import name of ours. Options: runner, lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch  # noqa: F401

from benchmarks.peers.protocol import Peer, serve
from zephon import MixtureSpec, Pipeline, StaticMixtureWorkSource
from zephon.io import Dataset
from zephon.work import TokenEstimation


class Zephon02(Peer):
    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        source = StaticMixtureWorkSource(
            datasets=[Dataset.from_path(name, path) for name, path in job["sources"].items()],
            mixture=MixtureSpec(dict.fromkeys(job["sources"], 1.0)),
            token_estimation=TokenEstimation(),
            exhausted_policy="repeat",
            chunk_size=256,  # it refuses to repeat a source that has fewer rows than its share of a chunk
            seed=42,
        )
        self.pipeline = (
            Pipeline(source)
            .options(
                runner=job["runner"],
                canonical_replicas=job["lanes"],
                world_size=world,
                global_rank=rank,
                dp_degree=world,
                dp_group_id=rank,
            )
            .decode_text()
            .tokenize(tokenizer_id=job["tokenizer"], field="text", special_tokens="eos", parallelism=job["threads"])
            .pack_flat(max_length=job["seq_len"] + 1, algorithm="wrap")
            .shuffle(buffer_size=1024, seed=42)
            .batch(microbatch_size=job["microbatch"])
        )
        if states:
            self.pipeline.restore(states[0])
        return (batch.to_training(return_labels=True) for batch in self.pipeline)

    def state(self) -> Any:
        return self.pipeline.checkpoint()

    def records(self, batch: Any) -> np.ndarray:
        return np.concatenate([batch["input_ids"].numpy(), batch["labels"].numpy()[:, -1:]], axis=1)


if __name__ == "__main__":
    serve(Zephon02)
