"""Runners: where jobs run. The order of results is the engine's business, so all runners give the same stream."""

from __future__ import annotations

from typing import Any

from zephon.engine.runners.base import Runner, Task
from zephon.engine.runners.inline import InlineRunner
from zephon.engine.runners.process import ProcessRunner
from zephon.engine.runners.threads import ThreadsRunner
from zephon.errors import PipelineError

__all__ = ["RUNNERS", "InlineRunner", "ProcessRunner", "Runner", "Task", "ThreadsRunner", "make_runner"]

RUNNERS: dict[str, type[InlineRunner | ThreadsRunner | ProcessRunner]] = {
    "inline": InlineRunner,
    "threads": ThreadsRunner,
    "process": ProcessRunner,
}


def make_runner(name: str, **workers: Any) -> Runner:
    """The runner called `name`, with a number of workers per kind of job.

    Raises:
        PipelineError: there is no such runner.
    """
    if name not in RUNNERS:
        raise PipelineError(f"runner is {name!r}; this version has {sorted(RUNNERS)}.")
    return RUNNERS[name](**workers)
