"""What a loader does to be measured: a subclass of `Peer`, served over standard input and output.

This file runs in the environment of each loader, so it needs NumPy and nothing else. A request is a line of JSON, and
so is its answer; whatever the loader prints goes to standard error. Requests: prepare, open, turn, state, records,
restore, elastic (see `_Server`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHARES = (0.1, 0.5, 0.9)  # of an epoch, where a restore is measured


class NotOffered(Exception):
    """The loader has no such thing in its public interface; the message says what is missing."""


class Peer:
    """A loader: batches of `microbatch` records of `seq_len` + 1 tokens, from two sources of Parquet files.

    Attributes:
        job: what the benchmark asks for: sources (name -> folder), tokenizer, vocabulary (its size), eos, seq_len,
            microbatch, threads, folder (where the loader may keep prepared data), cache and the options of this entry.
        one_rank: why a run cannot go on with another number of ranks, where the loader does not offer it.
        unmeasured: why that is not measured, where the loader may offer it.
        pad_id: the token that fills records, where the loader pads at all.
    """

    pad_id: int | None = None
    one_rank = ""
    unmeasured = ""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    @property
    def folder(self) -> Path:
        return Path(self.job["folder"])

    def prepare(self) -> None:
        """Convert the sources to what the loader reads, where it does not read Parquet."""

    def prepared(self) -> list[Path]:
        """Folders that `prepare` writes."""
        return []

    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        """Batches of one rank; `states` are those of all ranks that took them."""
        raise NotImplementedError

    def state(self) -> Any:
        """The state of the stream that was opened last."""
        raise NotOffered("no state")

    def tokens(self, batch: Any) -> int:
        """Tokens that a batch counts for."""
        return self.job["microbatch"] * self.job["seq_len"]

    def records(self, batch: Any) -> np.ndarray:
        """The records of a batch with `seq_len` + 1 tokens each."""
        return np.asarray(batch)

    def close(self) -> None:
        """Stop the stream that was opened last."""


def parquet_files(folder: str) -> list[str]:
    """The files of a source."""
    return [str(path) for path in sorted(Path(folder).glob("*.parquet"))]


def texts(*files: str) -> Iterator[list[str]]:
    """The documents of some files, about a thousand at a time."""
    import pyarrow.parquet as pq

    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(1000, columns=["text"]):
            yield batch.column(0).to_pylist()


class Packer:
    """Concatenate documents of tokens, each with an end-of-text token, and cut records: for loaders that leave it to
    the user."""

    def __init__(self, length: int, eos: int) -> None:
        self.length, self.eos = length, eos
        self.held: list[int] = []

    def push(self, ids: list[int]) -> Iterator[list[int]]:
        self.held.extend(ids)
        self.held.append(self.eos)
        start = 0
        while len(self.held) - start >= self.length:
            yield self.held[start : start + self.length]
            start += self.length
        if start:
            del self.held[:start]


def pack(documents: Iterator[list[int]], job: dict[str, Any]) -> Iterator[list[int]]:
    """Records of `seq_len` + 1 tokens."""
    packer = Packer(job["seq_len"] + 1, job["eos"])
    for ids in documents:
        yield from packer.push(ids)


def process_tree(root: int) -> list[int]:
    """A process and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_bytes()
            except OSError:
                continue
            parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def cpu_seconds(root: int) -> float:
    """CPU time of a process, its descendants, and those that they have waited for."""
    ticks = 0
    for pid in process_tree(root):
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            continue
        ticks += sum(int(each) for each in stat[stat.rindex(b")") + 2 :].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def evict(folder: str) -> None:
    """Ask the system to drop the files of a folder from its cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def state_bytes(state: Any) -> int:
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))


def _digests(records: np.ndarray) -> list[str]:
    return [hashlib.sha256(np.ascontiguousarray(each, np.int64)).hexdigest() for each in records]


class _Server:
    """Answers the requests of the benchmark for one loader."""

    def __init__(self, make: Callable[[dict[str, Any]], Peer]) -> None:
        self.make = make
        self.batches: Iterator[Any] = iter(())
        self.peer: Peer

    def prepare(self, job: dict[str, Any]) -> dict[str, float]:
        """Converts the sources, once; what it took is kept beside the result."""
        peer = self.make(job)
        done = peer.folder / "prepared.json"
        if not done.exists():
            shutil.rmtree(peer.folder, ignore_errors=True)
            peer.folder.mkdir(parents=True)
            began, used = time.perf_counter(), cpu_seconds(os.getpid())
            peer.prepare()
            found = {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds(os.getpid()) - used}
            found["bytes"] = sum(
                file.stat().st_size for folder in peer.prepared() for file in folder.rglob("*") if file.is_file()
            )
            done.write_text(json.dumps(found))
        return json.loads(done.read_text())

    def open(self, job: dict[str, Any]) -> dict[str, float]:
        """Opens the stream up to its first batch; `cold` drops the files from the system's cache first."""
        self.peer = self.make(job)
        if job.get("cold"):
            for folder in [*job["sources"].values(), job["tokenizer"], *self.peer.prepared()]:
                evict(str(folder))
        used, began = cpu_seconds(os.getpid()), time.perf_counter()
        self.batches = self.peer.open()
        batch = next(self.batches)
        seconds = time.perf_counter() - began
        self.peer.tokens(batch)
        return {"first_batch_s": seconds, "first_batch_cpu_s": cpu_seconds(os.getpid()) - used}

    def turn(self, job: dict[str, Any]) -> dict[str, float]:
        """Streams for some seconds after a fifth of them that is not counted, so that full queues count for nobody."""
        tokens, peer = 0, self.peer
        until = time.perf_counter() + job["seconds"] / 5
        while time.perf_counter() < until:
            next(self.batches)
        used, began = cpu_seconds(os.getpid()), time.perf_counter()
        until = began + job["seconds"]
        while (now := time.perf_counter()) < until:
            tokens += peer.tokens(next(self.batches))
        now = time.perf_counter()
        return {"tokens": tokens, "seconds": now - began, "cpu_seconds": cpu_seconds(os.getpid()) - used}

    def state(self, job: dict[str, Any]) -> dict[str, float]:
        """Bytes of a state, and milliseconds to take one."""
        state, times = self.peer.state(), []
        for _ in range(5):
            began = time.perf_counter()
            self.peer.state()
            times.append(time.perf_counter() - began)
        return {"bytes": state_bytes(state), "ms": sorted(times)[2] * 1000}

    def records(self, job: dict[str, Any]) -> dict[str, Any]:
        """Writes the next records to a file of NumPy: so many tokens, or what comes within so many seconds."""
        found, tokens = [], 0
        until = time.perf_counter() + job["seconds"]
        while tokens < job["tokens"] and time.perf_counter() < until:
            found.append(self.peer.records(next(self.batches)).astype(np.int32))
            tokens += found[-1].size
        np.save(job["to"], np.concatenate(found))
        return {"shape": list(found[0].shape), "pad_id": self.peer.pad_id}

    def restore(self, job: dict[str, Any]) -> dict[str, Any]:
        """Seconds from opening to the next batch by states of 10, 50 and 90 % of an epoch; are the batches the same?"""
        peer = self.make(job)
        batches = peer.open()
        places = [int(job["epoch_tokens"] * share / (job["microbatch"] * job["seq_len"])) for share in SHARES]
        saved: list[tuple[bytes, list[str]]] = []
        next(batches)
        peer.state()  # where there is none, that is said at once
        for n in range(1, places[-1] + 1):
            state = pickle.dumps(peer.state()) if n in places else None
            batch = next(batches)
            if state is not None:
                saved.append((state, _digests(peer.records(batch))))
        peer.close()
        found = {}
        for share, (data, expected) in zip(SHARES, saved, strict=True):
            peer = self.make(job)
            state = pickle.loads(data)
            began = time.perf_counter()
            batch = next(peer.open(states=[state]))
            seconds = time.perf_counter() - began
            found[f"{share:.0%}"] = {"seconds": seconds, "same": _digests(peer.records(batch)) == expected}
            peer.close()
        return found

    def elastic(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do global batches stay the same when a run goes on from 1 rank to 2 and 4? Three steps of each."""
        steps, size = 3, job["microbatch"]
        if why := self.make(job).one_rank:
            raise NotOffered(why)
        if why := self.make(job).unmeasured:
            return {"outcome": "not measured", "message": why}

        def run(world: int, states: list[Any] | None, count: int) -> tuple[list[list[str]], list[Any]]:
            taken: list[list[str]] = [[] for _ in range(count)]
            after = []
            for rank in range(world):
                peer = self.make({**job, "microbatch": size // world, "global_batch": size})
                batches = peer.open(rank=rank, world=world, states=states)
                for step in range(count):
                    taken[step] += _digests(peer.records(next(batches)))
                after.append(pickle.loads(pickle.dumps(peer.state())))
                peer.close()
            return [sorted(step) for step in taken], after

        expected, _ = run(1, None, 3 * steps)
        found: list[list[str]] = []
        states: list[Any] | None = None
        for world in (1, 2, 4):
            try:
                global_batches, states = run(world, states, steps)
            except NotOffered:
                raise
            except Exception as error:
                return {"outcome": "refused", "at": world, "message": f"{type(error).__name__}: {error}"[:300]}
            found += global_batches
            if found != expected[: len(found)]:
                return {"outcome": "other data", "at": world}
        return {"outcome": "same"}


def serve(make: Callable[[dict[str, Any]], Peer]) -> None:
    """Answer requests until standard input ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the benchmark, even while stopped
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not stand among the answers
    server = _Server(make)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(request)
        except NotOffered as missing:
            answer = {"not_offered": str(missing)}
        except StopIteration:
            answer = {"error": "the stream ended"}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # threads and workers of loaders do not all end by themselves
