"""LanceDB's StreamingDataset on one table of both sources. Options: prepared (tokens, which it packs itself; else text,
tokenized by its transform and packed by the user)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataset
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.peers.protocol import NotOffered, Packer, Peer, parquet_files, serve, texts

PAD = 50_257  # a token that the vocabulary does not have


class Online(IterableDataset):
    """Rows of tokens, packed as they come."""

    def __init__(self, job: dict[str, Any], rows: Any) -> None:
        self.job, self.rows = job, rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        packer = Packer(self.job["seq_len"] + 1, self.job["eos"])
        while True:
            for ids in self.rows:
                for record in packer.push(ids):
                    yield torch.tensor(record)


class LanceDB(Peer):
    pad_id = PAD

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
        if world > 1 and not job["prepared"]:
            raise NotOffered("no resuming of samples packed by the user")
        table = lancedb.connect(str(self.prepared()[0])).open_table("rows")
        options: dict[str, Any] = {"num_splits": job["splits"], "shuffle_seed": 42, "rank": rank, "world_size": world}
        if job["prepared"]:
            options |= {
                "columns": ["tokens"],
                "pack_sequences": job["seq_len"] + 1,
                "eos_id": job["eos"],
                "pad_id": PAD,
                "blocks_per_epoch": "auto",
            }
        else:
            encode = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json").encode_batch_fast

            def transform(batch: pa.RecordBatch) -> list[list[int]]:
                return [each.ids for each in encode(batch.column("text").to_pylist(), add_special_tokens=False)]

            options |= {"columns": ["text"], "transform": transform}
        self.dataset = StreamingDataset(table, **options)
        if states:
            self.dataset.load_state_dict(states[0] if len(states) == 1 else StreamingDataset.merge_state_dicts(states))
        rows = self.dataset if job["prepared"] else Online(job, self.dataset)
        self.loader = DataLoader(rows, batch_size=job["microbatch"], num_workers=0)
        return self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            for batch in self.loader:
                yield batch["input_ids"] if self.job["prepared"] else batch

    def state(self) -> Any:
        if not self.job["prepared"]:
            raise NotOffered("no state of samples packed by the user")
        return self.dataset.state_dict()

    def records(self, batch: Any) -> np.ndarray:
        return batch.numpy()


if __name__ == "__main__":
    serve(LanceDB)
