"""From a process that has torch to its first batch: seconds, CPU and memory, by lanes and sources, cold and warm.

Warm is any start after the first on the same files, tokenizer and versions; the system has the files in memory in both.
"""

from __future__ import annotations

import shutil
import statistics
import time
from typing import Any

from benchmarks.common import Setup, corpus, in_process, peak_mb, records, rows
from benchmarks.curves import shape

ROUNDS = 5
SHAPES = [("lanes", 1), ("lanes", 64), ("lanes", 256), ("sources", 16), ("sources", 50), ("sources", 200)]


def first_batch(job: dict[str, Any]) -> dict[str, float]:
    """Start a pipeline in this process; where the job has a state, from there."""
    import torch  # noqa: F401  (a training process has it loaded before the loader starts)

    wall, cpu = time.perf_counter(), time.process_time()
    pipeline = records(rows(job), job)
    if "state" in job:
        pipeline.restore(job["state"])
    pipeline.explain()
    compiled = time.process_time() - cpu
    next(iter(pipeline))
    return {
        "seconds": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "compile_cpu": compiled,
        "peak_mb": peak_mb(),
    }


def states(job: dict[str, Any]) -> list[dict[str, Any]]:
    """States at 10, 50 and 90 % of an epoch, by the bytes of its text."""
    pipeline = records(rows(job), job)
    epoch = sum(dataset.catalog.bytes for dataset in pipeline.compiled.datasets) // (3 * 2048 * 8)
    found, consumed, stream = [], 0, iter(pipeline)
    for share in (0.1, 0.5, 0.9):
        while consumed < share * epoch:
            next(stream)
            consumed += 1
        found.append(pipeline.checkpoint())
    return found


def bench(setup: Setup) -> None:
    base = corpus(setup)
    print(f"{'':24}{'seconds':>9}{'CPU':>8}{'of it compiling':>17}{'peak':>10}")

    def report(name: str, job: dict[str, Any], rounds: int = ROUNDS) -> None:
        taken = [in_process(first_batch, job) for _ in range(rounds)]
        median = {key: statistics.median(each[key] for each in taken) for key in taken[0]}
        print(
            f"{name:24}{median['seconds']:>7.2f} s{median['cpu']:>6.2f} s{median['compile_cpu']:>15.2f} s"
            f"{median['peak_mb']:>7.0f} MB",
            flush=True,
        )

    for curve, value in SHAPES:
        if not setup.wants(curve):
            continue
        job = shape(base, setup.folder / "curves", curve, value)
        cold = setup.folder / "cold"
        shutil.rmtree(cold, ignore_errors=True)
        report(f"{value} {curve}, cold", {**job, "cache": str(cold)}, rounds=1)
        report(f"{value} {curve}", {**job, "cache": str(cold)})
    for lanes in (1, 64):
        if setup.wants("restore"):
            job = {**base, "lanes": lanes}
            for share, state in zip((10, 50, 90), in_process(states, job), strict=True):
                report(f"{lanes} lanes, at {share} %", {**job, "state": state})
