"""The benchmark's side of the protocol: a loader in a process of its own, stopped while others run."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import variables
from benchmarks.peers.protocol import process_tree


class PeerError(Exception):
    """A loader failed, or did not answer in time; the message says how."""


class PeerNotOffered(Exception):
    """A loader has no such thing."""


def memory_mb(root: int) -> float:
    """Memory of a process and its descendants, each shared page counted once."""
    total = 0
    for pid in process_tree(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


class Process:
    """A loader that answers requests; `with` ends it and everything that it started.

    Attributes:
        peak_mb: most memory that its process tree had while it answered, sampled ten times a second.
    """

    def __init__(self, python: str, environment: str, module: str, job: dict[str, Any], log: Path) -> None:
        self.job, self.peak_mb = job, 0.0
        self._log = open(log, "a")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.{module}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=variables(environment), cwd=log.parent, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._stopped = False

    def ask(self, do: str, limit: float, **more: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises: `PeerError`, `PeerNotOffered`.
        """
        self._signal(signal.SIGCONT)
        done = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(done,), daemon=True)
        sampler.start()
        try:
            self._requests.write(json.dumps({**self.job, **more, "do": do}) + "\n")
            self._requests.flush()
            if not self._selector.select(limit):
                self.end()
                raise PeerError(f"no answer within {limit:.0f} s")
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            done.set()
            sampler.join()
        if not line:
            self.end()
            raise PeerError(f"ended with status {self._process.returncode}")
        answer = json.loads(line)
        if "not_offered" in answer:
            raise PeerNotOffered(answer["not_offered"])
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def pause(self) -> None:
        """Stop it and its workers, so that what they prefetch takes no time of others."""
        self._signal(signal.SIGSTOP)

    def _sample(self, done: threading.Event) -> None:
        while not done.wait(0.1):
            self.peak_mb = max(self.peak_mb, memory_mb(self._process.pid))

    def _signal(self, number: int) -> None:
        if self._process.poll() is None and self._stopped != (number == signal.SIGSTOP):
            os.killpg(self._process.pid, number)
            self._stopped = number == signal.SIGSTOP

    def end(self) -> None:
        """End its whole process group."""
        if not self._log.closed:
            with contextlib.suppress(ProcessLookupError):  # its workers too, also where it died itself
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._log.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
