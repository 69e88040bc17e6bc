"""What runners cost: processes for slow Python code, and an engine in a process of its own, each beside threads.

    .venv/bin/python scripts/bench_runners.py [--folder .zephon/bench] [--seconds 20] [--only map isolate lock]

Everything is measured in turns within one run, so that look at the ratios on a machine that others use too. Seconds of
CPU time are those of all processes of a pipeline, and rates per second of CPU time do not depend on who else is there.

map      a row-wise Python function: a bare loop over the same rows, then worker processes, one and two
isolate  columns from Parquet to tensors, in threads and in a process of its own
lock     how fast pure Python runs in the training thread meanwhile
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from bench import MICROBATCH, SEQ_LEN, prepare

from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

_SPACE = re.compile(r"[ \t]+")
_TICKS = os.sysconf("SC_CLK_TCK")
_TURN_SECONDS = 2.0
_SETTLED_TOKENS = 12_000_000  # what may have been ready


def clean(row: dict[str, Any]) -> dict[str, Any]:
    """A function such as people write: normalise text, line by line, and drop lines that repeat."""
    seen: set[str] = set()
    lines = []
    for line in unicodedata.normalize("NFC", row["text"]).splitlines():
        short = " ".join(word for word in _SPACE.split(line.rstrip()) if len(word) < 1000)
        if not short or short not in seen:
            lines.append(short)
            seen.add(short)
    return {"text": "\n".join(lines)}


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS


def wanted_by(pid: int) -> float:
    """Seconds for which the main thread of a process ran or waited for a core so far: for which it had work."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


def workers_of(pid: int) -> list[int]:
    """Processes started by a process, and by those."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(word) for task in tasks for word in task.read_text().split()]
    return found + [each for child in found for each in workers_of(child)]


def build(prepared: dict[str, Any], folder: Path, *, threads: int, mapped: bool = False, **options: Any) -> Pipeline:
    names = list(prepared["sources"])[-1:] if mapped else list(prepared["sources"])
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path(name, prepared["sources"][name]) for name in names], seed=42, token_estimation=False
    )
    pipeline = Pipeline(source).options(
        canonical_replicas=1, io_options={"cache": {"enabled": True, "dir": str(folder / "cache")}}, **options
    )
    if mapped:
        pipeline = pipeline.map_transform(clean, columns=["text"])
    pipeline = pipeline.tokenize(prepared["tokenizer"], parallelism=threads)
    return pipeline.pack_flat(max_length=SEQ_LEN).shuffle(buffer_size=1024, seed=42).batch(microbatch_size=MICROBATCH)


def bare_loop(prepared: dict[str, Any]) -> Callable[[], float]:
    """Rows per second of CPU time of the function alone."""
    file = sorted(Path(list(prepared["sources"].values())[-1]).glob("*.parquet"))[0]
    rows = pq.read_table(file, columns=["text"]).slice(0, 4000).to_pylist()

    def measure() -> float:
        began = time.thread_time()
        done = [clean(row) for row in rows]
        return len(done) / (time.thread_time() - began)

    return measure


class Stream:
    """A pipeline that is consumed for a while, and then waits."""

    def __init__(self, pipeline: Pipeline) -> None:
        before = set(workers_of(os.getpid()))
        self.pipeline = pipeline
        self.batches = iter(pipeline)
        next(self.batches)
        self.workers = sorted(set(workers_of(os.getpid())) - before)

    def turn(self, settled: int, seconds: float = _TURN_SECONDS) -> dict[str, float]:
        """Consume for so long, what was ready aside; rates per second of wall and of CPU time."""
        for _ in range(settled // (MICROBATCH * SEQ_LEN)):
            next(self.batches).to_training()
        mixture = self.pipeline.mixture
        rows = sum(each.rows for each in mixture().values())
        cpu, own = [cpu_of(pid) for pid in self.workers], time.process_time()
        wanted = sum(map(wanted_by, self.workers))
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            next(self.batches).to_training()
            count += 1
        wall = time.perf_counter() - began
        spent = sum(cpu_of(pid) - was for pid, was in zip(self.workers, cpu, strict=True))
        wanted = sum(map(wanted_by, self.workers)) - wanted
        rows = sum(each.rows for each in mixture().values()) - rows
        tokens = count * MICROBATCH * SEQ_LEN
        own = time.process_time() - own
        return {
            "tokens": tokens / wall,
            "tokens_per_cpu": tokens / (own + spent),
            "rows": rows / wall,
            "rows_per_worker_cpu": rows / spent if spent else 0.0,
            "cores": (own + spent) / wall,
            "worker_cores": spent / wall,
            "at_work": wanted / wall,
        }


def in_turns(jobs: dict[str, Callable[[], dict[str, float]]], seconds: float) -> dict[str, dict[str, float]]:
    """The middle one of several turns of each."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    until = time.perf_counter() + seconds * len(jobs)
    while time.perf_counter() < until or len(next(iter(taken.values()))) < 3:
        for name, job in jobs.items():
            taken[name].append(job())
    return {
        name: {key: statistics.median(each[key] for each in turns) for key in turns[0]} for name, turns in taken.items()
    }


