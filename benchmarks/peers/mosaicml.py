"""MosaicML Streaming. Options: prepared (records of tokens, written before; else text, tokenized in the workers)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from benchmarks.peers.protocol import NotOffered, Packer, Peer, pack, parquet_files, serve, texts


class Online(StreamingDataset):
    """Documents that are tokenized and packed as they come."""

    def __init__(self, job: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self.arguments = job

    def __iter__(self) -> Iterator[torch.Tensor]:
        encode = Tokenizer.from_file(f"{self.arguments['tokenizer']}/tokenizer.json").encode
        packer = Packer(self.arguments["seq_len"] + 1, self.arguments["eos"])
        while True:
            for sample in super().__iter__():
                for record in packer.push(encode(sample["text"], add_special_tokens=False).ids):
                    yield torch.tensor(record)


class MosaicML(Peer):
    unmeasured = "ranks are those of torch.distributed"

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.one_rank = "" if job["prepared"] else "no state of samples packed by the user"

    def prepared(self) -> list[Path]:
        return [self.folder / name for name in self.job["sources"]]

    def prepare(self) -> None:
        job, length = self.job, self.job["seq_len"] + 1
        encode = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json").encode_batch_fast
        for folder, source in zip(self.prepared(), job["sources"].values(), strict=True):
            columns = {"tokens": f"ndarray:int32:{length}"} if job["prepared"] else {"text": "str"}
            with MDSWriter(columns=columns, out=str(folder)) as out:
                if job["prepared"]:
                    ids = (
                        each.ids
                        for some in texts(*parquet_files(source))
                        for each in encode(some, add_special_tokens=False)
                    )
                    for record in pack(ids, job):
                        out.write({"tokens": np.array(record, np.int32)})
                else:
                    for some in texts(*parquet_files(source)):
                        for text in some:
                            out.write({"text": text})

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        options: dict[str, Any] = {
            "streams": [Stream(local=str(folder), proportion=1.0) for folder in self.prepared()],
            "batch_size": job["microbatch"],
            "shuffle": True,
        }
        if job["prepared"]:
            dataset = StreamingDataset(**options)
            self.loader = StreamingDataLoader(dataset, batch_size=job["microbatch"], num_workers=job["workers"])
            if states:
                self.loader.load_state_dict(states[0])
        else:
            self.loader = DataLoader(Online(job, **options), batch_size=job["microbatch"], num_workers=job["workers"])
        return self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            for batch in self.loader:
                yield batch["tokens"].long() if self.job["prepared"] else batch

    def state(self) -> Any:
        if not self.job["prepared"]:
            raise NotOffered(self.one_rank)
        return self.loader.state_dict()


if __name__ == "__main__":
    serve(MosaicML)
