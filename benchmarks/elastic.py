"""What elasticity costs: taking a state, going on from one, entering a run far from its start.

    .venv/bin/python scripts/bench_elastic.py [--folder .zephon/bench] [--steps 100000] [--lanes 8]

On the corpus of bench.py. The first part streams `--steps` global batches of one record per lane while it keeps a flush
index; what follows runs in fresh processes, opening data and loading the tokenizer included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import SEQ_LEN, prepare


def build(job: dict[str, Any], lanes: int, **options: Any) -> Any:
    from zephon import Pipeline
    from zephon.io import Dataset
    from zephon.work import StaticMixtureWorkSource

    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path(name, path) for name, path in job["sources"].items()], seed=42
    )
    return (
        Pipeline(source)
        .options(
            canonical_replicas=lanes,
            global_batch=lanes,
            io_options={"cache": {"dir": job["cache"]}},
            **options,
        )
        .tokenize(job["tokenizer"])
        .pack_flat(SEQ_LEN)
        .shuffle(1024, seed=42)
        .batch(lanes)
    )


def checkpoint_ms(pipeline: Any) -> float:
    began = time.perf_counter()
    for _ in range(100):
        state = pipeline.checkpoint()
    json.dumps(state)
    return (time.perf_counter() - began) * 10


def stream(job: dict[str, Any]) -> dict[str, Any]:
    """The run itself: states early and late, and how long they take."""
    pipeline = build(job, job["lanes"], flush_index=job["index"])
    batches = iter(pipeline)
    for _ in range(10):
        next(batches)
    early = checkpoint_ms(pipeline)
    for _ in range(job["steps"] - 10):
        last = next(batches)
    state = pipeline.checkpoint()
    return {
        "early_ms": early,
        "late_ms": checkpoint_ms(pipeline),
        "bytes": len(json.dumps(state)),
        "state": state,
        "next": [digest.hex() for digest in next(batches).digests],
        "last": int(last.sequence_numbers[-1]),
    }


def enter(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds from nothing to the next batch, by restoring a state or by seeking."""
    began = time.perf_counter()
    if job["how"] == "seek":
        pipeline = build(job, job["lanes"], flush_index=job["index"]).seek(step=job["steps"])
    else:
        pipeline = build(job, job["lanes"])
        if job["how"] == "restore":
            pipeline.restore(job["state"])
    batch = next(iter(pipeline))
    return {"seconds": time.perf_counter() - began, "next": [digest.hex() for digest in batch.digests]}


def advance(job: dict[str, Any]) -> dict[str, Any]:
    """A state from the middle of a run with another number of lanes."""
    pipeline = build(job, job["lanes"])
    batches = iter(pipeline)
    for _ in range(job["steps"]):
        next(batches)
    state = pipeline.checkpoint()
    return {"state": state, "ms": checkpoint_ms(pipeline), "bytes": len(json.dumps(state))}


def run(part: str, job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, __file__, "--part", part, "--job", file.name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench"))
    parser.add_argument("--source-mb", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--part", choices=["stream", "enter", "advance"], help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        job = json.loads(Path(options.job).read_text())
        print(json.dumps({"stream": stream, "enter": enter, "advance": advance}[options.part](job)))
        return
    folder = options.folder.absolute()
    base = {**prepare(folder, options.source_mb * 1_000_000), "cache": str(folder / "cache"), "lanes": options.lanes}
    with tempfile.TemporaryDirectory() as index:
        job = {**base, "index": index, "steps": options.steps}
        made = run("stream", job)
        size = sum(file.stat().st_size for file in Path(index).iterdir())
        print(
            f"state: {made['early_ms']:.2f} ms at step 10, {made['late_ms']:.2f} ms at step {options.steps:,}, "
            f"{made['bytes']} bytes for {options.lanes} lanes; flush index {size / 1000:.1f} KB"
        )
        fresh = run("enter", {**job, "how": "start"})
        print(f"from nothing to the first batch of a new run: {fresh['seconds']:.2f} s")
        for how in ("restore", "seek"):
            got = run("enter", {**job, "how": how, "state": made["state"]})
            same = "the same batch" if got["next"] == made["next"] else "ANOTHER BATCH"
            print(f"from nothing by {how} to step {options.steps:,}: {got['seconds']:.2f} s, {same}")
    for lanes in (1, 64, 256):
        job = {**base, "lanes": lanes, "steps": 20_000 // lanes}
        made = run("advance", job)
        got = run("enter", {**job, "how": "restore", "state": made["state"]})
        print(
            f"{lanes} lanes: state {made['ms']:.2f} ms, {made['bytes']} bytes; restored in {got['seconds']:.2f} s, "
            f"which is {got['seconds'] / lanes:.3f} s per lane"
        )


if __name__ == "__main__":
    main()
