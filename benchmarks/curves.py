"""What a token costs as a run grows: flat lines are good, and everything else is a defect or has its reason.

Each curve changes one thing and leaves the rest as it is: the text (see `benchmarks.text`, written anew for each
shape), records of 2,048 tokens, microbatches of 8. All points of a curve take turns, so a ratio is of one round. What
comes out lies in FOLDER/curves: results.json, results.md, results.png.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import MICROBATCH, SEQ_LEN, Setup, corpus, in_process, records, rows
from benchmarks.peers import environments

MAX_TEXT = 64_000_000  # bytes of text per shape
MAX_TOKENS = 2e7
ROUNDS = 3

CURVES: dict[str, list[Any]] = {
    "lanes": [1, 8, 64, 256, 1024],
    "sources": [1, 4, 16, 50, 200],
    "shards": [10, 1000, 5000, 20_000],
    "document bytes": [50, 200, 1000, 10_000, 10_000_000],
    "document bytes, best_fit": [50, 200, 1000, 10_000],
    "row group MB": [1, 8, 64, 1000],
    "sequence length": [512, 2048, 8192, 131_072],
    "microbatch": [1, 2, 8, 32, 64],
    "threads": [1, 2, 4, 8],
    "ranks": [1, 2, 4],
    "format": ["parquet", "jsonl"],
    "runner": ["threads", "isolated"],
}
BASES = {"document bytes": 1000, "document bytes, best_fit": 1000, "row group MB": 8, "sequence length": 2048,
         "microbatch": 32, "threads": 2}  # fmt: skip
"""The point that others of a curve are compared with, where it is not the first."""
SETTINGS = {"lanes": "lanes", "sequence length": "seq_len", "microbatch": "microbatch", "threads": "threads"}


def measure(job: dict[str, Any]) -> dict[str, float]:
    """One point: CPU time from full look-ahead to full look-ahead, so that what was made is what was taken."""
    import torch  # noqa: F401  (a training process has it loaded before the loader starts)

    import zephon  # noqa: F401

    options = {key: job[key] for key in ("dp_degree", "dp_group_id", "isolate") if key in job}

    def built() -> Any:
        return records(rows(job, **options), job, algorithm=job.get("algorithm", "wrap"))

    began, used = time.perf_counter(), time.process_time()
    pipeline = built()
    batches = iter(pipeline)
    next(batches)
    first, first_cpu = time.perf_counter() - began, time.process_time() - used
    per_batch = job.get("microbatch", MICROBATCH) * job.get("seq_len", SEQ_LEN)
    count = max(4, int(job["tokens"]) // per_batch)
    for _ in range(max(1, count // 20)):
        next(batches).to_training()
    _settle()
    began, used = time.perf_counter(), _cpu_seconds()
    for _ in range(count):
        next(batches).to_training()
    until = _settle()
    spent = _cpu_seconds() - used
    peak = _peak_mb()
    state = pipeline.checkpoint()
    pipeline.close()
    restoring = time.perf_counter()
    again = built()
    again.restore([state])
    next(iter(again))
    restore = time.perf_counter() - restoring
    again.close()
    return {
        "tokens": count * per_batch,
        "cpu_ms_per_million": spent * 1e9 / (count * per_batch),
        "million_tokens_per_s": count * per_batch / (until - began) / 1e6,
        "first_batch_s": first,
        "first_batch_cpu_s": first_cpu,
        "restore_s": restore,
        "peak_mb": peak,
    }


def _peak_mb() -> float:
    """Most memory since this program began; that of `getrusage` counts the process that started it."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def _settle() -> float:
    """Wait until nothing works any more, which is when look-ahead is full; when that was."""
    idle, last, at = 0, _cpu_seconds(), time.perf_counter()
    while idle < 4:
        time.sleep(0.05)
        now = _cpu_seconds()
        if now - last > 0.01:
            idle, at = 0, time.perf_counter()
        idle, last = idle + 1, now
    return at


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it started."""
    tick, total, waiting = os.sysconf("SC_CLK_TCK"), time.process_time(), [os.getpid()]
    while waiting:
        for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            for child in children.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / tick
                waiting.append(int(child))
    return total


def point(job: dict[str, Any]) -> dict[str, float]:
    """A point in fresh processes: one, or one per rank side by side."""
    ranks = job.get("ranks", 1)
    if ranks == 1:
        return dict(in_process(measure, job))
    jobs = [{**job, "dp_degree": ranks, "dp_group_id": n, "tokens": job["tokens"] / ranks} for n in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda each: in_process(measure, each), jobs))
    summed = {key: sum(each[key] for each in found) for key in ("tokens", "million_tokens_per_s", "peak_mb")}
    slowest = {key: max(each[key] for each in found) for key in ("first_batch_s", "first_batch_cpu_s", "restore_s")}
    return {**summed, **slowest, "cpu_ms_per_million": statistics.mean(each["cpu_ms_per_million"] for each in found)}


def texts(job: dict[str, Any], nbytes: int) -> Iterator[str]:
    """Documents of both sources in turn, and again from the start where there are not enough."""
    import pyarrow.parquet as pq

    def source(path: str) -> Iterator[str]:
        for file in sorted(Path(path).glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches(256, columns=["text"]):
                yield from batch.column(0).to_pylist()

    size = 0
    while size < nbytes:
        for pair in itertools.zip_longest(*map(source, job["sources"].values())):
            for text in filter(None, pair):
                if size < nbytes:
                    size += len(text.encode())
                    yield text


def cut(documents: Iterator[str], characters: int) -> Iterator[str]:
    """The same text in documents of so many characters."""
    held = ""
    for text in documents:
        held += text
        while len(held) >= characters:
            yield held[:characters]
            held = held[characters:]


def shape(job: dict[str, Any], folder: Path, curve: str, value: Any) -> dict[str, Any]:
    """The job of a point of a curve; its data are written unless they are there."""
    if curve in SETTINGS:
        # Every lane opens a group per source at its start, and uses it for a long time.
        return {**job, SETTINGS[curve]: value} | ({"tokens": job["tokens"] * 5} if curve == "lanes" else {})
    if curve == "ranks":
        return {**job, "lanes": 8, "ranks": value}
    if curve == "runner":
        return {**job, "isolate": value == "isolated"}
    data, _, algorithm = curve.partition(", ")
    folder = folder / f"{data.replace(' ', '-')}-{value}"
    if not folder.exists():
        work = folder.with_suffix(".tmp")
        shutil.rmtree(work, ignore_errors=True)
        documents = texts(job, 1_100_000_000 if (curve, value) == ("row group MB", 1000) else MAX_TEXT)
        if data == "document bytes":
            documents = cut(documents, value)
        if data == "shards":  # several documents for each
            documents = cut(documents, 1000)
        sources = value if curve == "sources" else 1 if curve == "row group MB" else 2
        shards = value if curve == "shards" else sources
        group_bytes = value * 10**6 if curve == "row group MB" else 8 << 20
        _write(work, list(documents), sources, shards, group_bytes, as_lines=value == "jsonl")
        work.rename(folder)
    found = {**job, "sources": {path.name: str(path) for path in sorted(folder.iterdir())}}
    return {**found, "algorithm": algorithm} if algorithm else found


def _write(
    folder: Path, documents: list[str], sources: int, shards: int, group_bytes: int, *, as_lines: bool = False
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    per_group = max(1, group_bytes * len(documents) // sum(len(text.encode()) for text in documents))
    for shard in range(shards):
        path = folder / f"source-{shard % sources:03d}" / f"{shard // sources:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        some = documents[shard::shards]
        if as_lines:
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in some)
            path.with_suffix(".jsonl").write_text(lines)
            continue
        table = pa.table({"text": pa.array(some, pa.large_string())})
        pq.write_table(table, path, row_group_size=per_group, compression="zstd")


def summary(curve: str, turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Medians of each point, and its CPU time over that of the curve's base in the same round."""
    base = turns[str(BASES.get(curve, CURVES[curve][0]))]
    found: dict[str, dict[str, Any]] = {}
    for value, each in turns.items():
        costs = [one["cpu_ms_per_million"] / other["cpu_ms_per_million"] for one, other in zip(each, base, strict=True)]
        medians = {key: statistics.median(one[key] for one in each) for key in each[0]}
        found[value] = {**medians, "ratio": [statistics.median(costs), min(costs), max(costs)]}
    return found


