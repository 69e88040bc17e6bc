"""What elasticity costs: taking a state, going on from one, entering a run far from its start.

The first part streams 100,000 global batches of one record per lane while it keeps a flush index; what follows runs in
fresh processes, opening data and loading the tokenizer included.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Setup, corpus, in_process, records, rows

LANES = 8


def build(job: dict[str, Any], **options: Any) -> Any:
    lanes = job["lanes"]
    return records(rows(job, global_batch=lanes, **options), {**job, "microbatch": lanes})


def checkpoint_ms(pipeline: Any) -> float:
    began = time.perf_counter()
    for _ in range(100):
        pipeline.checkpoint()
    return (time.perf_counter() - began) * 10


def stream(job: dict[str, Any]) -> dict[str, Any]:
    """A run of `job["steps"]` steps: how long states take, and the last one."""
    options = {"flush_index": job["index"]} if "index" in job else {}
    pipeline = build(job, **options)
    batches = iter(pipeline)
    for _ in range(10):
        next(batches)
    early = checkpoint_ms(pipeline)
    for _ in range(job["steps"] - 10):
        next(batches)
    state, late = pipeline.checkpoint(), checkpoint_ms(pipeline)
    return {
        "early_ms": early,
        "late_ms": late,
        "bytes": len(json.dumps(state)),
        "state": state,
        "next": [digest.hex() for digest in next(batches).digests],
    }


def enter(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds from nothing to the next batch: of a new run, by a state, or by seeking."""
    began = time.perf_counter()
    if job["how"] == "seek":
        pipeline = build(job, flush_index=job["index"]).seek(step=job["steps"])
    else:
        pipeline = build(job)
        if job["how"] == "restore":
            pipeline.restore(job["state"])
    batch = next(iter(pipeline))
    return {"seconds": time.perf_counter() - began, "next": [digest.hex() for digest in batch.digests]}


def bench(setup: Setup) -> None:
    base = {**corpus(setup), "lanes": LANES}
    steps = int(setup.tokens // 4000)
    with tempfile.TemporaryDirectory() as index:
        job = {**base, "index": index, "steps": steps}
        run = in_process(stream, job)
        size = sum(file.stat().st_size for file in Path(index).iterdir())
        print(
            f"state: {run['early_ms']:.2f} ms at step 10, {run['late_ms']:.2f} ms at step {steps:,}, "
            f"{run['bytes']} bytes for {LANES} lanes; flush index {size / 1000:.1f} KB"
        )
        fresh = in_process(enter, {**job, "how": "start"})
        print(f"from nothing to the first batch of a new run: {fresh['seconds']:.2f} s")
        for how in ("restore", "seek"):
            entered = in_process(enter, {**job, "how": how, "state": run["state"]})
            same = "the same batch" if entered["next"] == run["next"] else "ANOTHER BATCH"
            print(f"from nothing by {how} to step {steps:,}: {entered['seconds']:.2f} s, {same}")
    for lanes in (1, 64, 256):
        job = {**base, "lanes": lanes, "steps": 20 + 20_000 // lanes}
        run = in_process(stream, job)
        entered = in_process(enter, {**job, "how": "restore", "state": run["state"]})
        print(
            f"{lanes} lanes: state {run['late_ms']:.2f} ms, {run['bytes']} bytes; restored in "
            f"{entered['seconds']:.2f} s, {entered['seconds'] / lanes:.3f} s per lane"
        )
