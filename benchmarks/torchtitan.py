"""What the loader takes of a TorchTitan step: time in `next()` while batches are ready, and the interpreter lock (GIL).

    .venv/bin/python scripts/bench_torchtitan.py [--folder .zephon/bench] [--steps 400] [--compute-ms 50]

One rank, 64 lanes, with the corpus and tokenizer of bench.py. A step here is the `next()` of its microbatches and a
pause without the GIL, as long as a fast step of a GPU, in which batches become ready.

How long the GIL is held is seen by a thread that sleeps for 0.2 ms and then wants it back: what comes on top of the
sleep is time in which somebody else had the GIL, or in which the system gave the processor to somebody else. The latter
is measured beside it, by the same thread in a process that only waits while the loader of another process works as
hard. Two switch intervals are used: with Python's own (5 ms) a thread that runs bytecode gives the GIL up after 5 ms
when somebody waits; with 0.1 ms what is left are calls of libraries that keep it. Run as root, the watching threads get
real-time priority, so that other work on the machine is in the figures as little as possible.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench import prepare

SLEEP = 0.0002
# Records per microbatch, their length, microbatches per step.
SHAPES = {"8 x 2,048": (8, 2048, 1), "8 x 2,048, eight microbatches": (8, 2048, 8), "1 x 8,192": (1, 8192, 1)}
LANES = 64


class Watcher:
    """Collects, from a thread of its own, how much later than asked for it comes back from sleeping."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(1))
        while not self._stop.is_set():
            began = time.perf_counter()
            time.sleep(SLEEP)
            self.lags.append(time.perf_counter() - began - SLEEP)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def report(self) -> dict[str, float]:
        """In ms."""
        lags = np.array(self.lags) * 1e3
        return {
            "p50": float(np.median(lags)),
            "p99.9": float(np.quantile(lags, 0.999)),
            "max": float(lags.max()),
            "over 5 ms": int((lags > 5).sum()),
            "of": len(lags),
        }


def loader_of(job: dict[str, Any], local: int, seq_len: int) -> Any:
    from torchtitan_zephon import ZephonDataLoader
    from zephon.tokenizer.tokenizer import load_tokenizer

    recipe = Path(job["recipe"])
    tokenizer = load_tokenizer(job["tokenizer"])
    config = ZephonDataLoader.Config.from_toml(recipe)
    return config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=SimpleNamespace(tokenizer_path=job["tokenizer"], bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id),
        global_batch_size=LANES,
        seq_len=seq_len,
        local_batch_size=local,
    )


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Steps in this process, the GIL watched."""
    import torch

    torch.set_num_threads(1)
    local, seq_len, microbatches = job["shape"]
    sys.setswitchinterval(job["switch"])
    loader = loader_of(job, local, seq_len)
    batches = iter(loader)
    next(batches)
    time.sleep(1.0)
    taken = []
    with Watcher() as watcher:
        for _ in range(job["steps"]):
            began = time.perf_counter()
            for _ in range(microbatches):
                next(batches)
            taken.append(time.perf_counter() - began)
            time.sleep(job["compute"])
    while loader.progress.batches * local % LANES:  # states are taken at the end of a step
        next(batches)
    state = []
    for _ in range(50):
        began = time.perf_counter()
        loader.state_dict()
        state.append(time.perf_counter() - began)
    ms = np.array(taken) * 1e3
    return {
        "step": {"p50": float(np.median(ms)), "p99": float(np.quantile(ms, 0.99)), "max": float(ms.max())},
        "state_dict": float(np.median(state)) * 1e3,
        "gil": watcher.report(),
    }


def run(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """`measure` in a fresh process, and what a thread of this one, which only waits, sees meanwhile."""
    with (
        subprocess.Popen(
            [sys.executable, __file__, "--job", json.dumps(job)], stdout=subprocess.PIPE, text=True
        ) as process,
        Watcher() as watcher,
    ):
        assert process.stdout is not None
        out = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the measuring process ended with {process.returncode}")
    return json.loads(out.splitlines()[-1]), watcher.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench"))
    parser.add_argument("--source-mb", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--compute-ms", type=float, default=50)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measure(json.loads(options.job))))
        return
    prepared = prepare(options.folder.absolute(), options.source_mb * 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.toml")
        recipe.write_text(
            "".join(f'[[sources]]\nname = "{name}"\npath = "{path}"\n' for name, path in prepared["sources"].items())
        )
        for name, shape in SHAPES.items():
            for switch in (0.005, 0.0001):
                job = {
                    "recipe": str(recipe),
                    "tokenizer": prepared["tokenizer"],
                    "shape": shape,
                    "switch": switch,
                    "steps": options.steps,
                    "compute": options.compute_ms / 1e3,
                }
                seen, beside = run(job)
                print(f"{name}, switch interval {switch * 1e3:g} ms")
                print(f"  next(), all of a step: {_told(seen['step'])}; state_dict() {seen['state_dict']:.2f} ms")
                print(f"  back from sleep, this process: {_told(seen['gil'])}")
                print(f"  back from sleep, a process that only waits: {_told(beside)}", flush=True)


def _told(figures: dict[str, float]) -> str:
    units = {"over 5 ms": "times", "of": "sleeps"}
    return ", ".join(
        f"{name} {value:.2f} ms" if name not in units else f"{name}: {value:,.0f}" for name, value in figures.items()
    )


if __name__ == "__main__":
    main()
