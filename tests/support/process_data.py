"""Operators for worker processes, and a look at which of these there are."""

import os
import signal
import time
from pathlib import Path

from support.operator_data import Doubled
from zephon.ops.functions import Operator


def children_of(pid):
    """Ids of the processes that a process has at work for it, directly or through others."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has just ended
            continue
        if b"zephon.engine.processes.child" in words and f'"parent": {pid}}}'.encode() in words and state != "Z":
            found.append(int(entry.name))
    return found + [each for child in found for each in children_of(child)]


def wait_until(what, seconds=60):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"waited {seconds} seconds in vain"
        time.sleep(0.05)


def dies_once(row):
    """Ends its process at row 5, unless the file says that it has done so before."""
    if row["number"] == 5 and "DIED" in os.environ and not (path := Path(os.environ["DIED"])).exists():
        path.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def _in_worker():
    return os.environ.get("PARENT", str(os.getpid())) != str(os.getpid())


def dies(row):
    """Ends its process at row 5, in worker processes."""
    if row["number"] == 5 and _in_worker():
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def exits(row):
    if row["number"] == 5 and _in_worker():
        raise SystemExit(3)
    return row


def keeps_number(row):
    return row["number"] % 5 != 2


def slow(row):
    time.sleep(0.002 if "PARENT" in os.environ else 0)
    return row


class Pid(Operator):
    """Writes down in which processes it works."""

    columns = ("text",)

    def __init__(self, folder):
        self.folder = folder

    def setup(self):
        (self.folder / str(os.getpid())).write_text("")

    def __call__(self, table):
        return table


class Unsendable:
    """A function that cannot be pickled."""

    def __init__(self):
        self.lock = open(os.devnull)  # noqa: SIM115

    def __call__(self, row):
        return row


class FailsToBegin(Doubled):
    """Once a file is there."""

    def __init__(self, path):
        self.path = path

    def init_state(self):
        if self.path.exists():
            raise ValueError("no state")
        return super().init_state()
