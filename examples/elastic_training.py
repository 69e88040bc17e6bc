"""Training curves on 1, 2 and 4 ranks, with TorchTitan's standard loader and with Zephon; the picture is elastic.png.

    python -m examples.elastic_training [--folder .zephon/elastic] [--ranks 1 2 4] [--steps 30] [--seeds 2]

Two experiments with the real Trainer of TorchTitan on the CPU (gloo), a tiny llama and the Python standard library:

- From one checkpoint: a run on one rank is saved, and goes on from there on each number of ranks. The standard
  loader refuses its own state on another number of ranks, so there it starts anew, as its users have to.
- From scratch: for each seed and number of ranks a run and its loss on held-out text. How far numbers of ranks move
  that loss is compared with how far seeds move it.

The global batch is the same on any number of ranks. What each step trained on is recorded below the loaders: the
SHA-256 of each record that the Trainer got, whoever it came from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

SEQ_LEN, GLOBAL_BATCH, SAVED = 128, 8, 10
LOADERS = ("standard", "zephon")
_LOSS = re.compile(r"(validate )?step: +(\d+) +loss: +(\S+)")


# In the ranks


def standard() -> Any:
    """TorchTitan's config with its own loader, on the Parquet files of ELASTIC_DATA."""
    from datasets import load_dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    config = zephon()
    files = sorted(map(str, Path(os.environ["ELASTIC_DATA"]).glob("*.parquet")))
    DATASETS["elastic"] = DatasetConfig(
        path="elastic",
        loader=lambda path: load_dataset("parquet", data_files=files, split="train", streaming=True),
        sample_processor=lambda sample: sample["text"],
    )
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="elastic", infinite=True)
    return config


def zephon() -> Any:
    """TorchTitan's config with the loader of Zephon."""
    from torchtitan_zephon.config_registry import llama3_debugmodel_zephon

    config = llama3_debugmodel_zephon()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    return config


def _rank() -> None:
    """A rank of a run: TorchTitan's own program, with what it trains on recorded."""
    from torchtitan_zephon import cpu_train

    program = cpu_train.prepare()
    from torchtitan.trainer import Trainer

    stock, path = Trainer.batch_generator, Path(os.environ["ELASTIC_RECORDS"]) / f"{os.environ['RANK']}.jsonl"

    def recorded(self: Any, batches: Iterable[Any]) -> Iterator[Any]:
        with open(path, "a", encoding="utf-8") as file:
            for fields, labels in stock(self, batches):
                rows = zip(fields["input"].numpy(), labels.numpy(), strict=True)
                found = [hashlib.sha256(row.tobytes() + label.tobytes()).hexdigest() for row, label in rows]
                print(json.dumps({"step": self.step, "records": found}), file=file, flush=True)
                yield fields, labels

    Trainer.batch_generator = recorded
    program.main()


# Runs


