"""The ledger: what each rank has consumed, record by record, and the comparison of such accounts.

A rank writes two files, only ever by appending, so that a killed process leaves a readable account:

NAME.ledger
    A header line of JSON, padded to 512 bytes, then 40 bytes per record: its sequence number (uint64) and the SHA-256
    of its tokens and document starts (see `SampleBatch.digests`).
NAME.spans
    32 bytes per document, or part of one: sequence number (uint64), place in the record (uint32), index of the dataset
    (uint32), row within the dataset (uint64), first token of the document (uint64).

All numbers are little-endian. A run that was killed and resumed consumes some records twice; both times they must have
the same digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from zephon.batch import SampleBatch
from zephon.columns.appending import append_whole, new_file
from zephon.config.topology import Topology
from zephon.errors import DataError

__all__ = ["Difference", "Ledger", "LedgerWriter", "compare", "read_ledger"]

_HEADER_BYTES = 512
_RECORD = np.dtype([("sequence", "<u8"), ("digest", "u1", 32)])
_SPAN = np.dtype([("sequence", "<u8"), ("start", "<u4"), ("dataset", "<u4"), ("row", "<u8"), ("token", "<u8")])


class _Header(msgspec.Struct):
    """First line of a ledger: what the ledgers of all ranks of a run agree on."""

    zephon_ledger: Literal[1]
    lanes: int
    global_batch: Annotated[int, msgspec.Meta(gt=0)] | None
    datasets: list[str]


class LedgerWriter:
    """Appends the batches that one rank consumes.

    Args:
        folder: shared by the ranks of a run; made if it does not exist.
        topology: of the rank.
        datasets: names by index.
    """

    def __init__(self, folder: str | os.PathLike[str], topology: Topology, datasets: Sequence[str]) -> None:
        group = {"dp_degree": topology.dp_degree, "dp_group_id": topology.dp_group_id}
        header = {"zephon_ledger": 1, "lanes": topology.lanes, "global_batch": topology.global_batch, **group}
        line = json.dumps({**header, "datasets": list(datasets)}).encode()
        if len(line) >= _HEADER_BYTES:
            line = json.dumps({**header, "datasets": []}).encode()
        name = f"dp{topology.dp_degree}-{topology.dp_group_id}-{time.time_ns()}-{os.getpid()}"
        self._records = new_file(folder, f"{name}.ledger", "the ledger", line.ljust(_HEADER_BYTES - 1) + b"\n")
        self._spans = new_file(folder, f"{name}.spans", "the ledger")

    def write(self, batch: SampleBatch) -> None:
        """Append one batch."""
        block = batch.block
        entries = np.empty(len(batch), dtype=_RECORD)
        entries["sequence"] = batch.sequence_numbers
        entries["digest"] = np.frombuffer(b"".join(batch.digests), dtype=np.uint8).reshape(-1, 32)
        spans = np.empty(len(block.span_row), dtype=_SPAN)
        spans["sequence"] = np.repeat(batch.sequence_numbers, np.diff(block.span_offsets))
        spans["row"], spans["token"] = block.span_row, block.span_token
        spans["start"], spans["dataset"] = block.span_start, block.span_dataset
        try:
            append_whole(self._spans, spans.tobytes())
            append_whole(self._records, entries.tobytes())
        except OSError as error:
            where = self._records.name
            raise DataError(f"the ledger cannot be written to {where}: {error.strerror}; free space there.") from None

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        self._spans.close()


@dataclass(frozen=True)
class Ledger:
    """What all ranks of a run consumed.

    Attributes:
        name: for messages.
        lanes: L.
        global_batch: B, or None.
        datasets: names by index; empty where they were too long to keep.
        sequence: int64[n], ascending, each number once.
        digests: uint8[n, 32].
        spans: see the module; sorted by sequence number and place.
    """

    name: str
    lanes: int
    global_batch: int | None
    datasets: list[str]
    sequence: np.ndarray
    digests: np.ndarray
    spans: np.ndarray

    def step_digests(self, global_batch: int) -> dict[int, bytes]:
        """SHA-256 over the digests of the records of every complete step, by its number."""
        steps, first, counts = np.unique(self.sequence // global_batch, return_index=True, return_counts=True)
        whole = counts == global_batch
        return {
            step: hashlib.sha256(self.digests[start : start + global_batch].tobytes()).digest()
            for step, start in zip(steps[whole].tolist(), first[whole].tolist(), strict=True)
        }

    def documents(self, sequence: int) -> str:
        """The documents of a record, for messages."""
        low, high = np.searchsorted(self.spans["sequence"], [sequence, sequence + 1])
        parts = []
        for span in self.spans[low:high]:
            d = int(span["dataset"])
            name = self.datasets[d] if d < len(self.datasets) else f"dataset {d}"
            parts.append(f"{name} row {span['row']} from token {span['token']}")
        return "; ".join(parts) or "no document"


def read_ledger(folder: str | os.PathLike[str]) -> Ledger:
    """The accounts of all ranks in `folder`, put together.

    Raises:
        DataError: there are none, they are damaged, or they contradict each other.
    """
    path = Path(folder)
    heads, records, spans = [], [], []
    for file in sorted(path.glob("*.ledger")):
        content = file.read_bytes()
        if len(content) < _HEADER_BYTES:
            continue  # of a process that was killed before it had consumed anything
        try:
            heads.append(msgspec.json.decode(content[:_HEADER_BYTES], type=_Header))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise DataError(f"{file} is no ledger of this version: its header cannot be read.") from None
        records.append(_whole_entries(content[_HEADER_BYTES:], _RECORD))
        other = file.with_suffix(".spans")
        spans.append(_whole_entries(other.read_bytes() if other.exists() else b"", _SPAN))
    if not heads:
        raise DataError(
            f"{path} holds no ledger (no *.ledger file with a header); pass the folder given as options(ledger=...)."
        )
    for key in ("lanes", "global_batch", "datasets"):
        values = sorted({str(getattr(head, key)) for head in heads})
        if len(values) > 1:
            raise DataError(f"{path} holds ledgers of different runs: {key} is {' and '.join(values)}.")
    entries = np.concatenate(records)
    entries = entries[np.argsort(entries["sequence"], kind="stable")]
    twice = np.flatnonzero(entries["sequence"][1:] == entries["sequence"][:-1])
    unequal = (entries["digest"][twice] != entries["digest"][twice + 1]).any(axis=1)
    if unequal.any():
        number = entries["sequence"][twice[unequal][0]]
        raise DataError(f"{path} contradicts itself: record {number} was consumed twice with different content.")
    entries = np.delete(entries, twice)
    return Ledger(
        name=str(path),
        lanes=heads[0].lanes,
        global_batch=heads[0].global_batch,
        datasets=heads[0].datasets,
        sequence=entries["sequence"].astype(np.int64),
        digests=entries["digest"],
        spans=np.unique(np.concatenate(spans)),
    )


def _whole_entries(content: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    """The entries of a file whose last one may be cut short."""
    return np.frombuffer(content, dtype=dtype, count=len(content) // dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part.

    Attributes:
        step: number of the step, or None where the global batch is unknown.
        lane: the lane.
        sequence: the record.
        text: what differs, for people.
    """

    step: int | None
    lane: int
    sequence: int
    text: str


