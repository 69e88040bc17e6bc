"""Zephon as the external data loader of Megatron.

This version holds only the package itself: no dataset provider is offered to Megatron yet. Until it is,
`zephon.Pipeline.from_recipe` gives the batches to any training loop.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
