"""Runs TorchTitan's real training on the CPU, many times, with its imports paid for once.

As a program it reads one order (JSON) per line and answers with one line; every order is a fresh set of forked ranks.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zephon.run.ledger import read_ledger

BATCH, STEPS, SAVED, SEQ = 8, 6, 3, 64
_ROW_SIZES = (f"--training.seq_len={SEQ}", "--training.local_batch_size=1", f"--training.global_batch_size={BATCH}")
_FLAT_SIZES = (
    f"--training.max_context_length={SEQ}",
    f"--training.num_tokens_per_microbatch_per_dp_rank={SEQ}",
    f"--training.num_tokens_per_train_step={BATCH * SEQ}",
)
_STEP = re.compile(r"step: +(\d+) +loss: +(\S+)")
_VALIDATION = re.compile(r"validate step: +(\d+) +loss: +(\S+)")


@dataclass
class Outcome:
    """How a run went: exit codes and what was printed, by rank."""

    codes: list[int]
    logs: list[str]
    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)

    def __post_init__(self):
        # Of the last rank: with pipeline parallelism, the first does not know the loss.
        for step, loss in _STEP.findall(self.logs[-1].replace("validate step", "validated")):
            self.losses[int(step)] = float(loss)
        for step, loss in _VALIDATION.findall(self.logs[-1]):
            self.validation[int(step)] = float(loss)

    @property
    def ok(self) -> bool:
        return not any(self.codes)


class Forks:
    """The program, as its caller sees it."""

    def __init__(self, folder: Path, pythonpath: str = "") -> None:
        self._count, self._folder = 0, folder
        self._errors = open(folder / "forks.stderr", "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": pythonpath},
        )

    def run(
        self,
        ranks: int,
        args: list[str],
        *,
        env: dict[str, str],
        last_env: dict[str, str] | None = None,
        kill_at: int | None = None,
    ) -> Outcome:
        """Train on `ranks` ranks.

        Args:
            last_env: more of the environment, for the last rank alone.
            kill_at: SIGKILL to all of them once that step is logged.
        """
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir()
        order = {"ranks": ranks, "args": args, "env": env, "last_env": last_env or {}}
        order |= {"kill_at": kill_at, "folder": str(folder)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "forks.stderr").read_text()
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)]
        return Outcome(json.loads(answer), logs)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._errors.close()


class Titan:
    """A corpus, and runs on it."""

    def __init__(self, folder: Path, *, pythonpath: str = "", flat: bool = False) -> None:
        self.folder, self._flat = folder, flat
        from support import train_tiny_tokenizer

        self.tokenizer = train_tiny_tokenizer(folder / "tokenizer")
        for name, count in (("a", 600), ("b", 300), ("held-out", 16)):
            (folder / name).mkdir()
            texts = [f"{name} {i} " + f"some words to fill document {i} " * (1 + i % 13) for i in range(count)]
            for shard in range(2):
                pq.write_table(pa.table({"text": texts[shard::2]}), folder / name / f"{shard}.parquet")
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(
            'seed = 5\ncanonical_replicas = "auto"\nchunk_size = 200\nshuffle_buffer_size = 64\n'
            '[[sources]]\nname = "a"\npath = "a"\nweight = 2.0\n[[sources]]\nname = "b"\npath = "b"\n'
        )
        self.validation = folder / "validation.toml"
        self.validation.write_text(
            "repeat = false\nshuffle_shards = false\nshuffle_within_shard = false\nshuffle_after_pack = false\n"
            '[[sources]]\nname = "held-out"\npath = "held-out"\n'
        )
        self._forks = Forks(folder, pythonpath)

    def run(
        self,
        name: str,
        ranks: int,
        *more: str,
        kill_at: int | None = None,
        validate: bool = False,
        recipe: Path | None = None,
        env: dict[str, str] | None = None,
        last_env: dict[str, str] | None = None,
    ):
        """Train in the dump folder `name`."""
        dump = self.folder / name
        args = [
            "--module=torchtitan_zephon",
            "--config=llama3_debugmodel_zephon",
            f"--hf_assets_path={self.tokenizer}",
            f"--dump_folder={dump}",
            "--metrics.disable_color_printing",
            f"--training.steps={STEPS}",
            *(_FLAT_SIZES if self._flat else _ROW_SIZES),
            "--training.mixed_precision_param=float32",
            "--debug.seed=3",
            "--checkpoint.enable",
            f"--checkpoint.interval={SAVED}",
            f"--dataloader.ledger={dump / 'ledger'}",
            *more,
        ]
        env = {
            **(env or {}),
            "ZEPHON_RECIPE": str(recipe or self.recipe),
            "ZEPHON_CACHE_DIR": str(self.folder / "cache"),
        }
        if validate:
            env["ZEPHON_VALIDATION_RECIPE"] = str(self.validation)
        return self._forks.run(ranks, args, env=env, last_env=last_env, kill_at=kill_at)

    def close(self) -> None:
        self._forks.close()

    def copy_checkpoint(self, source: str, step: int, target: str) -> None:
        shutil.copytree(
            self.folder / source / "checkpoint" / f"step-{step}", self.folder / target / "checkpoint" / f"step-{step}"
        )

    def ledger(self, name: str):
        return read_ledger(self.folder / name / "ledger")

    def digests(self, name: str) -> dict[int, bytes]:
        return self.ledger(name).step_digests(BATCH)


def _rank(order, rank: int, port: int, train) -> None:
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
    sys.argv = ["train", *order["args"]]
    code = 0
    try:
        train.main()
    except BaseException as error:
        import traceback

        traceback.print_exc()
        print(f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from torchtitan_zephon import cpu_train

    train = cpu_train.prepare()
    import torchtitan_zephon.config_registry  # noqa: F401

    sleep = time.sleep
    import torchtitan.trainer

    # At the end, rank 0 waits two seconds for the others.
    torchtitan.trainer.time = type("time", (), {"perf_counter": time.perf_counter, "sleep": lambda seconds: None})
    for line in sys.stdin:
        order = json.loads(line)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if not pid:
                _rank(order, rank, port, train)
            pids.append(pid)
        codes: dict[int, int] = {}
        failed_at = None
        while len(codes) < len(pids):
            sleep(0.05)
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            log = Path(order["folder"], "0.log")
            kill = order["kill_at"] is not None and log.exists() and f"step: {order['kill_at']:2}  " in log.read_text()
            if any(codes.values()):
                failed_at = failed_at or time.monotonic()
                kill = kill or time.monotonic() > failed_at + 15
            for rank, pid in enumerate(pids):
                if kill and rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        answers.write(json.dumps([codes[rank] for rank in range(len(pids))]) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
