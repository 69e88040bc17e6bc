"""The ledger: what each rank has consumed, record by record, and the comparison of such accounts.

A rank writes three files, only ever by appending, so that a killed process leaves a readable account:

NAME.ledger
    A header line of JSON, padded to a multiple of 512 bytes, then 40 bytes per record: its sequence number (uint64) and
    the SHA-256 of its tokens and document starts (see `SampleBatch.digests`).
NAME.spans
    32 bytes per document, or part of one: sequence number (uint64), place in the record (uint32), index of the dataset
    (uint32), row within the dataset (uint64), first token of the document (uint64).

NAME.steps
    A line for each step, see `zephon.run.metrics`.

All numbers are little-endian. Every start of a run writes files of its own. What earlier starts consumed of a lane
behind the place where a later one begins was rolled back and does not count; as long as the data are the same, records
consumed twice must have the same digest. A live process holds its files, so that no second run writes for its lanes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from zephon.batch import SampleBatch
from zephon.columns.appending import append_whole, hold, is_held, new_file
from zephon.config.topology import Topology
from zephon.engine.totals import Totals
from zephon.errors import DataError
from zephon.run.compile import Compiled
from zephon.run.metrics import Metrics, StepsWriter

_log = logging.getLogger("zephon")
_RECORD = np.dtype([("sequence", "<u8"), ("digest", "u1", 32)])
_SPAN = np.dtype([("sequence", "<u8"), ("start", "<u4"), ("dataset", "<u4"), ("row", "<u8"), ("token", "<u8")])
_NAME = re.compile(r"dp(\d+)-(\d+)-")
_LOCK_SECONDS = 120  # after which network file systems give up what a node that died held


class _Header(msgspec.Struct, kw_only=True):
    """First line of a ledger; version 1 has none of the fields with defaults.

    Attributes:
        microbatch: records per batch.
        data, after: digests of what decides the data, of this start and of the state that it goes on from.
        begun: records of the group used before.
        time: of the start, in nanoseconds.
        job: the same for the ranks of one start, of which several may write for one group.
        host: of the process.
        pixels: whether digests are over the pixels of images too.
    """

    zephon_ledger: Literal[1, 2]
    lanes: int
    global_batch: Annotated[int, msgspec.Meta(gt=0)] | None
    dp_degree: Annotated[int, msgspec.Meta(gt=0)]
    dp_group_id: int
    datasets: list[str]
    microbatch: int = 0
    data: str | None = None
    after: str | None = None
    begun: int | None = None
    time: int = 0
    job: str = ""
    host: str = ""
    pixels: bool = False


class _File(NamedTuple):
    """A ledger file: its header, and where its entries begin."""

    path: Path
    head: _Header
    offset: int

    @property
    def records(self) -> np.ndarray:
        return _entries(self.path, _RECORD, self.offset)


def check_ledger(option: str, folder: str | os.PathLike[str], compiled: Compiled, after: str = "") -> None:
    """Refuse a folder with the ledger of a run with other data, before one is written; `option` names the folder.

    Raises:
        DataError: the run does not go on from that one, whose data are `after` where a state of it was restored.
    """
    data = compiled.digest
    files = _files(folder, compiled.topology)
    _refuse_foreign(option, folder, files, data[:16], (after or data)[:16], compiled.digests_pixels)


def _refuse_foreign(
    option: str,
    folder: str | os.PathLike[str],
    files: Sequence[_File],
    data: str | None,
    after: str | None,
    pixels: bool,
) -> None:
    starts = [(file.head.data, file.head.after) for file in files if file.head.data]
    if starts and files[-1].head.pixels != pixels:
        raise DataError(
            f"digest_pixels is {str(pixels).lower()}; expected {str(not pixels).lower()}, as in the ledger in "
            f"{str(folder)!r}. Set it so (zephon stream --pixels), or name another folder for {option}."
        )
    if starts and starts[-1][0] not in _linked([*starts, (data, after)]):
        raise DataError(
            f"{option} is {str(folder)!r}, which holds the ledger of a run with other data; expected a new folder, "
            "or that of a run which this one goes on from. Name another folder."
        )


class LedgerWriter:
    """Appends the batches that one rank consumes.

    Args:
        folder: shared by the ranks of a run; made if it does not exist.
        compiled: the pipeline.
        after: digest of the data of the state that the run goes on from.
        begun: records of the group used before.

    Raises:
        DataError: the folder cannot be written, or holds the ledger of a run with other data.
    """

    def __init__(self, folder: str | os.PathLike[str], compiled: Compiled, after: str, begun: int) -> None:
        topology = compiled.topology
        head = _Header(
            zephon_ledger=2,
            lanes=topology.lanes,
            global_batch=topology.global_batch,
            dp_degree=topology.dp_degree,
            dp_group_id=topology.dp_group_id,
            datasets=list(compiled.plan.dataset_names),
            microbatch=compiled.operators.batch.microbatch_size,
            data=compiled.digest[:16],
            after=after[:16],
            begun=begun,
            time=time.time_ns(),
            job=_job(),
            host=socket.gethostname(),
            pixels=compiled.digests_pixels,
        )
        line = msgspec.json.encode(head)
        name = f"dp{topology.dp_degree}-{topology.dp_group_id}-{head.time}-{os.getpid()}"
        line += b" " * (-(len(line) + 1) % 512) + b"\n"
        self._records = new_file(folder, f"{name}.ledger", "the ledger", line)
        hold(self._records)
        self._spans = new_file(folder, f"{name}.spans", "the ledger")
        self._steps = StepsWriter(folder, name, compiled, begun)
        try:
            self._check_others(folder, head, int(topology.sequence_numbers(begun, 1)[0]), topology)
        except DataError:
            self.close()
            for file in (self._records, self._spans, self._steps.file):
                os.unlink(file.name)
            raise

    def _check_others(self, folder: str | os.PathLike[str], head: _Header, first: int, topology: Topology) -> None:
        """Refuse a folder with other data, or in which another live run writes for these lanes."""
        others = [file for file in _files(folder, topology) if file.path != Path(self._records.name)]
        _refuse_foreign("ledger", folder, others, head.data, head.after, head.pixels)
        until = time.monotonic() + _LOCK_SECONDS
        while live := [file for file in others if file.head.job != head.job and is_held(file.path)]:
            if live[0].head.host == head.host or time.monotonic() > until:
                raise DataError(
                    f"ledger is {str(folder)!r}, in which another pipeline writes at present ({live[0].path.name}, on "
                    f"{live[0].head.host}); expected a folder of this run alone. Close that pipeline, or name another "
                    "folder."
                )
            _log.warning("another run writes to the ledger in %s: waiting for %s to end", folder, live[0].path.name)
            time.sleep(_LOCK_SECONDS / 12)
        ended = [file for file in others if len(file.records) and not is_held(file.path)]
        if ended and (last := int(ended[-1].records["sequence"][-1])) >= first:
            what = "goes up to record %d, and this run goes on from record %d: what lies behind counts as rolled back"
            _log.warning(f"the ledger in %s {what}", folder, last, first)

    def write(self, batch: SampleBatch, until: int, wait: float, totals: Totals) -> None:
        """Append one batch, which ends at record `until` of the group; the trainer waited `wait` seconds for it."""
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
            self._steps.add(batch, until, wait, totals)
        except OSError as error:
            where = self._records.name
            raise DataError(f"the ledger cannot be written to {where}: {error.strerror}; free space there.") from None

    def close(self) -> None:
        """Close the files."""
        with suppress(OSError):
            self._steps.flush()
        for file in (self._records, self._spans, self._steps.file):
            file.close()


@dataclass(frozen=True)
class Ledger:
    """What all ranks of a run consumed.

    Attributes:
        steps: changes of the global batch, ascending: first record, steps before it, and records per step from there.
        changed: whether starts differ in their data, as after a takeover or an accepted change.
        datasets: names by index.
        sequence: int64[n], ascending, each number once.
        digests: uint8[n, 32].
        groups: int64[n, 2], data-parallel groups and records per batch (0 if unknown) where it was consumed.
        spans: see the module; sorted by sequence number and place.
        pixels: whether digests are over the pixels of images too.
    """

    name: str
    lanes: int
    steps: tuple[tuple[int, int, int], ...]
    changed: bool
    datasets: list[str]
    sequence: np.ndarray
    digests: np.ndarray
    groups: np.ndarray
    spans: np.ndarray
    pixels: bool = False

    @property
    def global_batch(self) -> int | None:
        """B, or None where it is unknown or has changed."""
        return self.steps[0][2] if len(self.steps) == 1 else None

    def step_of(self, sequence: np.ndarray) -> np.ndarray:
        """int64[n]: the steps of records, from 1; rounds where the global batch is unknown."""
        steps: np.ndarray = _step_of(self.steps, self.lanes, sequence)
        return steps

    def step_digests(self, global_batch: int) -> dict[int, bytes]:
        """SHA-256 over the digests of the records of every complete step, by its number, from 1."""
        steps, first, counts = np.unique(self.sequence // global_batch, return_index=True, return_counts=True)
        whole = counts == global_batch
        return {
            step + 1: hashlib.sha256(self.digests[start : start + global_batch].tobytes()).digest()
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
        DataError: there are none, they are damaged, of several runs, or they contradict each other.
    """
    files = _files(folder)
    if not files:
        raise DataError(
            f"{folder} holds no ledger (no *.ledger file with a header); pass the folder given as options(ledger=...)."
        )
    heads = [file.head for file in files]
    other_lanes, linked = len({head.lanes for head in heads}) > 1, _linked([(head.data, head.after) for head in heads])
    if other_lanes or not linked.issuperset(head.data for head in heads if head.data):
        raise DataError(
            f"{folder} holds ledgers of different runs, of other {'lanes' if other_lanes else 'data'}. Give each run a "
            "folder of its own."
        )
    names = list(dict.fromkeys(name for head in heads for name in head.datasets))
    # From the last start to the first: the round of each lane from which on a later start has consumed it.
    until = np.full(heads[0].lanes, np.iinfo(np.int64).max)
    records, groups, spans = [], [], []
    of_data: dict[str | None, list[np.ndarray]] = {}
    for file in reversed(files):
        head = file.head
        entries = file.records
        of_data.setdefault(head.data, []).append(entries)
        records.append(entries[_before(until, entries)])
        groups.append(np.tile([head.dp_degree, head.microbatch], (len(records[-1]), 1)))
        parts = _entries(file.path.with_suffix(".spans"), _SPAN)
        parts = np.array(parts[_before(until, parts)])  # a copy: NumPy before 2.2 keeps a file's map read-only
        if head.datasets:
            parts["dataset"] = np.array([names.index(name) for name in head.datasets])[parts["dataset"]]
        spans.append(parts)
        if head.begun is not None:
            topology = Topology(head.lanes, head.dp_degree, head.dp_group_id)
            first = [topology.records_of_feed(head.begun, lane) for lane in topology.owned]
            until[topology.owned] = np.minimum(until[topology.owned], first)
    for same in of_data.values():
        _check_repeats(folder, np.concatenate(same))
    entries = np.concatenate(records)
    sequence, places = np.unique(entries["sequence"], return_index=True)
    return Ledger(
        name=str(folder),
        lanes=heads[0].lanes,
        steps=_steps(heads),
        changed=len({head.data for head in heads if head.data}) > 1,
        datasets=names,
        sequence=sequence.astype(np.int64),
        digests=entries["digest"][places],
        groups=np.concatenate(groups)[places],
        spans=np.unique(np.concatenate(spans)),
        pixels=heads[-1].pixels,
    )


