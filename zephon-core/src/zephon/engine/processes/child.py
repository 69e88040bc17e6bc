"""A process of our own: started afresh (not forked), given a task, and gone when this process is.

The child reads its task from its standard input, which this process then keeps open for as long as it lives: when it
has closed, the child ends, whatever it is at. Its process group is its own, so that Ctrl-C in a terminal reaches this
process alone, which ends the child in its turn.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.spawn
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from zephon.columns.faults import reason_of
from zephon.engine.processes.channel import Channel, Stretch, shared_file
from zephon.errors import PipelineError, WorkerError

__all__ = ["Child", "Logged", "RemoteFailure", "Task", "pickled", "portable", "replay", "revived"]

_GRACE_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from zephon.engine.processes.child import main; main(given)"
)

Logged = tuple[str, int, str]
"""Logger, level and text of a log record on its way to the parent."""


class Task(Protocol):
    """What a child does; is sent to it by pickle."""

    def run(self, channels: Sequence[Channel], stretches: Sequence[Stretch]) -> None:
        """Work until a channel ends, which raises EOFError or OSError."""

    def fail(self, error: BaseException, channels: Sequence[Channel]) -> None:
        """The task could not be read in the child; tell it whoever waits. Called on the class."""


def pickled(task: Any) -> bytes:
    """A task as it is sent, once for any number of children.

    Raises:
        PipelineError: it cannot be.
    """
    try:
        made = pickle.dumps(task, protocol=5)
    except Exception as error:
        raise PipelineError(
            f"the pipeline cannot be sent to another process ({reason_of(error)}); use functions and classes that "
            'are defined at the top of a module, or the runner "threads" without isolate.'
        ) from error
    return made


class Child:
    """A process at work for this one.

    Args:
        kind: the class of the task, for a task that cannot be read.
        task: the `pickled` task.
        channels, stretches: how many connections and how much shared memory it gets.
        what: what messages call it.
    """

    def __init__(self, kind: type, task: bytes, *, channels: int, stretches: int, what: str) -> None:
        if _loading:
            raise PipelineError(
                "the training script starts its pipeline when it is imported, and worker processes have to import it "
                'for the functions that it defines; put what it runs under if __name__ == "__main__":, or the '
                "functions into a module."
            )
        self.what = what
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        ends: list[tuple[socket.socket, socket.socket]] = []
        files: list[int] = []
        try:
            ends += (socket.socketpair() for _ in range(channels))
            files += (shared_file() for _ in range(stretches))
            given = {
                "path": list(sys.path),
                "sockets": [theirs.fileno() for _, theirs in ends],
                "files": files,
                "parent": os.getpid(),
            }
            main = multiprocessing.spawn.get_preparation_data("zephon") if b"_main__" in task else {}
            head = {
                "main": {key: value for key, value in main.items() if key.startswith("init_main")},
                "level": logging.getLogger("zephon").getEffectiveLevel(),
                "kind": kind,
            }
            first = pickle.dumps(head)
            self._process = subprocess.Popen(
                [
                    os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable),
                    "-c",
                    _START,
                    json.dumps(given),
                ],
                bufsize=0,
                stdin=subprocess.PIPE,
                pass_fds=[*given["sockets"], *files],  # type: ignore[misc]
                process_group=0,
            )
        except BaseException as error:
            for ours, _ in ends:
                ours.close()
            for fd in files:
                os.close(fd)
            if isinstance(error, OSError):
                raise WorkerError(f"{what} cannot be started: {error.strerror or error}.") from None
            raise
        finally:
            for _, theirs in ends:
                theirs.close()
        self.channels = [Channel(ours) for ours, _ in ends]
        self.stretches = [Stretch(fd) for fd in files]
        # A large task fills the pipe before the child has begun to read.
        feeder = threading.Thread(target=_feed, args=(self._process.stdin, first, task), daemon=True)
        try:
            feeder.start()
        except RuntimeError as error:
            self.close()
            raise WorkerError(f"{what} cannot be started: {error}.") from None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def died(self) -> WorkerError:
        """What to raise where the process is gone without having said why."""
        try:
            code = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"ended with exit code {code}"
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else "an unknown signal"
            hint = ", which is what a system out of memory does" if name == "SIGKILL" else ""
            how = f"was ended by signal {-code} ({name}{hint})"
        return WorkerError(f"{self.what} (process {self.pid}) {how}.")

    def close(self) -> None:
        """End the process; does not wait for it."""
        if os.getpid() != self._owner:  # a fork: the process is not ours, nor are the other ends
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for channel in self.channels:
            channel.close()
        for stretch in self.stretches:
            stretch.close()
        stdin = self._process.stdin
        assert stdin
        stdin.close()
        try:
            threading.Thread(target=_reap, args=(self._process,), name="zephon-reaper", daemon=True).start()
        except RuntimeError:  # the interpreter is going away
            _reap(self._process, 0.0)


def _feed(stdin: Any, head: bytes, task: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # the child is gone, which its channels tell
        for part in (len(head).to_bytes(8, "little") + head + len(task).to_bytes(8, "little"), task):
            left = memoryview(part)
            while left:
                left = left[stdin.write(left) :]


def _reap(process: subprocess.Popen[bytes], seconds: float = _GRACE_SECONDS) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Errors and log records on their way back


class RemoteFailure(Exception):
    """The traceback of an error in another process, as the cause of that error here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def portable(error: BaseException) -> tuple[BaseException, str]:
    """An error that can travel, and its traceback as text."""
    told = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error, told
    except Exception:
        pass
    return WorkerError(f"{reason_of(error)} (in a worker process)."), told


