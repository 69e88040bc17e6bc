"""What the loader costs a training step of TorchTitan and of Megatron.

TorchTitan, one rank, 64 lanes: a step here is the `next()` of its microbatches and a pause without the GIL, as long as
a fast step of a GPU, in which batches become ready. How long the GIL is held is seen by a thread that sleeps for 0.2 ms
and then wants it back: what comes on top of the sleep is time in which somebody else had the GIL, or in which the
system gave the processor to somebody else. The latter is measured beside it, by the same thread in a process that only
waits. Two switch intervals are used: with Python's own (5 ms) a thread that runs bytecode gives the GIL up after 5 ms;
with 0.1 ms what is left are calls of libraries that keep it. Run as root, the watching threads get real-time priority.

Megatron: microbatches of 8 records of 2,048 tokens and of one of 8,192, in the forms that Megatron's options ask for;
then, with 256 lanes on one rank, what `save_state` and Megatron's torch.save of it take.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common import Setup, corpus

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


def torchtitan_loader(job: dict[str, Any], local: int, seq_len: int) -> Any:
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


def measure_torchtitan(job: dict[str, Any]) -> dict[str, Any]:
    """Steps in this process, the GIL watched."""
    import torch

    torch.set_num_threads(1)
    local, seq_len, microbatches = job["shape"]
    sys.setswitchinterval(job["switch"])
    loader = torchtitan_loader(job, local, seq_len)
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
    """`measure_torchtitan` in a fresh process, and what a thread of this one, which only waits, sees meanwhile."""
    program = (
        "import json, sys; from benchmarks.trainers import measure_torchtitan as measure; "
        "print(json.dumps(measure(json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", program, json.dumps(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Watcher() as watcher:
        assert process.stdout is not None
        out = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the measuring process ended with {process.returncode}")
    return json.loads(out.splitlines()[-1]), watcher.report()


def _figures(figures: dict[str, float]) -> str:
    units = {"over 5 ms": "times", "of": "sleeps"}
    return ", ".join(
        f"{name} {value:.2f} ms" if name not in units else f"{name}: {value:,.0f}" for name, value in figures.items()
    )


def bench_torchtitan(job: dict[str, Any], seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.toml")
        recipe.write_text(
            "".join(f'[[sources]]\nname = "{name}"\npath = "{path}"\n' for name, path in job["sources"].items())
        )
        for name, shape in SHAPES.items():
            for switch in (0.005, 0.0001):
                compute = 0.05
                steps = int(2 * seconds / compute)
                more = {"recipe": str(recipe), "shape": shape, "switch": switch, "steps": steps, "compute": compute}
                loader, beside = run({**job, **more})
                print(f"TorchTitan, {name}, switch interval {switch * 1e3:g} ms")
                print(
                    f"  next(), all of a step: {_figures(loader['step'])}; state_dict() {loader['state_dict']:.2f} ms"
                )
                print(f"  back from sleep, this process: {_figures(loader['gil'])}")
                print(f"  back from sleep, a process that only waits: {_figures(beside)}", flush=True)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "positions reset, EOD masked": {"reset_positions": True, "mask_eos": True},
    "packed (cu_seqlens)": {"reset_positions": True, "packed": True},
    "with attention mask": {"attention_mask": "causal"},
    "with attention mask, reset": {"attention_mask": "documents", "reset_positions": True},
}


def megatron_loader(
    job: dict[str, Any], *, seq_len: int, micro: int, lanes: int, form: dict[str, Any], saves: bool
) -> Any:
    from megatron_zephon.batches import BatchForm
    from megatron_zephon.loaders import TrainLoader
    from zephon import DataRecipe, Pipeline
    from zephon.tokenizer.tokenizer import load_tokenizer

    recipe = DataRecipe.from_dict({"sources": [{"name": n, "path": p} for n, p in job["sources"].items()], "seed": 42})
    pipeline = Pipeline.from_recipe(
        recipe,
        tokenizer=job["tokenizer"],
        seq_len=seq_len,
        microbatch_size=micro,
        canonical_replicas=lanes,
        io_options={"cache": {"dir": job["cache"]}},
    )
    described = {"megatron_zephon": 1, "iteration": 1, "consumed_train_samples": 0, "dp_size": 1, "time": 0}
    eos = load_tokenizer(job["tokenizer"]).eos_id
    return TrainLoader(pipeline, BatchForm(seq_len, eos, eos, **form), (lambda: described) if saves else None)


def per_batch_ms(loader: Any, count: int, pause: float = 0.005) -> list[float]:
    """Milliseconds of each `next`, the batches before it being ready."""
    for _ in range(10):
        next(loader)
    times = []
    for _ in range(count):
        time.sleep(pause)
        began = time.perf_counter()
        next(loader)
        times.append(1000 * (time.perf_counter() - began))
    loader.close()
    return times


def state_ms(loader: Any, lanes: int) -> tuple[list[float], list[float], int]:
    """Milliseconds of `save_state` and of writing it, and the bytes of the file."""
    import torch

    taking, writing = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train_dataloader_dprank000.pt"
        for _ in range(50):
            for _ in range(lanes // 8):
                next(loader)
            began = time.perf_counter()
            state = loader.save_state()
            taken = time.perf_counter()
            torch.save({"dataloader_state_dict": state}, path)
            writing.append(1000 * (time.perf_counter() - taken))
            taking.append(1000 * (taken - began))
        size = path.stat().st_size
    loader.close()
    return taking, writing, size


def bench_megatron(job: dict[str, Any], seconds: float) -> None:
    for micro, seq_len in ((8, 2048), (1, 8192)):
        for name, form in FORMS.items():
            loader = megatron_loader(job, seq_len=seq_len, micro=micro, lanes=8, form=form, saves=False)
            times = sorted(per_batch_ms(loader, 50 if "attention_mask" in form else int(40 * seconds)))
            print(
                f"Megatron, {micro} x {seq_len:,} tokens, {name}: median {statistics.median(times):.2f} ms, "
                f"95 % below {times[int(0.95 * len(times))]:.2f} ms",
                flush=True,
            )
    taking, writing, size = state_ms(megatron_loader(job, seq_len=512, micro=8, lanes=256, form={}, saves=True), 256)
    print(
        f"Megatron, state of 256 lanes: save_state {statistics.median(taking):.2f} ms (at most {max(taking):.2f}), "
        f"torch.save {statistics.median(writing):.2f} ms (at most {max(writing):.2f}), {size:,} bytes"
    )


def bench(setup: Setup) -> None:
    job = corpus(setup)
    if setup.wants("torchtitan"):
        bench_torchtitan(job, setup.seconds)
    if setup.wants("megatron"):
        bench_megatron(job, setup.seconds)
