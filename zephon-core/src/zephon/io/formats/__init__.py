"""File formats: how the bytes of one shard become groups of rows.

A format is one object of the `Format` protocol in a module of its own, listed in `FORMATS`. It knows nothing of
datasets, row ids or caches: `scan` says which groups a file holds, `open` gives a `ShardReader` that decodes them.

Damage is found as far as a format can tell: gzip, zstd with checksums and Parquet with page checksums find all of it;
in plain JSON lines, in Arrow IPC and in Parquet pages without checksums, flipped bits inside a text can go unseen.
"""

import difflib

from zephon.errors import DataError, RecipeError
from zephon.io.formats.arrow_ipc import ArrowIpc
from zephon.io.formats.base import Format, Group, ShardReader, ShardScan
from zephon.io.formats.jsonl import JsonLines
from zephon.io.formats.parquet import Parquet
from zephon.io.storage import Listing

__all__ = ["FORMATS", "Format", "Group", "ShardReader", "ShardScan", "format_named", "select_format"]

FORMATS: dict[str, Format] = {known.name: known for known in (Parquet(), JsonLines(), ArrowIpc())}


def format_named(name: str) -> Format:
    """The format called `name`; a `RecipeError` with the nearest name when there is none."""
    if name not in FORMATS:
        close = difflib.get_close_matches(str(name).lower(), FORMATS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "leave it out to have it found from the files"
        raise RecipeError(f"fmt is '{name}', but must be one of {', '.join(FORMATS)}; {hint}")
    return FORMATS[name]


def select_format(listing: Listing, fmt: str | None, path: str) -> tuple[Format, Listing]:
    """The format of a dataset's files, and those files that have it; other kinds of file are passed over.

    Without `fmt` the endings decide, and must agree. With `fmt`, files of that format's endings are taken or, where
    there are none, files whose ending belongs to no format (a single file that was named is taken as it is).

    Raises:
        DataError: two formats side by side, or no file of the format.
    """
    kinds = [_kind(name) for name in listing.names]
    if fmt is not None:
        chosen = format_named(fmt)
        keep = [i for i, kind in enumerate(kinds) if kind == fmt]
        keep = keep or [i for i, kind in enumerate(kinds) if kind is None or len(kinds) == 1]
        if not keep:
            raise DataError(
                f"'{path}' holds no {fmt} file (endings {', '.join(chosen.suffixes)}), but for example "
                f"'{listing.names[0]}'; correct the path, or fmt"
            )
        return chosen, listing.select(keep)
    keep = [i for i, kind in enumerate(kinds) if kind is not None]
    if not keep:
        endings = ", ".join(suffix for known in FORMATS.values() for suffix in known.suffixes)
        raise DataError(
            f"no file of '{path}' has an ending of a known format, for example '{listing.names[0]}'; "
            f"the endings are {endings}, or name the format with fmt"
        )
    first = keep[0]
    for i in keep:
        if kinds[i] != kinds[first]:
            raise DataError(
                f"'{path}' holds files of two formats, {kinds[first]} ('{listing.names[first]}') and {kinds[i]} "
                f"('{listing.names[i]}'); name the one to read with fmt"
            )
    return FORMATS[str(kinds[first])], listing.select(keep)


def _kind(name: str) -> str | None:
    lower = name.lower()
    return next((fmt for fmt, known in FORMATS.items() if lower.endswith(known.suffixes)), None)
