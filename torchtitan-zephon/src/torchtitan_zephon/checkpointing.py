"""The state of the data in TorchTitan's distributed checkpoint (DCP).

The loader's part of a checkpoint is one key per lane, an int64[7] tensor (six numbers and their checksum; with
ensure_mixture also one number per dataset), and one key for the run, JSON text as uint8. Every rank writes the keys
of its lanes; DCP deduplicates equal keys. A load requests the keys in the state dict of the new loader, those of the
lanes that it owns: so any topology loads the checkpoint of any other.

DCP's error for a missing key does not name the cause. So the list of keys is read before the first load, if the
trainer's config tells which checkpoint will be loaded.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchtitan_zephon.forms import filesystem
from torchtitan_zephon.trainer_view import TrainerView
from zephon import CheckpointError, merge_checkpoints
from zephon.loader import LaneStart, RunState, Topology, gather, on_first_rank

_RUN, _LANE, _PREFIX = "run", "lane_", "dataloader."
_RUN_BYTES = 256 << 10  # ten thousand datasets take about half of it
_AFRESH = "To begin the data at its start, set --dataloader.start_afresh, which a restarted job may keep."


def to_keys(state: Mapping[str, Any], global_batch: int | None, tokens: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The keys for a state of `Pipeline.checkpoint`.

    Args:
        global_batch: records per step, if known.
        tokens: used by all ranks since the start of the run, by source.

    Raises:
        CheckpointError: the state was taken inside a round, so only ranks of the same topology could load it.
    """
    read = RunState.from_dict(state)
    if read.extra:
        raise CheckpointError(
            f"a checkpoint is taken {read.extra} records after the end of round {read.rounds}; the data can be saved "
            "only at the end of a step whose global batch divides by the number of lanes (canonical_replicas)."
        )
    # The key of the run must be equal on every rank, so parts of single ranks are merged.
    run = replace(read, lanes={}, dp_degree=0, dp_group_id=0).to_dict()
    if read.earlier or read.images:
        run = merge_checkpoints(gather(run))
    return {
        _RUN: _packed(json.dumps({"state": run, "global_batch": global_batch, "tokens": dict(tokens)}, sort_keys=True)),
        **{
            f"{_LANE}{lane}": torch.tensor([*start.as_list(), _checksum(lane, start)], dtype=torch.int64)
            for lane, start in read.lanes.items()
        },
    }


def blank_keys(topology: Topology, numbers: int) -> dict[str, torch.Tensor]:
    """Empty keys of a rank to load into, with `numbers` numbers per lane, checksum included."""
    return {
        _RUN: torch.zeros(_RUN_BYTES, dtype=torch.uint8),
        **{f"{_LANE}{lane}": torch.zeros(numbers, dtype=torch.int64) for lane in topology.owned},
    }


def from_keys(keys: Mapping[str, Any]) -> tuple[dict[str, Any], int | None, dict[str, int]]:
    """The state for `Pipeline.restore`; of the run that saved it the records per step, if known, and tokens by source.

    Raises:
        CheckpointError: the keys are of another loader, or damaged.
    """
    try:
        run = json.loads(_unpacked(keys[_RUN]))
        state, global_batch, tokens = run["state"], run["global_batch"], dict(run.get("tokens", {}))
        lanes = {int(key.removeprefix(_LANE)): keys[key].tolist() for key in keys if key.startswith(_LANE)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error, zlib.error):
        raise CheckpointError(
            f"the data loader's part of the checkpoint has the keys {sorted(map(str, keys))[:5]}; it is damaged or of "
            f"another loader. {_AFRESH}"
        ) from None
    starts = {}
    for lane, numbers in lanes.items():
        start = LaneStart.of(numbers[:-1]) if len(numbers) >= 7 else None
        if start is None or numbers[-1] != _checksum(lane, start):
            raise CheckpointError(
                f"the data loader's part of the checkpoint is damaged: lane {lane} does not match its checksum. Load "
                "another checkpoint (--checkpoint.load_step)."
            )
        starts[lane] = start
    restored = replace(RunState.from_dict(state), lanes=starts).to_dict()
    return restored, global_batch if isinstance(global_batch, int) else None, tokens


def _packed(text: str) -> torch.Tensor:
    """The text as uint8[_RUN_BYTES]: DCP would pickle a str, and needs tensors of the same size in save and load."""
    content = zlib.compress(text.encode())
    if len(content) > _RUN_BYTES - 4:
        raise CheckpointError(
            f"the state of the run takes {len(content)} bytes compressed; expected at most {_RUN_BYTES - 4}. Use fewer "
            "datasets."
        )
    packed = np.zeros(_RUN_BYTES, dtype=np.uint8)
    packed[: 4 + len(content)] = np.frombuffer(struct.pack("<I", len(content)) + content, dtype=np.uint8)
    return torch.from_numpy(packed)


def _unpacked(packed: torch.Tensor) -> str:
    content = packed.numpy().tobytes()
    (size,) = struct.unpack_from("<I", content)
    return zlib.decompress(content[4 : 4 + size]).decode()


