"""Settings of a run that are not the data's: who runs it, where, with how much look-ahead, and what damage it bears."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from zephon.config.keys import (
    AutoSize,
    Folder,
    Limit,
    Name,
    Positive,
    Prose,
    Share,
    Size,
    Whole,
    Workers,
    check_keys,
    key,
    keys_of,
    refuse_unknown,
    seen,
)
from zephon.config.topology import resolve_lanes
from zephon.errors import PipelineError, ZephonError

# The disk that data of stores may take where nobody set a folder or a limit: a home folder is not for a corpus.
DEFAULT_LIMIT_BYTES = 32 * 10**9
_READY_BYTES = 8 << 20


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


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """The fate of rows that cannot be used: the options on_error, error_budget and error_budget_rows."""

    on_error: str = "raise"
    budget: float = 0.01
    budget_rows: int = 0

    @property
    def skips(self) -> bool:
        """Whether rows are left out rather than ending the run."""
        return self.on_error != "raise"

    @property
    def keeps(self) -> bool:
        """Whether the content of rows that are left out is kept."""
        return self.on_error == "quarantine"

    def allowed(self, rows: int) -> int:
        """Rows that may be left out of so many."""
        return max(math.ceil(self.budget * rows), self.budget_rows)

    def described(self, rows: int) -> str:
        """The budget for so many rows, in words."""
        more = f" or error_budget_rows {self.budget_rows}" if self.budget_rows else ""
        return f"error_budget {self.budget}{more} allows {self.allowed(rows)}"


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Workers on a Ray cluster: the options ray_address, ray_pool and ray_timeout."""

    address: str | None
    pool: str | None
    timeout: float


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run: lanes, speed, memory and faults"""

    canonical_replicas: Limit | Literal["auto"] = key(
        "auto",
        'Number of lanes, fixed for the life of a run; data-parallel degrees divide it. "auto": the size of the global '
        "batch where that is at most 256, else its divisor up to 256 that most degrees divide.",
    )
    feeds: Limit | Literal["auto"] = key(
        "auto",
        "Feeds that the lanes take their records from, in turn; a divisor of the number of lanes. With more of them "
        'each rank has less to read, and lanes end further apart. "auto": one for each lane, or, in a run that ends, '
        "one for each GiB of data.",
    )
    flush_every_k_chunks: Positive = key(
        1, "Chunks per window: stateful operators start each window empty and end it flushed."
    )
    runner: Literal["inline", "threads", "process", "ray"] = key(
        "threads",
        'Where the work runs: "threads", "process" for slow Python code, "ray" on other machines, or "inline" in the '
        "calling thread.",
        decides_data=False,
    )
    ray_address: Prose | None = key(
        None,
        "Address of the Ray cluster; by default RAY_ADDRESS, else the cluster of this machine, which is started if "
        "there is none.",
        decides_data=False,
    )
    ray_pool: Name | None = key(
        None,
        "Name of a pool of Ray workers that all ranks share, which outlives them; by default each rank has workers of "
        "its own.",
        decides_data=False,
    )
    ray_timeout: Positive = key(
        600,
        "Seconds after which a Ray worker that does not answer is ended, and its rows go to another.",
        decides_data=False,
    )
    isolate: bool = key(
        False,
        "Run the whole engine in a process of its own, which leaves the training process's interpreter lock alone.",
        decides_data=False,
    )
    pack_parallelism: Workers | None = key(
        None, "Threads that pack and shuffle; by default the one that runs the lanes.", decides_data=False
    )
    fetch_parallelism: Workers | None = key(None, "Reads that are under way at the same time.", decides_data=False)
    prefetch_buffer_size: AutoSize | None = key(
        None, "Bytes of prepared data that may wait, for the whole process.", decides_data=False
    )
    on_error: Literal["raise", "skip", "quarantine"] = key(
        "raise",
        'Rows that cannot be used: "raise" ends the run at the first one, "skip" leaves them out, "quarantine" keeps '
        "their content in the report besides.",
        decides_data=False,
    )
    error_budget: Share = key(
        0.01, "Share of the rows of a chunk that may be left out before the run ends all the same.", decides_data=False
    )
    error_budget_rows: Whole = key(
        0, "Rows of a chunk that may be left out although they are more than that share.", decides_data=False
    )
    error_report: Folder | None = key(
        None,
        "Folder in which every rank reports the rows that it leaves out; without it the log alone has them.",
        decides_data=False,
    )

    def _check_faults(self, error: type[ZephonError]) -> None:
        if self.on_error == "quarantine" and self.error_report is None:
            raise error(
                'on_error is "quarantine" and error_report is missing; set error_report to a folder, or take "skip".'
            )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What is kept on this node's disk and in this process's memory: `io_options={"cache": {...}}`."""

    enabled: bool = key(True, "Keep indexes of datasets, data of stores and decoded data on disk.", decides_data=False)
    dir: Folder | None = key(
        None, "The folder; by default ZEPHON_CACHE_DIR, or zephon in the user's cache folder.", decides_data=False
    )
    limit_bytes: Size | None = key(
        None,
        "Most bytes that data of stores may take on disk; by default no limit where dir is given, else 32 GB.",
        decides_data=False,
    )
    memory_bytes: Size = key(
        512 << 20,
        "Decoded data held in memory by this process; half as much again for data of stores.",
        decides_data=False,
    )
    disk_bytes: Whole = key(
        16 << 30,
        "Decoded data beyond that which this process may write to the folder for temporary files (TMPDIR), where many "
        "datasets or lanes are read at a time; 0 for none.",
        decides_data=False,
    )

    def __post_init__(self) -> None:
        check_keys(self, PipelineError)

    @property
    def index_dir(self) -> Path | None:
        """The folder for indexes, or None where none are kept."""
        return self._folder / "index" if self.enabled else None

    @property
    def data_dir(self) -> Path | None:
        """The folder for data of stores, or None where none is kept."""
        return self._folder / "data" if self.enabled else None

    @property
    def decoded_limit_bytes(self) -> int:
        """Most bytes of decoded data on disk."""
        return self.disk_bytes if self.enabled else 0

    @property
    def data_limit_bytes(self) -> int | None:
        """Most bytes below `data_dir`, None for no limit but the disk."""
        return self.limit_bytes or (DEFAULT_LIMIT_BYTES if self.dir is None else None)

    @property
    def _folder(self) -> Path:
        if folder := self.dir or os.environ.get("ZEPHON_CACHE_DIR"):
            return Path(folder)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zephon"

    @staticmethod
    def from_io_options(io_options: Mapping[str, Any] | None) -> CacheOptions:
        """Read `{"cache": {...}}`; unknown keys are refused."""
        options = io_options or {}
        cache = options.get("cache", {}) if isinstance(options, Mapping) else None
        if not isinstance(cache, Mapping):
            raise PipelineError(
                f'io_options is {seen(io_options)}; expected a dict such as {{"cache": {{"dir": FOLDER}}}}.'
            )
        refuse_unknown(options, ["cache"], "io option", PipelineError)
        refuse_unknown(cache, keys_of(CacheOptions), "cache option", PipelineError)
        return CacheOptions(**cache)


