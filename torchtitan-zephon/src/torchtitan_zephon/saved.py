"""The state in a checkpoint on disk, for the command `zephon`: read without a trainer, and without unpickling code."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from torchtitan_zephon.checkpointing import _LANE, _PREFIX, _RUN, _RUN_BYTES, from_keys
from zephon import CheckpointError

_RECORDS = "torch.distributed.checkpoint.metadata"
_NAMES = {("torch", "Size"), ("collections", "OrderedDict"), ("torch.serialization", "_get_layout")}
_NAMES |= {("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")}
_NAMES |= {("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")}
_MAX_NUMBERS = 1 << 17  # of a lane


class _Unpickler(pickle.Unpickler):
    """Knows the records that DCP's metadata consist of, and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module in (_RECORDS, "torch") and "." not in name else None
        if isinstance(found, torch.dtype) or (isinstance(found, type) and found.__module__ == _RECORDS):
            return found
        raise pickle.UnpicklingError(f"its metadata name {module}.{name}")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_state(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The state of the data in TorchTitan's checkpoint `folder` (step-1000), for `Pipeline.restore`.

    Raises:
        CheckpointError: the folder holds no such state, or it is damaged.
    """
    try:
        reader = _Reader(folder)
        entries = reader.read_metadata().state_dict_metadata
        keys = {
            key: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if key.startswith((_PREFIX + _RUN, _PREFIX + _LANE)) and isinstance(entry, TensorStorageMetadata)
            if entry.size.numel() <= max(_RUN_BYTES, _MAX_NUMBERS)
        }
        if keys:
            with warnings.catch_warnings(action="ignore"):  # that there is no process group
                load(keys, storage_reader=reader, no_dist=True)
    except Exception as error:  # whatever torch and pickle raise for files that are damaged or no checkpoint
        raise CheckpointError(f"{folder} is no checkpoint that can be read: {error}; name another one.") from None
    if not keys:
        raise CheckpointError(f"{folder} holds no state of Zephon; expected a checkpoint of a run with its loader.")
    return [from_keys({key.removeprefix(_PREFIX): value for key, value in keys.items()})[0]]
