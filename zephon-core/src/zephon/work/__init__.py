"""The curriculum: which rows every lane reads, in which order, as pure functions of recipe, seed and catalogs."""

from .continued import NO_CUT, AnyCurriculum, Continued, curriculum_of
from .mixture import Chunk, Curriculum, Ending
from .order import DatasetOrder, OrderOptions
from .schedule import Stage
from .source import DATASET_KEYS, ScheduledMixtureWorkSource, StaticMixtureWorkSource, WorkSource
from .tokens import TokenEstimation

__all__ = [
    "DATASET_KEYS",
    "NO_CUT",
    "AnyCurriculum",
    "Chunk",
    "Continued",
    "Curriculum",
    "DatasetOrder",
    "Ending",
    "OrderOptions",
    "ScheduledMixtureWorkSource",
    "Stage",
    "StaticMixtureWorkSource",
    "TokenEstimation",
    "WorkSource",
    "curriculum_of",
]