@dataclass(frozen=True, kw_only=True)
class Options(RunSettings):
    """See `Pipeline.options`. Topology is checked by `zephon.config.topology.Topology`."""

    dp_degree: int = 1
    dp_group_id: int = 0
    global_batch: int | None = None
    prefetch_batches: Positive | None = key(
        None, "Microbatches that may be ready; by default 8 MiB of records.", decides_data=False
    )
    io_options: Mapping[str, Any] | None = None
    combine_flag: Callable[[bool], bool] | None = None
    ledger: Folder | None = key(
        None, "Folder in which every rank writes the records that it consumes.", decides_data=False
    )
    flush_index: Folder | None = key(
        None, "Folder in which every rank writes where windows begin, for seek.", decides_data=False
    )
    digest_pixels: bool = key(False, "Let digests be over the pixels of images too.", decides_data=False)
    check_operators: bool = key(True, "Try the user's own functions before the run.", decides_data=False)

    def __post_init__(self) -> None:
        check_keys(self, PipelineError)
        CacheOptions.from_io_options(self.io_options)
        if self.combine_flag is not None and not callable(self.combine_flag):
            raise PipelineError(f"combine_flag is {seen(self.combine_flag)}; expected a function of one flag.")
        self._check_faults(PipelineError)

    def changed(self, changes: Mapping[str, Any]) -> Options:
        """These options with some changed, all checked."""
        refuse_unknown(changes, [f.name for f in fields(self)], "option", PipelineError)
        return replace(self, **changes)

    @property
    def lanes(self) -> int:
        """L."""
        return resolve_lanes(self.canonical_replicas, global_batch=self.global_batch, dp_degree=self.dp_degree)

    @property
    def cache(self) -> CacheOptions:
        """The cache's part of `io_options`."""
        return CacheOptions.from_io_options(self.io_options)

    @property
    def faults(self) -> FaultPolicy:
        """The fate of rows that cannot be used."""
        return FaultPolicy(self.on_error, self.error_budget, self.error_budget_rows)

    @property
    def ray(self) -> RaySettings:
        """Workers on a Ray cluster."""
        return RaySettings(self.ray_address, self.ray_pool, self.ray_timeout)

    def ready_records(self, microbatch_size: int, record_bytes: int) -> int:
        """Finished records that may wait for the consumer."""
        if self.prefetch_batches is not None:
            return self.prefetch_batches * microbatch_size
        return max(2 * microbatch_size, _READY_BYTES // record_bytes)
