"""Zephon as the external data loader of Megatron.

`pretrain_gpt_zephon.py --zephon-data-config recipe.toml ...` is Megatron's pretrain() on a data recipe. Modules:

    options      command-line options, and defaults of Megatron's own for an external loader
    checks       start-up checks: Megatron's arguments against the data and against each other
    batches      the forms of batches for Megatron's options
    vlm          batches with images for Megatron-Bridge
    loaders      the loaders that Megatron calls: training, and validation or test
    states       the state files beside the model's checkpoints: find, merge, prune
    history      the data that a run has read so far
    resume       the place where a run continues
    provider     zephon_train_valid_test_datasets_provider, in place of Megatron's
    training     the batch function, loss and forward step
    metrics      metrics of the loader in Megatron's log line, TensorBoard and Weights & Biases
    pretrain_gpt_zephon
                 the program
    blend        a data recipe from the --data-path of Megatron's own datasets
    cpu_train    a launcher for machines without a GPU; nothing imports it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_zephon.provider import zephon_train_valid_test_datasets_provider
    from megatron_zephon.states import prune_states, read_state

__all__ = ["__version__", "prune_states", "read_state", "zephon_train_valid_test_datasets_provider"]

__version__ = "0.1.0"

_MODULES = {"prune_states": "states", "read_state": "states", "zephon_train_valid_test_datasets_provider": "provider"}


def __getattr__(name: str) -> Any:
    # Lazily: `megatron_zephon.cpu_train` has to run before megatron is imported.
    if name in _MODULES:
        return getattr(import_module(f"megatron_zephon.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