class Experiment:
    """A corpus, and runs on it; each run keeps its losses and digests, so that an interrupted experiment goes on."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder.absolute(), steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data, self.tokenizer = self._corpus()

    def _corpus(self) -> tuple[Path, Path]:
        """Rows of the standard library in one random order: training data, and every 20th row held out."""
        import random

        import pyarrow as pa
        import pyarrow.parquet as pq

        from examples.corpus import build_demo

        demo = build_demo(self.folder / "corpus")
        data, held_out = self.folder / "train", self.folder / "held-out"
        if not (held_out / "0.parquet").exists():
            texts = [text for path in sorted(demo.sources["code"].glob("*.parquet")) for text in _texts(path)]
            random.Random(0).shuffle(texts)
            rest = [text for n, text in enumerate(texts) if n % 20]
            for path, part in (
                *((data / f"{n}.parquet", rest[n::4]) for n in range(4)),
                (held_out / "0.parquet", texts[::20][:40]),
            ):
                path.parent.mkdir(exist_ok=True)
                pq.write_table(pa.table({"text": part}), path, row_group_size=256)
        (self.folder / "held-out.toml").write_text(_recipe("held-out", repeat=False), encoding="utf-8")
        return data, demo.tokenizer

    def run(
        self, name: str, loader: str, ranks: int, *, seed: int = 0, start: str = "", until: int | None = None
    ) -> dict[str, Any]:
        """Losses by step, held-out losses and digests of a run, from the checkpoint of the run `start`, if named.

        With 0 steps it saves the initial weights only, which TorchTitan would else draw anew for each number of ranks.
        """
        dump = self.folder / name
        if not (result := dump / "result.json").exists():
            shutil.rmtree(dump, ignore_errors=True)
            (dump / "records").mkdir(parents=True)
            print(f"{name} ...", flush=True)
            self._train(dump, loader, ranks, seed, start, self.steps if until is None else until)
            result.write_text(json.dumps(_result(dump)), encoding="utf-8")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found

    def _train(self, dump: Path, loader: str, ranks: int, seed: int, start: str, until: int) -> None:
        more = []
        if start:
            shutil.copytree(self.folder / start / "checkpoint", dump / "checkpoint")
            if loader == "standard" and ranks > 1:  # its state is for one rank
                more = ["--checkpoint.exclude_from_loading=dataloader"]
        elif not until:
            more = ["--checkpoint.create_seed_checkpoint"]
        recipe = dump / "train.toml"
        recipe.write_text(f"seed = {seed}\n" + _recipe("../train", repeat=True), encoding="utf-8")
        arguments = [
            "--module=examples.elastic_training", f"--config={loader}", f"--hf_assets_path={self.tokenizer}",
            f"--dump_folder={dump}", "--metrics.disable_color_printing", f"--training.steps={until or 1}",
            f"--training.seq_len={SEQ_LEN}", f"--training.global_batch_size={GLOBAL_BATCH}", f"--debug.seed={seed}",
            f"--training.local_batch_size={GLOBAL_BATCH // ranks}",
            f"--lr_scheduler.total_steps={self.steps}", f"--validator.freq={until or 1}", "--checkpoint.enable",
            f"--checkpoint.interval={SAVED if until == SAVED else 10**6}", *more,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ELASTIC_DATA": str(self.data),
            "ELASTIC_RECORDS": str(dump / "records"),
            "ZEPHON_RECIPE": str(recipe),
            "ZEPHON_VALIDATION_RECIPE": str(self.folder / "held-out.toml"),
        }
        program = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
        program += ["-m", "examples.elastic_training", "--rank", *arguments]
        with open(dump / "log.txt", "w", encoding="utf-8") as log:
            done = subprocess.run(program, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise SystemExit(f"{dump.name} failed with exit status {done.returncode}; see {dump / 'log.txt'}.")


def _recipe(path: str, *, repeat: bool) -> str:
    return f'repeat = {str(repeat).lower()}\n\n[[sources]]\nname = "code"\npath = "{path}"\n'


def _texts(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    texts: list[str] = pq.read_table(path, columns=["text"]).column("text").to_pylist()
    return texts


def _result(dump: Path) -> dict[str, Any]:
    losses: dict[str, float] = {}
    held_out: dict[str, float] = {}
    for validated, step, loss in _LOSS.findall((dump / "log.txt").read_text(encoding="utf-8")):
        (held_out if validated else losses)[step] = float(loss)
    steps: dict[int, list[str]] = {}
    for path in sorted((dump / "records").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            read = json.loads(line)
            steps.setdefault(read["step"], []).extend(read["records"])
    # Which records a step had, in whatever order its ranks and microbatches had them.
    digests = {step: hashlib.sha256("".join(sorted(records)).encode()).hexdigest() for step, records in steps.items()}
    return {"losses": losses, "held_out": held_out, "digests": digests}


# The picture


def draw(path: Path, resumed: dict[tuple[str, int], Any], scratch: dict[tuple[str, int, int], Any]) -> list[str]:
    """Curves after the checkpoint, barcodes of their global batches, and held-out losses; returns what they say."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 8.5), dpi=100, layout="constrained")
    places = figure.subplot_mosaic([["standard", "zephon", "scratch"], ["bars"] * 3], height_ratios=[3, 2])
    curves = [places["standard"], places["zephon"]]
    said = []
    for axes, loader in zip(curves, LOADERS, strict=True):
        runs = {ranks: run for (name, ranks), run in resumed.items() if name == loader}
        for style, marker, (ranks, run) in zip(("-", "--", ":", "-."), "os^D", sorted(runs.items()), strict=False):
            x, y = zip(*sorted((int(step), loss) for step, loss in run["losses"].items()), strict=True)
            axes.plot(x, y, style, marker=marker, markersize=4, markevery=5, label=f"{ranks} rank{'s' * (ranks > 1)}")
        apart = max(
            max(run["losses"][step] for run in runs.values()) - min(run["losses"][step] for run in runs.values())
            for step in next(iter(runs.values()))["losses"]
        )
        axes.set(title=f"{_title(loader)}: at most {apart:.2g} apart", xlabel="step", ylabel="training loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper right")
        said.append(f"{_title(loader)}: losses of a step at most {apart:.2g} apart between numbers of ranks")
    low = min(axes.get_ylim()[0] for axes in curves)
    high = max(axes.get_ylim()[1] for axes in curves)
    for axes in curves:
        axes.set_ylim(low, high)

    axes = places["scratch"]
    for place, loader in enumerate(LOADERS):
        seeds = sorted({seed for _, seed, _ in scratch})
        for offset, seed in enumerate(seeds):
            values = {r: _last(run["held_out"]) for (name, s, r), run in scratch.items() if (name, s) == (loader, seed)}
            x = place + (offset - (len(seeds) - 1) / 2) * 0.22
            axes.plot([x] * len(values), list(values.values()), "-", color="0.6", zorder=1)
            for marker, (ranks, value) in zip("os^D", sorted(values.items()), strict=False):
                label = f"{ranks} rank{'s' * (ranks > 1)}" if not place and not offset else None
                axes.plot(x, value, marker, color=f"C{'os^D'.index(marker)}", fillstyle="none", label=label)
        by_ranks, by_seeds = _spreads(scratch, loader)
        said.append(f"{_title(loader)}: held-out loss moves {by_ranks:.2g} with ranks, {by_seeds:.2g} with seeds")
    axes.set_xticks(range(len(LOADERS)), [_title(loader) for loader in LOADERS])
    axes.set(title="from scratch; one line per seed", ylabel="loss on held-out text", xlim=(-0.6, len(LOADERS) - 0.4))
    axes.legend(loc="upper right")
    _barcodes(places["bars"], resumed)
    figure.savefig(path)
    return said


