"""The state files beside the model's checkpoints.

At each save Megatron writes DIR/iter_0000042/mp_rank_00 (mp_rank_00_000 with pipeline parallelism), one file per
data-parallel rank: train_dataloader_dprank000.pt and so on, each {"dataloader_state_dict": `TrainLoader.save_state()`}.
Megatron never reads these files, and does not delete those of an earlier, larger number of ranks.

They are read without unpickling code (`weights_only`), merged over any number of ranks, and used only if they agree
with each other, the iteration and their checksums.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zephon import CheckpointError
from zephon.loader import RunState

FORMAT = 1
"""Layout of `TrainLoader.save_state()`."""

_RANK_FOLDERS = ("mp_rank_00", "mp_rank_00_000")
_FILE = re.compile(r"train_dataloader_dprank\d{3,}\.pt")
_NUMBERS = {"iteration": "iteration", "consumed": "consumed_train_samples", "dp_size": "dp_size", "time": "time"}
_ITERATION = re.compile(r"iter_(\d{7,})")


def iteration_folder(folder: str | os.PathLike[str], iteration: int) -> Path:
    """The folder of an iteration's states."""
    return Path(folder) / f"iter_{iteration:07d}"


@dataclass(frozen=True)
class _Saved:
    """The state that one rank saved.

    Attributes:
        iteration, consumed: Megatron's iteration and consumed samples when it was saved.
        dp_size: data-parallel ranks of the run that saved it.
        data_start: Megatron's consumed samples where the data began.
        time: time of the save in nanoseconds, to choose the latest of several states.
        run: the lanes.
        tokens: used by the rank, by source; on the first rank with those of earlier processes of all ranks.
    """

    iteration: int
    consumed: int
    dp_size: int
    time: int
    data_start: int
    run: RunState
    tokens: dict[str, int]

    @property
    def moment(self) -> tuple[Any, ...]:
        """A key that is equal for the states of one save of one run."""
        return (
            self.iteration,
            self.consumed,
            self.data_start,
            self.run.rounds,
            self.run.extra,
            repr(self.run.fingerprint),
        )


