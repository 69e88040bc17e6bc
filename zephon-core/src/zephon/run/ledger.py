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

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from zephon.batch import SampleBatch, combine_digests
from zephon.columns.appending import append_whole
from zephon.errors import DataError

__all__ = ["Difference", "Ledger", "LedgerWriter", "compare", "read_ledger"]

_HEADER_BYTES = 512
_RECORD = np.dtype([("sequence", "<u8"), ("digest", "V32")])
_SPAN = np.dtype([("sequence", "<u8"), ("start", "<u4"), ("dataset", "<u4"), ("row", "<u8"), ("token", "<u8")])


class _Header(msgspec.Struct):
    """First line of a ledger."""

    zephon_ledger: Literal[1]
    lanes: int
    global_batch: Annotated[int, msgspec.Meta(gt=0)] | None
    datasets: list[str]


class LedgerWriter:
    """Appends the batches that one rank consumes.

    Args:
        folder: shared by the ranks of a run; made if it does not exist.
        header: JSON types; needs "lanes", "global_batch" (or None), "dp_degree", "dp_group_id", "datasets".
    """

    def __init__(self, folder: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        path = Path(folder)
        name = f"dp{header['dp_degree']}-{header['dp_group_id']}-{time.time_ns()}-{os.getpid()}"
        line = json.dumps({"zephon_ledger": 1, **header}).encode()
        if len(line) >= _HEADER_BYTES:
            line = json.dumps({"zephon_ledger": 1, **header, "datasets": []}).encode()
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what a killed process had consumed is on record.
            self._records = open(path / f"{name}.ledger", "xb", buffering=0)  # noqa: SIM115
            self._spans = open(path / f"{name}.spans", "xb", buffering=0)  # noqa: SIM115
            self._records.write(line.ljust(_HEADER_BYTES - 1) + b"\n")
        except OSError as error:
            raise DataError(
                f"the ledger cannot be written to {path}: {error.strerror}; give a folder that can."
            ) from None

    def write(self, batch: SampleBatch) -> None:
        """Append one batch."""
        entries = np.empty(len(batch), dtype=_RECORD)
        entries["sequence"] = batch.sequence_numbers
        entries["digest"] = np.frombuffer(b"".join(batch.digests), dtype="V32")
        block = batch.block
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
        digests: n digests of 32 bytes.
        spans: see the module; sorted by sequence number and place.
    """

    name: str
    lanes: int
    global_batch: int | None
    datasets: tuple[str, ...]
    sequence: np.ndarray
    digests: np.ndarray
    spans: np.ndarray

    def step_digests(self, global_batch: int) -> dict[int, bytes]:
        """SHA-256 of every complete step, by its number."""
        steps, first, counts = np.unique(self.sequence // global_batch, return_index=True, return_counts=True)
        return {
            int(step): combine_digests([d.tobytes() for d in self.digests[start : start + global_batch]])
            for step, start, count in zip(steps, first, counts, strict=True)
            if count == global_batch
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
    if not isinstance(folder, str | os.PathLike):
        raise DataError(f"a ledger is read from {folder!r}, but must be the path of a folder.")
    path = Path(folder)
    files = sorted(file for file in path.glob("*.ledger") if file.is_file())
    if not files:
        raise DataError(f"{path} holds no ledger (no *.ledger file); pass the folder given as options(ledger=...).")
    heads, records, spans = [], [], []
    for file in files:
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
        raise DataError(f"{path} holds no ledger: its *.ledger files are empty, as of processes killed at their start.")
    head = heads[0]
    for key in ("lanes", "global_batch", "datasets"):
        values = {json.dumps(getattr(each, key)) for each in heads}
        if len(values) > 1:
            raise DataError(f"{path} holds ledgers of different runs: {key} is {' and '.join(sorted(values))}.")
    entries = np.concatenate(records)
    entries = entries[np.argsort(entries["sequence"], kind="stable")]
    same = np.flatnonzero(entries["sequence"][1:] == entries["sequence"][:-1])
    for i in same.tolist():
        if entries["digest"][i].tobytes() != entries["digest"][i + 1].tobytes():
            raise DataError(
                f"{path} contradicts itself: record {entries['sequence'][i]} was consumed twice with different content."
            )
    entries = np.delete(entries, same)
    return Ledger(
        name=str(path),
        lanes=head.lanes,
        global_batch=head.global_batch,
        datasets=tuple(head.datasets),
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
    batch = a.global_batch or b.global_batch
    start = max(int(a.sequence[0]), int(b.sequence[0]))
    end = min(_complete_until(a), _complete_until(b))
    in_a, in_b = (ledger.sequence[(ledger.sequence >= start) & (ledger.sequence < end)] for ledger in (a, b))
    missing = np.setxor1d(in_a, in_b)
    shared = np.intersect1d(a.sequence, b.sequence, assume_unique=True)
    da = a.digests[np.searchsorted(a.sequence, shared)]
    db = b.digests[np.searchsorted(b.sequence, shared)]
    unequal = shared[[x.tobytes() != y.tobytes() for x, y in zip(da, db, strict=True)]] if len(shared) else shared
    candidates = [int(numbers[0]) for numbers in (missing, unequal) if len(numbers)]
    if not candidates:
        return None
    sequence = min(candidates)
    step = sequence // batch if batch else None
    lane = sequence % a.lanes
    if len(missing) and sequence == missing[0]:
        holder, other = (a, b) if sequence in in_a else (b, a)
        what = f"only {holder.name} consumed it ({holder.documents(sequence)}), {other.name} did not"
    else:
        documents, others = a.documents(sequence), b.documents(sequence)
        what = f"{a.name} consumed {documents}; {b.name} consumed {others}"
        if documents == others:
            what = f"{a.name} and {b.name} consumed the same documents ({documents}) with other tokens"
    where = f"step {step}, lane {lane}" if step is not None else f"lane {lane}"
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
