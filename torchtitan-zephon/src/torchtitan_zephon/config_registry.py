"""Configs to launch: `--module torchtitan_zephon --config llama3_debugmodel_zephon`.

The environment variable ZEPHON_RECIPE is the path of the data recipe; ZEPHON_VALIDATION_RECIPE, if set, that of the
validation data, all documents of which are used. Fields can be overridden on the command line.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from torchtitan.components.validate import Validator
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

from torchtitan_zephon.loader import ZephonDataLoader
from torchtitan_zephon.metrics import ZephonMetricsProcessor
from zephon import RecipeError

_DEMO_VOCAB = 8192


def llama3_debugmodel_zephon() -> Trainer.Config:
    """TorchTitan's llama3_debugmodel on the data of ZEPHON_RECIPE, small enough for a CPU.

    Its vocabulary is widened to the 8,192 tokens of the tokenizer that `make demo` trains, and its global batch is
    fixed, so that the data does not change with the number of ranks.
    """
    config = llama3.llama3_debugmodel()
    model = config.model_spec.model
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = _DEMO_VOCAB
    config.loss.loss_fn.global_vocab_size = _DEMO_VOCAB
    config.hf_assets_path = ".zephon/demo/tokenizer"
    _set_sizes(config.training, seq_len=256, local=2, total=8)
    config.metrics.log_freq = 1
    return _with_data(config)


def muse_glimmer_debugmodel_mm_zephon() -> Trainer.Config:
    """TorchTitan's muse_glimmer_debugmodel_mm, which sees images, on the data of ZEPHON_RECIPE. Needs torchvision.

    A batch has at most 8 images, so `max_images` in the recipe is at most 4 at 2 sequences per batch.
    """
    from torchtitan.models.muse_glimmer import config_registry as muse_glimmer

    config = muse_glimmer.muse_glimmer_debugmodel_mm()
    _set_sizes(config.training, seq_len=256, local=2, total=8)
    return _with_data(config, vision=config.dataloader)


def llama3_8b_zephon() -> Trainer.Config:
    """TorchTitan's llama3_8b on the data of ZEPHON_RECIPE, with a global batch of 512 sequences of 8,192 tokens."""
    config = llama3.llama3_8b()
    _set_sizes(config.training, seq_len=8192, local=1, total=512)
    return _with_data(config)


def _set_sizes(training: Any, *, seq_len: int, local: int, total: int) -> None:
    """Set sequences per rank and forward, and per step, in the fields of the installed TorchTitan."""
    if hasattr(training, "num_tokens_per_train_step"):
        training.max_context_length = seq_len
        training.num_tokens_per_microbatch_per_dp_rank = local * seq_len
        training.num_tokens_per_train_step = total * seq_len
    else:
        training.seq_len, training.local_batch_size, training.global_batch_size = seq_len, local, total


def _with_data(config: Trainer.Config, vision: Any = None) -> Trainer.Config:
    recipe = os.environ.get("ZEPHON_RECIPE")
    if not recipe:
        raise RecipeError("ZEPHON_RECIPE is not set; expected the path of a data recipe (a TOML file).")
    config.dataloader = ZephonDataLoader.Config.from_toml(recipe, vision=vision)
    stock = config.metrics
    config.metrics = ZephonMetricsProcessor.Config(**{f.name: getattr(stock, f.name) for f in fields(stock) if f.init})
    validation = os.environ.get("ZEPHON_VALIDATION_RECIPE")
    if validation:
        config.validator = Validator.Config(
            enable=True,
            freq=config.validator.freq,
            steps=-1,
            dataloader=ZephonDataLoader.Config.from_toml(validation, vision=vision),
        )
    return config
