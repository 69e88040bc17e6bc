"""The state of the data in TorchTitan's distributed checkpoint (DCP).

The loader's part of a checkpoint is one key per lane, an int64[7] tensor (six numbers and their checksum; with
ensure_mixture one number per dataset besides), and one key for the run, uint8 with a JSON text in it. Every rank writes
the keys of its lanes; DCP keeps one of equal keys. A load asks for the keys that the fresh loader lists, which are
those of the lanes that it owns now: so any topology loads what any other saved.

DCP refuses a checkpoint that lacks a key with a message about keys. So before the first load the checkpoint's list of
keys is looked at, where the trainer's config says which checkpoint it will be.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.tools import filesystem

from zephon import CheckpointError, merge_checkpoints
from zephon.loader import LaneStart, RunState, Topology

from .ranks import gathered, is_distributed
from .trainer_view import TrainerView

__all__ = ["Ahead", "Refusal", "blank_keys", "from_keys", "look_ahead", "to_keys"]

_RUN = "run"
_LANE = "lane_"
_PREFIX = "dataloader."
_RUN_BYTES = 256 << 10  # ten thousand datasets take about half of it
_MOST_TEXT = 16 << 20
_MOST_NUMBERS = 1 << 17


def to_keys(state: Mapping[str, Any], global_batch: int | None) -> dict[str, torch.Tensor]:
    """What goes into the checkpoint, for a state of `Pipeline.checkpoint`.

    Args:
        global_batch: records per step, where they are known.

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
    if read.earlier:
        run = merge_checkpoints([json.loads(told) for told in gathered(json.dumps(run).encode())])
    return {
        _RUN: _packed(json.dumps({"state": run, "global_batch": global_batch}, sort_keys=True)),
        **{
            f"{_LANE}{lane}": torch.tensor([*start.as_list(), _check(lane, start)], dtype=torch.int64)
            for lane, start in read.lanes.items()
        },
    }


def blank_keys(topology: Topology, numbers: int) -> dict[str, torch.Tensor]:
    """The keys of a rank, to be loaded into; lanes have so many numbers each, their checksum included."""
    return {
        _RUN: torch.zeros(_RUN_BYTES, dtype=torch.uint8),
        **{f"{_LANE}{lane}": torch.zeros(numbers, dtype=torch.int64) for lane in topology.owned},
    }


def from_keys(keys: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The state, for `Pipeline.restore`, and the records per step of the run that saved it, if it knew them.

    Raises:
        CheckpointError: it is not one of Zephon's, or damaged.
    """
    try:
        run = json.loads(_unpacked(keys[_RUN]))
        state, global_batch = run["state"], run["global_batch"]
        lanes = {
            int(name.removeprefix(_LANE)): [int(number) for number in value.tolist()]
            for name, value in keys.items()
            if name.startswith(_LANE)
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, zlib.error):
        raise CheckpointError(
            f"the data loader's part of the checkpoint has the keys {sorted(map(str, keys))[:5]} and is none of "
            f"Zephon's, or damaged; {_SWITCH}"
        ) from None
    starts = {}
    for lane, numbers in lanes.items():
        start = LaneStart.of(numbers[:-1]) if len(numbers) >= 7 else None
        if start is None or numbers[-1] != _check(lane, start):
            raise CheckpointError(
                f"the data loader's part of the checkpoint is damaged: lane {lane} does not match its checksum; load "
                "another checkpoint (--checkpoint.load_step)."
            )
        starts[lane] = start
    restored = replace(RunState.from_dict(state), lanes=starts).to_dict()
    return restored, global_batch if isinstance(global_batch, int) else None


def _packed(text: str) -> torch.Tensor:
    """The text as uint8[_RUN_BYTES]: DCP would pickle a text, and wants tensors of one size on both sides."""
    content = zlib.compress(text.encode())
    if len(content) > _RUN_BYTES - 4:
        raise CheckpointError(
            f"the state of the run takes {len(content)} bytes compressed, more than the {_RUN_BYTES - 4} there are; "
            "use fewer datasets."
        )
    packed = np.zeros(_RUN_BYTES, dtype=np.uint8)
    packed[: 4 + len(content)] = np.frombuffer(struct.pack("<I", len(content)) + content, dtype=np.uint8)
    return torch.from_numpy(packed)


def _unpacked(packed: torch.Tensor) -> str:
    content = packed.numpy().tobytes()
    size = struct.unpack_from("<I", content)[0]
    reader = zlib.decompressobj()
    text = reader.decompress(content[4 : 4 + size], _MOST_TEXT)
    if not reader.eof:
        raise ValueError("more than a state")
    return text.decode()


def _check(lane: int, start: LaneStart) -> int:
    """CRC-32 of a lane's number and its numbers."""
    numbers = lane, *start.as_list()
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers))


