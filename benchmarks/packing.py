"""How full records are, and how fast they are made, for every way of packing, side by side.

The documents are cut from the text of the corpus, in lengths as web pages have them: log-normal, half of them below
1,800 characters, some 700 tokens on average, one in seventy longer than a record of 4,096 tokens. `wrap` is measured
again at the end to show how noisy the machine is; CPU time is the steadier figure. "resume" is the time from a state in
the middle of a window to the next batch, opening data and loading the tokenizer included.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.common import MICROBATCH, Setup, corpus, in_process, peak_mb, rows

SEQ_LEN = 4096
NUM_BINS = 64


def web_pages(folder: Path, sources: dict[str, str], nbytes: int) -> str:
    """A Parquet folder of about `nbytes` of documents, built unless it is there already."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = folder / "web"
    if not target.exists():
        files = sorted(file for path in sources.values() for file in Path(path).glob("*.parquet"))
        text = "\n".join(t for file in files[:2] for t in pq.read_table(file).column("text").to_pylist() if t)
        draw = np.random.default_rng(7)
        lengths = np.exp(draw.normal(np.log(1800), 1.05, size=nbytes // 3124)).astype(int) + 20
        places = draw.integers(0, len(text) - 200_000, size=len(lengths))
        pages = [
            text[place : place + min(n, 200_000)] for place, n in zip(places.tolist(), lengths.tolist(), strict=True)
        ]
        target.mkdir(parents=True)
        for part in range(4):
            pq.write_table(pa.table({"text": pages[part::4]}), target / f"web-{part}.parquet", row_group_size=2000)
    return str(target)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Stream `job["tokens"]` slots in this process; where there is a state, only go on from it."""
    import torch  # noqa: F401  (a training process has it loaded before the loader starts)

    started = time.perf_counter()
    pipeline = rows(job, global_batch=job["lanes"] * 8).tokenize(job["tokenizer"], parallelism=job["threads"])
    pipeline = getattr(pipeline, job["method"])(SEQ_LEN, job["algorithm"], num_bins=NUM_BINS)
    pipeline = pipeline.shuffle(1024, seed=42).batch(MICROBATCH)
    if "state" in job:
        pipeline.restore(job["state"])
    batches = iter(pipeline)
    next(batches)
    first = time.perf_counter() - started
    if "state" in job:
        return {"resume_s": first}
    per_batch = MICROBATCH * SEQ_LEN
    for _ in range(int(job["tokens"] / 10) // per_batch):
        next(batches)
    real, used, began = 0, time.process_time(), time.perf_counter()
    for _ in range(int(job["tokens"]) // per_batch):
        batch = next(batches)
        batch.to_training()
        real += int(batch.lengths.sum())
    seconds, used = time.perf_counter() - began, time.process_time() - used
    packing = pipeline.packing()
    return {
        "million_tokens_per_s": real / seconds / 1e6,
        "efficiency": packing.efficiency,
        "split": packing.split / packing.documents,
        "first_batch_s": first,
        "cpu_ns_per_token": used / real * 1e9,
        "peak_mb": peak_mb(),
        "state": pipeline.checkpoint(),
    }


def bench(setup: Setup) -> None:
    base = corpus(setup)
    web = web_pages(setup.folder, base["sources"], setup.source_mb * 1_000_000)
    base |= {"sources": {"web": web}, "tokens": setup.tokens / 7, "lanes": 8, "method": "pack_flat"}
    jobs = {
        **{name: {**base, "algorithm": name} for name in ("wrap", "first_fit", "best_fit", "best_fit_wrap")},
        "sequences": {**base, "method": "pack_sequences", "algorithm": "best_fit"},
        "best_fit, 64 lanes": {**base, "algorithm": "best_fit", "lanes": 64},
        "wrap, 64 lanes": {**base, "algorithm": "wrap", "lanes": 64},
        "wrap, again": {**base, "algorithm": "wrap"},
    }
    titles = ("M tokens/s", "CPU ns/token", "efficiency", "split", "first", "resume", "peak")
    print(f"{'':20}" + "".join(f"{title:>14}" for title in titles))
    for name, job in jobs.items():
        if setup.wants(name):
            r = in_process(measure, job)
            resumed = in_process(measure, {**job, "state": r["state"]})["resume_s"]
            print(
                f"{name:20}{r['million_tokens_per_s']:>14.1f}{r['cpu_ns_per_token']:>14.1f}{r['efficiency']:>14.2%}"
                f"{r['split']:>14.1%}{r['first_batch_s']:>12.2f} s{resumed:>12.2f} s{r['peak_mb']:>11.0f} MB",
                flush=True,
            )
