"""LitData. Options: prepared (tokens by its `optimize`; else its Parquet reader, tokenized in the workers)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from litdata import (
    CombinedStreamingDataset,
    StreamingDataLoader,
    StreamingDataset,
    TokensLoader,
    index_parquet_dataset,
    optimize,
)
from litdata.streaming.item_loader import ParquetLoader
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.peers.protocol import NotOffered, Packer, Peer, parquet_files, serve, texts


class Tokens:
    """Documents of a file as tensors of tokens, for `optimize`."""

    def __init__(self, tokenizer: str, eos: int) -> None:
        self.tokenizer, self.eos = tokenizer, eos

    def __call__(self, file: str) -> Iterator[torch.Tensor]:
        encode = Tokenizer.from_file(f"{self.tokenizer}/tokenizer.json").encode_batch_fast
        for some in texts(file):
            for each in encode(some, add_special_tokens=False):
                yield torch.tensor([*each.ids, self.eos], dtype=torch.int32)


class Online(IterableDataset):
    """Documents of the combined datasets, tokenized and packed as they come."""

    def __init__(self, job: dict[str, Any], rows: Any) -> None:
        self.job, self.rows = job, rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        encode = Tokenizer.from_file(f"{self.job['tokenizer']}/tokenizer.json").encode
        packer = Packer(self.job["seq_len"] + 1, self.job["eos"])
        while True:
            for row in self.rows:
                text = row["text"] if isinstance(row, dict) else row[0]
                for record in packer.push(encode(text, add_special_tokens=False).ids):
                    yield torch.tensor(record)


class LitData(Peer):
    unmeasured = "ranks are those of torch.distributed"

    def prepared(self) -> list[Path]:
        return [self.folder / name for name in self.job["sources"]]

    def prepare(self) -> None:
        job = self.job
        for folder, source in zip(self.prepared(), job["sources"].values(), strict=True):
            if job["prepared"]:
                optimize(
                    fn=Tokens(job["tokenizer"], job["eos"]),
                    inputs=parquet_files(source),
                    output_dir=str(folder),
                    chunk_size=(job["seq_len"] + 1) * 4000,
                    item_loader=TokensLoader(),
                    num_workers=job["threads"],
                )
            else:
                shutil.copytree(source, folder)  # its index is written among the files
                index_parquet_dataset(str(folder))

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        loader = TokensLoader(block_size=job["seq_len"] + 1) if job["prepared"] else ParquetLoader(columns=["text"])
        parts = [
            StreamingDataset(
                str(folder), item_loader=loader if n == 0 else type(loader)(**_arguments(job)), shuffle=True, seed=42
            )
            for n, folder in enumerate(self.prepared())
        ]
        mixed = CombinedStreamingDataset(parts, seed=42, weights=[1 / len(parts)] * len(parts), iterate_over_all=False)
        if job["prepared"]:
            self.loader = StreamingDataLoader(mixed, batch_size=job["microbatch"], num_workers=job["workers"])
            if states:
                self.loader.load_state_dict(states[0])
        else:
            self.loader = DataLoader(Online(job, mixed), batch_size=job["microbatch"], num_workers=job["workers"])
        return self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from (batch.long() for batch in self.loader)

    def state(self) -> Any:
        if not self.job["prepared"]:
            raise NotOffered("no state of samples packed by the user")
        return self.loader.state_dict()


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    return {"block_size": job["seq_len"] + 1} if job["prepared"] else {"columns": ["text"]}


if __name__ == "__main__":
    serve(LitData)
