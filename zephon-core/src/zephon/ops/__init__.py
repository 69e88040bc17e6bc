"""Operators: what a pipeline does between rows and records."""

from .base import Accumulator, Job, Packer
from .batch import Batch
from .pack import PackFlat, WrapPacker
from .shuffle import Shuffle, Shuffler
from .tokenize import Tokenize, TokenizeWorker, add_special_tokens

__all__ = [
    "Accumulator",
    "Batch",
    "Job",
    "PackFlat",
    "Packer",
    "Shuffle",
    "Shuffler",
    "Tokenize",
    "TokenizeWorker",
    "WrapPacker",
    "add_special_tokens",
]