def compare(a: Ledger, b: Ledger) -> Difference | None:
    """The first record in which two runs differ; None where they agree in all records that both have consumed.

    A record that only one of them has, before the last step that the shorter run has whole, is a difference too.
    """
    if a.lanes != b.lanes:
        return Difference(None, 0, 0, f"{a.name} has {a.lanes} lanes, {b.name} has {b.lanes}: they are different runs.")
    if not (len(a.sequence) and len(b.sequence)):
        return None
    start, end = max(a.sequence[0], b.sequence[0]), min(_complete_until(a), _complete_until(b))
    shared, in_a, in_b = np.intersect1d(a.sequence, b.sequence, assume_unique=True, return_indices=True)
    alone = np.setxor1d(a.sequence, b.sequence, assume_unique=True)
    alone = alone[(alone >= start) & (alone < end)]
    unequal = shared[(a.digests[in_a] != b.digests[in_b]).any(axis=1)]
    different = np.concatenate([alone, unequal])
    if not len(different):
        return None
    sequence = int(different.min())
    documents = a.documents(sequence), b.documents(sequence)
    if sequence in alone:
        holder, other = (a, b) if sequence in a.sequence else (b, a)
        what = f"only {holder.name} consumed it ({holder.documents(sequence)}), {other.name} did not"
    elif documents[0] == documents[1]:
        what = f"{a.name} and {b.name} consumed the same documents ({documents[0]}) with other tokens"
    else:
        what = f"{a.name} consumed {documents[0]}; {b.name} consumed {documents[1]}"
    batch, lane = a.global_batch or b.global_batch, sequence % a.lanes
    step = sequence // batch if batch else None
    where = f"lane {lane}" if step is None else f"step {step}, lane {lane}"
    return Difference(step, lane, sequence, f"{where} (record {sequence}): {what}.")


def _complete_until(ledger: Ledger) -> int:
    """The sequence number up to which a run has surely consumed what it was to consume.

    Ranks do not stop, and are not killed, at the same record: only steps that every lane has reached count.
    """
    reached = np.full(ledger.lanes, -1, dtype=np.int64)
    np.maximum.at(reached, ledger.sequence % ledger.lanes, ledger.sequence // ledger.lanes)
    until = (int(reached.min()) + 1) * ledger.lanes
    unit = ledger.global_batch or ledger.lanes
    return until // unit * unit
