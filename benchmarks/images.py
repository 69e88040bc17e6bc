"""Images: pixels beside TorchTitan's own path, packing, headers, and whole pipelines beside Grain's by workers.

Pictures are made at run time: fractal noise with grain, 640 x 480 JPEGs of about 80 KB as a camera's are, and smaller
ones among them where records are packed. Figures are per second of CPU time where no clock is named.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Setup, in_process, in_turns
from benchmarks.peers import environments
from benchmarks.peers.process import Process

SEQ_LEN, MICROBATCH, MAX_IMAGES = 2048, 2, 8
SHARDS, ROWS = 8, 48
SIZES = ((640, 480), (480, 640), (512, 384), (320, 320), (256, 192), (160, 120))
WORKERS = (1, 2, 3, 4)
_IMAGES = 24  # of a turn


def photo(width: int, height: int, seed: int, quality: int = 90) -> bytes:
    """A JPEG that is as hard to decode as a photograph of its size."""
    from PIL import Image

    choose = np.random.default_rng(seed)
    total = choose.normal(127, 7, (height, width, 3)).astype(np.float32)
    for octave in range(1, 8):
        coarse = choose.normal(0, 90 * 0.55**octave, (max(2, 2**octave * height // width), 2**octave, 3))
        for c in range(3):
            plane = Image.fromarray(coarse[..., c].astype(np.float32))
            total[..., c] += np.asarray(plane.resize((width, height), Image.Resampling.BICUBIC))
    buffer = io.BytesIO()
    Image.fromarray(total.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def prepare(setup: Setup) -> dict[str, Any]:
    """Shards of photographs with captions, and a tokenizer; made unless they are there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from examples.pictures import build_pictures

    pictures = build_pictures(setup.folder / "pictures")
    folder = setup.folder / "photographs"
    if not folder.exists():
        print("making photographs ...", flush=True)
        words = [
            word
            for file in sorted(pictures.sources["captions"].glob("*.parquet"))
            for text in pq.read_table(file, columns=["text"]).column(0).to_pylist()
            for word in text.split()
        ]
        choose, scratch = random.Random(0), folder.with_name("photographs.new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for shard in range(SHARDS):
            sizes = [choose.choice(SIZES) for _ in range(ROWS)]
            files = [photo(*size, seed=shard * ROWS + n) for n, size in enumerate(sizes)]
            captions = [" ".join(choose.choices(words, k=choose.randint(4, 120))) for _ in range(ROWS)]
            table = pa.table({"image": pa.array(files, pa.binary()), "text": captions})
            pq.write_table(table, scratch / f"{shard}.parquet", row_group_size=16)
        scratch.rename(folder)
    return {"data": str(folder), "tokenizer": str(pictures.tokenizer), "seq_len": SEQ_LEN, "microbatch": MICROBATCH,
            "max_images": MAX_IMAGES, "cache": str(setup.folder / "cache"), "sources": {}}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Pixels


def pixels(job: dict[str, Any]) -> dict[str, Any]:
    """Images per second of CPU time on one thread: TorchTitan's functions, the same bits, and uint8."""
    import torch

    from zephon.columns.images import PixelForm, PixelsAhead
    from zephon.vision.geometry import Grid, VisionSettings
    from zephon.vision.headers import read_header
    from zephon.vision.pixels import image_patches, put, values_shape

    torch.set_num_threads(1)
    vision = VisionSettings()
    files = [photo(*job["size"], seed=n) for n in range(_IMAGES)]

    def grid(file: bytes) -> Grid:
        header = read_header(file)
        return vision.grid(header.width, header.height)

    def timed(function: Callable[[bytes], Any]) -> Callable[[], dict[str, float]]:
        def measure() -> dict[str, float]:
            began = time.process_time()
            for file in files:
                function(file)
            return {"rate": len(files) / (time.process_time() - began)}

        measure()
        return measure

    memory = PixelsAhead()

    def made(file: bytes, form: PixelForm) -> Any:
        """As workers do it: into memory that is used again once nothing refers to it."""
        patches = image_patches(file, grid(file), vision)
        values = memory.memory(values_shape(form, [len(patches)], vision), form.dtype)
        put(values, form, 0, 0, patches, vision)
        return values

    def as_uint8(file: bytes) -> Any:
        return made(file, PixelForm("packed", "uint8"))

    def as_float(file: bytes) -> Any:
        return made(file, PixelForm("packed", "float32"))

    jobs = {"float32": timed(as_float), "uint8": timed(as_uint8)}
    found: dict[str, Any] = {"kb": sum(map(len, files)) / len(files) / 1e3}
    try:
        from torchtitan.hf_datasets.multimodal.utils import image as titan
    except ImportError as error:
        print(f"TorchTitan's image functions are not there: {error}")
    else:

        def by_titan(file: bytes) -> Any:
            shown = titan.process_image(
                file, patch_size=vision.patch_size, merge_size=vision.merge_size, min_pixels=vision.min_pixels,
                max_pixels=vision.max_pixels, max_patches=vision.max_patches,
                max_patches_per_side=vision.max_patches_per_side, image_mean=vision.mean, image_std=vision.std,
                resize_fn=titan.resize_to_pixel_budget,
            )  # fmt: skip
            order = vision.patch_size, vision.temporal_patch_size, vision.merge_size, vision.patch_order
            return titan.vision_to_patches(shown, *order)[0]

        found["equal"] = all(torch.equal(torch.from_numpy(as_float(file)), by_titan(file)) for file in files)
        jobs["TorchTitan"] = timed(by_titan)
    return found | {name: each["rate"] for name, each in in_turns(jobs, job["seconds"]).items()}


def threads(job: dict[str, Any]) -> dict[str, float]:
    """How much faster two threads make patches than one, by the clock, and what CPU time they need beside it."""
    from zephon.vision.geometry import VisionSettings
    from zephon.vision.headers import read_header
    from zephon.vision.pixels import image_patches

    vision = VisionSettings()
    files = [photo(*SIZES[0], seed=n) for n in range(_IMAGES)]
    sizes = [read_header(file) for file in files]
    grids = [vision.grid(size.width, size.height) for size in sizes]

    def some(part: Sequence[int], waited: list[float]) -> None:
        began, used = time.perf_counter(), time.thread_time()
        queued = _queued_seconds()
        for n in [*part, *part]:
            image_patches(files[n], grids[n], vision)
        waited.append(time.perf_counter() - began - (time.thread_time() - used) - (_queued_seconds() - queued))

    def timed(count: int) -> Callable[[], dict[str, float]]:
        def measure() -> dict[str, float]:
            began, used = time.perf_counter(), time.process_time()
            waited: list[float] = []
            parts = [range(n, _IMAGES, count) for n in range(count)]
            running = [threading.Thread(target=some, args=(part, waited)) for part in parts]
            for each in running:
                each.start()
            for each in running:
                each.join()
            used = time.process_time() - used
            return {"clock": time.perf_counter() - began, "cpu": used, "busy": used + max(0.0, sum(waited))}

        measure()
        return measure

    found = in_turns({"one": timed(1), "two": timed(2)}, job["seconds"])
    one, two = found["one"], found["two"]
    # By the clock of a busy machine two threads cannot be twice as fast. So also what they would be with a core each:
    # from the CPU time, and the time that they wait for each other and not for a core.
    return {"clock": one["clock"] / two["clock"], "free": 2 * one["busy"] / two["busy"], "cpu": two["cpu"] / one["cpu"]}


def _queued_seconds() -> float:
    """How long this thread has waited for a core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# Records


def pipeline_of(job: dict[str, Any]) -> Any:
    """Photographs and captions, packed into records of whole documents."""
    from zephon import Pipeline
    from zephon.io import Dataset
    from zephon.work import StaticMixtureWorkSource

    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("photographs", job["data"])],
        mixture={"photographs": 1.0},
        token_estimation=True,
        seed=42,
    )
    return (
        Pipeline(source)
        .options(canonical_replicas=1, io_options={"cache": {"enabled": True, "dir": job["cache"]}})
        .tokenize_images(job["tokenizer"], parallelism=job["workers"], special_tokens="eos")
        .pack_flat(job["seq_len"], "best_fit", oversized="drop", max_images=job["max_images"])
        .shuffle(64, seed=42)
        .batch(job["microbatch"])
    )


def fill(job: dict[str, Any]) -> dict[str, float]:
    """Share of token places that are filled, and most images of a record."""
    pipeline = pipeline_of({**job, "workers": 2})
    filled = places = images = most = 0
    for batch, _ in zip(pipeline, range(40), strict=False):
        filled += int(batch.lengths.sum())
        places += batch.tokens.size
        block = batch.block
        each = np.diff(block.images.offsets[block.span_offsets])
        images, most = images + int(each.sum()), max(most, int(each.max()))
    pipeline.close()
    return {"fill": filled / places, "most": most, "images": images}


def headers(job: dict[str, Any]) -> dict[str, float]:
    """Seconds of CPU time for the headers and grids of 8,000 images, which is what a resume reads of them."""
    from zephon.vision.geometry import VisionSettings
    from zephon.vision.headers import read_header

    vision = VisionSettings()
    files = [photo(*SIZES[n % len(SIZES)], seed=n) for n in range(12)]

    def read() -> dict[str, float]:
        began = time.process_time()
        for n in range(8000):
            header = read_header(files[n % 12])
            vision.tokens(vision.grid(header.width, header.height))
        return {"seconds": time.process_time() - began}

    return in_turns({"headers": read}, job["seconds"] / 4)["headers"]


# ---------------------------------------------------------------------------------------------------------------------
# Whole pipelines, in turns with Grain's


def compare(setup: Setup, job: dict[str, Any]) -> dict[str, Any]:
    """Usable tokens per second by workers, of the clock and of CPU time."""
    folder = setup.folder / "images"
    folder.mkdir(parents=True, exist_ok=True)
    loaders = {"Zephon": ("", "images_zephon"), "Grain 0.2.18": ("grain-images", "images_grain")}
    found: dict[str, Any] = {name: {} for name in loaders}
    for workers in WORKERS:
        with ExitStack() as stack:
            running = {}
            for name, (environment, module) in loaders.items():
                python = environments.python(setup.folder / "peers", environment) if environment else sys.executable
                of_one = {**job, "workers": workers, "folder": str(folder)}
                running[name] = stack.enter_context(Process(python, environment, module, of_one, folder / "log"))
                running[name].ask("open", 240)
                running[name].pause()
            taken: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
            for _ in range(setup.rounds):
                for name, process in running.items():
                    taken[name].append(process.ask("turn", 240, seconds=setup.seconds))
                    process.pause()
        for name, turns in taken.items():
            figures = {
                "clock": statistics.median(turn["tokens"] / turn["seconds"] for turn in turns),
                "cpu": statistics.median(turn["tokens"] / turn["cpu_seconds"] for turn in turns),
                "mb": running[name].peak_mb,
            }
            found[name][workers] = figures
            print(f"{name}, {workers} workers: {figures['clock']:,.0f} tokens/s, {figures['cpu']:,.0f} per CPU second, "
                  f"{figures['mb'] / 1e3:.1f} GB", flush=True)  # fmt: skip
    (folder / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    python = environments.python(setup.folder / "peers", "plot")
    subprocess.run([python, __file__, str(folder)], check=True, env=environments.variables("plot"))
    print(f"{folder / 'images.png'}")
    return found


def plot(folder: Path) -> None:
    """images.png of results.json; needs Matplotlib, so it runs in an environment that has it."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = json.loads((folder / "results.json").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, which, title in zip(axes, ("clock", "cpu"), ("second", "CPU second"), strict=True):
        for (name, points), marker in zip(found.items(), "os", strict=True):
            numbers = [int(each) for each in points]
            axis.plot(numbers, [each[which] / 1e3 for each in points.values()], f"{marker}-", label=name, linewidth=2)
        axis.set(xlabel="workers", ylabel=f"thousand usable tokens per {title}", xticks=numbers)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle("Images and captions: decoded, tokenized, packed, as float32 tensors")
    figure.savefig(folder / "images.png", dpi=150)


def bench(setup: Setup) -> None:
    job = {**prepare(setup), "seconds": setup.seconds}
    if setup.wants("pixels"):
        for size in ((640, 480), (650, 490)):  # the second one is resized
            found = in_process(pixels, {**job, "size": size})
            same = {True: "equal bits", False: "OTHER BITS", None: "not compared"}[found.get("equal")]
            rates = ", ".join(
                f"{name} {found[name]:.0f}" for name in ("float32", "uint8", "TorchTitan") if name in found
            )
            print(f"{size[0]} x {size[1]}, {found['kb']:.0f} KB, images/s of CPU time: {rates}; {same}", flush=True)
    if setup.wants("threads"):
        found = in_process(threads, job)
        print(f"two threads: {found['free']:.2f} times one with a core each, {found['clock']:.2f} times by this clock; "
              f"{found['cpu']:.3f} times the CPU time", flush=True)  # fmt: skip
    if setup.wants("fill"):
        found = in_process(fill, job)
        print(
            f"packing, at most {MAX_IMAGES} images: {found['fill']:.2%} filled, up to {found['most']} images",
            flush=True,
        )
    if setup.wants("headers"):
        print(f"headers of 8,000 images: {in_process(headers, job)['seconds'] * 1e3:.0f} ms of CPU time", flush=True)
    if setup.wants("workers"):
        compare(setup, job)


if __name__ == "__main__":
    plot(Path(sys.argv[1]))
