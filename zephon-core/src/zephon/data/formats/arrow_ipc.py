"""Arrow IPC files, file and stream format, and folders that `save_to_disk` of Hugging Face datasets has written."""

from __future__ import annotations

import json
import posixpath

from zephon.data.fetch import Spans
from zephon.data.formats.base import Format, Shard, corrupt_data_errors
from zephon.data.formats.ipc import IpcShard
from zephon.data.storage import Listing, StoredFile
from zephon.errors import DataError

__all__ = ["ArrowIpc"]


class ArrowIpc(Format):
    """Arrow IPC files. Group offset and length are the bytes of its whole message."""

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc")

    def open_shard(self, file: StoredFile) -> Shard:
        return IpcShard(file)

    def select(self, listing: Listing, keep: list[int], path: str, spans: Spans | None) -> Listing:
        """Of a saved dataset only the files that its state.json names, not what `map` caches beside them."""
        place = {name: i for i, name in enumerate(listing.names)}
        folders = sorted({posixpath.dirname(listing.names[i]) for i in keep})
        if "dataset_dict.json" in place and len(folders) > 1:
            raise DataError(
                f"'{path}' holds several splits ({', '.join(folders[:10])}); append the one to read to the path"
            )
        named: dict[str, set[str]] = {}
        for folder in folders:
            state = place.get(posixpath.join(folder, "state.json"))
            if state is None:
                continue
            file = listing.file(state, spans)
            with corrupt_data_errors(file, "the state of a saved dataset"), file.open() as handle:
                entries = json.loads(handle.read(file.size))["_data_files"]
                named[folder] = {posixpath.join(folder, entry["filename"]) for entry in entries}
            if missing := sorted(named[folder] - set(listing.names)):
                raise DataError(f"'{file.path}' names '{missing[0]}', which is not there; restore the dataset's files")
        kept = []
        for i in keep:
            name = listing.names[i]
            if name in named.get(posixpath.dirname(name), {name}):
                kept.append(i)
        return listing.select(kept)
