"""Arguments that several commands have, and a pipeline made from them."""

from __future__ import annotations

import json
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from zephon.config.keys import keys_of, refuse_unknown
from zephon.config.recipe import DataRecipe
from zephon.errors import PipelineError
from zephon.pipeline import Pipeline
from zephon.vision.geometry import VisionSettings

LIMIT = 1 << 24
"""Tokens per sequence and records per batch, at most."""

# Options that are required in one command and not in another.
TOKENIZER = typer.Option("--tokenizer", metavar="T", help="Folder with a tokenizer.json, its path, or a Hub name.")
SEQ_LEN = typer.Option("--seq-len", metavar="N", min=1, max=LIMIT, help="Tokens per sequence.")
GLOBAL_BATCH = typer.Option("--global-batch", metavar="B", min=1, max=LIMIT, help="Records per step over all ranks.")
MICROBATCH = typer.Option("--microbatch-size", metavar="M", min=1, max=LIMIT, help="Records per batch.")

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="Data recipe (TOML).")]
Tokenizer = Annotated[str, TOKENIZER]
SeqLen = Annotated[int, SEQ_LEN]
GlobalBatch = Annotated[int, GLOBAL_BATCH]
Lanes = Annotated[
    int | None,
    typer.Option(
        "--canonical-replicas", metavar="L", min=1, max=1 << 20, help="Number of lanes, instead of the recipe's."
    ),
]
_Runner = StrEnum("_Runner", ["inline", "threads", "process", "ray"])  # all versions of typer know enums
Runner = Annotated[_Runner | None, typer.Option("--runner", help="Where rows are processed.")]
FlushIndex = Annotated[Path | None, typer.Option("--flush-index", metavar="DIR", help="Folder of the flush index.")]
VISION = typer.Option(
    "--vision",
    metavar="KEY=VALUE,...",
    help="How the model sees images, as in patch_size=16,merge_size=2; lists in brackets. See docs/images.md.",
)
Vision = Annotated[str | None, VISION]


def vision_settings(text: str | None) -> VisionSettings | None:
    """The settings that `--vision` spells."""
    if text is None:
        return None
    pairs = dict[str, Any]()
    for part in re.findall(r"(?:\[[^]]*\]|[^,\[])+", text):
        name, equals, value = part.partition("=")
        if not equals:
            raise PipelineError(f"--vision is {text!r}; expected settings as in patch_size=16,merge_size=2.")
        try:
            pairs[name.strip()] = json.loads(value)
        except ValueError:
            pairs[name.strip()] = value.strip()
    refuse_unknown(pairs, keys_of(VisionSettings), "setting in --vision", PipelineError)
    return VisionSettings(**pairs)


def open_pipeline(
    recipe: DataRecipe, tokenizer: str, seq_len: int, microbatch_size: int, vision: str | None, **options: Any
) -> Pipeline:
    """The pipeline of a recipe; options that are None keep the recipe's value."""
    return Pipeline.from_recipe(
        recipe,
        tokenizer=tokenizer_path(tokenizer),
        seq_len=seq_len,
        microbatch_size=microbatch_size,
        vision=vision_settings(vision),
        **{name: value for name, value in options.items() if value is not None},
    )


def tokenizer_path(tokenizer: str) -> str | Path:
    """A `Path` if it exists, so that it is not looked up on the Hub; any other text as it is."""
    return Path(tokenizer) if os.path.exists(tokenizer) else tokenizer
