"""`zephon report`: one page of a run, for a browser, that needs nothing else."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.resources import files
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from zephon import __version__
from zephon.cli.options import (
    GLOBAL_BATCH,
    SEQ_LEN,
    TOKENIZER,
    FlushIndex,
    Lanes,
    Vision,
    open_pipeline,
)
from zephon.cli.output import LiveLine, plural, writing
from zephon.cli.show import SeenRun
from zephon.columns.faults import read_report
from zephon.config.recipe import DataRecipe
from zephon.errors import DataError, PipelineError, RecipeError
from zephon.run.ledger import Ledger, compare, read_ledger, read_metrics
from zephon.run.metrics import REASONS, Metrics, StepMetrics

_POINTS = 400  # of a chart, at most; beyond that each stands for several steps
_CELLS = 240  # of a row of the barcode, likewise
_STEPS_SHOWN = 6


def report(
    targets: Annotated[
        list[Path], typer.Argument(metavar="LEDGER | RECIPE...", help="Ledger of the run, its recipe, other ledgers.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="The page.")],
    tokenizer: Annotated[str | None, TOKENIZER] = None,
    seq_len: Annotated[int | None, SEQ_LEN] = None,
    global_batch: Annotated[int | None, GLOBAL_BATCH] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Steps to make of a recipe without a ledger.")
    ] = None,
    show: Annotated[
        str | None, typer.Option("--show", metavar="N,N-M", help="Steps whose documents are in the page.")
    ] = None,
    records: Annotated[
        int, typer.Option("--records", metavar="N", min=1, help="Records of each of them, at most.")
    ] = 16,
    chars: Annotated[
        int, typer.Option("--chars", metavar="C", min=0, help="Characters of each document, at most.")
    ] = 600,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="PATH", help="State of the run, as for zephon show.")
    ] = None,
    error_report: Annotated[
        Path | None, typer.Option("--error-report", metavar="DIR", help="The run's report of rows left out.")
    ] = None,
    canonical_replicas: Lanes = None,
    vision: Vision = None,
    flush_index: FlushIndex = None,
) -> None:
    """Write a page of a run: sources, packing, waits, documents of steps.

    A recipe gives the documents of steps; without a ledger it is run for --steps steps first.
    """
    recipes = [path for path in targets if path.suffix == ".toml"]
    folders = [path for path in targets if path not in recipes]
    for path in targets:
        if not path.exists():
            raise DataError(f"{path} does not exist; expected a recipe (TOML), or ledger folders.")
    if len(recipes) > 1:
        raise RecipeError(f"{len(recipes)} recipes are given; expected one, that of the first ledger.")
    recipe = recipes[0] if recipes else None
    if recipe and (tokenizer is None or seq_len is None):
        raise PipelineError(f"{recipe} needs --tokenizer and --seq-len: those of the run.")
    if recipe is None and (show or state or flush_index):
        raise PipelineError("--show, --state and --flush-index are for the steps of a recipe; name the recipe too.")
    if recipe and not folders and (global_batch is None or steps is None):
        raise PipelineError(f"{recipe} is given without a ledger; expected --global-batch and --steps, to run it.")
    with nullcontext() if folders else tempfile.TemporaryDirectory(prefix="zephon-report-") as scratch:
        if scratch is not None:
            assert recipe and tokenizer and seq_len and global_batch and steps
            folders = [Path(scratch) / recipe.stem]
            options = {"global_batch": global_batch, "canonical_replicas": canonical_replicas, "ledger": folders[0]}
            pipeline = open_pipeline(DataRecipe.from_toml(recipe), tokenizer, seq_len, global_batch, vision, **options)
            with LiveLine(lambda: f"record {pipeline.cursor:,} of {(steps or 0) * (global_batch or 0):,}") as live:
                for _ in islice(pipeline, steps):
                    live.tick()
            pipeline.close()
        page = _page(folders, global_batch, error_report)
        if recipe:
            assert tokenizer and seq_len
            ledger = read_ledger(folders[0])
            size = global_batch or (ledger.steps[-1][2] if ledger.steps else ledger.lanes)
            run = SeenRun(recipe, tokenizer, seq_len, size, ledger, state, canonical_replicas, vision, flush_index)
            page["viewer"] = _viewer(run, ledger, show, records, chars)
            page["recipe"] = recipe.read_text(encoding="utf-8")
    text = json.dumps(page, ensure_ascii=False, separators=(",", ":"))
    # Inside of a script, only these could end it.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    template = files("zephon.cli").joinpath("report.html").read_text(encoding="utf-8")
    with writing(output, "page"):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(template.replace("/*DATA*/", text, 1), encoding="utf-8", errors="backslashreplace")
    print(f"report: {output} ({output.stat().st_size / 1024:,.0f} KiB)")


def _page(folders: Sequence[Path], global_batch: int | None, error_report: Path | None) -> dict[str, Any]:
    """All that ledgers tell, as JSON types; the first one is that of the run."""
    ledgers = [read_ledger(folder) for folder in folders]
    ledger, metrics = ledgers[0], read_metrics(folders[0])
    if not len(ledger.sequence):
        raise DataError(f"{folders[0]} holds a ledger without a record; expected a run that has consumed some.")
    step_of = ledger.step_of(ledger.sequence)
    numbers = np.unique(step_of)
    edges = _edges(len(numbers), _POINTS)
    known = [metrics.steps.get(number, StepMetrics()) for number in numbers.tolist()]
    passes, counted = _documents(ledger, metrics, numbers, edges)
    names = list(dict.fromkeys([*ledger.datasets, *metrics.rows]))
    bins = [known[low:high] for low, high in pairwise(edges)]
    tokens = {name: [sum(each.tokens.get(name, 0) for each in some) for some in bins] for name in names}
    sums = [sum(of) for of in zip(*tokens.values(), strict=True)]
    places = [metrics.places * sum(each.records for each in some) for some in bins]
    waits = [[list(each.waits.values()) for each in some if each.waits] for some in bins]
    return {
        "version": __version__,
        "run": folders[0].name,
        "word": "step" if ledger.steps else "round",
        "lanes": ledger.lanes,
        "records": len(ledger.sequence),
        "global_batch": [size for *_, size in ledger.steps],
        "groups": sorted({int(each) for each in ledger.groups[:, 0]}),
        "changed": ledger.changed,
        "steps": [int(numbers[0]), int(numbers[-1]), len(numbers)],
        "x": [[int(numbers[low]), int(numbers[high - 1])] for low, high in pairwise(edges)],
        "metrics": bool(metrics.steps),
        "sources": [
            {
                "name": name,
                "rows": metrics.rows.get(name),
                **counted.get(name, {}),
                "tokens": sum(tokens[name]),
                "seen": [value / total if total else None for value, total in zip(tokens[name], sums, strict=True)],
                "wanted": [_mean([each.wanted.get(name, 0.0) for each in some if each.wanted]) for some in bins],
                "passes": passes.get(name),
            }
            for name in names
        ],
        "fill": [total / of if of else None for total, of in zip(sums, places, strict=True)],
        "wait": {
            "most": [max(map(max, of), default=None) for of in waits],
            "mean": [_mean([sum(each) / len(each) for each in of]) for of in waits],
            "total": sum(max(each.waits.values(), default=0.0) for each in known),
        },
        "left": [
            {"reason": REASONS.get(reason, reason), "source": name or "all sources", "rows": rows}
            for reason, by_source in metrics.left.items()
            for name, rows in by_source.items()
        ],
        "read": metrics.read,
        "faults": _faults(error_report),
        "runs": _barcode(ledgers, folders, global_batch or ledger.global_batch),
    }


def _edges(n: int, most: int) -> list[int]:
    """Where bins of a number of steps begin, and their end."""
    width = -(-n // most)
    return [*range(0, n, width), n]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _documents(
    ledger: Ledger, metrics: Metrics, numbers: np.ndarray, edges: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """By source, passes up to the end of each bin of steps, and documents, distinct ones, and most uses of one.

    A pass is as many documents as the files have rows, without the share of those read that are left out.
    """
    begun = ledger.spans[ledger.spans["token"] == 0]
    places = np.searchsorted(
        numbers[[edge - 1 for edge in edges[1:]]], ledger.step_of(begun["sequence"].astype(np.int64))
    )
    passes, counted = {}, {}
    for d, name in enumerate(ledger.datasets):
        mine = begun["dataset"] == d
        _, uses = np.unique(begun["row"][mine], return_counts=True)
        counted[name] = {"documents": int(mine.sum()), "distinct": len(uses), "most": int(uses.max(initial=0))}
        if rows := metrics.rows.get(name):
            read, left = metrics.read.get(name, 0), sum(each.get(name, 0) for each in metrics.left.values())
            usable = rows * (1 - left / read) if read > left else rows
            per_bin = np.bincount(places[mine], minlength=len(edges) - 1)
            passes[name] = (np.cumsum(per_bin) / usable).round(4).tolist()
            counted[name]["repeats"] = int((uses > 1).sum())
    return passes, counted


def _faults(folder: Path | None) -> list[dict[str, Any]]:
    """The most frequent reasons of a report of rows left out."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise DataError(f"--error-report is {folder}; expected the existing folder of the run's error_report.")
    rows, first = Counter[tuple[str, str, str]](), dict[tuple[str, str, str], str]()
    for entry in read_report(folder):
        key = str(entry["dataset"]), str(entry["operator"]), str(entry.get("reason", ""))[:200]
        rows[key] += entry["rows"] or 1
        first.setdefault(key, f"{entry['shard']}, row {entry['row']}")
    names = ("source", "operator", "reason")
    return [dict(zip(names, key, strict=True)) | {"rows": n, "first": first[key]} for key, n in rows.most_common(20)]


