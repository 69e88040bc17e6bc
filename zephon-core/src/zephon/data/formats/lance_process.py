"""The library of Lance in processes of its own, which may die of a damaged file without taking the run with them.

The library allocates whatever a file claims and ends the process where it cannot; nothing in Python can catch that.
So rows are decoded in children, a few of them, and come back over a pipe as an Arrow stream. As children are started
anew and not forked, processes that were forked from one that read Lance can read it as well.

A request is a line of JSON; an answer is a line of JSON with the length of the Arrow stream that follows it.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa

from zephon.errors import DataError

__all__ = ["ask", "serve"]

_MAX_CHILDREN = 2  # a second to start, 150 MB; each decodes on several threads of its own
_MAX_DATASETS = 16


class _Children:
    """The children of this process that have nothing to do; `turn` bounds how many there are."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.turn = threading.BoundedSemaphore(_MAX_CHILDREN)
        self.idle: list[subprocess.Popen[bytes]] = []
        self.lock = threading.Lock()

    def take(self) -> "subprocess.Popen[bytes]":
        with self.lock:
            if self.idle:
                return self.idle.pop()
        return _started()

    def end(self) -> None:
        for child in self.idle:
            _end(child)


def _started() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", "from zephon.data.formats.lance_process import serve; serve()"]
    pipe = subprocess.PIPE
    # In a session of its own, so that an interrupt of the terminal is the run's to deal with.
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)


_made = _Children()


@atexit.register
def _end_all() -> None:
    _made.end()


def ask(request: dict[str, Any]) -> tuple[dict[str, Any], pa.Table | None]:
    """The answer of the library to a request of `_answer`: what it told, and the rows, if any.

    Raises:
        ValueError: the library could not read it, or ended over it.
        DataError: the library is missing.
    """
    global _made
    if _made.process != os.getpid():  # forked: the children are the parent's
        _made = _Children()
    children = _made
    with children.turn:
        # An idle child may have been ended from outside; a new one that ends does so because of the request.
        answer = _asked(children.take(), children, request) or _asked(_started(), children, request)
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
    return told, pa.ipc.open_stream(body).read_all() if body else None


def _asked(
    child: "subprocess.Popen[bytes]", children: _Children, request: dict[str, Any]
) -> tuple[dict[str, Any], bytes] | None:
    """The answer of a child, None if it ended instead."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        line = child.stdout.readline()
        told = json.loads(line) if line.endswith(b"\n") else None
        body = child.stdout.read(told["bytes"]) if told else b""
    except OSError:
        told, body = None, b""
    except BaseException:  # interrupted in the middle of an answer
        _end(child)
        raise
    if told is None or len(body) != told["bytes"]:
        _end(child)
        return None
    with children.lock:
        children.idle.append(child)
    return told, body


def _end(child: "subprocess.Popen[bytes]") -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    child.kill()
    child.wait()


def serve() -> None:
    """Answers requests from stdin until it ends; the main function of a child."""
    source: IO[bytes] = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    datasets: dict[tuple[str, int], Any] = {}
    for line in source:
        body = b""
        try:
            told, rows = _answer(json.loads(line), datasets)
            if rows is not None:
                stream = pa.BufferOutputStream()
                with pa.ipc.new_stream(stream, rows.schema) as writer:
                    writer.write_table(rows)
                body = stream.getvalue()
        except ImportError as error:
            told = {"missing": str(error)[:100]}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            told = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
        sink.write(json.dumps({**told, "bytes": len(body)}).encode() + b"\n")
        sink.write(body)
        sink.flush()


def _answer(request: dict[str, Any], datasets: dict[tuple[str, int], Any]) -> tuple[dict[str, Any], pa.Table | None]:
    """`folder`, and `version` or, for the newest one, the `stamp` it was listed with.

    With `columns`: `limit` rows of `fragment` from `offset`. Else of the dataset its version, schema (as no rows), and
    fragments by the name of their first data file: what makes each up, and, of the one that is named, its rows; where
    none is named, the data files of all.
    """
    import lance

    version, folder = request.get("version"), request["folder"]
    key = (folder, -version if version is not None else request["stamp"])
    if key not in datasets:
        if len(datasets) >= _MAX_DATASETS:
            datasets.clear()
        dataset = lance.dataset(folder, version=version)
        found = {os.path.basename(part.metadata.files[0].path): part for part in dataset.get_fragments()}
        datasets[key] = dataset, found
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
