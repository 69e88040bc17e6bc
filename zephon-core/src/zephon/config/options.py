"""Options of a pipeline: who runs it, where, and with how much look-ahead."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from zephon.errors import PipelineError

__all__ = [
    "ON_ERROR",
    "RUNNERS",
    "CacheOptions",
    "FaultPolicy",
    "Options",
    "check_workers",
    "default_cache_dir",
    "default_lookahead",
    "default_workers",
]

RUNNERS = ("inline", "threads", "process")
ON_ERROR = ("raise", "skip", "quarantine")
MAX_WORKERS = 1024

DEFAULT_MEMORY_BYTES = 512 << 20
# What may be kept of stores where nobody said where or how much: a home folder is not for a corpus.
DEFAULT_LIMIT_BYTES = 32 * 10**9
_READY_BYTES = 8 << 20


def default_cache_dir() -> Path:
    """Where indexes are kept when nobody says: ZEPHON_CACHE_DIR, else zephon in the user's cache folder."""
    if folder := os.environ.get("ZEPHON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zephon"


def default_workers() -> int:
    """Worker threads for tokenizing: this rank's share of the cores, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(8, cores // max(1, int(local) if local.isdigit() else 1)))


def default_lookahead(workers: int, lanes: int) -> int:
    """Bytes of text under way or ready: blocks of 1 MiB for every lane and more for every worker, at most 128 MiB.

    With smaller blocks threads spend their time handing the interpreter lock to each other: 64 lanes ran at half the
    speed of one with blocks of 256 KiB, at the same speed with 1 MiB.
    """
    return min(128 << 20, max(workers * (8 << 20), lanes * (2 << 20)))


def _refuse_unknown(what: str, given: Mapping[str, Any], known: list[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise PipelineError(f"{what} {name!r} is unknown{hint}; known are {', '.join(known)}.")


def _whole(name: str, value: Any, least: int = 1) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise PipelineError(f"option {name} is {value!r}; a whole number of at least {least} is needed.")


def check_workers(operator: str, parallelism: object) -> None:
    """Refuse a number of workers that cannot be meant; None stands for the default."""
    if parallelism is None:
        return
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or not 1 <= parallelism <= MAX_WORKERS:
        raise PipelineError(
            f"{operator} parallelism is {parallelism!r}; a whole number from 1 to {MAX_WORKERS}, or None, is needed."
        )


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """What happens to rows that cannot be used.

    Attributes:
        on_error: "raise" ends the run at the first one, "skip" leaves them out, "quarantine" leaves them out and keeps
            what they hold in the report.
        budget: share of the rows of a chunk that may be left out, rounded up; more end the run.
        budget_rows: rows of a chunk that may be left out although they are more than that share.
    """

    on_error: str = "raise"
    budget: float = 0.01
    budget_rows: int = 0

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise PipelineError(f'on_error is {self.on_error!r}; "raise", "skip" or "quarantine" is needed.')
        budget, rows = self.budget, self.budget_rows
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            raise PipelineError(f"error_budget is {budget!r}; a share of rows from 0 to 1 is needed.")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise PipelineError(f"error_budget_rows is {rows!r}; a whole number of at least 0 is needed.")

    @property
    def skips(self) -> bool:
        """Whether rows are left out rather than ending the run."""
        return self.on_error != "raise"

    @property
    def keeps(self) -> bool:
        """Whether the content of rows that are left out is kept."""
        return self.on_error == "quarantine"

    def allowed(self, rows: int) -> int:
        """How many of so many rows may be left out."""
        return max(math.ceil(self.budget * rows), self.budget_rows)

    def described(self, rows: int) -> str:
        """The budget for so many rows, in words."""
        more = f" or error_budget_rows {self.budget_rows}" if self.budget_rows else ""
        return f"error_budget {self.budget}{more} allows {self.allowed(rows)}"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What is kept on this node's disk and in this process's memory.

    Attributes:
        enabled: keep indexes of datasets on disk, so that a second start scans no data. (It still reads the few rows
            on which the tokenizer is checked and token ratios are measured.)
        dir: the folder; by default ZEPHON_CACHE_DIR, or zephon in the user's cache folder.
        limit_bytes: most bytes that data of stores may take on disk; None is no limit but the disk where `dir` is
            given, else 32 GB. Indexes, a few bytes per row group, do not count.
        memory_bytes: decoded data held in memory by this process; half as much again for what comes from stores.
    """

    enabled: bool = True
    dir: str | os.PathLike[str] | None = None
    limit_bytes: int | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    @property
    def index_dir(self) -> Path | None:
        """The folder for indexes, or None where none are kept."""
        if not self.enabled:
            return None
        return (Path(self.dir) if self.dir is not None else default_cache_dir()) / "index"

    @property
    def data_dir(self) -> Path | None:
        """The folder for data of stores, or None where none is kept."""
        if not self.enabled:
            return None
        return (Path(self.dir) if self.dir is not None else default_cache_dir()) / "data"

    @property
    def data_limit_bytes(self) -> int | None:
        """Most bytes below `data_dir`, None for no limit but the disk."""
        return self.limit_bytes or (DEFAULT_LIMIT_BYTES if self.dir is None else None)

    @staticmethod
    def from_io_options(io_options: Mapping[str, Any] | None) -> CacheOptions:
        """Read `{"cache": {...}}`; unknown keys are refused."""
        if io_options is None:
            return CacheOptions()
        if not isinstance(io_options, Mapping):
            raise PipelineError(
                f'io_options is {io_options!r}; a dict such as {{"cache": {{"enabled": True}}}} is needed.'
            )
        _refuse_unknown("io option", io_options, ["cache"])
        cache = io_options.get("cache", {})
        if not isinstance(cache, Mapping):
            raise PipelineError(f'io option "cache" is {cache!r}; a dict such as {{"enabled": True}} is needed.')
        _refuse_unknown("cache option", cache, [field.name for field in fields(CacheOptions)])
        made = CacheOptions(**cache)
        if not isinstance(made.enabled, bool):
            raise PipelineError(f'cache option "enabled" is {made.enabled!r}; True or False is needed.')
        if made.dir is not None and (not isinstance(made.dir, str | os.PathLike) or not os.fspath(made.dir)):
            raise PipelineError(f'cache option "dir" is {made.dir!r}; the path of a folder is needed.')
        _whole("limit_bytes", made.limit_bytes)
        _whole("memory_bytes", 0 if made.memory_bytes is None else made.memory_bytes)
        return made


@dataclass(frozen=True, slots=True)
class Options:
    """See `Pipeline.options`."""

    runner: str = "threads"
    isolate: bool = False
    dp_degree: int = 1
    dp_group_id: int = 0
    canonical_replicas: int | str = "auto"
    global_batch: int | None = None
    flush_every_k_chunks: int = 1
    prefetch_batches: int | None = None
    prefetch_buffer_size: int | None = None
    fetch_parallelism: int | None = None
    pack_parallelism: int | None = None
    io_options: Mapping[str, Any] | None = None
    combine_flag: Callable[[bool], bool] | None = None
    ledger: str | os.PathLike[str] | None = None
    flush_index: str | os.PathLike[str] | None = None
    on_error: str = "raise"
    error_budget: float = 0.01
    error_budget_rows: int = 0
    error_report: str | os.PathLike[str] | None = None
    check_operators: bool = True

    def changed(self, changes: Mapping[str, Any]) -> Options:
        """These options with some changed, all checked."""
        _refuse_unknown("option", changes, [field.name for field in fields(Options)])
        made = replace(self, **changes)
        if not isinstance(made.runner, str) or made.runner not in RUNNERS:
            raise PipelineError(f"option runner is {made.runner!r}; this version has {sorted(RUNNERS)}.")
        if not isinstance(made.isolate, bool):
            raise PipelineError(f"option isolate is {made.isolate!r}; True or False is needed.")
        for name in ("flush_every_k_chunks", "prefetch_batches"):
            _whole(name, getattr(made, name))
        check_workers("fetch", made.fetch_parallelism)
        check_workers("pack", made.pack_parallelism)
        _whole("prefetch_buffer_size", made.prefetch_buffer_size)
        if made.flush_every_k_chunks is None:
            raise PipelineError("option flush_every_k_chunks is None; a whole number of at least 1 is needed.")
        if made.combine_flag is not None and not callable(made.combine_flag):
            raise PipelineError(f"option combine_flag is {made.combine_flag!r}; a function of one flag is needed.")
        for name in ("ledger", "flush_index", "error_report"):
            folder = getattr(made, name)
            if folder is not None and (not isinstance(folder, str | os.PathLike) or not os.fspath(folder)):
                raise PipelineError(f"option {name} is {folder!r}; the path of a folder is needed.")
        CacheOptions.from_io_options(made.io_options)
        if made.faults.keeps and made.error_report is None:
            raise PipelineError(
                'option on_error is "quarantine", which keeps the rows left out in a report; pass the option '
                'error_report, a folder, or take "skip".'
            )
        if not isinstance(made.check_operators, bool):
            raise PipelineError(f"option check_operators is {made.check_operators!r}; True or False is needed.")
        return made

    @property
    def faults(self) -> FaultPolicy:
        """What happens to rows that cannot be used."""
        return FaultPolicy(self.on_error, self.error_budget, self.error_budget_rows)

    def ready_records(self, microbatch_size: int, record_bytes: int) -> int:
        """How many finished records may wait for the consumer."""
        if self.prefetch_batches is not None:
            return self.prefetch_batches * microbatch_size
        return max(2 * microbatch_size, _READY_BYTES // record_bytes)
