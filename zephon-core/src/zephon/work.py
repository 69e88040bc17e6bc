"""Work sources: which datasets a run reads, in which shares and in which order."""

from zephon.config.settings import Stage
from zephon.curriculum.mixture import Ending
from zephon.curriculum.source import ScheduledMixtureWorkSource, StaticMixtureWorkSource, WorkSource
from zephon.curriculum.tokens import TokenEstimation

__all__ = ["Ending", "ScheduledMixtureWorkSource", "Stage", "StaticMixtureWorkSource", "TokenEstimation", "WorkSource"]
