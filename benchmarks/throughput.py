"""How fast, how lean: the figures of one process on this machine.

    .venv/bin/python scripts/bench.py [--folder .zephon/bench] [--source-mb 100] [--tokens 400e6] [--growth-tokens 1e9]

Two Parquet sources of real text, mixed half and half, a byte-level BPE of GPT-2's size, records of 2,048 tokens,
microbatches of 8, handed out as torch tensors. Each measurement runs in a process of its own; on a noisy machine look
at the ratios, which are measured side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEQ_LEN = 2048
MICROBATCH = 8
VOCABULARY = 50_257


def prepare(folder: Path, source_bytes: int) -> dict[str, Any]:
    """The sources and the tokenizer, made unless they are there already."""
    import pyarrow.parquet as pq

    from examples.corpus import build_corpus, grow, train_tokenizer

    small = build_corpus(folder / "small")
    sources = grow(small, folder / "grown", source_bytes)
    tokenizer = folder / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():

        def texts() -> Iterator[str]:
            for path in sources.values():
                for file in sorted(path.glob("*.parquet"))[:1]:
                    yield from pq.read_table(file, columns=["text"]).column("text").to_pylist()

        print("training the tokenizer ...", flush=True)
        train_tokenizer(texts(), tokenizer, VOCABULARY, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    return {"sources": {name: str(path) for name, path in sources.items()}, "tokenizer": str(tokenizer)}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Stream `job["tokens"]` tokens in this process."""
    import torch  # noqa: F401  (a training process has it loaded before the loader starts)

    began_import = time.perf_counter()
    from zephon import Pipeline
    from zephon.io import Dataset
    from zephon.work import StaticMixtureWorkSource, TokenEstimation

    imported = time.perf_counter()
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path(name, path) for name, path in job["sources"].items()],
        mixture=dict.fromkeys(job["sources"], 0.5),
        token_estimation=TokenEstimation(),
        seed=42,
    )
    pipeline = (
        Pipeline(source)
        .options(
            runner=job["runner"],
            canonical_replicas=job["lanes"],
            io_options={"cache": {"enabled": True, "dir": job["cache"]}},
        )
        .tokenize(job["tokenizer"], field="text", parallelism=job["threads"], backend=job["backend"])
        .pack_flat(max_length=SEQ_LEN, algorithm="wrap")
        .shuffle(buffer_size=1024, seed=42)
        .batch(microbatch_size=MICROBATCH)
    )
    started = time.perf_counter()
    batches = iter(pipeline)
    next(batches)
    first = time.perf_counter() - started
    per_batch = MICROBATCH * SEQ_LEN
    # Steady state begins when the look-ahead is full.
    warm_up = min(int(job["tokens"] // 10), 50_000_000) // per_batch
    for _ in range(warm_up):
        next(batches).to_training()
    count = int(job["tokens"]) // per_batch
    used = time.process_time()
    began = time.perf_counter()
    memory = [_memory_mb()]
    for n in range(count):
        batch = next(batches)
        batch.to_training()
        if job["digests"]:
            batch.digests  # noqa: B018
        if n % max(1, count // 10) == 0:
            memory.append(_memory_mb())
    seconds = time.perf_counter() - began
    used = time.process_time() - used
    return {
        "million_tokens_per_s": count * per_batch / seconds / 1e6,
        "first_batch_s": first,
        "import_s": imported - began_import,
        "cores_used": used / seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "memory_mb": [round(m) for m in memory],
        "backend": pipeline.checkpoint()["fingerprint"]["tokenizer_backend"],
    }


def _memory_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(job)], stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench"))
    parser.add_argument("--source-mb", type=int, default=100)
    parser.add_argument("--tokens", type=float, default=400e6)
    parser.add_argument("--growth-tokens", type=float, default=1e9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--only", nargs="*", help="names of the measurements to run")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measure(json.loads(options.job))))
        return

    prepared = prepare(options.folder.absolute(), options.source_mb * 1_000_000)
    base = {
        **prepared,
        "cache": str(options.folder.absolute() / "cache"),
        "tokens": options.tokens,
        "threads": options.threads,
        "lanes": 1,
        "runner": "threads",
        "backend": options.backend,
        "digests": False,
    }
    jobs = {
        "first start (no index)": {**base, "tokens": 1e7, "cache": str(options.folder.absolute() / f"c{os.getpid()}")},
        "1 lane": base,
        "64 lanes": {**base, "lanes": 64},
        "1 lane, with digests": {**base, "digests": True},
        "1 lane, inline": {**base, "runner": "inline", "tokens": options.tokens / 4},
        "1 lane, long": {**base, "tokens": options.growth_tokens},
    }
    results: dict[str, dict[str, Any]] = {}
    print(f"{'':26}{'M tokens/s':>11}{'first batch':>13}{'peak':>10}{'cores':>7}")
    for name, job in jobs.items():
        if options.only and name not in options.only:
            continue
        r = results[name] = run(job)
        print(
            f"{name:26}{r['million_tokens_per_s']:>11.1f}{r['first_batch_s']:>11.2f} s{r['peak_mb']:>7.0f} MB"
            f"{r['cores_used']:>7.2f}",
            flush=True,
        )
    one = results.get("1 lane")
    for name, what in (("64 lanes", "64 lanes to 1"), ("1 lane, with digests", "with digests to without")):
        if one and name in results:
            print(f"speed of {what}: {results[name]['million_tokens_per_s'] / one['million_tokens_per_s']:.2f}")
    if "1 lane, long" in results:
        print("memory over the long run, MB:", *results["1 lane, long"]["memory_mb"])
    if results:
        print("tokenizer:", next(iter(results.values()))["backend"])


if __name__ == "__main__":
    main()
