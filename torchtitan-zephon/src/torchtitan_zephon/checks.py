"""Start-up checks: a misconfigured run fails here, before its first step, with one sentence."""

from __future__ import annotations

import os
from typing import Any

from zephon import DataRecipe, TokenizerError, TopologyError
from zephon.loader import Tokenizer, Topology, load_tokenizer, resolve_lanes

from .trainer_view import GlobalBatch

__all__ = ["check_tokenizer", "check_topology", "tokenizer_folder"]


def check_topology(
    recipe: DataRecipe, batch: GlobalBatch | None, *, dp_world_size: int, dp_rank: int, steps: bool = True
) -> Topology:
    """Lanes of the run, and who owns which.

    "auto" lanes come from a global batch that does not depend on the number of ranks, or not at all.

    Args:
        steps: whether the loader is stepped by the global batch, as in training; a validator has steps of its own.

    Raises:
        TopologyError: lanes, ranks and global batch do not divide as they must, or lanes cannot be chosen.
    """
    if recipe.canonical_replicas == "auto" and (batch is None or not batch.fixed):
        why = (
            "no trainer that states a global batch builds this data loader; pass global_batch_size to build(), or set "
            "canonical_replicas in the recipe."
            if batch is None
            else f"{batch.key} is not set, so the global batch ({batch.records} sequences here) and with it the data "
            f"would change with the number of ranks; set --{batch.key} {batch.value}, or canonical_replicas in the "
            "recipe."
        )
        raise TopologyError(
            f'canonical_replicas is "auto", which takes the number of lanes from the global batch: {why}'
        )
    records = None if batch is None else batch.records
    lanes = resolve_lanes(recipe.canonical_replicas, global_batch=records, dp_degree=dp_world_size)
    return Topology(lanes, dp_world_size, dp_rank, records if steps else None)


def tokenizer_folder(tokenizer: Any) -> str:
    """Where the trainer's tokenizer was loaded from.

    Raises:
        TokenizerError: it does not say, or there is no tokenizer.json.
    """
    path = getattr(tokenizer, "tokenizer_path", None)
    if not isinstance(path, str | os.PathLike):
        raise TokenizerError(
            f"the trainer's tokenizer is a {type(tokenizer).__name__}, which does not say where it was loaded from; "
            "Zephon needs a HuggingFaceTokenizer (its tokenizer_path is a folder with a tokenizer.json)."
        )
    if not os.path.exists(os.path.join(path, "tokenizer.json")):
        raise TokenizerError(
            f"hf_assets_path {os.fspath(path)!r} holds no tokenizer.json; Zephon tokenizes with that file, so set "
            "--hf_assets_path to a folder that has one."
        )
    return os.fspath(path)


def check_tokenizer(tokenizer: Any, model_vocab_size: int | None) -> Tokenizer:
    """The trainer's tokenizer as Zephon loads it, after seeing that they agree with each other and the model.

    Raises:
        TokenizerError: they do not.
    """
    folder = tokenizer_folder(tokenizer)
    ours = load_tokenizer(folder)
    if model_vocab_size is not None and ours.vocab_size > model_vocab_size:
        raise TokenizerError(
            f"the tokenizer in {folder!r} has ids up to {ours.vocab_size - 1}, the model has a vocabulary of "
            f"{model_vocab_size}; use the tokenizer that belongs to the model."
        )
    for name in ("bos_id", "eos_id"):
        theirs, mine = getattr(tokenizer, name, None), getattr(ours, name)
        if theirs is not None and mine is not None and theirs != mine:
            raise TokenizerError(
                f"the tokenizer in {folder!r} has {name} {theirs} for the trainer and {mine} for Zephon; its "
                "tokenizer_config.json and tokenizer.json do not agree, so put one of them right."
            )
    return ours
