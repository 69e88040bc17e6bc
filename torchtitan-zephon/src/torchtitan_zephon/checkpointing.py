"""The state of the data in TorchTitan's distributed checkpoint (DCP).

The loader's part of a checkpoint is one key per lane, an int64[7] tensor (six numbers and their checksum), and one key
for the run, a JSON text. Every rank writes the keys of its lanes; DCP keeps one of equal keys. A load asks for the keys
that the fresh loader lists, which are those of the lanes that it owns now: so any topology loads what any other saved.

DCP refuses a checkpoint that lacks a key with a message about keys. So before the first load the checkpoint's list of
keys is looked at, where the trainer's config says which checkpoint it will be.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zephon import CheckpointError, merge_checkpoints
from zephon.state import LaneStart, RunState

from .trainer_view import TrainerView

__all__ = ["Refusal", "from_keys", "refusal", "to_keys"]

_RUN = "run"
_LANE = "lane_"
_PREFIX = "dataloader."


def to_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the checkpoint, for a state of `Pipeline.checkpoint`.

    Raises:
        CheckpointError: the state was taken inside a round, which no other rank could load.
    """
    read = RunState.from_dict(state)
    if read.extra:
        raise CheckpointError(
            f"a checkpoint is taken {read.extra} records after the end of round {read.rounds}; the data can be saved "
            "only at the end of a step whose global batch divides by the number of lanes (canonical_replicas)."
        )
    # The key of the run has to be the same on every rank, so what ranks know of their own lanes is put together.
    run = replace(read, lanes={}, dp_degree=0, dp_group_id=0).to_dict()
    if read.earlier and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, run)
        run = merge_checkpoints(told)
    return {
        _RUN: json.dumps(run, sort_keys=True),
        **{
            f"{_LANE}{lane}": torch.tensor([*start.as_list(), _check(lane, start)], dtype=torch.int64)
            for lane, start in read.lanes.items()
        },
    }


def from_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The state, for `Pipeline.restore`.

    Raises:
        CheckpointError: it is not one of Zephon's, or damaged.
    """
    try:
        run = json.loads(keys[_RUN])
        lanes = {
            int(name.removeprefix(_LANE)): [int(number) for number in value.tolist()]
            for name, value in keys.items()
            if name.startswith(_LANE)
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"the data loader's part of the checkpoint has the keys {sorted(map(str, keys))[:5]} and is none of "
            f"Zephon's; {_SWITCH}"
        ) from None
    starts = {}
    for lane, numbers in lanes.items():
        start = LaneStart(*numbers[:6]) if len(numbers) == 7 else None
        if start is None or numbers[6] != _check(lane, start):
            raise CheckpointError(
                f"the data loader's part of the checkpoint is damaged: lane {lane} does not match its checksum; load "
                "another checkpoint (--checkpoint.load_step)."
            )
        starts[lane] = start
    return replace(RunState.from_dict(run), lanes=starts).to_dict()


def _check(lane: int, start: LaneStart) -> int:
    """CRC-32 of a lane's number and its six numbers."""
    return zlib.crc32(struct.pack("<7q", lane, *start.as_list()))


_SWITCH = "to begin the data at its start on purpose, set --dataloader.start_afresh, which a restarted job may keep."


@dataclass(frozen=True)
class Refusal:
    """Why a checkpoint cannot be loaded.

    Attributes:
        text: for people.
        absent: whether it holds no state of Zephon's at all.
    """

    text: str
    absent: bool


def refusal(view: TrainerView, lanes: int) -> Refusal | None:
    """Why the checkpoint that the trainer is about to load cannot be loaded, or None.

    To be called by all ranks alike: the first one looks, and tells the others. Whatever else may be wrong with the
    checkpoint is DCP's to tell.
    """
    return _on_first_rank(lambda: _refusal(view, lanes))


def _refusal(view: TrainerView, lanes: int) -> Refusal | None:
    folder = _about_to_load(view)
    keys = None if folder is None else _keys_in(folder)
    if keys is None:
        return None
    names = [key.removeprefix(_PREFIX) for key in keys if key.startswith(_PREFIX)]
    if _RUN not in names:
        what = "no data loader's state" if not names else "the state of another data loader"
        return Refusal(
            f"the checkpoint {folder} holds {what}, so the data cannot go on where it stopped; {_SWITCH}", True
        )
    saved = sum(name.startswith(_LANE) for name in names)
    if saved != lanes:
        return Refusal(
            f"the checkpoint {folder} is of a run with {saved} lanes (canonical_replicas), this run has {lanes}; the "
            "number of lanes is fixed for the life of a run, so set it back, or begin the data at its start with "
            "--checkpoint.exclude_from_loading dataloader.",
            False,
        )
    return None


def _about_to_load(view: TrainerView) -> Path | None:
    """Where the data's state will be loaded from; None where it is not known here or none will be."""
    checkpoint: Any = getattr(view.config, "checkpoint", None)
    if not getattr(checkpoint, "enable", False) or "dataloader" in getattr(checkpoint, "exclude_from_loading", ()):
        return None
    folder = Path(getattr(view.config, "dump_folder", ""), checkpoint.folder)
    step = checkpoint.load_step
    if folder.is_dir() and step == -1:
        step = max(
            (
                int(found[1])
                for entry in folder.iterdir()
                if (found := re.search(r"step-(\d+)", entry.name)) and (entry / ".metadata").is_file()
            ),
            default=-1,
        )
    if step != -1:
        return folder / f"step-{step}" if step else None  # of step 0, the model alone is loaded
    path = checkpoint.initial_load_path
    if path and not checkpoint.initial_load_model_only and os.path.isdir(path):
        return Path(path)
    return None


def _keys_in(folder: Path) -> list[str] | None:
    """The keys of a checkpoint, or None where they cannot be read."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (folder / ".metadata").is_file():
        return None
    try:
        return list(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except Exception:
        return None


def _on_first_rank(look: Callable[[], Refusal | None]) -> Refusal | None:
    """What `look` says on rank 0, on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return look()
    told = [look() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return told[0]
