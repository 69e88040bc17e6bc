"""One listing of a store per job and node: the first rank makes it, the others find it in the cache folder.

Where processes are known to be ranks of one job (torchrun, Slurm, MPI launchers and their like set RANK or
SLURM_PROCID), all of them use one listing, and one of them scans; restarts of a rank by its launcher too. A process by
itself lists anew, so that a run started again sees what has been added.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from zephon.data.storage import Listing, list_files
from zephon.data.stores import store_of
from zephon.data.stores.base import Source, shown

__all__ = ["job_listing", "job_of"]

_log = logging.getLogger(__name__)

_JOB_KEYS = (
    "ZEPHON_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE",
)  # fmt: skip
_RANK_KEYS = ("ZEPHON_JOB_ID", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_OLDEST_SECONDS = 7 * 86400.0
_POLL_SECONDS = 0.02
_SAY_SECONDS = 10.0


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
    """The listing of `uri`; while inside, other ranks of this node wait, to find an index of the scan afterwards."""
    job = job_of(os.environ, _parent())
    if index_dir is None or job is None:
        yield list_files(uri)
        return
    name = hashlib.sha256(json.dumps([uri, job]).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    with _turn(index_dir / f"{name}.lock", uri):
        kept = index_dir / f"{name}.listing"
        listing = _load(kept, uri)
        if listing is None:
            listing = list_files(uri)
            _save(kept, listing)
        yield listing


def _parent() -> str:
    """The process that started this one, in a way that its number alone, which is used again, cannot give."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{parent}/{started}"


@contextmanager
def _turn(lock: Path, uri: str) -> Iterator[None]:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        _log.warning("cannot lock '%s' (%s); every rank lists '%s' by itself", lock, error, shown(uri))
        yield
        return
    try:
        began, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said and time.monotonic() - began > _SAY_SECONDS:
                    said = True
                    _log.info("waiting for another rank of this node, which lists '%s'", shown(uri))
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _load(kept: Path, uri: str) -> Listing | None:
    try:
        if time.time() - kept.stat().st_mtime > _OLDEST_SECONDS:
            return None
        text = kept.read_bytes()
        body = text[64:]
        if hashlib.sha256(body).hexdigest().encode() != text[:64]:
            return None
        plain: dict[str, Any] = json.loads(body)
        store, _ = store_of(uri)
        return Listing(
            plain["root"],
            plain["names"],
            np.array(plain["sizes"], np.int64),
            np.array(plain["mtimes"], np.int64),
            [Source(store, key, version) for key, version in zip(plain["keys"], plain["versions"], strict=True)],
            plain["pin"],
        )
    except (OSError, ValueError, KeyError):
        return None


def _save(kept: Path, listing: Listing) -> None:
    assert listing.sources is not None
    plain = {
        "root": listing.root,
        "names": listing.names,
        "sizes": listing.sizes.tolist(),
        "mtimes": listing.mtimes.tolist(),
        "keys": [source.key for source in listing.sources],
        "versions": [source.version for source in listing.sources],
        "pin": listing.pin,
    }
    body = json.dumps(plain).encode()
    temporary = kept.with_suffix(".tmp")  # under the lock there is one writer
    try:
        temporary.write_bytes(hashlib.sha256(body).hexdigest().encode() + body)
        os.replace(temporary, kept)
    except OSError as error:
        _log.warning("cannot keep the listing in '%s' (%s); every rank lists by itself", kept.parent, error)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
