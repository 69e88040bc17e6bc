"""Lance datasets, read with their own library: a shard is a fragment, named by its first data file.

A Lance dataset is a folder of data files and of versions, each of which says which files count and which of their rows
are deleted. The newest version counts when the dataset is listed, and is read to the end of the run even where further
ones are written meanwhile. Files of older versions have no rows. A group is a run of a fragment's rows.

The library allocates whatever a file claims and ends the process where it cannot; nothing in Python can catch that, and
forks of a process that has used it hang. So it runs in a child process, started anew and not forked, to which a request
is a line of JSON; the answer is a line of JSON and an Arrow stream. Layout and library: https://github.com/lancedb/lance.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.data.columns import top_level
from zephon.data.fetch import Spans
from zephon.data.formats.base import Format, Group, Groups, Shard, run_bounds
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

__all__ = ["Lance", "serve"]

_MAX_DATASETS = 16


class Lance(Format):
    """Lance datasets. Group offset = first row of the fragment, length = version of the dataset."""

    name = "lance"
    suffixes = (".lance",)

    def open_shard(self, file: StoredFile) -> Shard:
        return _LanceShard(file)

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        """Each data file with the time of its dataset's newest version as its own.

        So what an index remembers of a fragment holds until the dataset gets another version.

        Raises:
            DataError: a dataset in a store; data files without a dataset round them, or a dataset that lacks one.
        """
        if listing.sources is not None:
            raise DataError(
                f"Lance datasets are read from local folders by their library, and '{path}' lies in a store; copy it "
                "to this machine or mount it, or write it as Parquet"
            )
        mtimes = listing.mtimes.copy()
        newest: dict[str, int] = {}
        for i in keep:
            folder = _folder(os.path.join(listing.root, listing.names[i]))
            if folder not in newest:
                try:
                    with os.scandir(os.path.join(folder, "_versions")) as entries:
                        stamps = [entry.stat().st_mtime_ns for entry in entries if entry.name.endswith(".manifest")]
                    newest[folder] = max(stamps)
                except (OSError, ValueError):
                    raise DataError(
                        f"'{listing.names[i]}' below '{path}' is no part of a local Lance dataset: no versions are "
                        "beside it; name the dataset's own folder on this machine"
                    ) from None
                _check_complete(folder, newest[folder])
            mtimes[i] = newest[folder]
        return Listing(listing.root, listing.names, listing.sizes, mtimes).select(keep)


class _LanceShard(Shard):
    def __init__(self, file: StoredFile) -> None:
        super().__init__(file)
        self._place = {"folder": _folder(file.path), "fragment": os.path.basename(file.path)}
        self._described, empty = _ask({**self._place, "stamp": file.mtime_ns})
        self.schema = empty.schema

    def scan(self, size_column: str) -> tuple[str, Groups]:
        described, digest = self._described, hashlib.sha256()
        if "rows" not in described:
            return digest.hexdigest()[:32], []
        rows = described["rows"]
        # Data files are never written again, and their names are; so this is all that makes the fragment's rows.
        digest.update(json.dumps(described["made_of"], sort_keys=True).encode())
        per_row = max(1, described["size"] // max(rows, 1))
        bounds = run_bounds(np.full(rows, per_row, np.int64))
        counts = np.diff(bounds)
        versions = np.full(len(counts), described["version"], np.int64)
        return digest.hexdigest()[:32], np.stack([counts, counts * per_row, bounds[:-1], versions], axis=1)

    def ranges(self, group: Group, columns: Sequence[str]) -> None:
        return None

    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        if (size := os.path.getsize(self.file.path)) != self.file.size:
            raise ValueError(f"it has {size} bytes, and was listed with {self.file.size}")
        wanted = top_level(columns, self.schema.names) or self.schema.names[:1]
        rows = {"version": group.length, "columns": wanted, "offset": group.offset, "limit": group.rows}
        return _ask({**self._place, **rows})[1].combine_chunks()


def _check_complete(folder: str, stamp: int) -> None:
    """Raises `DataError` where a data file of the newest version is missing, which no listing can show."""
    try:
        described, _ = _ask({"folder": folder, "fragment": "", "stamp": stamp})
    except ValueError:
        return  # damaged: every file's scan says so, with the file
    missing = sorted(set(described["files"]) - set(os.listdir(os.path.join(folder, "data"))))
    if missing:
        raise DataError(
            f"'{os.path.join(folder, 'data', missing[0])}' is not there, and version {described['version']} of its "
            "Lance dataset is made of it; restore the file, or write the dataset anew"
        )


def _folder(path: str) -> str:
    """The folder of the dataset that a data file belongs to."""
    return os.path.dirname(os.path.dirname(path))


# The child, one per process: half a second to start, 150 MB; it decodes on several threads of its own.
_lock = threading.Lock()
_child: subprocess.Popen[bytes] | None = None
_child_of = 0


def _ask(request: dict[str, Any]) -> tuple[dict[str, Any], pa.Table]:
    """The answer of the library to a request of `_answer`.

    Raises:
        ValueError: the library could not read it, or ended over it.
        DataError: the library is missing.
    """
    with _lock:
        # An idle child may have been ended from outside; a new one that ends does so because of the request.
        answer = _exchange(request) or _exchange(request)
    if answer is None:
        raise ValueError("its library ended the processes that tried to read it")
    told, body = answer
    if "missing" in told:
        raise DataError(
            f"'{request['folder']}' is read with the library lance of the same project, which is missing or does not "
            f"work here ({told['missing']}); install it with: pip install 'zephon-core[lance]'"
        )
    if "error" in told:
        raise ValueError(told["error"])
    return told, pa.ipc.open_stream(body).read_all()


def _exchange(request: dict[str, Any]) -> tuple[dict[str, Any], bytes] | None:
    """The answer of the child, None if it ended instead."""
    global _child, _child_of
    if _child is None or _child_of != os.getpid():  # a fork has its own
        command = [sys.executable, "-c", "from zephon.data.formats.lance import serve; serve()"]
        # In a session of its own, so that an interrupt of the terminal is the run's to deal with. When this process
        # ends, so does its pipe, and with it the child.
        _child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        _child_of = os.getpid()
    child, is_whole = _child, False
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        line = child.stdout.readline()
        told = json.loads(line) if line.endswith(b"\n") else {"bytes": 1}
        body = child.stdout.read(told["bytes"])
        is_whole = len(body) == told["bytes"]
    except OSError:
        pass
    finally:
        if not is_whole:  # it has ended, or this thread was interrupted in the middle of an answer
            child.kill()
            child.wait()
            _child = None
    return (told, body) if is_whole else None


def serve() -> None:
    """Answers requests from stdin until it ends; the main function of a child."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    datasets: dict[tuple[str, int], Any] = {}
    for line in sys.stdin.buffer:
        body = b""
        try:
            told, rows = _answer(json.loads(line), datasets)
            stream = pa.BufferOutputStream()
            with pa.ipc.new_stream(stream, rows.schema) as writer:
                writer.write_table(rows)
            body = stream.getvalue()
        except ImportError as error:
            told = {"missing": str(error)[:100]}
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            told = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        sink.write(json.dumps({**told, "bytes": len(body)}).encode() + b"\n")
        sink.write(body)
        sink.flush()