def read_metrics(folder: str | os.PathLike[str]) -> Metrics:
    """The metrics of all ranks in `folder`, put together; empty where the ledger is of a version without them."""
    files = _files(folder)
    heads = [file.head for file in files]
    steps, metrics, limit = _steps(heads), Metrics(), float("inf")
    for job in reversed(dict.fromkeys(head.job for head in heads)):
        seen, begun = set[int](), limit
        for path, head, _ in files:
            if head.job == job:
                step_of = partial(_step_of, steps, head.lanes)
                first = head.dp_group_id not in seen
                seen.add(head.dp_group_id)
                metrics.add(path.with_suffix(".steps"), head.dp_degree, head.dp_group_id, step_of, limit, first)
                begun = min(begun, (head.begun or 0) * head.dp_degree)
        limit = begun  # what later starts went back behind does not count
    return metrics


def _step_of(steps: Sequence[tuple[int, int, int]], lanes: int, record: Any) -> Any:
    """The step, from 1, of a record, or of an array of them; rounds count where the global batch is unknown."""
    number: Any = 0
    for origin, done, size in steps or ((0, 0, lanes),):
        number = np.where(record >= origin, (record - origin) // size + done + 1, number)
    return number if np.ndim(record) else int(number)


def _files(folder: str | os.PathLike[str], topology: Topology | None = None) -> list[_File]:
    """The ledger files in a folder in the order of their starts; with a topology, only those for lanes of its group.

    Raises:
        DataError: one of them is no ledger.
    """
    files = []
    for path in sorted(Path(folder).glob("*.ledger")):
        if topology and (match := _NAME.match(path.name)):
            degree, group = int(match[1]), int(match[2])
            if not group * topology.dp_degree < (topology.dp_group_id + 1) * degree or (
                not topology.dp_group_id * degree < (group + 1) * topology.dp_degree
            ):
                continue
        with open(path, "rb") as content:
            line = content.readline()
        if not line:
            continue  # of a process that was killed before it had consumed anything
        try:
            files.append(_File(path, msgspec.json.decode(line, type=_Header), len(line)))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise DataError(f"{path} is no ledger of this version: its header cannot be read.") from None
    return sorted(files, key=lambda file: file.head.time)


def _steps(heads: Sequence[_Header]) -> tuple[tuple[int, int, int], ...]:
    """See `Ledger`; what later starts went back behind does not count."""
    steps: list[tuple[int, int, int]] = []
    for head in heads:
        if (batch := head.global_batch) is None:
            continue
        first = (head.begun or 0) * head.dp_degree
        while len(steps) > 1 and steps[-1][0] >= first:
            steps.pop()
        if not steps or (first == 0 and batch != steps[0][2]):
            steps = [(0, 0, batch)]
        elif batch != steps[-1][2]:
            record, before, size = steps[-1]
            steps.append((first, before + (first - record) // size, batch))
    return tuple(steps)


def _entries(path: Path, dtype: np.dtype[Any], offset: int = 0) -> np.ndarray:
    """The entries of a file, of which the last one may be cut short."""
    count = (path.stat().st_size - offset) // dtype.itemsize if path.exists() else 0
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)


def _before(until: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """bool[n]: entries of rounds before `until`, int64[lanes]."""
    rounds, lane = np.divmod(entries["sequence"].astype(np.int64), len(until))
    before: np.ndarray = rounds < until[lane]
    return before


def _job() -> str:
    """What the ranks of one start have in common: the meeting point that torchrun sets, or nothing."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT")
    if address in ("", "localhost", "127.0.0.1", "::1"):
        address = socket.gethostname()
    return f"{address}:{port or time.time_ns()}"


def _linked(starts: Sequence[tuple[str | None, str | None]]) -> set[str | None]:
    """Digests of the data of the last start, and of those that restored states link with it."""
    pairs = {pair for pair in starts if pair[0]}
    linked = {starts[-1][0]}
    for _ in pairs:
        linked.update(each for pair in pairs if linked.intersection(pair) for each in pair)
    return linked


def _check_repeats(folder: str | os.PathLike[str], entries: np.ndarray) -> None:
    """Refuse records consumed twice with other content."""
    entries = entries[np.argsort(entries["sequence"], kind="stable")]
    twice = np.flatnonzero(entries["sequence"][1:] == entries["sequence"][:-1])
    unequal = (entries["digest"][twice] != entries["digest"][twice + 1]).any(axis=1)
    if unequal.any():
        number = entries["sequence"][twice[unequal][0]]
        raise DataError(f"{folder} contradicts itself: record {number} was consumed twice with different content.")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part; `step` counts from 1, and is None where the global batch is unknown or differs."""

    step: int | None
    lane: int
    sequence: int  # of the record
    text: str


def compare(a: Ledger, b: Ledger) -> Difference | None:
    """The first record in which two runs differ; None where they agree in all records that both have consumed.

    A record that only one of them has, before the last step that the shorter run has whole, is a difference too.
    """
    if a.lanes != b.lanes:
        return Difference(None, 0, 0, f"{a.name} has {a.lanes} lanes, {b.name} has {b.lanes}: they are different runs.")
    if not (len(a.sequence) and len(b.sequence)):
        return None
    if a.pixels != b.pixels:
        over, other = (a, b) if a.pixels else (b, a)
        what = "are over the pixels of images (digest_pixels, --pixels)"
        return Difference(None, 0, 0, f"digests of {over.name} {what}, those of {other.name} are not: make both alike.")
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
        what += ", images or pixels" * a.pixels
    else:
        what = f"{a.name} consumed {documents[0]}; {b.name} consumed {documents[1]}"
    batches, lane = {each for ledger in (a, b) for _, _, each in ledger.steps}, sequence % a.lanes
    step = sequence // batches.pop() + 1 if len(batches) == 1 else None
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
