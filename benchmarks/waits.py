"""What a training step waits for its batch: a loop that takes a microbatch and pauses, as for a step of a GPU.

Threads and the isolated engine side by side; a pause is a sleep, which leaves the interpreter lock alone, or pure
Python, which holds it as a busy training script does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import Setup, corpus, in_process, records, rows

STEP_SECONDS = 0.020
STEPS = 500


def busy(seconds: float) -> int:
    """Pure Python for a while; how often its loop went round."""
    until, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        rounds += sum(range(50)) > 0
    return rounds


def measure(job: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of `next()` with the fields of a step: median, 99th percentile, most."""
    import numpy as np
    import torch  # noqa: F401

    pipeline = records(rows(job, isolate=job["isolate"]), job)
    batches = iter(pipeline)
    pause: Callable[[float], Any] = busy if job["busy"] else time.sleep
    next(batches)
    waits, work = [], 0
    for step in range(STEPS + 50):
        began = time.perf_counter()
        next(batches).to_training()
        if step >= 50:
            waits.append((time.perf_counter() - began) * 1e3)
        work += pause(STEP_SECONDS) or 0
    pipeline.close()
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    return {"p50": p50, "p99": p99, "max": max(waits), "rounds": work}


def bench(setup: Setup) -> None:
    base = corpus(setup)
    alone = sum(busy(STEP_SECONDS) for _ in range(100)) / 100
    print(f"{'engine':16}{'step':>10}{'p50':>10}{'p99':>10}{'max':>10}{'speed of the script':>22}")
    for isolate in (False, True):
        for is_busy in (False, True):
            found = in_process(measure, {**base, "isolate": isolate, "busy": is_busy})
            speed = f"{found['rounds'] / (STEPS + 50) / alone:.2f}" if is_busy else ""
            print(
                f"{'isolated' if isolate else 'threads':16}{'busy' if is_busy else 'sleeps':>10}"
                f"{found['p50']:>7.2f} ms{found['p99']:>7.2f} ms{found['max']:>7.2f} ms{speed:>22}",
                flush=True,
            )
