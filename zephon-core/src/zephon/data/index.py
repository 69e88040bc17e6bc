"""What scans and listings found, kept in the cache folder so that later starts and other ranks need not look again.

Both are hints and never authorities: what an index says of a shard is taken only where the listing has the same file,
and one that is missing, damaged or of another version only costs a new look.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock

from zephon.columns.arrow import int64_array, string_array, values_of
from zephon.data.clients import store_of
from zephon.data.storage import Listing, list_files
from zephon.data.store import Source, shown

_log = logging.getLogger(__name__)

_VERSION = 3
_DIGEST_BYTES = 32
_NUMBERS = pa.large_list(pa.int64())

# One row per shard. "columns" is a JSON object of names and types; "digest" and the lists are those of a `ShardScan`.
INDEX_SCHEMA = pa.schema(
    {
        "name": pa.string(),
        "size": pa.int64(),
        "mtime_ns": pa.int64(),
        "digest": pa.string(),
        "columns": pa.string(),
        "group_rows": _NUMBERS,
        "group_bytes": _NUMBERS,
        "group_offset": _NUMBERS,
        "group_length": _NUMBERS,
    }
)
_LISTING = pa.schema(
    {"name": pa.string(), "size": pa.int64(), "mtime_ns": pa.int64(), "key": pa.string(), "version": pa.string()}
)
_RESULT = pa.schema({"result": pa.string()})  # JSON
_JOB_KEYS = (
    "ZEPHON_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE",
)  # fmt: skip
_RANK_KEYS = ("ZEPHON_JOB_ID", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_OLDEST_SECONDS = 7 * 86400.0
_POLL_SECONDS = 0.02


def index_path(index_dir: Path, path: str, fmt: str, size_column: str) -> Path:
    """Where the index of a dataset lies; `path` is absolute."""
    return index_dir / f"{_name([_VERSION, path, fmt, size_column])}.index"


def load_table(index: Path, schema: pa.Schema = INDEX_SCHEMA) -> pa.Table | None:
    """The table kept in a file, or None when there is none that is sound."""
    try:
        data = index.read_bytes()
        payload = memoryview(data)[_DIGEST_BYTES:]
        # Checked first: a flipped bit would pass through Arrow unseen and make row ids of rows that do not exist.
        if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
            raise ValueError("checksum")
        table = pa.ipc.open_file(pa.py_buffer(payload)).read_all()
        if table.schema != schema:
            raise ValueError("schema")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, pa.ArrowException) as error:
        _log.debug("index %s is not usable (%s) and is made anew", index, error)
        return None
    return table


def save_table(index: Path, table: pa.Table) -> None:
    """Writes a table whole or not at all; a folder that cannot be written is a warning, for the run can go on."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    payload = sink.getvalue()
    temporary = index.with_suffix(f".{secrets.token_hex(8)}.tmp")  # several processes may be starting at once
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
        os.replace(temporary, index)
    except OSError as error:
        _log.warning(
            "cannot write to the index folder '%s' (%s); every start will scan and check anew", index.parent, error
        )
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def job_of(environment: Mapping[str, str], parent: str) -> str | None:
    """A name for the job that this process is a rank of, None where it is by itself.

    `parent` names the launcher, the same for all ranks of a node: jobs one after another may share all else.
    """
    if not any(key in environment for key in _RANK_KEYS):
        return None
    if "ZEPHON_JOB_ID" in environment:
        return environment["ZEPHON_JOB_ID"]
    return json.dumps([parent, *(environment.get(key) for key in _JOB_KEYS)])


@contextmanager
def job_listing(uri: str, index_dir: Path | None) -> Iterator[Listing]:
    """The listing of `uri`; while inside, other ranks of this node wait, to find an index of the scan afterwards.

    Where processes are known to be ranks of one job (torchrun, Slurm, MPI launchers and their like set RANK or
    SLURM_PROCID), all of them use one listing, restarts of a rank by its launcher too. A process by itself lists anew,
    so that a run started again sees what has been added.
    """
    job = job_of(os.environ, _parent())
    if index_dir is None or job is None:
        yield list_files(uri)
        return
    kept = index_dir / f"{_name([uri, job])}.listing"
    with _alone(kept, f"every rank lists '{shown(uri)}' by itself"):
        listing = _load_listing(kept, uri)
        if listing is None:
            listing = list_files(uri)
            _save_listing(kept, listing)
        yield listing


def kept_result(index_dir: Path | None, identity: list[object], compute: Callable[[], Any]) -> Any:
    """What `compute` gives (JSON types), which `identity` decides: one process of a node computes it, others find it.

    None is not kept.
    """
    if index_dir is None:
        return compute()
    kept = index_dir / f"{_name([_VERSION, *identity])}.result"
    with _alone(kept, "every rank measures and checks by itself"):
        if (table := load_table(kept, _RESULT)) is not None:
            return json.loads(table["result"][0].as_py())
        if (result := compute()) is not None:
            save_table(kept, pa.table([string_array([json.dumps(result)])], _RESULT))
        return result


@contextmanager
def _alone(kept: Path, otherwise: str) -> Iterator[None]:
    """While inside, other processes that want the same file wait; where that cannot be had, `otherwise` says so."""
    lock = FileLock(kept.with_suffix(".lock"))
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=_POLL_SECONDS)
    except OSError as error:
        _log.warning("cannot lock '%s' (%s); %s", lock.lock_file, error, otherwise)
    try:
        yield
    finally:
        lock.release()


def _name(identity: list[object]) -> str:
    return hashlib.sha256(json.dumps(identity).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _parent() -> str:
    """The process that started this one, in a way that its number alone, which is used again, cannot give."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{parent}/{started}"


def _load_listing(kept: Path, uri: str) -> Listing | None:
    table = load_table(kept, _LISTING)
    if table is None or time.time() - kept.stat().st_mtime > _OLDEST_SECONDS:
        return None
    of = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    store, _ = store_of(uri)
    sources = [Source(store, *at) for at in zip(table["key"].to_pylist(), table["version"].to_pylist(), strict=True)]
    sizes, stamps = (values_of(table[name]).copy() for name in ("size", "mtime_ns"))
    return Listing(of["root"], table["name"].to_pylist(), sizes, stamps, sources, of["pin"])


def _save_listing(kept: Path, listing: Listing) -> None:
    assert listing.sources is not None
    columns = [
        string_array(listing.names),
        int64_array(listing.sizes),
        int64_array(listing.mtimes),
        string_array([source.key for source in listing.sources]),
        string_array([source.version for source in listing.sources]),
    ]
    save_table(kept, pa.table(columns, _LISTING.with_metadata({"root": listing.root, "pin": listing.pin})))
