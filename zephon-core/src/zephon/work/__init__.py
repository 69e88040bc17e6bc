"""The curriculum: which rows every lane reads, in which order, as pure functions of recipe, seed and catalogs."""

from .mixture import Chunk, Curriculum
from .order import DatasetOrder, OrderOptions
from .source import StaticMixtureWorkSource
from .tokens import TokenEstimation

__all__ = ["Chunk", "Curriculum", "DatasetOrder", "OrderOptions", "StaticMixtureWorkSource", "TokenEstimation"]
