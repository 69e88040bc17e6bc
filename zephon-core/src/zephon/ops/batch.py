"""Batching: how many records a microbatch holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zephon.config.keys import Positive, check_keys, key
from zephon.errors import PipelineError


@dataclass(frozen=True)
class Batch:
    """Give out records in microbatches; see the fields."""

    kind: ClassVar[str] = "batch"

    microbatch_size: Positive = key(
        doc="Records per microbatch; it never changes the order of records.", decides_data=False
    )
    drop_last: bool = key(
        True,
        "At the end of a finite run leave out what fills no record or no microbatch, and report it; else the last "
        "record is padded and the last microbatch may be shorter.",
    )

    def __post_init__(self) -> None:
        check_keys(self, PipelineError, "batch ")
