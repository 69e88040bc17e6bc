"""A child process: a fresh interpreter (no fork) that runs one task and ends with its parent.

`multiprocessing.Process` is not used: it imports the training script into every process (with torch that is seconds and
hundreds of MB each), refuses to start any from a worker of a PyTorch `DataLoader`, and shares Ctrl-C with its children.
Here the script is imported only for functions that it defines, and a process ends as soon as its channels are closed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.spawn
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from queue import SimpleQueue
from typing import Any, Protocol

from zephon.columns.faults import reason_of
from zephon.engine.processes.channel import Channel, Closed
from zephon.errors import PipelineError, WorkerError

_GRACE_SECONDS = 2.0
_PARENT_CHECK_SECONDS = 1.0
_START = (
    "import json, sys; setup = json.loads(sys.argv[1]); sys.path[:] = setup['path']; "
    "from zephon.engine.processes.child import main; main(setup['sockets'], setup['parent'])"
)


class ChildTask(Protocol):
    """The work of a child; sent to it by pickle."""

    def run(self, channels: Sequence[Channel]) -> None:
        """Work until a channel raises `Closed`."""


def pickle_task(task: ChildTask) -> bytes:
    """The task, pickled once for any number of children."""
    try:
        return pickle.dumps(task, protocol=5)
    except Exception as error:
        raise PipelineError(
            f"the pipeline cannot be sent to another process ({reason_of(error)}). Define functions and "
            'classes at the top level of a module, or use runner="threads" without isolate.'
        ) from error


class Child:
    """A child process.

    Args:
        task: the result of `pickle_task`.
        channels: number of connections.
        name: its name in messages.

    Raises:
        PipelineError: this process is a child that is importing the training script.
        WorkerError: the process cannot be started.
    """

    def __init__(self, task: bytes, channels: int, name: str) -> None:
        if _importing_script:
            raise PipelineError(
                "the training script starts its pipeline on import, and worker processes import it for the functions "
                'that it defines. Put the code that runs under if __name__ == "__main__":, or move the functions to a '
                "module."
            )
        self._name = name
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._started = False
        self._failure: BaseException | None = None
        theirs: list[Connection] = []
        self.channels: list[Channel] = []
        try:
            for _ in range(channels):
                ours, other = Pipe()
                self.channels.append(Channel(ours))
                theirs.append(other)
            sockets = [other.fileno() for other in theirs]
            setup = json.dumps({"path": sys.path, "sockets": sockets, "parent": os.getpid()})
            # A process group of its own: Ctrl-C in a terminal reaches this process alone, which ends the child.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, setup], stdin=subprocess.DEVNULL, pass_fds=sockets, process_group=0
            )
        except OSError as error:
            raise WorkerError(f"{name} cannot be started: {error.strerror or error}.") from None
        finally:
            for other in theirs:
                other.close()
        data = multiprocessing.spawn.get_preparation_data("zephon") if b"_main__" in task else {}
        script = {key: value for key, value in data.items() if key.startswith("init_main")}
        with suppress(Closed):  # the next receive raises it again
            self.channels[0].send((script, logging.getLogger("zephon").getEffectiveLevel(), pickle.PickleBuffer(task)))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_until_started(self) -> None:
        """Wait for the child's first message. Any number of threads may call this, each before it uses a channel."""
        with self._lock:
            if not self._started:
                self._failure, self._started = self.channels[0].receive(), True
        if self._failure:
            raise self._failure

    def death(self) -> WorkerError:
        """The error to raise where the process ended without sending one."""
        try:
            code = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"ended with exit code {code}"
        if code < 0:
            signal_name = signal.Signals(-code).name if -code in signal.valid_signals() else "an unknown signal"
            hint = ", as by a system that is out of memory" if signal_name == "SIGKILL" else ""
            how = f"was ended by signal {-code} ({signal_name}{hint})"
        return WorkerError(f"{self._name} (process {self.pid}) {how}.")

    def close(self) -> None:
        """End the process; does not wait for it."""
        if os.getpid() != self._owner:  # a fork: the process is not ours
            return
        for channel in self.channels:
            channel.close()
        try:
            threading.Thread(target=self._reap, name="zephon-reaper", daemon=True).start()
        except RuntimeError:  # the interpreter is ending
            self._process.kill()

    def _reap(self) -> None:
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def portable_error(error: BaseException) -> Any:
    """An error in a form that can be sent: it arrives as an exception whose cause holds the traceback as text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        survives = type(copy) is type(error) and str(copy) == str(error)
    except Exception:
        survives = False
    if survives:
        return ExceptionWithTraceback(error, error.__traceback__)
    replacement = WorkerError(f"{reason_of(error)} (in a worker process).")
    replacement.__cause__ = error
    return ExceptionWithTraceback(replacement, None)


_log_records: SimpleQueue[logging.LogRecord] = SimpleQueue()


def keep_logs(level: int) -> None:
    """In a worker: keep what is logged under "zephon" for `log_records`."""
    logger = logging.getLogger("zephon")
    logger.setLevel(level)
    logger.addHandler(QueueHandler(_log_records))
    logger.propagate = False


def log_records() -> list[logging.LogRecord]:
    """In a worker: the log records since the last call."""
    return [_log_records.get() for _ in range(_log_records.qsize())]


def replay_logs(records: Sequence[logging.LogRecord]) -> None:
    """In the parent: log the records of a child."""
    for record in records:
        logging.getLogger(record.name).handle(record)


# ---------------------------------------------------------------------------------------------------------------------
# In the child

_importing_script = False
"""Whether this is a child that is importing the script of its parent."""


def main(sockets: Sequence[int], parent: int) -> None:
    """The main function of a child."""
    global _importing_script
    threading.Thread(target=_end_with_parent, args=(sockets[0], parent), name="zephon-watch", daemon=True).start()
    for fd in sockets:
        os.set_inheritable(fd, False)
    channels = [Channel(Connection(fd)) for fd in sockets]
    with suppress(Closed):
        script, level, task_bytes = channels[0].receive()
        keep_logs(level)
        try:
            if script:
                _importing_script = True
                multiprocessing.spawn.prepare(script)
                _importing_script = False
            task: ChildTask = pickle.loads(task_bytes)
        except BaseException as error:
            failure = error
            if not isinstance(error, PipelineError):
                failure = PipelineError(
                    f"a worker process cannot import what the pipeline's functions need ({reason_of(error)}). Define "
                    "functions and classes at the top level of an importable module or of the training script, not in "
                    "a notebook or at a prompt."
                )
                failure.__cause__ = error
            channels[0].send(portable_error(failure))
            os._exit(1)
        del task_bytes
        channels[0].send(None)
        task.run(channels)
    sys.stdout.flush()


def _end_with_parent(fd: int, parent: int) -> None:
    """End this process when the parent has closed the channel, or has ended while a fork of it keeps it open."""
    poll = select.poll()
    poll.register(fd, 0)  # which reports a hang-up and nothing else
    while not poll.poll(_PARENT_CHECK_SECONDS * 1000) and os.getppid() == parent:
        pass
    time.sleep(_GRACE_SECONDS / 4)  # an idle process ends in order meanwhile
    os._exit(0)
