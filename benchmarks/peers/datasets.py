"""Hugging Face datasets, streaming: interleave, a batched map that tokenizes and groups, a stateful DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from datasets import interleave_datasets, load_dataset
from tokenizers import Tokenizer
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.peers.protocol import Peer, parquet_files, serve


class Group:
    """Tokenize a batch of documents and cut it into records, as the examples of transformers do: the rest of each
    batch is left out."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.tokenizer = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json")
        self.length, self.eos = job["seq_len"] + 1, job["eos"]

    def __call__(self, rows: dict[str, list[str]]) -> dict[str, Any]:
        encoded = self.tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
        ids = np.fromiter(chain.from_iterable([*each.ids, self.eos] for each in encoded), np.int64)
        whole = len(ids) // self.length
        return {"input_ids": ids[: whole * self.length].reshape(whole, self.length)}


class Datasets(Peer):
    one_rank = "a state belongs to one rank of one number of ranks"

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        sources = [
            load_dataset("parquet", data_files=parquet_files(path), split="train", streaming=True)
            for path in job["sources"].values()
        ]
        rows = interleave_datasets(sources, [1 / len(sources)] * len(sources), 42, stopping_strategy="all_exhausted")
        records = rows.map(Group(job), batched=True, batch_size=100, remove_columns=["text"]).with_format("torch")
        self.loader = StatefulDataLoader(records, batch_size=job["microbatch"], num_workers=job["workers"])
        if states:
            self.loader.load_state_dict(states[0])
        return self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from (batch["input_ids"] for batch in self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()


if __name__ == "__main__":
    serve(Datasets)