def bench_map(prepared: dict[str, Any], folder: Path, seconds: float) -> None:
    bare = bare_loop(prepared)
    streams = {
        name: Stream(build(prepared, folder, threads=count, mapped=True, runner=runner))
        for name, runner, count in (
            ("threads, 2", "threads", 2),
            ("process, 1", "process", 1),
            ("process, 2", "process", 2),
        )
    }
    jobs: dict[str, Callable[[], dict[str, float]]] = {"bare loop": lambda: {"rows_per_worker_cpu": bare()}}
    jobs |= {name: lambda stream=stream: stream.turn(4_000_000, 3.0) for name, stream in streams.items()}  # type: ignore[misc]
    taken = in_turns(jobs, seconds)
    loop = taken.pop("bare loop")["rows_per_worker_cpu"]
    print(f"map: a bare loop does {loop:,.0f} rows per second of CPU time")
    for name, each in taken.items():
        worker = (
            f"; {each['rows_per_worker_cpu'] / loop:.2f} of the bare loop per second of a worker's CPU time; "
            f"{each['at_work']:.2f} workers had work, and got {each['worker_cores']:.2f} cores"
        )
        print(
            f"  {name}: {each['rows']:,.0f} rows/s on {each['cores']:.2f} cores" + worker * name.startswith("process")
        )
    one, two = taken["process, 1"], taken["process, 2"]
    speed = [each["rows_per_worker_cpu"] * each["at_work"] for each in (one, two)]
    scaled = f"{two['rows'] / one['rows']:.2f} times what one does; {speed[1] / speed[0]:.2f} with idle cores"
    print(f"  two workers do {scaled}")
    for stream in streams.values():
        stream.pipeline.close()


def bench_isolate(prepared: dict[str, Any], folder: Path, seconds: float, threads: int) -> None:
    streams = {
        "threads": Stream(build(prepared, folder, threads=threads)),
        "isolate": Stream(build(prepared, folder, threads=threads, isolate=True)),
    }
    taken = in_turns({name: lambda s=s: s.turn(_SETTLED_TOKENS) for name, s in streams.items()}, seconds)  # type: ignore[misc]
    for name, each in taken.items():
        rates = (
            f"{each['tokens'] / 1e6:.1f} million tokens/s, {each['tokens_per_cpu'] / 1e6:.1f} per second of CPU time"
        )
        print(f"{name}: {rates} ({each['cores']:.2f} cores used)")
    ratio = {key: taken["isolate"][key] / taken["threads"][key] for key in ("tokens", "tokens_per_cpu")}
    print(f"  isolate to threads: {ratio['tokens']:.2f} in wall time, {ratio['tokens_per_cpu']:.2f} in CPU time")
    for stream in streams.values():
        stream.pipeline.close()


def steps(batches: Iterator[Any], seconds: float) -> dict[str, float]:
    """A training loop whose steps are 2 ms of pure Python: how many of them a second of the rest leaves."""
    done = tokens = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        batch = next(batches, None)
        tokens += 0 if batch is None else batch.tokens.size
        for _ in range(20):
            done += sum(1 for _ in range(2000)) // 2000
    return {"done": done / (time.perf_counter() - began), "tokens": tokens / (time.perf_counter() - began)}


def bench_lock(prepared: dict[str, Any], folder: Path, seconds: float, threads: int) -> None:
    streams = {
        "threads": Stream(build(prepared, folder, threads=threads, mapped=True)),
        "isolate": Stream(build(prepared, folder, threads=threads, mapped=True, isolate=True)),
    }
    alone: Iterator[Any] = iter(())
    jobs: dict[str, Callable[[], dict[str, float]]] = {"alone": lambda: steps(alone, _TURN_SECONDS)}
    jobs |= {name: lambda s=s: steps(s.batches, _TURN_SECONDS) for name, s in streams.items()}  # type: ignore[misc]
    taken = in_turns(jobs, seconds)
    for name in streams:
        speed, tokens = taken[name]["done"] / taken["alone"]["done"], taken[name]["tokens"] / 1e6
        print(
            f"lock, {name}: pure Python in the training thread runs at {speed:.2f} of its speed while a row-wise map "
            f"makes {tokens:.2f} million tokens/s"
        )
    for stream in streams.values():
        stream.pipeline.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench"))
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--source-mb", type=int, default=100)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=["map", "isolate", "lock"])
    options = parser.parse_args()
    folder = options.folder.absolute()
    prepared = prepare(folder, options.source_mb * 1_000_000)
    if "map" in options.only:
        bench_map(prepared, folder, options.seconds)
    if "isolate" in options.only:
        bench_isolate(prepared, folder, options.seconds, options.threads)
    if "lock" in options.only:
        bench_lock(prepared, folder, options.seconds, options.threads)


if __name__ == "__main__":
    main()
