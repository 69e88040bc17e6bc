"""Batching: how many records a microbatch holds."""

from __future__ import annotations

from dataclasses import dataclass

from zephon.errors import PipelineError

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Give out records in microbatches.

    Attributes:
        microbatch_size: records per microbatch; it never changes the order of records.
        drop_last: at the end of a finite run leave out what does not fill a record or a microbatch, and report it;
            else the last record is padded and the last microbatch may be shorter.
    """

    microbatch_size: int
    drop_last: bool = True

    def __post_init__(self) -> None:
        size = self.microbatch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PipelineError(f"microbatch_size is {size!r}; a whole number of at least 1 is needed.")
        if not isinstance(self.drop_last, bool):
            raise PipelineError(f"drop_last is {self.drop_last!r}; True or False is needed.")
