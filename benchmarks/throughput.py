"""How fast and how lean one process is: records of 2,048 tokens, microbatches of 8, handed out as torch tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import MICROBATCH, SEQ_LEN, Setup, corpus, in_process, memory_mb, peak_mb, records, rows


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Stream `job["tokens"]` tokens in this process, once the look-ahead is full."""
    import torch  # noqa: F401  (a training process has it loaded before the loader starts)

    import zephon  # noqa: F401

    started = time.perf_counter()
    pipeline = records(rows(job, runner=job.get("runner", "threads")), job)
    batches = iter(pipeline)
    next(batches)
    first = time.perf_counter() - started
    per_batch = job.get("microbatch", MICROBATCH) * job.get("seq_len", SEQ_LEN)
    for _ in range(min(int(job["tokens"] // 10), 50_000_000) // per_batch):
        next(batches).to_training()
    count = int(job["tokens"]) // per_batch
    used, began, memory = time.process_time(), time.perf_counter(), [memory_mb()]
    for n in range(count):
        batch = next(batches)
        batch.to_training()
        if job.get("digests"):
            batch.digests  # noqa: B018
        if n % max(1, count // 10) == 0:
            memory.append(memory_mb())
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return {
        "million_tokens_per_s": count * per_batch / seconds / 1e6,
        "cpu_ms_per_million": used * 1e9 / (count * per_batch),
        "first_batch_s": first,
        "cores_used": used / seconds,
        "peak_mb": peak_mb(),
        "memory_mb": [round(m) for m in memory],
        "backend": pipeline.checkpoint()["fingerprint"]["tokenizer_backend"],
    }


def cycle_of(items: Callable[[str], Iterator[Any]], path: str) -> Iterator[Any]:
    """`items(path)` again and again."""
    while True:
        yield from items(path)


def bare_loop(job: dict[str, Any]) -> dict[str, float]:
    """The least work there is: decode row groups in file order and tokenize them, one thread, nothing kept."""
    import pyarrow.parquet as pq

    from zephon.tokenizer.tokenizer import load_tokenizer

    encode = load_tokenizer(job["tokenizer"]).encode

    def groups(path: str) -> Iterator[Any]:
        for file in sorted(Path(path).glob("*.parquet")):
            opened = pq.ParquetFile(file)
            for group in range(opened.num_row_groups):
                yield opened.read_row_group(group, columns=["text"]).column("text").combine_chunks()

    sources = {name: cycle_of(groups, path) for name, path in job["sources"].items()}
    counts = dict.fromkeys(sources, 0)
    used, began = time.process_time(), time.perf_counter()
    while (tokens := sum(counts.values())) < job["tokens"]:
        behind = min(counts, key=counts.__getitem__)
        counts[behind] += len(encode(next(sources[behind]))[0])
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return {"million_tokens_per_s": tokens / seconds / 1e6, "cpu_ms_per_million": used * 1e9 / tokens}


def bench(setup: Setup) -> None:
    base = corpus(setup)
    jobs = {
        "first start (no index)": {**base, "tokens": 1e7, "cache": str(setup.folder / f"c{os.getpid()}")},
        "1 lane": base,
        "64 lanes": {**base, "lanes": 64},
        "digests": {**base, "digests": True},
        "inline": {**base, "runner": "inline", "tokens": setup.tokens / 4},
        "long": {**base, "tokens": setup.tokens * 2.5},
    }
    print(f"{'':24}{'M tokens/s':>11}{'CPU ms/M':>10}{'first batch':>13}{'peak':>10}{'cores':>7}")
    results = {}
    for name, job in jobs.items():
        if setup.wants(name):
            r = results[name] = in_process(measure, job)
            print(
                f"{name:24}{r['million_tokens_per_s']:>11.1f}{r['cpu_ms_per_million']:>10.1f}"
                f"{r['first_batch_s']:>11.2f} s{r['peak_mb']:>7.0f} MB{r['cores_used']:>7.2f}",
                flush=True,
            )
    for name in ("64 lanes", "digests"):
        if {"1 lane", name} <= results.keys():
            ratio = results[name]["million_tokens_per_s"] / results["1 lane"]["million_tokens_per_s"]
            print(f"speed of {name} beside 1 lane: {ratio:.2f}")
    if "long" in results:
        print("memory over the long run, MB:", *results["long"]["memory_mb"])
    if results:
        print("tokenizer:", next(iter(results.values()))["backend"])
