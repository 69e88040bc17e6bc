"""How full records are, and how fast they are made, for every way of packing, side by side.

    .venv/bin/python scripts/bench_pack.py [--folder .zephon/bench] [--seq-len 4096] [--num-bins 64] [--tokens 60e6]

The documents are cut from the text of bench.py's corpus, in lengths as web pages have them: log-normal, half of them
below 1,800 characters, some 700 tokens on average, one in seventy longer than a record of 4,096. Each way runs in a
process of its own, `wrap` again at the end to show how noisy the machine is; CPU time is the steadier figure.
"resume" is the time from a state in the middle of a window to the next batch, opening data and loading the tokenizer
included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import MICROBATCH, prepare

WINDOW_DOCUMENTS = 16_384


def web_pages(folder: Path, sources: dict[str, str], nbytes: int) -> str:
    """A Parquet folder of about `nbytes` of documents, made unless it is there already."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = folder / "web"
    if not made.exists():
        files = sorted(file for path in sources.values() for file in Path(path).glob("*.parquet"))
        text = "\n".join(t for file in files[:2] for t in pq.read_table(file).column("text").to_pylist() if t)
        draw = np.random.default_rng(7)
        lengths = np.exp(draw.normal(np.log(1800), 1.05, size=nbytes // 3124)).astype(int) + 20
        places = draw.integers(0, len(text) - 200_000, size=len(lengths))
        pages = [
            text[place : place + min(n, 200_000)] for place, n in zip(places.tolist(), lengths.tolist(), strict=True)
        ]
        made.mkdir(parents=True)
        for part in range(4):
            pq.write_table(pa.table({"text": pages[part::4]}), made / f"web-{part}.parquet", row_group_size=2000)
    return str(made)


def build(job: dict[str, Any]) -> Any:
    """The pipeline of one measurement."""
    from zephon import Pipeline
    from zephon.io import Dataset
    from zephon.work import StaticMixtureWorkSource

    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("web", job["web"])], seed=42, chunk_size=WINDOW_DOCUMENTS
    )
    pipeline = (
        Pipeline(source)
        .options(
            canonical_replicas=job["lanes"], global_batch=job["lanes"] * 8, io_options={"cache": {"dir": job["cache"]}}
        )
        .tokenize(job["tokenizer"], parallelism=job["threads"])
    )
    pipeline = getattr(pipeline, job["how"])(job["seq_len"], job["algorithm"], num_bins=job["num_bins"])
    return pipeline.shuffle(1024, seed=42).batch(MICROBATCH)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Stream `job["tokens"]` places in this process; where there is a state, only go on from it."""
    import torch  # noqa: F401  (a training process has it loaded before the loader starts)

    started = time.perf_counter()
    pipeline = build(job)
    if "state" in job:
        pipeline.restore(job["state"])
    batches = iter(pipeline)
    next(batches)
    first = time.perf_counter() - started
    if "state" in job:
        return {"resume_s": first}
    per_batch = MICROBATCH * job["seq_len"]
    for _ in range(int(job["tokens"] / 10) // per_batch):
        next(batches)
    count = int(job["tokens"]) // per_batch
    real, used, began = 0, time.process_time(), time.perf_counter()
    for _ in range(count):
        batch = next(batches)
        batch.to_training()
        real += int(batch.lengths.sum())
    seconds = time.perf_counter() - began
    used = time.process_time() - used
    packing = pipeline.packing()
    return {
        "million_tokens_per_s": real / seconds / 1e6,
        "efficiency": packing.efficiency,
        "split": packing.split / packing.documents,
        "first_batch_s": first,
        "cpu_ns_per_token": used / real * 1e9,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "state": pipeline.checkpoint(),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--job"], input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench"))
    parser.add_argument("--source-mb", type=int, default=100)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--num-bins", type=int, default=64)
    parser.add_argument("--tokens", type=float, default=60e6)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", help="names of the measurements to run")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measure(json.load(sys.stdin))))
        return

    folder = options.folder.absolute()
    prepared = prepare(folder, options.source_mb * 1_000_000)
    base = {
        "web": web_pages(folder, prepared["sources"], options.source_mb * 1_000_000),
        "tokenizer": prepared["tokenizer"],
        "cache": str(folder / "cache"),
        "tokens": options.tokens,
        "threads": options.threads,
        "lanes": 8,
        "seq_len": options.seq_len,
        "num_bins": options.num_bins,
        "how": "pack_flat",
    }
    jobs = {
        **{name: {**base, "algorithm": name} for name in ("wrap", "first_fit", "best_fit", "best_fit_wrap")},
        "sequences, best_fit": {**base, "how": "pack_sequences", "algorithm": "best_fit"},
        "best_fit, 64 lanes": {**base, "algorithm": "best_fit", "lanes": 64},
        "wrap, 64 lanes": {**base, "algorithm": "wrap", "lanes": 64},
        "wrap, again": {**base, "algorithm": "wrap"},
    }
    print(
        f"{'':22}{'M tokens/s':>11}{'CPU ns/token':>14}{'efficiency':>12}{'split':>8}"
        f"{'first':>9}{'resume':>9}{'peak':>10}"
    )
    for name, job in jobs.items():
        if options.only and name not in options.only:
            continue
        r = run(job)
        resumed = run({**job, "state": r["state"]})["resume_s"]
        print(
            f"{name:22}{r['million_tokens_per_s']:>11.1f}{r['cpu_ns_per_token']:>14.1f}{r['efficiency']:>12.2%}{r['split']:>8.1%}"
            f"{r['first_batch_s']:>7.2f} s{resumed:>7.2f} s{r['peak_mb']:>7.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
