"""Operators: what a pipeline does between rows and records."""

from .base import Job, Ordered, Orderer, PackCounts, Packer
from .batch import Batch
from .bins import BinPacker
from .mixture import LEAST_HELD, EnsureMixture, MixturePacker, Turns
from .pack import PackFlat, PackSequences, WrapPacker
from .shuffle import Passer, Shuffle, Shuffler
from .tokenize import Tokenize, TokenizeWorker, add_special_tokens

__all__ = [
    "LEAST_HELD",
    "Batch",
    "BinPacker",
    "EnsureMixture",
    "Job",
    "MixturePacker",
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
    "Turns",
    "WrapPacker",
    "add_special_tokens",
]
