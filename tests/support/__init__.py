"""Small data and stand-ins that several test files build on."""

import hashlib
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from zephon.columns.records import TokenBlock


def catalog_of(group_rows: list[int], groups_per_shard: int, *, row_bytes: int = 100, sequential: bool = False):
    """A catalog as far as the order of rows is concerned: groups of so many rows, so many groups per shard."""
    starts = np.concatenate([[0], np.cumsum(group_rows)]).astype(np.int64)
    return SimpleNamespace(
        row_starts=starts,
        rows=int(starts[-1]),
        bytes=int(starts[-1]) * row_bytes,
        group_shard=np.arange(len(group_rows), dtype=np.int32) // groups_per_shard,
        sequential=sequential,
    )


def train_tiny_tokenizer(folder: Path, *, bos: str | None = "<|bos|>", eos: str | None = "<|eos|>") -> Path:
    """A byte-level BPE of 400 tokens, trained on a page of this Python's own sources."""
    from examples.corpus import train_tokenizer

    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    if eos is None:
        train_tokenizer([text], folder, 400, bos_token=None, eos_token="<|unused|>")
        (folder / "tokenizer_config.json").unlink()
        return folder
    return train_tokenizer([text], folder, 400, bos_token=bos, eos_token=eos)


def combine_digests(digests) -> bytes:
    """The digest of a step, over those of its records."""
    return hashlib.sha256(b"".join(digests)).digest()


def step_digests(pipelines, steps: int, global_batch: int) -> list[bytes]:
    """SHA-256 of `steps` global batches put together from all groups of a run, each group stepped in turn."""
    records: dict[int, bytes] = {}
    streams = [iter(pipeline) for pipeline in pipelines]
    for stream in streams:
        used = 0
        while used < steps * global_batch // len(pipelines):
            batch = next(stream)
            used += len(batch)
            for number, digest in zip(batch.sequence_numbers.tolist(), batch.digests, strict=True):
                assert number not in records
                records[number] = digest
    first = min(records) // global_batch
    return [
        combine_digests([records[number] for number in range(step * global_batch, (step + 1) * global_batch)])
        for step in range(first, first + steps)
    ]


def block_of(lengths, first, chunk=0):
    """Document i is the tokens i * 1000, i * 1000 + 1, ..., at row 10 * i and position i of its chunk."""
    index = np.arange(first, first + len(lengths), dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.concatenate([np.arange(n) + i * 1000 for i, n in zip(index, lengths, strict=True)] + [[]])
    zero = np.zeros(1, dtype=np.int64)
    return TokenBlock(
        tokens.astype(np.uint32), offsets, (index % 3).astype(np.int32), index * 10, index, chunk, zero, zero
    )


def described(records):
    """Every span as (record, start, row, first token, tokens)."""
    lengths = records.span_lengths()
    return [
        (record, int(records.span_start[s]), int(records.span_row[s]), int(records.span_token[s]), int(lengths[s]))
        for record in range(len(records))
        for s in range(records.span_offsets[record], records.span_offsets[record + 1])
    ]
