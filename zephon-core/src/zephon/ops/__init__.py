"""Operators: what a pipeline does between rows and records."""

from .base import Job, Ordered, Orderer, Packer
from .batch import Batch
from .pack import PackFlat, WrapPacker
from .shuffle import Passer, Shuffle, Shuffler
from .tokenize import Tokenize, TokenizeWorker, add_special_tokens

__all__ = [
    "Batch",
    "Job",
    "Ordered",
    "Orderer",
    "PackFlat",
    "Packer",
    "Passer",
    "Shuffle",
    "Shuffler",
    "Tokenize",
    "TokenizeWorker",
    "WrapPacker",
    "add_special_tokens",
]
