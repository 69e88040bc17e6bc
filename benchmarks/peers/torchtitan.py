"""TorchTitan's own loader of text, with its two sources interleaved. Options: workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import load_dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HFDataSource,
    InterleavedHuggingFaceTextDataLoader,
)

from benchmarks.peers.protocol import Peer, parquet_files, serve


def _load(path: str) -> Any:
    return load_dataset("parquet", data_files=parquet_files(path), split="train", streaming=True)


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]


class TorchTitan(Peer):
    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        for name, path in job["sources"].items():
            DATASETS[name] = DatasetConfig(path=path, loader=_load, sample_processor=_text)
        config = InterleavedHuggingFaceTextDataLoader.Config(
            sources=[HFDataSource(dataset=name, weight=1.0, infinite=True) for name in job["sources"]],
            num_workers=job["workers"],
        )
        self.loader = config.build(
            dp_world_size=world,
            dp_rank=rank,
            tokenizer=HuggingFaceTokenizer(tokenizer_path=job["tokenizer"]),
            seq_len=job["seq_len"],
            local_batch_size=job["microbatch"],
        )
        if states:
            self.loader.load_state_dict(states[0] if world == 1 else {k: v for each in states for k, v in each.items()})
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def records(self, batch: Any) -> np.ndarray:
        fields, labels = batch
        last = labels[:, -1:].clamp(min=0)  # a masked label is that of a document's end
        return np.concatenate([fields["input"].numpy(), last.numpy()], axis=1)


if __name__ == "__main__":
    serve(TorchTitan)
