"""The files in which lanes lie beside the model's checkpoints.

Megatron writes them when it saves a model, in DIR/iter_0000042/mp_rank_00 (mp_rank_00_000 with pipeline parallelism),
one per data-parallel rank: train_dataloader_dprank000.pt and so on, each {"dataloader_state_dict": what
`TrainLoader.save_state` gave}. It never reads them, and does not delete those of a former, larger number of ranks.

They are read as untrusted data (`weights_only`), put together from whatever ranks wrote them, and believed only as far
as they agree with each other, the iteration and their checksums.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zephon import CheckpointError
from zephon.loader import RunState

__all__ = ["FORMAT", "Saved", "find_state", "iteration_folder", "prune_states"]

FORMAT = 1
"""Layout of what `save_state` gives."""

_RANK_FOLDERS = ("mp_rank_00", "mp_rank_00_000")
_NUMBERS = {
    "iteration": "iteration",
    "consumed": "consumed_train_samples",
    "cursor": "cursor",
    "dp_size": "dp_size",
    "time": "time",
}
_FILE = re.compile(r"train_dataloader_dprank\d{3,}\.pt")
_ITERATION = re.compile(r"iter_(\d{7,})")


def iteration_folder(folder: str | os.PathLike[str], iteration: int) -> Path:
    """Where the state of an iteration lies."""
    return Path(folder) / f"iter_{iteration:07d}"


@dataclass(frozen=True)
class Saved:
    """What one rank saved.

    Attributes:
        path: of the file.
        iteration, consumed, cursor: Megatron's iteration and consumed samples, and the records used, when it was saved.
        dp_size: data-parallel ranks of the run that saved it.
        time: when, in nanoseconds; tells which of two whole states in one folder is the later.
        state: the lanes, see `Pipeline.checkpoint`.
        run: the same, read.
    """

    path: Path
    iteration: int
    consumed: int
    cursor: int
    dp_size: int
    time: int
    state: Mapping[str, Any]
    run: RunState

    @staticmethod
    def read(path: Path) -> Saved:
        """Read a file, trusting nothing in it.

        Raises:
            CheckpointError: it is none of Zephon's, or damaged.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            saved = content["dataloader_state_dict"]
            format_of = saved["megatron_zephon"]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except (KeyError, TypeError):
            raise CheckpointError(f"{path} holds the state of another data loader") from None
        except Exception:  # whatever torch raises for a file that is cut short or no state at all
            raise CheckpointError(f"{path} is damaged or cut short") from None
        if not isinstance(format_of, int) or format_of != FORMAT:
            raise CheckpointError(f"{path} has format {format_of!r}, this version reads {FORMAT}")
        try:
            run = RunState.from_dict(saved["zephon"])
        except (KeyError, CheckpointError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        numbers = {name: saved.get(key) for name, key in _NUMBERS.items()}
        if not all(isinstance(number, int) for number in numbers.values()):
            raise CheckpointError(f"{path} is damaged: it says {numbers}")
        if numbers["cursor"] != run.rounds * run.lanes_total + run.extra * run.dp_degree:
            raise CheckpointError(f"{path} is damaged: its cursor {numbers['cursor']} is not that of its lanes")
        return Saved(path=path, **numbers, state=saved["zephon"], run=run)

    @property
    def moment(self) -> tuple[Any, ...]:
        """Equal for what was saved at one place of one run."""
        return (self.iteration, self.consumed, self.cursor, self.run.rounds, self.run.extra, repr(self.run.fingerprint))


def find_state(
    folders: list[Path], *, iteration: int, consumed: int, fingerprint: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The states of an iteration that hold all lanes of one run, from however many files.

    Where a folder holds whole states of several moments or runs, the one of this data, then the one at `consumed`, then
    the latest is taken.

    Args:
        folders: to look in, in this order; the first that has the iteration is used.
        iteration: that the model was loaded from.
        consumed: Megatron's consumed samples.
        fingerprint: of the data as they are now.

    Raises:
        CheckpointError: there is no state, or no whole one.
    """
    folder = next((f for f in folders if _files(iteration_folder(f, iteration))), None)
    if folder is None:
        looked = " and ".join(str(iteration_folder(f, iteration)) for f in folders) or "any folder"
        raise CheckpointError(
            f"there is no saved state of the data for iteration {iteration}, which the model was loaded from (looked "
            f"in {looked}); name the folder with --dataloader-load, or find the place by the number of consumed "
            "samples with --zephon-seek, or begin a new run with --finetune."
        )
    damaged, moments = [], dict[tuple[Any, ...], list[Saved]]()
    for path in _files(iteration_folder(folder, iteration)):
        try:
            saved = Saved.read(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if saved.iteration == iteration:
            moments.setdefault(saved.moment, []).append(saved)
    whole = [group for group in moments.values() if not _missing(group)]
    if not whole:
        raise CheckpointError(_incomplete(folder, iteration, damaged, list(moments.values())))
    best = max(
        whole,
        key=lambda group: (
            dict(group[0].run.fingerprint) == dict(fingerprint),
            group[0].consumed == consumed,
            max(saved.time for saved in group),
        ),
    )
    return [saved.state for saved in best]


def _files(folder: Path) -> list[Path]:
    """The state files of an iteration, in a fixed order."""
    return [
        path
        for name in _RANK_FOLDERS
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if _FILE.fullmatch(path.name)
    ]


def _missing(group: list[Saved]) -> int:
    """How many lanes a group of files lacks."""
    held: set[int] = set()
    for saved in group:
        held.update(saved.run.lanes)
    return group[0].run.lanes_total - len(held)


def _incomplete(folder: Path, iteration: int, damaged: list[str], groups: list[list[Saved]]) -> str:
    reasons = list(damaged)
    for group in groups:
        ranks = sorted({saved.dp_size for saved in group})
        reasons.append(
            f"{len(group)} file{'s' if len(group) > 1 else ''} of a run on {' and '.join(map(str, ranks))} ranks lack "
            f"{_missing(group)} of {group[0].run.lanes_total} lanes"
        )
    if not reasons:
        reasons.append("its files are of other iterations")
    return (
        f"the saved state of the data in {iteration_folder(folder, iteration)} is incomplete ({'; '.join(reasons)}); "
        "load another iteration (--ckpt-step), or find the place by the number of consumed samples with --zephon-seek."
    )


def prune_states(states: str | os.PathLike[str], models: str | os.PathLike[str]) -> list[int]:
    """Delete the saved states of iterations whose model is gone; gives the iterations.

    Only what is older than the latest model is looked at, so that nothing which is being saved is touched. Only state
    files are deleted, and folders that are empty then.

    Args:
        states: the folder of --dataloader-save.
        models: the folder of --save.
    """
    try:
        latest = int(Path(models, "latest_checkpointed_iteration.txt").read_text().strip())
    except (OSError, ValueError):
        return []
    pruned = []
    for folder in sorted(Path(states).glob("iter_*")):
        found = _ITERATION.fullmatch(folder.name)
        if found is None or int(found[1]) >= latest or _has_model(Path(models) / folder.name):
            continue
        files = _files(folder)
        for path in files:
            path.unlink(missing_ok=True)
        for empty in (*(folder / name for name in _RANK_FOLDERS), folder):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()
        if files:
            pruned.append(int(found[1]))
    return pruned


def _has_model(folder: Path) -> bool:
    """Whether an iteration's folder holds anything but states."""
    return folder.is_dir() and any(not _FILE.fullmatch(path.name) for path in folder.rglob("*") if not path.is_dir())
