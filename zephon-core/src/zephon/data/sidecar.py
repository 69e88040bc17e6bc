"""The sidecar index: what scans found, kept beside the cache so that a second start opens no data file.

One file per dataset path, format and size column; a hint and never an authority. It is checked against the listing
file by file, and one that is missing, damaged or of another version only costs a new scan.
"""

import hashlib
import json
import logging
import os
import secrets
from pathlib import Path

import pyarrow as pa

__all__ = ["SCHEMA", "load", "location", "save"]

_log = logging.getLogger(__name__)

_VERSION = 3
_DIGEST_BYTES = 32
_NUMBERS = pa.large_list(pa.int64())

# One row per shard. "columns" is a JSON object of names and types; "digest" and the lists are those of a `ShardScan`.
SCHEMA = pa.schema(
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


def location(index_dir: Path, path: str, fmt: str, size_column: str) -> Path:
    """Where the index of a dataset lies; `path` is absolute."""
    key = json.dumps([_VERSION, path, fmt, size_column])
    return index_dir / f"{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.index"


def load(index: Path) -> pa.Table | None:
    """The index, or None when there is none that is sound."""
    try:
        data = index.read_bytes()
        payload = memoryview(data)[_DIGEST_BYTES:]
        # Checked first: a flipped bit would pass through Arrow unseen and make row ids of rows that do not exist.
        if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
            raise ValueError("checksum")
        table = pa.ipc.open_file(pa.py_buffer(payload)).read_all()
        if table.schema != SCHEMA:
            raise ValueError("schema")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, pa.ArrowException) as error:
        _log.debug("index %s is not usable (%s) and is made anew", index, error)
        return None
    return table


def save(index: Path, shards: pa.Table) -> None:
    """Writes the index whole or not at all; a folder that cannot be written is a warning, for the run can go on."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_file(sink, SCHEMA, options=options) as writer:
        writer.write_table(shards)
    payload = sink.getvalue()
    temporary = None
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        temporary = index.with_suffix(f".{secrets.token_hex(8)}.tmp")  # several processes may be starting at once
        with open(temporary, "xb") as file:
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
        os.replace(temporary, index)
    except OSError as error:
        _log.warning("cannot write the index of a dataset to '%s' (%s); every start will scan it", index.parent, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