def _barcodes(axes: Any, resumed: dict[tuple[str, int], Any]) -> None:
    """A row per run and a cell per step, coloured by the digest of its global batch; a cross where the first run of the
    loader had other records."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    from zephon.cli.barcode import colour_of

    names = sorted(resumed)
    steps = sorted({int(step) for run in resumed.values() for step in run["digests"]})
    picture = np.ones((len(names), len(steps), 3))
    for y, name in enumerate(names):
        reference = resumed[name[0], min(ranks for loader, ranks in names if loader == name[0])]["digests"]
        for x, step in enumerate(steps):
            digest = resumed[name]["digests"].get(str(step))
            if digest is None:
                continue
            picture[y, x] = colour_of(bytes.fromhex(digest))
            if digest != reference[str(step)]:
                axes.plot(step, y, "x", color="black", markersize=5)
    extent = (steps[0] - 0.5, steps[-1] + 0.5, len(names) - 0.5, -0.5)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=extent)
    labels = [f"{_title(loader)}, {ranks} rank{'s' * (ranks > 1)}" for loader, ranks in names]
    axes.set_yticks(range(len(names)), labels)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="records of each global batch; a cross where they differ from those on one rank", xlabel="step")


def _title(loader: str) -> str:
    return {"standard": "TorchTitan's loader", "zephon": "Zephon"}[loader]


def _last(losses: dict[str, float]) -> float:
    return losses[max(losses, key=int)]


def _spreads(scratch: dict[tuple[str, int, int], Any], loader: str) -> tuple[float, float]:
    """(Mean over seeds of the range over ranks, standard deviation over seeds of the mean over ranks)."""
    by_seed: dict[int, list[float]] = {}
    for (name, seed, _), run in scratch.items():
        if name == loader:
            by_seed.setdefault(seed, []).append(_last(run["held_out"]))
    ranges = [max(values) - min(values) for values in by_seed.values()]
    means = [statistics.fmean(values) for values in by_seed.values()]
    return statistics.fmean(ranges), statistics.stdev(means) if len(means) > 1 else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.elastic_training", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".zephon/elastic"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="divisors of 8")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    experiment = Experiment(options.folder, options.steps)
    for loader in LOADERS:
        experiment.run(f"{loader}-saved", loader, 1, until=SAVED)
    resumed = {
        (loader, ranks): experiment.run(f"{loader}-resumed-{ranks}", loader, ranks, start=f"{loader}-saved")
        for loader in LOADERS
        for ranks in options.ranks
    }
    for seed in range(1, options.seeds + 1):
        experiment.run(f"weights-{seed}", "zephon", 1, seed=seed, until=0)
    scratch = {
        (loader, seed, ranks): experiment.run(
            f"{loader}-seed-{seed}-ranks-{ranks}", loader, ranks, seed=seed, start=f"weights-{seed}"
        )
        for seed in range(1, options.seeds + 1)
        for loader in LOADERS
        for ranks in options.ranks
    }
    picture = options.folder / "elastic.png"
    print("\n".join(draw(picture, resumed, scratch)))
    print(picture)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        sys.argv.remove("--rank")
        _rank()
    else:
        main()
