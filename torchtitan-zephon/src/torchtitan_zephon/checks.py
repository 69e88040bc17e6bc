"""Start-up checks: a misconfigured run fails before its first step."""

from __future__ import annotations

import os
from typing import Any

from torchtitan_zephon.config import ZephonConfig
from torchtitan_zephon.trainer_view import GlobalBatch, TrainerView
from torchtitan_zephon.vision import check_images, vision_settings
from zephon import DataRecipe, TokenizerError, TopologyError
from zephon.loader import Topology, check_division, on_all_ranks, open_once, resolve_lanes


def check_topology(recipe: DataRecipe, batch: GlobalBatch | None, *, dp_world_size: int, dp_rank: int) -> Topology:
    """The lanes of the run and of this rank. "auto" lanes follow from a global batch that is fixed.

    Raises:
        TopologyError: lanes, ranks and global batch do not divide, or "auto" lanes are undefined.
    """
    if recipe.canonical_replicas == "auto" and (batch is None or not batch.fixed):
        problem = (
            "there is no trainer to take it from. Pass global_batch_size to build(), or set "
            "canonical_replicas in the recipe."
            if batch is None
            else f"{batch.key} is not set: the global batch ({batch.records} sequences here), and with it the data, "
            f"would change with the number of ranks. Set --{batch.key} {batch.value}, or canonical_replicas in the "
            "recipe."
        )
        raise TopologyError(
            f'canonical_replicas is "auto", the number of lanes follows from the global batch, and {problem}'
        )
    records = None if batch is None else batch.records
    lanes = resolve_lanes(recipe.canonical_replicas, global_batch=records, dp_degree=dp_world_size)
    if batch is not None:
        check_division(lanes, dp_world_size, [batch.records], at_once=batch.at_once, where=f"--{batch.key}")
    return Topology(lanes, dp_world_size, dp_rank, records)


_checked: set[tuple[bool, str, str]] = set()


def check_ahead(view: TrainerView) -> None:
    """Check, before the model is built, the lanes of the run and its data, opened on the first rank of every node.

    Raises:
        ZephonError: they are wrong; on every rank if all of them call, as in TorchTitan's own trainer.
    """
    trainer = view.config
    if trainer is None or not view.starting:
        return
    validator = getattr(trainer, "validator", None)
    configs = [trainer.dataloader, getattr(validator, "dataloader", None)]
    configs = configs[: 2 if getattr(validator, "enable", False) else 1]
    configs = [config if isinstance(config, ZephonConfig) else None for config in configs]
    recipes = [config and config.to_recipe() for config in configs]
    if (key := (view.together, repr(recipes), repr([config and config.vision for config in configs]))) in _checked:
        return
    _checked.add(key)

    def check() -> None:
        training, degree = trainer.training, view.dp_degree
        if recipes[0] is not None:
            check_topology(recipes[0], view.global_batch(degree), dp_world_size=degree, dp_rank=0)
        if hasattr(training, "max_context_length"):  # main branch
            length = training.max_context_length
            records = training.num_tokens_per_microbatch_per_dp_rank // length
        else:
            length, records = training.seq_len, training.local_batch_size
        for config, recipe in zip(configs, recipes, strict=True):
            if config is not None and os.environ.get("LOCAL_RANK", "0") == "0":
                vision = vision_settings(config.vision, getattr(trainer, "tokenizer", None), view.model)
                check_images(config.vision, vision, recipe, records=records, seq_len=length, ranks=degree)
                open_once(recipe, tokenizer=trainer.hf_assets_path, seq_len=length, vision=vision)

    if view.together:
        on_all_ranks(check)
    else:
        check()


def tokenizer_folder(tokenizer: Any) -> str:
    """The folder of the trainer's tokenizer.

    Raises:
        TokenizerError: the tokenizer has no path, or the folder no tokenizer.json.
    """
    path = getattr(tokenizer, "tokenizer_path", None)
    if not isinstance(path, str | os.PathLike):
        raise TokenizerError(
            f"the trainer's tokenizer is a {type(tokenizer).__name__} without tokenizer_path; expected a "
            "HuggingFaceTokenizer, whose folder has a tokenizer.json."
        )
    if not os.path.exists(os.path.join(path, "tokenizer.json")):
        raise TokenizerError(
            f"hf_assets_path {os.fspath(path)!r} has no tokenizer.json; set --hf_assets_path to a folder that has one."
        )
    return os.fspath(path)
