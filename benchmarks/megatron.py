"""What the loader costs Megatron: milliseconds per microbatch while batches are ready, and per saved state.

    .venv/bin/python scripts/bench_megatron.py [--folder .zephon/bench] [--source-mb 20] [--batches 400]

Microbatches of 8 records of 2,048 tokens and of one of 8,192, in the forms that options of Megatron's ask for; each is
drawn after a pause, in which the next is made ready, as a training step gives it. Then, with 256 lanes on one rank,
what `save_state` and Megatron's torch.save of it take.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import prepare

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "positions reset, EOD masked": {"reset_positions": True, "mask_eos": True},
    "packed (cu_seqlens)": {"reset_positions": True, "packed": True},
    "with attention mask": {"attention_mask": "causal"},
    "with attention mask, reset": {"attention_mask": "documents", "reset_positions": True},
}


def loader_of(job: dict[str, Any], *, seq_len: int, micro: int, lanes: int, form: dict[str, Any], saves: bool) -> Any:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench"))
    parser.add_argument("--source-mb", type=int, default=20)
    parser.add_argument("--batches", type=int, default=400)
    options = parser.parse_args()
    job = prepare(options.folder, options.source_mb << 20)
    job["cache"] = str(options.folder / "cache")

    for micro, seq_len in ((8, 2048), (1, 8192)):
        for name, form in FORMS.items():
            loader = loader_of(job, seq_len=seq_len, micro=micro, lanes=8, form=form, saves=False)
            times = sorted(per_batch_ms(loader, 50 if "attention_mask" in form else options.batches))
            print(
                f"{micro} x {seq_len:,} tokens, {name}: median {statistics.median(times):.2f} ms, "
                f"95 % below {times[int(0.95 * len(times))]:.2f} ms",
                flush=True,
            )
    taking, writing, size = state_ms(loader_of(job, seq_len=512, micro=8, lanes=256, form={}, saves=True), 256)
    print(
        f"state of 256 lanes: save_state {statistics.median(taking):.2f} ms (at most {max(taking):.2f}), torch.save "
        f"{statistics.median(writing):.2f} ms (at most {max(writing):.2f}), {size:,} bytes"
    )


if __name__ == "__main__":
    main()