def markdown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """All curves as one table."""
    lines = ["| | | CPU ms/M tokens | of its base | M tokens/s | first batch (CPU) | restore | peak |",
             "|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for curve, points in results.items():
        for n, (value, found) in enumerate(points.items()):
            shown = f"{int(value):,}" if value.isdecimal() else value
            lines.append(
                f"| {'' if n else curve} | {shown} | {found['cpu_ms_per_million']:.1f} "
                f"| {'{:.2f} ({:.2f} to {:.2f})'.format(*found['ratio'])} | {found['million_tokens_per_s']:.1f} "
                f"| {found['first_batch_s']:.2f} s ({found['first_batch_cpu_s']:.2f}) | {found['restore_s']:.2f} s "
                f"| {found['peak_mb']:,.0f} MB |"
            )
    return "\n".join(lines) + "\n"


def draw(folder: Path) -> None:
    """results.png of results.json; needs Matplotlib, so it runs in an environment that has it."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    results = json.loads((folder / "results.json").read_text())
    rows = -(-len(results) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(14, 3 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, (curve, points) in zip(axes.flat, results.items(), strict=False):
        axis.plot(list(points), [found["cpu_ms_per_million"] for found in points.values()], "o-")
        axis.set(title=curve, ylim=(0, None))
        axis.set_ylabel("ms of CPU per M tokens", fontsize=8)
    figure.savefig(folder / "results.png", dpi=120)


def bench(setup: Setup) -> None:
    base = corpus(setup)
    base["tokens"] = min(setup.tokens, MAX_TOKENS)
    folder = setup.folder / "curves"
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for curve, values in CURVES.items():
        if not setup.wants(curve.replace(" ", "-")):
            continue
        jobs = {str(value): shape(base, folder, curve, value) for value in values}
        turns: dict[str, list[dict[str, float]]] = {value: [] for value in jobs}
        for _ in range(min(setup.rounds, ROUNDS)):
            for value, job in jobs.items():
                turns[value].append(point(job))
        results[curve] = summary(curve, turns)
        print(markdown({curve: results[curve]}), flush=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (folder / "results.md").write_text(markdown(results))
    try:
        python = environments.python(setup.folder / "peers", "plot")
        root = {"PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run([python, __file__, str(folder)], check=True, env={**os.environ, **root})
    except environments.NotInstalled as error:
        print(f"no picture: {error}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