def _barcode(ledgers: Sequence[Ledger], folders: Sequence[Path], unit: int | None) -> dict[str, Any]:
    """Digests by run of steps of `unit` records, else of rounds.

    Beyond `_CELLS` steps a cell has the first of several, and differs if one of them does.
    """
    digests = [ledger.step_digests(unit or ledgers[0].lanes) for ledger in ledgers]
    steps = sorted({step for each in digests for step in each})
    edges = _edges(len(steps), _CELLS) if steps else [0]
    bins = [steps[low:high] for low, high in pairwise(edges)]
    runs = []
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder)[-60:] for folder in folders]
    for folder, name, own, ledger in zip(folders, names, digests, ledgers, strict=True):
        cells = []
        for some in bins:
            mine = [own[step] for step in some if step in own]
            same = all(own[step] == digests[0].get(step, own[step]) for step in some if step in own)
            cells.append([mine[0].hex()[:12] if mine else "", same])
        difference = compare(ledgers[0], ledger)
        text = difference.text.replace(str(folders[0]), names[0]).replace(str(folder), name) if difference else ""
        runs.append({"name": name, "cells": cells, "different": text})
    return {"word": "step" if unit else "round", "bins": [[some[0], some[-1]] for some in bins], "runs": runs}


def _viewer(run: SeenRun, ledger: Ledger, show: str | None, most: int, chars: int) -> dict[str, Any]:
    """Documents of some steps, read again by the recipe."""
    numbers = np.unique(ledger.step_of(ledger.sequence)).tolist()
    wanted = _steps_of(show, numbers)
    # All in one global batch, that of the last of them.
    since = next((before for _, before, size in reversed(ledger.steps) if size == run.global_batch), 0)
    wanted = [step for step in wanted if step > since]
    if not wanted:
        raise PipelineError(f"--show is {show}; expected steps after step {since}, since when the global batch stays.")
    told: list[dict[str, Any]] = []
    with LiveLine(lambda: f"reading again: {len(told)} of {plural(len(wanted), 'step')}") as live:
        for number, _, records in run.steps(wanted):
            for each in records[:most]:
                for document in each["documents"]:
                    document["more"] = max(0, len(document["text"]) - chars)
                    document["text"] = document["text"][:chars]
            told.append({"step": number, "records": records[:most], "of": len(records)})
            live.tick()
    return {"steps": told, "chars": chars}


def _steps_of(show: str | None, numbers: Sequence[int]) -> list[int]:
    """The steps that `--show` names, or some all over the run."""
    if show is None:
        return [numbers[i] for i in np.unique(np.linspace(0, len(numbers) - 1, _STEPS_SHOWN).astype(int)).tolist()]
    wanted = set[int]()
    for part in show.split(","):
        low, _, high = part.strip().partition("-")
        if not (low.isdecimal() and (high.isdecimal() or not high)) or int(low) < 1 or int(high or low) < int(low):
            raise PipelineError(f"--show is {show}; expected steps, counted from 1, as in 1,17-20.")
        wanted.update(range(int(low), min(int(high or low), numbers[-1]) + 1))
    if not (chosen := sorted(wanted.intersection(numbers))):
        raise PipelineError(f"--show is {show}; expected steps of the ledger, from {numbers[0]} to {numbers[-1]}.")
    return chosen
