"""Zephon as the external data loader of Megatron.

`pretrain_gpt_zephon.py --zephon-data-config recipe.toml ...` is Megatron's pretrain() on a data recipe. Inside:

    options      command-line options, and the defaults of others that go with an external loader
    checks       start-up checks: what Megatron's arguments mean for the data, and what does not fit together
    batches      the forms of batches that Megatron's options ask for
    loaders      the loaders that Megatron calls: training, and validation or test
    states       the files in which lanes lie beside the model's checkpoints: chosen, merged, pruned
    provider     zephon_train_valid_test_datasets_provider, in place of Megatron's
    training     the batch function, loss and forward step
    metrics      metrics of the loader in Megatron's log line, TensorBoard and Weights & Biases
    pretrain_gpt_zephon
                 the program
    cpu_train    a launcher for machines without a GPU; nothing imports it
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .provider import zephon_train_valid_test_datasets_provider
    from .states import prune_states

__all__ = ["__version__", "prune_states", "zephon_train_valid_test_datasets_provider"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily, so that `megatron_zephon.cpu_train` is there before megatron is imported.
    if name == "zephon_train_valid_test_datasets_provider":
        from .provider import zephon_train_valid_test_datasets_provider

        return zephon_train_valid_test_datasets_provider
    if name == "prune_states":
        from .states import prune_states

        return prune_states
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
