"""The figures of the documentation, drawn from what the code computes.

python tools/figures.py FOLDER     writes all of them as SVG

Every figure can be read without colour: what colours tell is written beside, or told by the pattern.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zephon import Pipeline, ZephonError
from zephon.config.topology import Topology
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

ROOT = Path(__file__).parents[1]
PALE, DARK = ("#d6e4f0", "#f6e3c5", "#dcecd3", "#eadcf0"), ("#2f5d8a", "#a86a12", "#3f7a2e", "#6f4287")
HATCHES = ("", "///", "...", "xxx")
WORDS = ["lane", "shard", "record", "round", "step", "token", "cursor", "window", "chunk", "rank", "group", "epoch"]


def curriculum() -> Figure:
    """Rows of two lanes, chunk by chunk, and how close each dataset stays to its share."""
    compiled = _pipeline(lanes=2, chunk_size=20).compiled
    plan, names = compiled.plan, [dataset.name for dataset in compiled.datasets]
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    strips, counts = figure.subplots(2, 1, height_ratios=[1, 1.5])
    for lane in range(2):
        for index in range(4):
            chunk = plan.curriculum.chunk(lane, index)
            for place, dataset in enumerate(chunk.dataset.tolist()):
                _box(strips, index * 20.6 + place, 1 - lane, 0.92, 0.8, dataset)
            strips.text(index * 20.6 + 10, 2.1 - lane * 2.5, f"chunk({lane}, {index})", ha="center", va="center")
    strips.set(xlim=(-1, 83), ylim=(-0.7, 2.4), yticks=[])
    strips.set_xticks([])
    strips.spines[:].set_visible(False)
    taken = np.concatenate([plan.curriculum.chunk(0, index).dataset for index in range(8)])
    rows = np.arange(len(taken) + 1)
    shares = np.bincount(taken, minlength=len(names)) / len(taken)
    for dataset, name in enumerate(names):
        counts.step(rows, np.concatenate([[0], np.cumsum(taken == dataset)]), DARK[dataset], where="post")
        counts.plot(rows, rows * shares[dataset], "k:", linewidth=0.8)
        counts.annotate(name, (rows[-1], shares[dataset] * rows[-1]), xytext=(4, -3), textcoords="offset points")
    counts.set(xlabel="rows that lane 0 has read (dotted: the share of each dataset)", ylabel="of them", xlim=(0, 175))
    return figure


def lanes() -> Figure:
    """Who owns which of eight lanes, and the numbers of the records, with 1, 2 and 4 groups."""
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    for axes, groups in zip(figure.subplots(1, 3), (1, 2, 4), strict=True):
        for group in range(groups):
            topology = Topology(8, groups, group, 16)
            for number in topology.sequence_numbers(0, 2 * topology.width).tolist():
                _box(axes, number // 8, 7 - number % 8, 0.94, 0.94, group)
                axes.text(number // 8 + 0.47, 7.47 - number % 8, str(number), ha="center", va="center")
            axes.text(2.1, 7.5 - topology.owned.start - (topology.width - 1) / 2, f"rank {group}", va="center")
        axes.set(xlim=(0, 3), ylim=(0, 8), title=f"dp_degree = {groups}", xticks=[0.47, 1.47])
        axes.set_xticklabels(["round 0", "round 1"])
        axes.set_yticks([7.47 - lane for lane in range(8)], [f"lane {lane}" for lane in range(8)])
        _bare(axes)
    return figure


def workers() -> Figure:
    """Blocks of rows that two workers finish in any order, and the accumulator that takes them in their own."""
    durations, free, begun = [3, 1, 1, 4, 1, 2, 1, 2], [0.0, 0.0], []
    figure = Figure(figsize=(8, 2.3), layout="constrained")
    axes = figure.subplots()
    for block, duration in enumerate(durations):
        worker = free.index(min(free))
        begun.append((worker, free[worker]))
        free[worker] += duration
        _bar(axes, 2 - worker, begun[block][1], duration, str(block), worker)
    taken = 0.0
    for block, (duration, (_, start)) in enumerate(zip(durations, begun, strict=True)):
        taken = max(taken, start + duration)
        _bar(axes, 0, taken, 0.45, str(block), 2)
        taken += 0.45
    axes.set_yticks([2.4, 1.4, 0.4], ["worker", "worker", "accumulator"])
    axes.set(xlim=(0, taken + 0.3), ylim=(0, 3), xlabel="time", xticks=[])
    _bare(axes)
    return figure


def windows() -> Figure:
    """Where a lane would be entered again, for every record that it has given."""
    pipeline = _pipeline(lanes=1, chunk_size=20, flush=3, shuffle=8)
    entries, window = [(0, 0)], [0]
    for batch, _ in zip(pipeline, range(72), strict=False):
        (numbers,) = pipeline.checkpoint()["lanes"].values()
        entries.append((int(batch.sequence_numbers[-1]) + 1, numbers[1]))
        window.append(numbers[0])
    pipeline.close()
    used, entry = np.array(entries).T
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(used, entry, used, color=PALE[0], step="post", label="made again by a restore, and thrown away")
    axes.plot(used, used, DARK[0], label="records used")
    axes.step(used, entry, DARK[1], where="post", linestyle="--", label="the place where the state enters the lane")
    for place in np.flatnonzero(np.diff(window)) + 1:
        axes.axvline(used[place], color="0.6", linestyle=":", linewidth=0.8)
    axes.set(xlabel="records that the lane has given (dotted: a window begins)", ylabel="record", xlim=(0, 72))
    axes.legend(frameon=False, loc="upper left")
    return figure


def step() -> Figure:
    """One step of sixteen records, cut into microbatches on 1, 2 and 4 ranks."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    line = 0
    for groups, size in ((1, 8), (2, 4), (4, 2)):
        for group in range(groups):
            numbers = Topology(8, groups, group, 16).sequence_numbers(0, 16 // groups).tolist()
            for place, number in enumerate(numbers):
                _box(axes, place * 0.8 + place // size * 0.25, -line, 0.76, 0.85, place // size)
                axes.text(place * 0.8 + place // size * 0.25 + 0.38, 0.42 - line, str(number), ha="center", va="center")
            end = len(numbers) * 0.8 + (len(numbers) - 1) // size * 0.25
            axes.text(end + 0.2, 0.42 - line, f"rank {group} of {groups}: microbatches of {size}", va="center")
            line += 1
        line += 0.4
    axes.set(xlim=(0, 18), ylim=(-line + 0.6, 1), xticks=[], yticks=[])
    _bare(axes)
    return figure


def speed() -> Figure:
    """CPU time per million tokens, as the table of docs/performance.md has it."""
    rows = cpu_times()
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for place, (name, milliseconds) in enumerate(rows):
        is_ours, is_limit = name.startswith("Zephon"), name.startswith(("reading", "copying"))
        axes.barh(-place, milliseconds, color=PALE[0 if is_ours else 2 if is_limit else 1], edgecolor="0.3")
        axes.text(milliseconds * 1.1, -place, f"{milliseconds:,g}", va="center")
    axes.set_yticks([-place for place in range(len(rows))], [name for name, _ in rows])
    axes.set(xscale="log", xlabel="ms of CPU time per million tokens (less is better; logarithmic)", xlim=(0.3, 60_000))
    _bare(axes)
    return figure


def cpu_times() -> list[tuple[str, float]]:
    """Names and milliseconds of the first table of docs/performance.md."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = re.search(r"^\|[^\n]*CPU ms/M tokens[^\n]*\n\|[-:| ]+\n((?:\|[^\n]*\n)+)", text, re.MULTILINE)
    assert table, "docs/performance.md has no table with a column of CPU ms/M tokens"
    cells = [[cell.strip("* ") for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
    return [(row[0], float(row[2].replace(",", ""))) for row in cells if row[2]]


def refusals() -> Figure:
    """What Zephon says to three mistakes, in its own words."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    place = 0.0
    for title, message in mistakes():
        axes.text(0, -place, title, weight="bold", va="top")
        lines = [part for line in message.splitlines() for part in textwrap.wrap(line, 100, subsequent_indent="    ")]
        axes.text(0.02, -place - 1.1, "\n".join(lines), family="monospace", size=8, va="top")
        place += len(lines) + 2.2
    axes.set(xlim=(0, 1), ylim=(-place, 0.3), xticks=[], yticks=[])
    _bare(axes)
    return figure


@cache
def mistakes() -> list[tuple[str, str]]:
    """Mistakes, each with the message that it really gets."""
    told = []

    def message_of(title: str, action: Callable[[], object]) -> None:
        try:
            action()
        except ZephonError as error:
            told.append((title, str(error)))

    message_of("A degree that does not divide the lanes", lambda: Topology(64, 6, 0, 512))
    message_of(
        "A weight in quotes", lambda: StaticMixtureWorkSource(datasets=[_dataset("web", 4)], mixture={"web": "3"})
    )
    before = _pipeline(lanes=1, chunk_size=20)
    next(iter(before))
    state = json.loads(json.dumps(before.checkpoint()))
    before.close()
    message_of("A resume with another seed", lambda: _pipeline(lanes=1, chunk_size=20, seed=9).restore(state))
    return told


def packing() -> Figure:
    """The first records of one lane under three ways of packing."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    for axes, algorithm in zip(figure.subplots(3, 1), ("wrap", "best_fit", "best_fit_wrap"), strict=True):
        pipeline = _pipeline(lanes=1, chunk_size=40, algorithm=algorithm)
        batches = iter(pipeline)
        spans = [next(batches).provenance().to_pylist() for _ in range(8)]
        pipeline.close()
        for record, documents in enumerate(spans):
            for document in documents:
                tokens = document["token_end"] - document["token_begin"]
                _box(axes, document["start"], 7 - record, tokens, 0.8, document["row"] % 3)
            filled = max(each["start"] + each["token_end"] - each["token_begin"] for each in documents)
            if filled < 65:
                axes.add_patch(Rectangle((filled, 7 - record), 65 - filled, 0.8, fill=False, linestyle=":"))
        axes.set(xlim=(0, 65), ylim=(0, 8), yticks=[], title=algorithm)
        _bare(axes)
    axes.set_xlabel("token of the record (a box is a document or a part of one; dotted: padding)")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "curriculum": curriculum,
    "lanes": lanes,
    "workers": workers,
    "windows": windows,
    "step": step,
    "speed": speed,
    "refusals": refusals,
    "packing": packing,
}


def svg_of(name: str) -> str:
    """A figure as SVG, the same bytes each time; text stays text, in the reader's own font."""
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "hatch.linewidth": 0.5}
    out = io.StringIO()
    with mpl.rc_context(settings):
        FIGURES[name]().savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def _box(axes: Any, x: float, y: float, width: float, height: float, kind: int) -> None:
    style = {"facecolor": PALE[kind % 4], "edgecolor": DARK[kind % 4], "hatch": HATCHES[kind % 4], "linewidth": 0.5}
    axes.add_patch(Rectangle((x, y), width, height, **style))


def _bar(axes: Any, y: float, x: float, width: float, text: str, kind: int) -> None:
    _box(axes, x, y, width, 0.8, kind)
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center")


def _bare(axes: Any) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _dataset(name: str, rows: int) -> Dataset:
    texts = [f"{name} {n} " + " ".join(WORDS[n * k % 12] for k in range(n * n % 31)) for n in range(rows)]
    return Dataset.from_dict(name, {"text": texts})


@cache
def _tokenizer() -> str:
    from tokenizers import ByteLevelBPETokenizer

    folder = Path(tempfile.mkdtemp(prefix="zephon-figures-"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(WORDS * 20, vocab_size=400, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    return str(folder)


def _pipeline(
    *, lanes: int, chunk_size: int, flush: int = 2, shuffle: int = 0, algorithm: str = "wrap", seed: int = 1
) -> Pipeline:
    datasets = [_dataset(name, rows) for name, rows in (("web", 600), ("code", 300), ("books", 100))]
    source = StaticMixtureWorkSource(
        datasets=datasets,
        mixture={"web": 0.5, "code": 0.3, "books": 0.2},
        token_estimation=False,
        seed=seed,
        chunk_size=chunk_size,
    )
    pipeline = Pipeline(source).options(canonical_replicas=lanes, flush_every_k_chunks=flush, runner="inline")
    pipeline = pipeline.tokenize(_tokenizer())
    pipeline = pipeline.pack_flat(64, algorithm, **({} if algorithm == "wrap" else {"num_bins": 3}))
    return (pipeline.shuffle(shuffle) if shuffle else pipeline).batch(1)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        (folder / f"{name}.svg").write_text(svg_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
