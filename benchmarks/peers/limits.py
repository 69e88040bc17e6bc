"""What no loader can beat: reading alone, reading and tokenizing in a bare loop, and copying tokens.

In the environment of this project; one thread, no shuffling, no packing, nothing kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.protocol import Peer, parquet_files, serve


class Limit(Peer):
    """`job["limit"]` is read, tokenize or copy."""

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        return {"read": self._groups, "tokenize": self._tokens, "copy": self._copies}[self.job["limit"]]()

    def tokens(self, batch: Any) -> int:
        """For text the tokens that it would give."""
        return batch.size if isinstance(batch, np.ndarray) else int(batch.nbytes / self.job["bytes_per_token"])

    def _groups(self) -> Iterator[Any]:
        """Row groups of the sources, in equal shares of bytes."""
        import pyarrow.parquet as pq

        def cycle(folder: str) -> Iterator[Any]:
            while True:
                for path in parquet_files(folder):
                    opened = pq.ParquetFile(path)
                    for group in range(opened.num_row_groups):
                        yield opened.read_row_group(group, columns=["text"]).column("text").combine_chunks()

        streams = [cycle(folder) for folder in self.job["sources"].values()]
        given = [0] * len(streams)
        while True:
            behind = given.index(min(given))
            texts = next(streams[behind])
            given[behind] += texts.nbytes
            yield texts

    def _tokens(self) -> Iterator[np.ndarray]:
        from zephon.tokenizer.tokenizer import load_tokenizer

        encode = load_tokenizer(self.job["tokenizer"]).encode
        return (encode(texts)[0] for texts in self._groups())

    def _copies(self) -> Iterator[np.ndarray]:
        source = np.arange(4_000_000, dtype=np.int64)
        target = np.empty_like(source)
        while True:
            np.copyto(target, source)
            yield target


if __name__ == "__main__":
    serve(Limit)
