"""A run whose ranks are killed again and again, resumed each time at another data-parallel degree.

    python crashing.py FOLDER TOKENIZER KILLS SEED

FOLDER has folders of texts, a and b, and perhaps one of images, pairs.

Ranks are forked from this process, which has imported everything and started no thread; each writes its state at every
step end, like a trainer that checkpoints always, and its ledger. They are killed with SIGKILL after a random time: in
start-up, between batches, while writing a state. What is in FOLDER/states then is all that the next ranks have.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from zephon import Pipeline
from zephon.io import Dataset
from zephon.vision.geometry import VisionSettings
from zephon.vision.probes import image_pixels
from zephon.work import StaticMixtureWorkSource

LANES, BATCH, MICROBATCH = 8, 16, 2
SHARES = {"a": 2.0, "b": 1.0, "pairs": 3.0}
LEAST_RESUMES, LEAST_STEPS = 5, 20


def build(folder: Path, tokenizer: Path, groups: int, group: int, ledger: Path) -> Pipeline:
    shares = {name: share for name, share in SHARES.items() if (folder / name).exists()}
    datasets = [Dataset.from_path(name, folder / name) for name in shares]
    source = StaticMixtureWorkSource(datasets=datasets, mixture=shares, seed=11, chunk_size=64)
    pipeline = (
        Pipeline(source)
        .options(
            canonical_replicas=LANES,
            global_batch=BATCH,
            dp_degree=groups,
            dp_group_id=group,
            ledger=ledger,
            prefetch_buffer_size=200_000,
            io_options={"cache": {"dir": folder / "cache"}},
            digest_pixels=True,
            on_error="skip" if "pairs" in shares else "raise",
            error_budget=0.5,
        )
        .tokenize(tokenizer, parallelism=1, datasets=["a", "b"])
    )
    if "pairs" in shares:
        vision = VisionSettings(patch_size=8, min_pixels=256, max_pixels=4096)
        pipeline = pipeline.tokenize_images(tokenizer, vision=vision, datasets=["pairs"], parallelism=1)
    packed = pipeline.pack_flat(127, "best_fit", max_images=3) if "pairs" in shares else pipeline.pack_flat(127)
    return packed.shuffle(64, seed=1).batch(MICROBATCH)


def rank(folder: Path, tokenizer: Path, groups: int, group: int, states: list[dict]) -> None:
    """Until killed."""
    pipeline = build(folder, tokenizer, groups, group, folder / "ledger")
    if states:
        pipeline.restore(states)
    stream = iter(pipeline)
    while True:
        for _ in range(BATCH // groups // MICROBATCH):
            step = int(next(stream).sequence_numbers[0]) // BATCH
        target = folder / "states" / f"{step:06d}-{groups}"
        target.mkdir(parents=True, exist_ok=True)
        part = target / f"{group}.part"
        part.write_text(json.dumps(pipeline.checkpoint()))
        part.replace(target / f"{group}.json")
        time.sleep(0.002)  # the training step


def latest(folder: Path) -> tuple[int, list[dict]]:
    """The last step of which all ranks of some topology have written their states, and those."""
    for target in sorted((folder / "states").glob("*"), reverse=True):
        step, groups = map(int, target.name.split("-"))
        files = sorted(target.glob("*.json"))
        if len(files) == groups:
            return step, [json.loads(file.read_text()) for file in files]
    return -1, []


def main(folder: Path, tokenizer: Path, kills: int, seed: int) -> None:
    choose = random.Random(seed)
    topologies, resumes = [], 0
    (folder / "states").mkdir()
    if (folder / "pairs").exists():
        image_pixels()  # imports torch, which takes longer than ranks live
    # On a busy machine ranks get longer to live, so that some of them come to write a state.
    step, patience = -1, 1.0
    while kills > 0 or resumes < LEAST_RESUMES or step < LEAST_STEPS:
        reached, states = latest(folder)
        patience = max(1.0, patience * 0.8) if reached > step else min(20.0, patience * 1.5)
        step = reached
        resumes += bool(states)
        groups = choose.choice([1, 2, 4, 8][: 3 if choose.random() < 0.8 else 4])
        topologies.append(groups)
        children = []
        for group in range(groups):
            child = os.fork()
            if not child:
                try:
                    rank(folder, tokenizer, groups, group, states)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(70)
            children.append(child)
        time.sleep(choose.uniform(0.05, (0.3 + 0.2 * groups) * patience))
        for child in choose.sample(children, len(children)):
            os.kill(child, signal.SIGKILL)
            time.sleep(choose.choice([0, 0.02]))
        for child in children:
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        kills -= groups
    step, _ = latest(folder)
    print(json.dumps({"topologies": topologies, "resumes": resumes, "steps": step + 1}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
