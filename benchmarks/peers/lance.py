"""LanceDB's StreamingDataset on one table of both sources. Options: prepared (tokens, which it packs itself; else text,
tokenized by its transform and packed by the user)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataset
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from benchmarks.peers.protocol import NotOffered, Peer, pack, parquet_files, serve, texts


class LanceDB(Peer):
    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.one_rank = "" if job["prepared"] else "no state of samples packed by the user"
        self.pad_id = job["vocabulary"]  # a token that the vocabulary does not have

    def prepared(self) -> list[Path]:
        return [self.folder / "db"]

    def prepare(self) -> None:
        job = self.job
        encode = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json").encode_batch_fast

        def tables() -> Iterator[pa.RecordBatch]:
            for source in job["sources"].values():
                for some in texts(*parquet_files(source)):
                    if job["prepared"]:
                        ids = [each.ids for each in encode(some, add_special_tokens=False)]
                        yield pa.record_batch({"tokens": pa.array(ids, pa.list_(pa.int32()))})
                    else:
                        yield pa.record_batch({"text": pa.array(some, pa.large_string())})

        kind = pa.list_(pa.int32()) if job["prepared"] else pa.large_string()
        schema = pa.schema([("tokens" if job["prepared"] else "text", kind)])
        lancedb.connect(str(self.prepared()[0])).create_table("rows", tables(), schema=schema)

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        self.options: dict[str, Any] = {
            "num_splits": job["splits"],
            "shuffle_seed": 42,
            "rank": rank,
            "world_size": world,
        }
        if job["prepared"]:
            self.options |= {
                "columns": ["tokens"],
                "pack_sequences": job["seq_len"] + 1,
                "eos_id": job["eos"],
                "pad_id": self.pad_id,
                "blocks_per_epoch": "auto",
            }
        else:
            encode = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json").encode_batch_fast

            def transform(batch: pa.RecordBatch) -> list[list[int]]:
                return [each.ids for each in encode(batch.column("text").to_pylist(), add_special_tokens=False)]

            # Its own 64 rows per read and split would look further ahead than a benchmark streams.
            self.options |= {"columns": ["text"], "transform": transform, "read_batch_size": 8}
        state = None
        if states:
            state = states[0] if len(states) == 1 else StreamingDataset.merge_state_dicts(states)
        epochs = self._epochs(lancedb.connect(str(self.prepared()[0])).open_table("rows"), state)
        return epochs if job["prepared"] else self._packed(epochs)

    def _epochs(self, table: Any, state: Any) -> Iterator[Any]:
        """Batches of packed records, or documents of tokens, epoch after epoch."""
        for epoch in count(state["epoch"] if state else 0):
            self.dataset = StreamingDataset(table, epoch=epoch, **self.options)
            if state:
                self.dataset.load_state_dict(state)
                state = None
            if self.job["prepared"]:
                for batch in DataLoader(self.dataset, batch_size=self.job["microbatch"], num_workers=0, drop_last=True):
                    yield batch["input_ids"]
            else:
                yield from self.dataset

    def _packed(self, documents: Iterator[list[int]]) -> Iterator[torch.Tensor]:
        records = pack(documents, self.job)
        while True:
            yield torch.tensor(list(islice(records, self.job["microbatch"])))

    def state(self) -> Any:
        if not self.job["prepared"]:
            raise NotOffered(self.one_rank)
        return self.dataset.state_dict()

    def records(self, batch: Any) -> np.ndarray:
        return batch.numpy()


if __name__ == "__main__":
    serve(LanceDB)
