"""Which source the tokens of records come from: told by runs of eight tokens, whatever the order and the packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.peers.protocol import parquet_files

WINDOW, EVERY = 8, 4  # tokens of a run; one run in so many is looked at, chosen by its hash
_FACTORS = np.random.default_rng(0).integers(1, 2**63, WINDOW, dtype=np.uint64) | np.uint64(1)


def hashes(ids: np.ndarray) -> np.ndarray:
    """A hash of the run that begins at each token but the last seven."""
    count = len(ids) - WINDOW + 1
    found = np.zeros(max(count, 0), np.uint64)
    for place, factor in enumerate(_FACTORS):
        found += ids[place : place + count].astype(np.uint64) * factor
    return found ^ (found >> np.uint64(29))


class Corpus:
    """The runs of tokens of two sources, and what else a table says of them.

    Attributes:
        tokens: of each source, end-of-text tokens included.
        bytes_per_token: over both.
    """

    def __init__(self, sources: dict[str, str], tokenizer: str) -> None:
        import pyarrow.parquet as pq

        from zephon.tokenizer.tokenizer import load_tokenizer

        encode, self.tokens, nbytes = load_tokenizer(tokenizer).encode, {}, 0
        runs = []
        for name, folder in sources.items():
            parts = []
            self.tokens[name] = 0
            for file in parquet_files(folder):
                opened = pq.ParquetFile(file)
                for group in range(opened.num_row_groups):
                    texts = opened.read_row_group(group, columns=["text"]).column("text").combine_chunks()
                    ids, _ = encode(texts)
                    nbytes += texts.nbytes - 8 * len(texts)
                    self.tokens[name] += len(ids) + len(texts)
                    found = hashes(np.asarray(ids))
                    parts.append(found[found % EVERY == 0])
            runs.append(np.unique(np.concatenate(parts)))
        both = np.intersect1d(*runs, assume_unique=True)
        self.runs = [np.setdiff1d(each, both, assume_unique=True) for each in runs]
        self.bytes_per_token = nbytes / sum(self.tokens.values())

    def shares(self, path: Path, eos: int, pad_id: int | None) -> dict[str, float]:
        """Of records in a file of NumPy: the first source's share of tokens, tokens whose source is known, and fill."""
        ids = np.load(path).astype(np.int64)
        fill = 1.0 if pad_id is None else float((ids != pad_id).mean())
        ids[:, -1] = np.where(ids[:, -1] < 0, eos, ids[:, -1])
        flat = ids.reshape(-1)
        starts = np.zeros(len(flat), np.int64)
        starts[1:] = flat[:-1] == eos
        starts[:: ids.shape[1]] = 1
        segment = np.cumsum(starts) - 1  # documents, cut where records are
        found = hashes(flat)
        looked = np.flatnonzero(found % EVERY == 0)
        votes = [
            np.bincount(segment[looked[_contains(runs, found[looked])]], minlength=segment[-1] + 1)
            for runs in self.runs
        ]
        length = np.bincount(segment)
        first, second = (int(length[mine > other].sum()) for mine, other in (votes, votes[::-1]))
        return {
            "first_share": first / max(1, first + second),
            "known": (first + second) / len(flat),
            "fill": fill,
        }


def _contains(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[place] == values