def _read(path: Path) -> _Saved:
    """Read a file.

    Raises:
        CheckpointError: the file is damaged, or not a state of Zephon.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)["dataloader_state_dict"]
        version = saved["megatron_zephon"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} holds the state of another data loader") from None
    except Exception:  # whatever torch raises for a file that is cut short or no state at all
        raise CheckpointError(f"{path} is damaged or cut short") from None
    if type(version) is not int or version != FORMAT:
        raise CheckpointError(f"{path} has format {version!r}; expected {FORMAT}")
    try:
        run = RunState.from_dict(saved["zephon"])
    except (KeyError, CheckpointError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    numbers = {name: saved.get(key) for name, key in _NUMBERS.items()}
    numbers["data_start"] = saved.get("data_start", 0)
    if not all(isinstance(number, int) for number in numbers.values()):
        raise CheckpointError(f"{path} is damaged: its numbers are {numbers}")
    return _Saved(**numbers, run=run, tokens=dict(saved.get("tokens", {})))


def find_state(
    folders: list[Path], *, iteration: int, consumed: int, fingerprint: Mapping[str, Any]
) -> tuple[list[RunState], int, dict[str, int]]:
    """The states of an iteration that hold all lanes of one run, from any number of files; where its data began, and
    the tokens that it used, by source.

    If a folder has complete states of several saves or runs, those of the present data are preferred, then those at
    `consumed`, then the latest.

    Args:
        folders: to search, in this order; the first that has the iteration is used.
        iteration: of the model that was loaded.
        consumed: Megatron's consumed samples.
        fingerprint: of the present data.

    Raises:
        CheckpointError: no complete state exists.
    """
    folder = next((f for f in folders if _files(iteration_folder(f, iteration))), None)
    if folder is None:
        searched = " and ".join(str(iteration_folder(f, iteration)) for f in folders) or "no folder"
        raise CheckpointError(
            f"the saved state of the data for iteration {iteration}, which the model was loaded from, is missing "
            f"(searched {searched}). Name the folder with --dataloader-load, resume by the number of consumed samples "
            "with --zephon-seek, begin the data at record 0 with --zephon-start-afresh, which keeps iteration and "
            "optimizer, or begin a new run with --finetune."
        )
    reasons, moments = [], dict[tuple[Any, ...], list[_Saved]]()
    for path in _files(iteration_folder(folder, iteration)):
        try:
            saved = _read(path)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        if saved.iteration == iteration:
            moments.setdefault(saved.moment, []).append(saved)
    whole = [group for group in moments.values() if not _missing(group)]
    if whole:
        best = max(
            whole,
            key=lambda group: (
                dict(group[0].run.fingerprint) == dict(fingerprint),
                group[0].consumed == consumed,
                max(saved.time for saved in group),
            ),
        )
        tokens = Counter[str]()
        for each in {tuple(sorted(saved.run.lanes)): saved.tokens for saved in best}.values():
            tokens.update(each)
        return [saved.run for saved in best], best[0].data_start, dict(tokens)
    for group in moments.values():
        ranks = " and ".join(map(str, sorted({saved.dp_size for saved in group})))
        reasons.append(
            f"{len(group)} file{'s' if len(group) > 1 else ''} of a run on {ranks} ranks lack "
            f"{_missing(group)} of {group[0].run.lanes_total} lanes"
        )
    raise CheckpointError(
        f"the saved state of the data in {iteration_folder(folder, iteration)} is incomplete "
        f"({'; '.join(reasons) or 'its files are of other iterations'}). Load another iteration (--ckpt-step), or "
        "resume by the number of consumed samples with --zephon-seek."
    )


def first_state(folders: list[Path], *, iteration: int) -> RunState | None:
    """The first state of an iteration that can be read, which may be incomplete; None without one."""
    for path in itertools.chain.from_iterable(_files(iteration_folder(folder, iteration)) for folder in folders):
        try:
            return _read(path).run
        except CheckpointError:
            continue  # reported where all states are read
    return None


def read_state(path: str | os.PathLike[str]) -> list[RunState]:
    """The state of the data of one iteration, for `Pipeline.restore`.

    Args:
        path: its folder (iter_0001000) in that of --dataloader-save, or a folder or file in it.

    Raises:
        CheckpointError: no complete state is there.
    """
    path = Path(path).absolute()
    for folder in (path, *path.parents):
        if name := _ITERATION.fullmatch(folder.name):
            return find_state([folder.parent], iteration=int(name[1]), consumed=-1, fingerprint={})[0]
    raise CheckpointError(f"{path} holds states of several iterations; name the folder of one, such as iter_0001000.")


def _files(folder: Path) -> list[Path]:
    """The state files of an iteration, in a fixed order."""
    return [
        path
        for name in _RANK_FOLDERS
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if _FILE.fullmatch(path.name)
    ]


def _missing(group: list[_Saved]) -> int:
    """The number of lanes that no file of the group holds."""
    return group[0].run.lanes_total - len({lane for saved in group for lane in saved.run.lanes})


def prune_states(states: str | os.PathLike[str], models: str | os.PathLike[str]) -> list[int]:
    """Delete the saved states of iterations whose model is gone; returns the iterations.

    Only iterations before the latest model are examined, since later ones may be in the middle of a save. Only state
    files, and folders left empty, are deleted.

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
        name, files = _ITERATION.fullmatch(folder.name), _files(folder)
        if name is None or int(name[1]) >= latest or not files or _has_model(Path(models) / folder.name):
            continue
        for path in files:
            path.unlink(missing_ok=True)
        for empty in (*(folder / name for name in _RANK_FOLDERS), folder):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()
        pruned.append(int(name[1]))
    return pruned


def _has_model(folder: Path) -> bool:
    """Whether an iteration's folder holds anything but states."""
    return any(not _FILE.fullmatch(path.name) for path in folder.rglob("*") if not path.is_dir())
