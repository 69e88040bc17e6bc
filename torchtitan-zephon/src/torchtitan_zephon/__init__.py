"""Zephon as the data loader of TorchTitan.

`config.dataloader = ZephonDataLoader.Config.from_toml("recipe.toml")` is all there is to it. Inside:

    config          the fields of a data recipe as a TorchTitan config
    loader          ZephonDataLoader
    forms           the shapes of batches that versions of TorchTitan want, one module each
    trainer_view    what the trainer knows and does not pass on, above all the global batch
    checks          start-up checks
    checkpointing   the state in TorchTitan's distributed checkpoint
    metrics         metrics of the loader among TorchTitan's own
    config_registry recipes to launch: --module torchtitan_zephon --config llama3_debugmodel_zephon
    cpu_train       a launcher for machines without a GPU; nothing imports it
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import ZephonDataLoader
    from .metrics import ZephonMetricsProcessor

__all__ = ["ZephonDataLoader", "ZephonMetricsProcessor", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily, so that `torchtitan_zephon.cpu_train` is there before torchtitan is imported.
    if name == "ZephonDataLoader":
        from .loader import ZephonDataLoader

        return ZephonDataLoader
    if name == "ZephonMetricsProcessor":
        from .metrics import ZephonMetricsProcessor

        return ZephonMetricsProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
