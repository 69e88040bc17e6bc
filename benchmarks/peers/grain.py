"""Grain with its Parquet reader, concat-then-split packing and workers. Options: tokenizers (which library)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from benchmarks.peers.protocol import Peer, parquet_files, serve

DOCUMENTS = 64  # encoded in one call
Encode = Callable[[list[str]], dict[str, np.ndarray]]


def joined(ids: np.ndarray, lengths: np.ndarray, eos: int) -> dict[str, np.ndarray]:
    """Tokens of some documents in one array, each document with its end-of-text token."""
    return {"tokens": np.insert(ids.astype(np.int64), np.cumsum(lengths), eos)}


def with_tokenizers(folder: str, eos: int) -> Encode:
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(f"{folder}/tokenizer.json").encode_batch_fast

    def tokenize(texts: list[str]) -> dict[str, np.ndarray]:
        ids = [each.ids for each in encode(texts, add_special_tokens=False)]
        return joined(np.concatenate(ids), np.array([len(each) for each in ids]), eos)

    return tokenize


def with_gigatoken(folder: str, eos: int) -> Encode:
    import awkward as ak
    import gigatoken

    encode = gigatoken.Tokenizer(f"{folder}/tokenizer.json").encode_batch

    def tokenize(texts: list[str]) -> dict[str, np.ndarray]:
        found = encode(texts)
        return joined(ak.to_numpy(ak.flatten(found)), ak.to_numpy(ak.num(found)), eos)

    return tokenize


class Tokenize(grain.transforms.Map):
    """Made where it runs: neither tokenizer need travel to the workers."""

    def __init__(self, library: str, folder: str, eos: int) -> None:
        self.arguments = library, folder, eos
        self.encode: Encode | None = None

    def map(self, texts: list[str]) -> dict[str, np.ndarray]:
        if self.encode is None:
            library, folder, eos = self.arguments
            self.encode = {"tokenizers": with_tokenizers, "gigatoken": with_gigatoken}[library](folder, eos)
        return self.encode(texts)

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self.arguments, "encode": None}


class Grain(Peer):
    one_rank = "its ElasticIterator takes no packing and no Parquet; other iterators do not change ranks"

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        workers = 0 if job["tokenizers"] == "gigatoken" else job["threads"]  # gigatoken has threads of its own
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

        def source(folder: str) -> Any:
            files = grain.MapDataset.source(parquet_files(folder)).map(grain.experimental.ParquetIterDataset)
            rows = grain.experimental.InterleaveIterDataset(files, cycle_length=1)
            texts = grain.experimental.RepeatIterDataset(rows).map(_text).batch(DOCUMENTS, batch_fn=list)
            return texts.map(Tokenize(job["tokenizers"], job["tokenizer"], job["eos"]))

        mixed = grain.IterDataset.mix([source(folder) for folder in job["sources"].values()])
        packed = grain.experimental.ConcatThenSplitIterDataset(mixed, length_struct={"tokens": job["seq_len"] + 1})
        batches = packed.batch(job["microbatch"], drop_remainder=True)
        if workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=8))
        else:
            batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=16)
        self.iterator = iter(batches)
        if states:
            self.iterator.set_state(states[0])
        return self.iterator

    def state(self) -> Any:
        return self.iterator.get_state()

    def records(self, batch: Any) -> np.ndarray:
        return batch["tokens"]

    def close(self) -> None:
        self.iterator.close()


def _text(row: Any) -> str:
    return str(row["text"])


if __name__ == "__main__":
    serve(Grain)
