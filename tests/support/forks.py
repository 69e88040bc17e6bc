"""Real trainers on the CPU, many times, with their imports paid for once.

`python -m support.forks FRAMEWORK` imports the framework (see `support.torchtitan` and `support.megatron`), reads one
order (JSON) per line and answers with one line. The ranks of every order are fresh forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from support import train_tiny_tokenizer
from zephon.cli.app import app
from zephon.run.ledger import read_ledger

BATCH, STEPS, SEQ = 8, 6, 64
_TESTS = Path(__file__).parents[1]
_WAIT_AFTER_FAILURE = 10  # seconds that the other ranks have to end by themselves
_sleep = time.sleep


@dataclass
class Outcome:
    """Exit codes and printed text, by rank."""

    codes: list[int]
    logs: list[str]

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    @property
    def log(self) -> str:
        return "\n".join(self.logs)


class Runs:
    """A corpus, and runs of a trainer on it; subclasses know its command line and its log."""

    framework: str
    held_out: dict[str, int]
    """Validation sets and their documents."""
    outcome = Outcome

    def __init__(self, folder: Path, pythonpath: str = "") -> None:
        self.folder, self._count = folder, 0
        self.tokenizer = train_tiny_tokenizer(folder / "tokenizer")
        for name, count in {"a": 600, "b": 300, **self.held_out}.items():
            (folder / name).mkdir()
            texts = [f"{name} {i} " + f"some words to fill document {i} " * (1 + i % 13) for i in range(count)]
            for shard in range(2):
                pq.write_table(pa.table({"text": texts[shard::2]}), folder / name / f"{shard}.parquet")
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(
            'seed = 5\ncanonical_replicas = "auto"\nchunk_size = 200\nshuffle_buffer_size = 64\n'
            '[[sources]]\nname = "a"\npath = "a"\nweight = 2.0\n[[sources]]\nname = "b"\npath = "b"\n'
        )
        self.validation = [folder / f"{name}.toml" for name in self.held_out]
        for path in self.validation:
            path.write_text(
                "repeat = false\nshuffle_shards = false\nshuffle_within_shard = false\nshuffle_after_pack = false\n"
                f'[[sources]]\nname = "{path.stem}"\npath = "{path.stem}"\n'
            )
        self._errors = (folder / "forks.stderr").open("w+")
        paths = [pythonpath, str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.forks", self.framework],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, paths))},
        )

    def show(self, steps: str, *more: str | Path) -> list[dict[str, Any]]:
        """What `zephon show` prints of some steps; the tokenizer, sizes and recipe are those of the runs."""
        sizes = ["--tokenizer", self.tokenizer, "--seq-len", SEQ, "--global-batch", BATCH, "--step", steps, "--json"]
        result = CliRunner().invoke(app, ["show", *map(str, [self.recipe, *sizes, *more])])
        assert result.exit_code == 0 and not result.stderr, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    def order(self, ranks: int, args: list[str], *, env: dict[str, str] | None = None, **more: Any) -> Any:
        """Run the trainer on `ranks` ranks.

        Args:
            more: `last_env`, variables of the last rank alone; `kill_at`, SIGKILL to all ranks once that text is in a
                log; the rest is for the framework.
        """
        self._count += 1
        folder = self.folder / f"run-{self._count}"
        folder.mkdir()
        env = {"ZEPHON_CACHE_DIR": str(self.folder / "cache"), **(env or {})}
        order = {"ranks": ranks, "args": args, "env": env, "last_env": {}, "kill_at": None, "folder": str(folder)}
        self._server.stdin.write(json.dumps(order | more) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, (self.folder / "forks.stderr").read_text()
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)]
        return self.outcome(json.loads(answer), logs)

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._errors.close()

    def ledger(self, name: str):
        return read_ledger(self.folder / name / "ledger")

    def digests(self, name: str) -> dict[int, bytes]:
        """By step, counted from 0."""
        return {step - 1: digest for step, digest in self.ledger(name).step_digests(BATCH).items()}


def _run_rank(order: dict[str, Any], rank: int, port: int, framework: Any) -> None:
    os.setpgid(0, 0)  # with the processes that it starts, which may outlive it
    log = os.open(f"{order['folder']}/{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(
        order["env"] | (order["last_env"] if rank == order["ranks"] - 1 else {}),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order["ranks"]),
        LOCAL_WORLD_SIZE=str(order["ranks"]),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    code: Any = 0
    try:
        framework.train(order, rank)
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_ranks(order: dict[str, Any], framework: Any) -> list[int]:
    """Exit codes by rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if not pid:
            _run_rank(order, rank, port, framework)
        pids.append(pid)
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(pids):
        _sleep(0.02)
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + _WAIT_AFTER_FAILURE)
        logs = Path(order["folder"]).glob("*.log") if order["kill_at"] else ()
        if time.monotonic() > deadline or any(order["kill_at"] in log.read_text(errors="replace") for log in logs):
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return [codes[rank] for rank in range(len(pids))]


def _serve(framework: Any) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    framework.prepare()
    for line in sys.stdin:
        answers.write(json.dumps(_run_ranks(json.loads(line), framework)) + "\n")
        answers.flush()
    os._exit(0)  # freeing all that a framework has imported takes seconds


if __name__ == "__main__":
    _serve(import_module(f"support.{sys.argv[1]}"))
