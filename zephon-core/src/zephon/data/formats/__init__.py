"""File formats: how the bytes of one shard become groups of rows.

A format is one object of the `Format` protocol in a module of its own, listed in `FORMATS`. It knows nothing of
datasets, row ids or caches: `scan` says which groups a file holds, `open` gives a `ShardReader` that decodes them.

Damage is found as far as a format can tell: gzip, zstd with checksums, bzip2 and Parquet with page checksums find all
of it; elsewhere what says where things lie is checked against the file, and flipped bits inside a text can go unseen.
"""

import difflib
import json
import posixpath

from zephon.data.fetch import Spans
from zephon.data.formats.arrow_ipc import ArrowIpc
from zephon.data.formats.base import Format, Group, ShardReader, ShardScan, corrupt_data_errors
from zephon.data.formats.jsonl import JsonLines
from zephon.data.formats.lance import Lance, as_listed
from zephon.data.formats.litdata import INDEX_NAME, LitData, chunk_names
from zephon.data.formats.mds import MosaicShards, shard_names
from zephon.data.formats.megatron import Megatron, index_name
from zephon.data.formats.numpy_tokens import NumpyTokens, PlainTokens
from zephon.data.formats.parquet import Parquet
from zephon.data.formats.text import PlainText
from zephon.data.formats.vortex import Vortex
from zephon.data.formats.webdataset import WebDataset
from zephon.data.storage import Listing
from zephon.errors import DataError, RecipeError

__all__ = ["FORMATS", "Format", "Group", "ShardReader", "ShardScan", "format_named", "select_format"]

FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        Parquet(),
        JsonLines(),
        ArrowIpc(),
        WebDataset(),
        MosaicShards(),
        LitData(),
        Megatron(),
        NumpyTokens(),
        PlainTokens("uint16"),
        PlainTokens("uint32"),
        Lance(),
        Vortex(),
        PlainText(),
    )
}
# Read only where they are named: nothing in such files says what they are.
_NAMED_ONLY = ("uint16", "uint32")
# Taken only where nothing else is there: a README beside the data is no document.
_LAST = "text"
# Files that describe a dataset, by the format of the files that they describe: no JSON lines.
_DESCRIPTIONS = {
    "arrow": {"state.json", "dataset_info.json", "dataset_dict.json"},
    "mds": {"index.json"},
    "litdata": {INDEX_NAME},
    "webdataset": {"wids.json", "index.json"},
}