def _answer(request: dict[str, Any], datasets: dict[tuple[str, int], Any]) -> tuple[dict[str, Any], pa.Table]:
    """`folder`, and `version` or, for the newest one, the `stamp` it was listed with.

    With `columns`: `limit` rows of `fragment` from `offset`. Else the dataset's version, its schema (as no rows), and
    of the fragment that is named, if it is part of that version, its rows and what it is made of; where none is named,
    the data files of all.
    """
    import lance

    version, folder = request.get("version"), request["folder"]
    key = (folder, -version if version is not None else request["stamp"])
    if key not in datasets:
        if len(datasets) >= _MAX_DATASETS:
            datasets.clear()
        dataset = lance.dataset(folder, version=version)
        datasets[key] = dataset, {os.path.basename(p.metadata.files[0].path): p for p in dataset.get_fragments()}
    dataset, fragments = datasets[key]
    fragment = fragments.get(request["fragment"])
    if "columns" in request:
        if fragment is None:
            raise ValueError("it is no part of the version that was listed")
        return {}, fragment.to_table(columns=request["columns"], offset=request["offset"], limit=request["limit"])
    told: dict[str, Any] = {"version": dataset.version}
    if not request["fragment"]:
        told["files"] = [file.path for part in fragments.values() for file in part.metadata.files]
    if fragment is not None:
        fragment.validate()  # that its data files hold as many rows as the version says
        sizes = [file.file_size_bytes or 0 for file in fragment.metadata.files]
        for file, size in zip(fragment.metadata.files, sizes, strict=True):
            now = os.path.getsize(os.path.join(folder, "data", file.path)) if size else 0
            if now != size:
                raise ValueError(f"{file.path} has {now} bytes, where the version says {size}")
        told |= {"rows": fragment.count_rows(), "made_of": fragment.metadata.to_json(), "size": sum(sizes)}
    return told, dataset.schema.empty_table()
