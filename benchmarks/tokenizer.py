"""How fast a tokenizer loads and encodes, per backend and number of threads.

The text is encoded in columns of 1 MB: "new" is text that the instance has not seen yet, "seen" the same again. "free"
is how fast another Python thread counts meanwhile, beside alone: what is missing is the interpreter lock held, and on
few cores the processor time itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import Setup, corpus
from zephon.errors import TokenizerError
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

MEGABYTES = 80


def columns(sources: dict[str, str]) -> list[pa.Array]:
    """Columns of about 1 MB of text each."""
    texts = [
        text
        for path in sources.values()
        for file in sorted(Path(path).glob("*.parquet"))
        for text in pq.read_table(file, columns=["text"]).column("text").to_pylist()
    ]
    result, part, size = [], [], 0
    for text in texts:
        part.append(text)
        size += len(text)
        if size >= 1_000_000:
            result.append(pa.array(part, pa.large_string()))
            part, size = [], 0
    return result[:MEGABYTES]


def speed(tokenizer: Tokenizer, work: list[pa.Array], n_threads: int) -> float:
    """MB of text per second, all threads together."""
    waiting = iter(work)
    lock = threading.Lock()

    def encode() -> None:
        while True:
            with lock:
                column = next(waiting, None)
            if column is None:
                return
            tokenizer.encode(column)

    threads = [threading.Thread(target=encode) for _ in range(n_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(column.nbytes for column in work) / 1e6 / (time.perf_counter() - began)


def counts_meanwhile(work: Callable[[], object], seconds: float = 1.0) -> float:
    """Steps per second of a counting thread while this thread does `work` again and again."""
    stop = threading.Event()
    steps = 0

    def count() -> None:
        nonlocal steps
        while not stop.is_set():
            steps += 1

    counter = threading.Thread(target=count)
    began = time.perf_counter()
    counter.start()
    while time.perf_counter() - began < seconds:
        work()
    stop.set()
    counter.join()
    return steps / seconds


def bench(setup: Setup) -> None:
    job = corpus(setup)
    work = columns(job["sources"])
    idle = counts_meanwhile(lambda: time.sleep(0.1))
    for backend in ("fastokens", "gigatoken"):
        try:
            began = time.perf_counter()
            tokenizer = load_tokenizer(job["tokenizer"], backend=backend)
            print(f"{backend}: loaded and checked in {time.perf_counter() - began:.2f} s")
        except TokenizerError as error:
            print(f"{backend}: {error}")
            continue
        for n_threads in sorted({1, setup.threads}):
            tokenizer = load_tokenizer(job["tokenizer"], backend=backend)
            speed(tokenizer, work[:n_threads], n_threads)
            new, seen = speed(tokenizer, work[n_threads:], n_threads), speed(tokenizer, work[n_threads:], n_threads)
            print(f"  {n_threads} threads: new {new:.0f} MB/s, seen {seen:.0f} MB/s")
        held = counts_meanwhile(lambda t=tokenizer: t.encode(work[0])) / idle  # type: ignore[misc]
        print(f"  free: {held:.2f}")
