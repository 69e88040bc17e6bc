"""`zephon index`: scan every file of a dataset ahead of training, so that runs start without a scan."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from zephon.cli.output import LiveLine, count, print_table
from zephon.columns.appending import new_file
from zephon.columns.damage import LostShard
from zephon.config.options import CacheOptions
from zephon.config.recipe import DataRecipe
from zephon.data.dataset import Dataset
from zephon.errors import DataError, RecipeError

# Columns of documents, tried in this order without --text-field: text, WebDataset's text, token ids.
_USUAL_COLUMNS = ("text", "txt", "tokens", "input_ids", "content")


def index(
    target: Annotated[str, typer.Argument(metavar="PATH | RECIPE", help="A dataset, or a recipe (.toml).")],
    text_field: Annotated[
        str | None,
        typer.Option("--text-field", metavar="C", help="Column of the documents; by default a usual one."),
    ] = None,
    fmt: Annotated[
        str | None, typer.Option("--fmt", metavar="F", help="Format of the files, where file names do not tell.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", metavar="DIR", help="Cache folder of the run, if not the default.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, max=1024, help="Files to scan in parallel.")] = 32,
) -> None:
    """Scan every file of a dataset, so that runs start without a scan.

    Runs read the index from their cache folder. It is saved every 20 seconds and at the end; an interrupted scan goes
    on from there.
    """
    if target.endswith(".toml"):
        if text_field is not None or fmt is not None:
            raise RecipeError(
                f"--text-field and --fmt do not apply to a recipe, {target}; set text_field and fmt in it."
            )
        recipe = DataRecipe.from_toml(target)
        datasets = [Dataset.from_path(s.name, s.path, s.fmt, s.text_field or recipe.text_field) for s in recipe.sources]
        cache_dir = cache_dir or (Path(recipe.cache_dir) if recipe.cache_dir else None)
        skips = recipe.on_error != "raise"
    else:
        datasets, skips = [Dataset.from_path(target, target, fmt, text_field)], False
    folder = CacheOptions(dir=str(cache_dir) if cache_dir else None).index_dir
    assert folder is not None
    with new_file(folder, f"{os.getpid()}.probe", "the index") as probe:  # before a scan that may take hours
        os.unlink(probe.name)
    rows = [_scan(dataset, folder, jobs, skips) for dataset in datasets]
    print_table(("dataset", "format", "files", "groups", "rows", "text", "column", "time"), rows, right="  rrrr r")
    print(f"index: {folder}")


def _scan(dataset: Dataset, folder: Path, jobs: int, skips: bool) -> tuple[str, ...]:
    column, is_text = _documents(dataset, skips)
    lost: list[LostShard] | None = [] if skips else None
    began = time.monotonic()
    done = (0, 0, 0, 0)

    def line() -> str:
        files, of_files, size, of_size = done
        seconds = max(time.monotonic() - began, 1e-3)
        left = f", {seconds * (of_size - size) / size:,.0f} s left" if size else ""
        return (
            f"{dataset.name}  {files:,} of {of_files:,} files, {count(size)}B of {count(of_size)}B, "
            f"{files / seconds:,.0f} files/s{left}"
        )

    with LiveLine(line) as live:

        def tick(*numbers: int) -> None:
            nonlocal done
            done = numbers[0], numbers[1], numbers[2], numbers[3]
            live.tick()

        catalog = dataset.scan(column, index_dir=folder, is_text=is_text, threads=jobs, progress=tick, lost=lost)
    for shard in lost or ():
        print(f"left out: {shard.reason}", file=sys.stderr)
    return (
        dataset.name,
        catalog.fmt,
        f"{catalog.n_shards:,}",
        f"{catalog.n_groups:,}",
        f"{catalog.rows:,}",
        f"{count(catalog.bytes)}B",
        column,
        f"{time.monotonic() - began:.1f} s",
    )


def _documents(dataset: Dataset, skips: bool) -> tuple[str, bool]:
    """The column of the documents, and whether it must be text."""
    existing = list(dataset.columns(skips=skips))
    column = dataset.text_field
    if column is None:
        column = next((name for name in _USUAL_COLUMNS if name in existing), None)
        if column is None:
            raise DataError(
                f"'{dataset.path}' has the columns {', '.join(existing[:20]) or '(none)'}; expected one of "
                f"{', '.join(_USUAL_COLUMNS)}. Name the column of the documents with --text-field."
            )
    elif column not in existing and column == "text" and "tokens" in existing:
        column = "tokens"  # text_field of a recipe is meant for its text sources
    return column, column not in ("tokens", "input_ids")
