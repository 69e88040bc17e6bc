"""Every error that Zephon raises on purpose.

A message is one sentence a person can act on: what was found, what was expected, what to do. Code that
catches `ZephonError` catches all of them; the subclasses say which part of the job was wrong.
"""

__all__ = [
    "CheckpointError",
    "DataError",
    "PipelineError",
    "RecipeError",
    "TokenizerError",
    "TopologyError",
    "WorkerError",
    "ZephonError",
]


class ZephonError(Exception):
    """Base of all errors raised by Zephon on purpose."""


class RecipeError(ZephonError, ValueError):
    """A data recipe, or an option of a dataset or work source, is not usable as written."""


class PipelineError(ZephonError, ValueError):
    """Operators or options of a pipeline do not fit together."""


class TopologyError(ZephonError, ValueError):
    """Lanes, data-parallel groups, microbatch or global batch do not divide as they must."""


class DataError(ZephonError):
    """A dataset is missing, empty, corrupt, or has changed since its catalog was made."""


class TokenizerError(ZephonError, ValueError):
    """A tokenizer cannot be loaded, or lacks what the special-token policy needs."""


class CheckpointError(ZephonError, ValueError):
    """A checkpoint is damaged, incomplete, of another version, or belongs to other data."""


class WorkerError(ZephonError, RuntimeError):
    """A process at work for the pipeline has died, or cannot be started."""
