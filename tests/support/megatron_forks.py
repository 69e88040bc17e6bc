"""Runs Megatron's real pretrain() on the CPU, many times, with its imports paid for once.

As a program it reads one order (JSON) per line and answers with one line; every order is a fresh set of forked ranks.
"""

import contextlib
import json
import multiprocessing
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

BATCH, STEPS, SAVED, SEQ = 8, 6, 2, 64
_STEP = re.compile(r"^loss of step (\d+): (\S+)$", re.MULTILINE)
_VALIDATION = re.compile(r"validation(\S*) loss at iteration (\d+)( on \w+ set)? \| lm loss value: (\S+)")
_WAIT_AFTER_FAILURE = 8  # seconds that the other ranks have to end by themselves


@dataclass
class Outcome:
    """How a run went: exit codes and what was printed, by rank."""

    codes: list[int]
    logs: list[str]
    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        for log in self.logs:
            for step, loss in _STEP.findall(log):
                assert self.losses.setdefault(int(step), float(loss)) == float(loss)  # one on all ranks
            for suffix, iteration, on, loss in _VALIDATION.findall(log):
                self.validation[f"{iteration}{suffix}{on}"] = float(loss)

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    @property
    def log(self) -> str:
        return "\n".join(self.logs)


class Forks:
    """The program, as its caller sees it."""

    def __init__(self, folder: Path) -> None:
        self._count, self._folder = 0, folder
        self._errors = open(folder / "forks.stderr", "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, ranks: int, args: list[str], *, env: dict[str, str], kill_at: int | None = None, **more) -> Outcome:
        """Train on `ranks` ranks; `kill_at`: SIGKILL to all of them once that step is made."""
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir()
        order = {"ranks": ranks, "args": args, "env": env, "kill_at": kill_at, "folder": str(folder), **more}
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


class Megatron:
    """A corpus, and runs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        from support import train_tiny_tokenizer

        self.tokenizer = train_tiny_tokenizer(folder / "tokenizer")
        for name, count in (("a", 600), ("b", 300), ("held-out", 20), ("other", 14)):
            (folder / name).mkdir()
            texts = [f"{name} {i} " + f"some words to fill document {i} " * (1 + i % 13) for i in range(count)]
            for shard in range(2):
                pq.write_table(pa.table({"text": texts[shard::2]}), folder / name / f"{shard}.parquet")
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(
            'seed = 5\ncanonical_replicas = "auto"\nchunk_size = 200\nshuffle_buffer_size = 64\n'
            '[[sources]]\nname = "a"\npath = "a"\nweight = 2.0\n[[sources]]\nname = "b"\npath = "b"\n'
        )
        self.validation, self.other = (
            self._validation(folder / f"{name}.toml", name) for name in ("held-out", "other")
        )
        self._forks = Forks(folder)

    @staticmethod
    def _validation(path: Path, name: str) -> Path:
        path.write_text(f'repeat = false\n[[sources]]\nname = "{name}"\npath = "{name}"\n')
        return path

    def run(
        self,
        name: str,
        ranks: int,
        *more: str,
        micro: int = 2,
        steps: int = STEPS,
        save: int | None = SAVED,
        ckpt: str = "torch_dist",
        kill_at: int | None = None,
        batches: int | None = None,
        sizes: tuple[str, ...] = (f"--global-batch-size={BATCH}", f"--train-iters={STEPS}", "--lr-decay-iters=100"),
    ) -> Outcome:
        """Train in the folder `name`, going on from what is saved there; options of `more` override."""
        out = self.folder / name
        args = [
            f"--zephon-data-config={self.recipe}",
            f"--zephon-ledger={out / 'ledger'}",
            f"--tokenizer-model={self.tokenizer}",
            "--make-vocab-size-divisible-by=8",
            "--num-layers=4",
            "--hidden-size=32",
            "--num-attention-heads=2",
            f"--seq-length={SEQ}",
            f"--max-position-embeddings={SEQ}",
            f"--micro-batch-size={micro}",
            *sizes,
            "--lr=1e-3",
            "--attention-dropout=0",
            "--hidden-dropout=0",
            "--log-interval=1",
            f"--exit-interval={steps}",
            f"--ckpt-format={ckpt}",
            "--distributed-timeout-minutes=2",
        ]
        args.append(f"--load={out / 'model'}")
        if save is not None:
            args += [f"--save={out / 'model'}", f"--save-interval={save}"]
        env = {"ZEPHON_CACHE_DIR": str(self.folder / "cache")}
        order = {} if batches is None else {"batches": batches, "out": str(out)}
        return self._forks.run(ranks, [*args, *more], env=env, kill_at=kill_at, **order)

    def batches(self, name: str, ranks: int, *more: str, micro: int = 2, count: int = 2) -> list[list[dict]]:
        """What `get_batch` gives on every rank, without a model: `count` batches each."""
        import torch

        out = self.folder / name
        out.mkdir()
        run = self.run(name, ranks, *more, micro=micro, save=None, batches=count)
        assert run.ok, run.log
        return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(ranks)]

    def close(self) -> None:
        self._forks.close()

    def copy_checkpoint(self, source: str, target: str, iteration: int) -> Path:
        """Begin the folder `target` with one iteration of `source`; gives the folder of its states."""
        models = self.folder / target / "model"
        copied = f"iter_{iteration:07d}"
        for part in ("", "dataloader"):
            origin = self.folder / source / "model" / part / copied
            if origin.is_dir():
                shutil.copytree(origin, models / part / copied)
        account = self.folder / source / "model" / "dataloader" / "zephon-data.json"
        if account.is_file():
            (models / "dataloader").mkdir(exist_ok=True)
            shutil.copy(account, models / "dataloader")
        (models / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return models / "dataloader" / copied / "mp_rank_00"

    def ledger(self, name: str):
        return read_ledger(self.folder / name / "ledger")

    def digests(self, name: str) -> dict[int, bytes]:
        return self.ledger(name).step_digests(BATCH)


def _rank(order, rank: int, port: int, program, flags) -> None:
    os.setpgid(0, 0)  # with the processes that it starts, which outlive it
    log = os.open(f"{order['folder']}/{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(
        order["env"],
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(order["ranks"]),
        LOCAL_WORLD_SIZE=str(order["ranks"]),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    if "--ckpt-format=torch_dist" in order["args"]:
        # Its first save would spawn a process, which imports everything again.
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    sys.argv = ["pretrain_gpt_zephon.py", *flags, *order["args"]]
    code = 0
    try:
        if "batches" in order:
            _batches(order, rank, program)
        else:
            program.main()
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException as error:
        import traceback

        traceback.print_exc()
        print(f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _batches(order, rank: int, program) -> None:
    """As far as pretrain() goes without a model; then batches, and only batches."""
    import torch
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args
    from megatron.training.initialize import initialize_megatron

    from megatron_zephon import zephon_train_valid_test_datasets_provider as provider
    from megatron_zephon.training import get_batch

    program.parse()
    initialize_megatron(allow_no_cuda=True)
    get_args().iteration = 0
    loader, _, _ = provider((1, 1, 1))
    iterator = None if loader is None else RerunDataIterator(loader)
    made = [get_batch(iterator) for _ in range(order["batches"])]
    made[-1]["saves"] = loader is not None and loader.save_state() is not None
    torch.save(made, f"{order['out']}/{rank}.pt")


def _tell_losses(training) -> None:
    """The printed loss of a second iteration is a mean of two: print what train_step gives, in full."""
    stock = training.train_step

    def train_step(*args, **kwargs):
        given = stock(*args, **kwargs)
        if "lm loss" in given[0]:
            print(f"\nloss of step {kwargs['iteration'] + 1}: {given[0]['lm loss'].item()!r}", flush=True)
        return given

    training.train_step = train_step


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from megatron_zephon import cpu_train

    program = cpu_train.prepare()
    import megatron.training.training
    import torch.utils.tensorboard  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    _tell_losses(megatron.training.training)
    for line in sys.stdin:
        order = json.loads(line)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if not pid:
                _rank(order, rank, port, program, cpu_train.FLAGS)
            pids.append(pid)
        codes: dict[int, int] = {}
        failed_at = None
        while len(codes) < len(pids):
            time.sleep(0.02)
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            kill = False
            if order["kill_at"] is not None:
                logs = [Path(order["folder"], f"{rank}.log") for rank in range(len(pids))]
                kill = any(log.exists() and f"loss of step {order['kill_at']}:" in log.read_text() for log in logs)
            if any(codes.values()):
                failed_at = failed_at or time.monotonic()
                kill = kill or time.monotonic() > failed_at + _WAIT_AFTER_FAILURE
            for rank, pid in enumerate(pids):
                if kill and rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        answers.write(json.dumps([codes[rank] for rank in range(len(pids))]) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
