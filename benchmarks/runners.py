"""What runners cost: processes for slow Python code, an engine in a process of its own, and Ray, each beside threads.

Seconds of CPU time are those of all processes of a pipeline, and rates per second of CPU time do not depend on who else
uses the machine.

map      a row-wise Python function: a bare loop over the same rows, then worker processes, one and two
isolate  columns from Parquet to tensors, in threads and in a process of its own
ray      columns and map in actors of a Ray cluster (RAY_ADDRESS, else a new one), with and without an isolated engine:
         tokens/s, and CPU time of the trainer
lock     how fast pure Python runs in the training thread meanwhile
"""

from __future__ import annotations

import os
import re
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.common import MICROBATCH, SEQ_LEN, Setup, corpus, in_turns, records, rows

_SPACE = re.compile(r"[ \t]+")
_TICKS = os.sysconf("SC_CLK_TCK")
_TURN_SECONDS = 2.0
_SETTLED_TOKENS = 12_000_000  # what may have been ready
_RAY_BESIDE: dict[str, dict[str, Any]] = {
    "threads": {"runner": "threads"},
    "ray": {"runner": "ray"},
    "ray and isolate": {"runner": "ray", "isolate": True},
}


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
    found = list[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            found += map(int, task.read_text().split())
    return found + [each for child in found for each in workers_of(child)]


def build(job: dict[str, Any], *, mapped: bool = False, **options: Any) -> Any:
    sources = dict(list(job["sources"].items())[-1:]) if mapped else job["sources"]
    pipeline = rows({**job, "sources": sources, "token_estimation": False}, **options)
    return records(pipeline.map_transform(clean, columns=["text"]) if mapped else pipeline, job)


def bare_loop(job: dict[str, Any]) -> Callable[[], float]:
    """Rows per second of CPU time of the function alone."""
    file = sorted(Path(list(job["sources"].values())[-1]).glob("*.parquet"))[0]
    rows = pq.read_table(file, columns=["text"]).slice(0, 4000).to_pylist()

    def measure() -> float:
        began = time.thread_time()
        done = [clean(row) for row in rows]
        return len(done) / (time.thread_time() - began)

    return measure


class Stream:
    """A pipeline that is consumed for a while, and then waits."""

    def __init__(self, pipeline: Any, seq_len: int = SEQ_LEN) -> None:
        before = set(workers_of(os.getpid()))
        self.pipeline = pipeline
        self.batch_tokens = MICROBATCH * seq_len
        self.batches = iter(pipeline)
        next(self.batches)
        self.workers = sorted(set(workers_of(os.getpid())) - before)

    def turn(self, settled: int, seconds: float = _TURN_SECONDS, least: int = 0) -> dict[str, float]:
        """Consume for so long and at least so many tokens, what was ready aside; rates per second of wall and of CPU
        time."""
        for _ in range(settled // self.batch_tokens):
            next(self.batches).to_training()
        mixture = self.pipeline.mixture
        rows = sum(each.rows for each in mixture().values())
        cpu, own = [cpu_of(pid) for pid in self.workers], time.process_time()
        wanted = sum(map(wanted_by, self.workers))
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds or count * self.batch_tokens < least:
            next(self.batches).to_training()
            count += 1
        wall = time.perf_counter() - began
        spent = sum(cpu_of(pid) - was for pid, was in zip(self.workers, cpu, strict=True))
        wanted = sum(map(wanted_by, self.workers)) - wanted
        rows = sum(each.rows for each in mixture().values()) - rows
        tokens = count * self.batch_tokens
        own = time.process_time() - own
        return {
            "tokens": tokens / wall,
            "tokens_per_cpu": tokens / (own + spent),
            "own_ms_per_million": own / tokens * 1e9,
            "rows": rows / wall,
            "rows_per_worker_cpu": rows / spent if spent else 0.0,
            "cores": (own + spent) / wall,
            "worker_cores": spent / wall,
            "at_work": wanted / wall,
        }


def bench_map(job: dict[str, Any], seconds: float) -> None:
    bare = bare_loop(job)
    streams = {
        name: Stream(build({**job, "threads": count}, mapped=True, runner=runner))
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


def bench_isolate(job: dict[str, Any], seconds: float) -> None:
    streams = {
        "threads": Stream(build(job)),
        "isolate": Stream(build(job, isolate=True)),
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


def bench_ray(job: dict[str, Any], seconds: float) -> None:
    import ray

    new = {"num_cpus": 2 * job["threads"], "include_dashboard": False, "object_store_memory": 1 << 30}
    given = {} if "RAY_ADDRESS" in os.environ else new
    ray.init(logging_level="ERROR", log_to_driver=False, **given)
    for what, mapped, seq_len in (
        ("columns", False, SEQ_LEN),
        ("columns", False, 4 * SEQ_LEN),
        ("a row-wise map", True, SEQ_LEN),
    ):
        settled = (4_000_000 if mapped else _SETTLED_TOKENS) * seq_len // SEQ_LEN  # the shuffle buffer grows with it
        taken: dict[str, dict[str, float]] = {}
        shape = f"ray, {what}, batches of {MICROBATCH} x {seq_len:,}"
        # Not in turns: what refills the one would count as CPU time of the other.
        for name, options in _RAY_BESIDE.items():
            stream = Stream(build({**job, "seq_len": seq_len}, mapped=mapped, **options), seq_len)
            stream.workers = []  # of a cluster, which are not this process's own
            # Many blocks of a turn, of which each worker makes two at once.
            taken |= in_turns({name: partial(stream.turn, settled, 0.0, settled)}, seconds)
            stream.pipeline.close()
            each, beside = taken[name], taken["threads"]
            print(
                f"{shape}, {name}: {each['tokens'] / 1e6:.2f} million tokens/s, "
                f"{each['tokens'] / beside['tokens']:.2f} of threads; the trainer needs "
                f"{each['own_ms_per_million']:.1f} ms of CPU time per million tokens, "
                f"{each['own_ms_per_million'] / beside['own_ms_per_million']:.3f} of threads"
            )
    ray.shutdown()


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


def bench_lock(job: dict[str, Any], seconds: float) -> None:
    streams = {
        "threads": Stream(build(job, mapped=True)),
        "isolate": Stream(build(job, mapped=True, isolate=True)),
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


def bench(setup: Setup) -> None:
    job = corpus(setup)
    for part, function in (("map", bench_map), ("isolate", bench_isolate), ("ray", bench_ray), ("lock", bench_lock)):
        if setup.wants(part):
            function(job, setup.seconds)
