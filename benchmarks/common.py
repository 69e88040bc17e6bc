"""What the benchmarks share: a corpus, a pipeline on it, fresh processes, and measurements taken in turns."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEQ_LEN = 2048
MICROBATCH = 8
VOCABULARY = 50_257


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a benchmark is run with.

    Attributes:
        folder: where the corpus, tokenizer and caches are kept from one run to the next.
        source_mb: megabytes of text per source.
        tokens: tokens of one measurement of throughput.
        seconds: seconds of one measurement that is taken in turns with others.
        threads: tokenizer threads.
        rounds: turns of each loader, where loaders are compared.
        only: parts of a benchmark to run; all where empty.
    """

    folder: Path
    source_mb: int
    tokens: float
    seconds: float
    threads: int
    rounds: int = 5
    only: tuple[str, ...] = ()

    def wants(self, part: str) -> bool:
        return not self.only or part in self.only


def corpus(setup: Setup) -> dict[str, Any]:
    """The job that every benchmark starts from: sources, tokenizer and cache folder, built unless they are there.

    Two Parquet sources of real text (see `benchmarks.text`), and a byte-level BPE of GPT-2's size trained on them.
    """
    import pyarrow.parquet as pq

    from benchmarks import text
    from examples.corpus import train_tokenizer

    folder = setup.folder / f"real-{setup.source_mb}"
    sources = {"code": text.code(folder, setup.source_mb), "prose": text.prose(folder, setup.source_mb)}
    tokenizer = setup.folder / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():

        def texts() -> Iterator[str]:
            for path in sources.values():
                first = pq.ParquetFile(min(path.glob("*.parquet")))
                for group in range(min(3, first.num_row_groups)):
                    yield from first.read_row_group(group).column("text").to_pylist()

        print("training the tokenizer ...", flush=True)
        train_tokenizer(texts(), tokenizer, VOCABULARY, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    return {
        "sources": {name: str(path) for name, path in sources.items()},
        "tokenizer": str(tokenizer),
        "cache": str(setup.folder / "cache"),
        "threads": setup.threads,
        "tokens": setup.tokens,
    }


def rows(job: dict[str, Any], **options: Any) -> Any:
    """A pipeline over the sources of `job` in equal shares, before any operator."""
    from zephon import Pipeline
    from zephon.io import Dataset
    from zephon.work import StaticMixtureWorkSource

    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path(name, path) for name, path in job["sources"].items()],
        mixture=dict.fromkeys(job["sources"], 1.0),
        token_estimation=job.get("token_estimation", True),
        seed=42,
    )
    lanes = job.get("lanes", 1)
    return Pipeline(source).options(
        canonical_replicas=lanes, io_options={"cache": {"enabled": True, "dir": job["cache"]}}, **options
    )


def records(pipeline: Any, job: dict[str, Any], **packing: Any) -> Any:
    """Tokenize, pack, shuffle and batch what a pipeline gives."""
    return (
        pipeline.tokenize(job["tokenizer"], parallelism=job["threads"], backend=job.get("backend", "auto"))
        .pack_flat(max_length=job.get("seq_len", SEQ_LEN), **packing)
        .shuffle(buffer_size=1024, seed=42)
        .batch(microbatch_size=job.get("microbatch", MICROBATCH))
    )


def in_process(function: Callable[[dict[str, Any]], Any], job: dict[str, Any]) -> Any:
    """`function(job)` in a fresh process; both the job and the answer are JSON."""
    program = (
        f"import json, sys; from {function.__module__} import {function.__name__} as function; "
        "print(json.dumps(function(json.load(sys.stdin))))"
    )
    # With byte code, as an installed package has it, also where writing it beside the source is forbidden.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "zephon-benchmarks")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(jobs: dict[str, Callable[[], dict[str, float]]], seconds: float) -> dict[str, dict[str, float]]:
    """The median of each figure over several turns of all jobs, so that a noisy machine is noisy for all alike."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    until = time.perf_counter() + seconds * len(jobs)
    while time.perf_counter() < until or len(next(iter(taken.values()))) < 3:
        for name, job in jobs.items():
            taken[name].append(job())
    return {
        name: {key: statistics.median(each[key] for each in turns) for key in turns[0]} for name, turns in taken.items()
    }


def cpu_seconds(job: Callable[[], Any]) -> Callable[[], dict[str, float]]:
    """A job for `in_turns`: seconds of CPU time of a call in this process."""

    def measure() -> dict[str, float]:
        began = time.process_time()
        job()
        return {"seconds": time.process_time() - began}

    job()
    return measure


def memory_mb() -> float:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mb() -> float:
    """Most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