_OF_A_RUN = ("dataloader.", "optimizer.", "train_state.", "lr_scheduler.")
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


@dataclass(frozen=True)
class Ahead:
    """The checkpoint that the trainer is about to load.

    Attributes:
        refusal: why it cannot be loaded, or None.
        numbers: how many numbers it has per lane, their checksum included.
    """

    refusal: Refusal | None
    numbers: int


def look_ahead(view: TrainerView, lanes: int) -> Ahead | None:
    """Looks at the checkpoint that the trainer is about to load; None where none is known of.

    To be called by all ranks alike: the first one looks, and tells the others. Whatever else may be wrong with the
    checkpoint is DCP's to tell.
    """
    mine = b""
    if not is_distributed() or dist.get_rank() == 0:
        try:
            found = _look_ahead(view, lanes)
        except OSError:  # of a folder that cannot be read; the others wait for an answer
            found = None
        mine = b"" if found is None else json.dumps(asdict(found)).encode()
    told = gathered(mine)[0]
    if not told:
        return None
    refused, numbers = (json.loads(told)[name] for name in ("refusal", "numbers"))
    return Ahead(Refusal(**refused) if refused else None, numbers)


def _look_ahead(view: TrainerView, lanes: int) -> Ahead | None:
    folder = _about_to_load(view)
    keys = None if folder is None else _keys_in(folder)
    if folder is None or keys is None:
        return None
    sizes = [size for key, size in keys.items() if key.startswith(f"{_PREFIX}{_LANE}")]
    return Ahead(_refusal(folder, keys, lanes), min(max(sizes, default=0), _MOST_NUMBERS))


def _refusal(folder: str, keys: Collection[str], lanes: int) -> Refusal | None:
    names = [key.removeprefix(_PREFIX) for key in keys if key.startswith(_PREFIX)]
    if not any(key.startswith(_OF_A_RUN) for key in keys):
        return Refusal(
            f"the checkpoint {folder} holds a model alone (TorchTitan writes the last one so with "
            "last_save_model_only), which no run can go on from; load an earlier one (--checkpoint.load_step), or "
            "start a new run from it in another folder (--checkpoint.initial_load_path).",
            False,
        )
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


def _about_to_load(view: TrainerView) -> str | None:
    """Where the data's state will be loaded from; None where it is not known here or none will be."""
    checkpoint: Any = getattr(view.config, "checkpoint", None)
    if not getattr(checkpoint, "enable", False) or "dataloader" in getattr(checkpoint, "exclude_from_loading", ()):
        return None
    folder = filesystem.join(getattr(view.config, "dump_folder", ""), checkpoint.folder)
    step = checkpoint.load_step
    if step == -1 and filesystem.isdir(folder):
        step = max(
            (
                int(found[1])
                for name in filesystem.listdir(folder)
                if (found := re.search(r"step-(\d+)", name))
                and any(
                    filesystem.isfile(filesystem.join(filesystem.join(folder, name), file))
                    for file in (".metadata", "model.safetensors.index.json")
                )
            ),
            default=-1,
        )
    if step != -1:
        return filesystem.join(folder, f"step-{step}") if step else None  # of step 0, the model alone is loaded
    path = checkpoint.initial_load_path
    if path and not checkpoint.initial_load_model_only and filesystem.isdir(path):
        return str(path)
    return None


def _keys_in(folder: str) -> dict[str, int] | None:
    """The keys of a checkpoint and how many numbers there are in each, or None where they cannot be read."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader  # the one that DCP takes for URIs

    reader = FsspecReader if filesystem.is_remote(folder) else FileSystemReader
    try:
        found = reader(folder).read_metadata().state_dict_metadata
        return {key: math.prod(getattr(value, "size", ())) for key, value in found.items()}
    except Exception:
        return None
