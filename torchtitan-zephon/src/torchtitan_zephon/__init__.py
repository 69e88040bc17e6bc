"""Zephon as the data loader of TorchTitan.

This version holds only the package itself: no dataloader config is offered to TorchTitan yet. Until it is,
`zephon.Pipeline.from_recipe` gives the batches to any training loop.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
