"""Zephon as the data loader of TorchTitan.

`config.dataloader = ZephonDataLoader.Config.from_toml("recipe.toml")` is all a run needs. Modules:

    config          the fields of a data recipe as a TorchTitan config
    loader          ZephonDataLoader
    forms           the forms of batches that versions of TorchTitan take
    vision          settings of images
    trainer_view    settings of the trainer that it does not pass to its loader, above all the global batch
    checks          start-up checks
    checkpointing   the state in TorchTitan's distributed checkpoint
    saved           the state in a checkpoint on disk, for the command
    metrics         metrics of the loader among TorchTitan's own
    config_registry configs to launch: --module torchtitan_zephon --config llama3_debugmodel_zephon
    cpu_train       a launcher for machines without a GPU; nothing imports it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_zephon.config import Source
    from torchtitan_zephon.loader import ZephonDataLoader
    from torchtitan_zephon.metrics import ZephonMetricsProcessor
    from torchtitan_zephon.saved import read_state

__all__ = ["Source", "ZephonDataLoader", "ZephonMetricsProcessor", "__version__", "read_state"]

__version__ = "0.1.0"

_MODULES = {
    "Source": "config",
    "ZephonDataLoader": "loader",
    "ZephonMetricsProcessor": "metrics",
    "read_state": "saved",
}


def __getattr__(name: str) -> Any:
    # Lazily: `torchtitan_zephon.cpu_train` has to run before torchtitan is imported.
    if name in _MODULES:
        return getattr(import_module(f"torchtitan_zephon.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