def _checksum(lane: int, start: LaneStart) -> int:
    """CRC-32 of the lane index and its state."""
    numbers = lane, *start.as_list()
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers))


@dataclass(frozen=True)
class Ahead:
    """The checkpoint that the trainer is about to load.

    Attributes:
        numbers: numbers per lane, checksum included.
        refusal: error message if the state cannot be loaded, or "".
        absent: whether the checkpoint has no state of Zephon.
    """

    numbers: int
    refusal: str = ""
    absent: bool = False


def look_ahead(view: TrainerView, lanes: int) -> Ahead | None:
    """The checkpoint that the trainer is about to load; None if unknown.

    Collective; the first rank reads. Other faults of the checkpoint are left to DCP.
    """

    def look() -> Ahead | None:
        folder = _about_to_load(view)
        keys = _keys_in(folder) if folder else None
        return None if folder is None or keys is None else _examined(folder, keys, lanes)

    return on_first_rank(look)


def saved_lanes(view: TrainerView) -> int | None:
    """Lanes of the run whose checkpoint the trainer is about to load; None if unknown. Collective."""

    def look() -> int | None:
        folder = _about_to_load(view)
        keys = (_keys_in(folder) if folder else None) or {}
        return sum(key.startswith(_PREFIX + _LANE) for key in keys) or None

    return on_first_rank(look)


def _examined(folder: str, keys: Mapping[str, int], lanes: int) -> Ahead:
    names = [key.removeprefix(_PREFIX) for key in keys if key.startswith(_PREFIX)]
    saved = [keys[f"{_PREFIX}{name}"] for name in names if name.startswith(_LANE)]
    numbers = max(saved, default=0)
    if not any(key.startswith((_PREFIX, "optimizer.", "train_state.", "lr_scheduler.")) for key in keys):
        return Ahead(
            numbers,
            f"the checkpoint {folder} holds only a model (as the last one with last_save_model_only), "
            "so the run cannot be continued from it. Load an earlier one (--checkpoint.load_step), or start "
            "a new run from it in another folder (--checkpoint.initial_load_path).",
        )
    if _RUN not in names:
        content = "the state of another data loader" if names else "no data loader's state"
        return Ahead(numbers, f"the checkpoint {folder} holds {content}. {_AFRESH}", absent=True)
    if len(saved) != lanes:
        return Ahead(
            numbers,
            f"the checkpoint {folder} is of a run with {len(saved)} lanes (canonical_replicas), this run has {lanes}; "
            "the number of lanes is fixed for the life of a run. Set it back, or begin the data at its start with "
            "--checkpoint.exclude_from_loading dataloader.",
        )
    return Ahead(numbers)


def state_left_out(view: TrainerView) -> str | None:
    """The checkpoint that is loaded without its state of the data; None if unknown or none. Collective."""
    checkpoint = getattr(view.config, "checkpoint", None)
    if "dataloader" not in getattr(checkpoint, "exclude_from_loading", ()):
        return None
    return on_first_rank(lambda: _about_to_load(view, excluded=True))


def begins(view: TrainerView) -> bool:
    """Whether the data begin at their start, as far as is known: no state is about to be loaded. Collective."""
    return on_first_rank(lambda: _about_to_load(view) is None)


def _about_to_load(view: TrainerView, *, excluded: bool = False) -> str | None:
    """The checkpoint that the state of the data will be loaded from, or would be; None if unknown or none."""
    checkpoint: Any = getattr(view.config, "checkpoint", None)
    if not getattr(checkpoint, "enable", False):
        return None
    if "dataloader" in getattr(checkpoint, "exclude_from_loading", ()) and not excluded:
        return None
    folder = filesystem.join(getattr(view.config, "dump_folder", ""), checkpoint.folder)
    step = checkpoint.load_step
    try:
        if step == -1 and filesystem.isdir(folder):
            step = max((n for n in map(_step_of, filesystem.listdir(folder)) if _is_whole(folder, n)), default=-1)
        if step != -1:
            return filesystem.join(folder, f"step-{step}") if step else None  # of step 0, the model alone is loaded
        path = checkpoint.initial_load_path
        return str(path) if path and not checkpoint.initial_load_model_only and filesystem.isdir(path) else None
    except OSError:
        return None


def _step_of(name: str) -> int:
    match = re.search(r"step-(\d+)", name)
    return int(match[1]) if match else -1


def _is_whole(folder: str, step: int) -> bool:
    """Whether TorchTitan regards the checkpoint of a step as complete."""
    path = filesystem.join(folder, f"step-{step}")
    return any(filesystem.isfile(filesystem.join(path, f)) for f in (".metadata", "model.safetensors.index.json"))


def _keys_in(folder: str) -> dict[str, int] | None:
    """The keys of a checkpoint and the number of elements of each; None if they cannot be read."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader  # the one that DCP takes for URIs

    reader = FsspecReader if filesystem.is_remote(folder) else FileSystemReader
    try:
        entries = reader(folder).read_metadata().state_dict_metadata
        return {key: math.prod(getattr(value, "size", ())) for key, value in entries.items()}
    except Exception:
        return None
