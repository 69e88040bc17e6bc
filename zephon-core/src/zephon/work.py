"""Work sources: which datasets a run reads, in which shares and in which order."""

from zephon.config.settings import Stage
from zephon.curriculum.source import ScheduledMixtureWorkSource, StaticMixtureWorkSource, WorkSource
from zephon.curriculum.tokens import TokenEstimation

__all__ = ["ScheduledMixtureWorkSource", "Stage", "StaticMixtureWorkSource", "TokenEstimation", "WorkSource"]