def revived(travelled: tuple[BaseException, str]) -> BaseException:
    """The error of another process, to be raised here."""
    error, told = travelled
    error.__cause__ = RemoteFailure(told)
    return error


class _Collector(logging.Handler):
    """Keeps what is logged in a child until it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Logged] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, record.getMessage()))


_collector = _Collector()


def logged() -> list[Logged]:
    """In a child: what was logged since the last call."""
    made, _collector.records = _collector.records, []
    return made


def replay(records: Sequence[Logged]) -> None:
    """In the parent: log what was logged in a child."""
    for name, level, text in records:
        logging.getLogger(name).log(level, "%s", text)


# ---------------------------------------------------------------------------------------------------------------------
# In the child

_loading = False
"""Whether this is a child that is importing the script of its parent."""


def main(given: dict[str, Any]) -> None:
    """What a child runs."""
    global _loading
    # Ours alone from here on; what the user's code reads from its standard input is nothing.
    life = os.dup(0)
    os.set_inheritable(life, False)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for fd in (*given["sockets"], *given["files"]):
        os.set_inheritable(fd, False)
    channels = [Channel(socket.socket(fileno=fd)) for fd in given["sockets"]]
    stretches = [Stretch(fd) for fd in given["files"]]
    try:
        head, task_bytes = _read(life), _read(life)
    except EOFError:
        os._exit(0)
    threading.Thread(target=_watch, args=(life, given["parent"]), name="zephon-watch", daemon=True).start()
    head = pickle.loads(head)
    log = logging.getLogger("zephon")
    log.setLevel(head["level"])
    log.addHandler(_collector)
    log.propagate = False
    task: Any = None
    try:
        if head["main"]:
            _loading = True
            multiprocessing.spawn.prepare(head["main"])
            _loading = False
        task = pickle.loads(task_bytes)
        del task_bytes
    except BaseException as error:
        what = error if isinstance(error, PipelineError) else _not_loaded(error)
        with contextlib.suppress(OSError, EOFError):
            head["kind"].fail(what, channels)
        os._exit(1)
    # Gone is who would want more: the ordinary end of a child.
    with contextlib.suppress(EOFError, OSError):
        task.run(channels, stretches)
    sys.stdout.flush()


def _not_loaded(error: BaseException) -> PipelineError:
    made = PipelineError(
        f"a worker process cannot import what the pipeline's functions need ({reason_of(error)}); define them at the "
        "top of a module that can be imported, or of the script that is run, and not in a notebook or at a prompt."
    )
    made.__cause__ = error
    return made


def _read(fd: int) -> bytes:
    size = int.from_bytes(_exactly(fd, 8), "little")
    return _exactly(fd, size)


def _exactly(fd: int, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = os.read(fd, min(nbytes, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _watch(life: int, parent: int) -> None:
    """End this process when its parent has closed its standard input, or has gone while a fork of it lives on."""
    poll = select.poll()
    poll.register(life, select.POLLIN | select.POLLHUP)
    while not poll.poll(_LOOK_SECONDS * 1000) and os.getppid() == parent:
        pass
    time.sleep(_GRACE_SECONDS / 4)  # for an orderly end, if there is nothing to do
    os._exit(0)
