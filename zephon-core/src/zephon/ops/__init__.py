"""Operators: what a pipeline does between rows and records."""

from .base import Job, Ordered, Orderer, PackCounts, Packer
from .batch import Batch
from .bins import BinPacker
from .pack import PackFlat, PackSequences, WrapPacker
from .shuffle import Passer, Shuffle, Shuffler
from .tokenize import Tokenize, TokenizeWorker, add_special_tokens

__all__ = [
    "Batch",
    "BinPacker",
    "Job",
    "Ordered",
    "Orderer",
    "PackCounts",
    "PackFlat",
    "PackSequences",
    "Packer",
    "Passer",
    "Shuffle",
    "Shuffler",
    "Tokenize",
    "TokenizeWorker",
    "WrapPacker",
    "add_special_tokens",
]
