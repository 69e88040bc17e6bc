"""Megatron-Core's indexed dataset and GPTDataset, blended, with Megatron's sampler; tokenized before, by necessity."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from tokenizers import Tokenizer

from benchmarks.peers.protocol import Peer, parquet_files, serve, texts

SAMPLES = 200_000  # records that its index is built for


class Megatron(Peer):
    def prepared(self) -> list[Path]:
        return [self.folder / "data"]

    def _prefix(self, name: str) -> str:
        return str(self.prepared()[0] / name)

    def prepare(self) -> None:
        job = self.job
        self.prepared()[0].mkdir()
        encode = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json").encode_batch_fast
        for name, source in job["sources"].items():
            builder = IndexedDatasetBuilder(f"{self._prefix(name)}.bin", dtype=np.uint16)
            for some in texts(*parquet_files(source)):
                for each in encode(some, add_special_tokens=False):
                    ids = [*each.ids, job["eos"]]
                    builder.add_document(torch.tensor(ids), [len(ids)])
            builder.finalize(f"{self._prefix(name)}.idx")

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        names = list(job["sources"])
        config = GPTDatasetConfig(
            random_seed=42,
            sequence_length=job["seq_len"],
            blend=([self._prefix(name) for name in names], [1 / len(names)] * len(names)),
            split="1,0,0",
            path_to_cache=job["cache"],
            tokenizer=SimpleNamespace(eod=job["eos"], pad=None, vocab_size=job["vocabulary"], unique_identifiers={}),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [SAMPLES, 0, 0], lambda: True, config).build()[0]
        self.consumed = states[0]["consumed_train_samples"] if states else 0
        self.step = job["microbatch"] * world
        sampler = MegatronPretrainingSampler(len(dataset), self.consumed, job["microbatch"], rank, world)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=job["workers"])
        return self._counted(loader)

    def _counted(self, loader: Any) -> Iterator[Any]:
        for batch in loader:
            self.consumed += self.step
            yield batch

    def state(self) -> Any:
        """What Megatron keeps in its checkpoint for the data."""
        return {"consumed_train_samples": self.consumed}

    def records(self, batch: Any) -> np.ndarray:
        return np.concatenate([batch["tokens"].numpy(), batch["labels"].numpy()[:, -1:]], axis=1)


if __name__ == "__main__":
    serve(Megatron)