def format_named(name: str) -> Format:
    """The format called `name`; a `RecipeError` with the nearest name when there is none."""
    if name not in FORMATS:
        close = difflib.get_close_matches(str(name).lower(), FORMATS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "leave it out to have it found from the files"
        raise RecipeError(f"fmt is '{name}', but must be one of {', '.join(FORMATS)}; {hint}")
    return FORMATS[name]


def select_format(listing: Listing, fmt: str | None, path: str, spans: Spans | None = None) -> tuple[Format, Listing]:
    """The format of a dataset's files, and those files that have it; other kinds of file are passed over.

    Without `fmt` the endings decide, and must agree. With `fmt`, files of that format's endings are taken or, where
    there are none, files whose ending belongs to no format (a single file that was named is taken as it is). Of a
    folder made by `save_to_disk` of datasets, only the files that its state names are taken; of LitData's chunks and
    MDS shards those that index.json names; such files of a store are kept on the node by `spans`.

    Raises:
        DataError: two formats side by side, or no file of the format; a file that is named and not there.
    """
    kinds = _kinds(listing.names)
    if fmt is not None:
        chosen = format_named(fmt)
        if fmt in _NAMED_ONLY:
            keep = [i for i, name in enumerate(listing.names) if name.lower().endswith(chosen.suffixes)]
        else:
            keep = [i for i, kind in enumerate(kinds) if kind == fmt]
        keep = keep or [i for i, kind in enumerate(kinds) if kind in (None, _LAST) or len(kinds) == 1]
        if not keep:
            raise DataError(
                f"'{path}' holds no {fmt} file (endings {', '.join(chosen.suffixes)}), but for example "
                f"'{listing.names[0]}'; correct the path, or fmt"
            )
        return chosen, _saved_files(listing, fmt, keep, path, spans)
    keep = [i for i, kind in enumerate(kinds) if kind is not None and kind != _LAST]
    keep = keep or [i for i, kind in enumerate(kinds) if kind is not None]
    if not keep:
        endings = ", ".join(suffix for name, known in FORMATS.items() if name != "litdata" for suffix in known.suffixes)
        bare = [name for name in listing.names if name.lower().endswith(".bin")]
        more = (
            "; a .bin file needs its .idx file (Megatron) or index.json (LitData) beside it, or a fmt" if bare else ""
        )
        raise DataError(
            f"no file of '{path}' has an ending of a known format, for example '{listing.names[0]}'; "
            f"the endings are {endings}, or name the format with fmt{more}"
        )
    first = keep[0]
    for i in keep:
        if kinds[i] != kinds[first]:
            raise DataError(
                f"'{path}' holds files of two formats, {kinds[first]} ('{listing.names[first]}') and {kinds[i]} "
                f"('{listing.names[i]}'); name the one to read with fmt"
            )
    chosen = FORMATS[str(kinds[first])]
    return chosen, _saved_files(listing, chosen.name, keep, path, spans)


def _kinds(names: list[str]) -> list[str | None]:
    """The format of each file by its name and by what lies beside it; None for files of no format."""
    beside = set(names)
    kinds = [_kind(name, beside) for name in names]
    describing = {name for kind in set(kinds) for name in _DESCRIPTIONS.get(str(kind), ())}
    return [None if posixpath.basename(name) in describing else kind for name, kind in zip(names, kinds, strict=True)]


def _kind(name: str, beside: set[str]) -> str | None:
    lower = name.lower()
    if lower.endswith(".bin"):
        if index_name(name) in beside:
            return "megatron"
        return "litdata" if posixpath.join(posixpath.dirname(name), INDEX_NAME) in beside else None
    found = (fmt for fmt, known in FORMATS.items() if fmt not in _NAMED_ONLY and lower.endswith(known.suffixes))
    return next(found, None)


def _saved_files(listing: Listing, fmt: str, keep: list[int], path: str, spans: Spans | None) -> Listing:
    """The files to read: what describes a dataset decides, where there is such a thing, which files beside it count."""
    if fmt == "lance":
        return as_listed(listing.select(keep), path)
    if fmt in ("litdata", "mds"):
        return listing.select(_indexed(listing, fmt, keep, path, spans))
    if fmt != "arrow":
        return listing.select(keep)
    place = {name: i for i, name in enumerate(listing.names)}
    folders = sorted({posixpath.dirname(listing.names[i]) for i in keep})
    if "dataset_dict.json" in place and len(folders) > 1:
        raise DataError(
            f"'{path}' holds several splits ({', '.join(folders[:10])}); append the one to read to the path"
        )
    states = {folder: place.get(posixpath.join(folder, "state.json")) for folder in folders}
    named: dict[str, set[str]] = {}
    for folder, state in states.items():
        if state is None:
            continue
        file = listing.file(state, spans)
        with corrupt_data_errors(file, "the state of a saved dataset"), file.open() as handle:
            told = json.loads(handle.read(file.size))
            named[folder] = {posixpath.join(folder, entry["filename"]) for entry in told["_data_files"]}
        missing = sorted(named[folder] - set(listing.names))
        if missing:
            raise DataError(f"'{file.path}' names '{missing[0]}', which is not there; restore the dataset's files")
    wanted = [i for i in keep if listing.names[i] in named.get(posixpath.dirname(listing.names[i]), {listing.names[i]})]
    return listing.select(wanted)


def _indexed(listing: Listing, fmt: str, keep: list[int], path: str, spans: Spans | None) -> list[int]:
    """Those of the files `keep` that their index.json names, and those that have none.

    LitData's lies beside the chunks; Mosaic's beside or, where several were merged, above. All that one names must be
    there. A glob or a single file that leaves the index out picks among the files.
    """
    place = {name: i for i, name in enumerate(listing.names)}
    folders = {posixpath.dirname(listing.names[i]): i for i in reversed(keep)}
    above = {parent for folder in folders for parent in _with_parents(folder)} if fmt == "mds" else set(folders)
    named: set[str] = set()
    governed: set[str] = set()
    for folder in sorted(above):
        index = place.get(posixpath.join(folder, INDEX_NAME))
        if index is None and fmt == "mds":
            continue
        at = index if index is not None else folders[folder]
        file = listing.file(at, spans) if index is not None else listing.file(at, spans).beside(INDEX_NAME)
        entries = shard_names(file) if fmt == "mds" else [(name,) for name in chunk_names(file)]
        if entries is None:
            continue
        governed.add(folder)
        for entry in entries:
            names = [posixpath.join(folder, name) for name in entry]
            found = next((name for name in names if name in place), None)
            if found is not None:
                named.add(found)
            elif index is not None:
                raise DataError(
                    f"'{file.path}' names '{entry[0][:200]}', which is not there; restore that file, or write the "
                    "dataset anew"
                )
    kept = [
        i
        for i in keep
        if listing.names[i] in named or governed.isdisjoint(_with_parents(posixpath.dirname(listing.names[i])))
    ]
    if not kept:
        raise DataError(
            f"'{path}' holds no file that its index.json names, but for example '{listing.names[keep[0]]}'; restore "
            "the files that belong to it, or the index"
        )
    return kept


def _with_parents(folder: str) -> list[str]:
    """A relative folder and all above it, "" the last."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:cut]) for cut in range(len(parts), -1, -1)]
