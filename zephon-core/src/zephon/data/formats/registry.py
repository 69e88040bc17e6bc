"""The formats there are, and which one the files of a dataset have.

Formats come from here and from the entry points `zephon.formats` of other packages: an entry point's name is the
format's, its value a `Format` object or a class that makes one. Where two formats claim a file, the one that is listed
first has it, and those of Zephon come first; the other one can be named.
"""

from __future__ import annotations

import difflib
import functools
import posixpath
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from zephon.data.fetch import Spans
from zephon.data.formats.arrow_ipc import ArrowIpc
from zephon.data.formats.base import Format
from zephon.data.formats.jsonl import JsonLines
from zephon.data.formats.lance import Lance
from zephon.data.formats.litdata import LitData
from zephon.data.formats.mds import MosaicShards
from zephon.data.formats.parquet import Parquet
from zephon.data.formats.text import PlainText
from zephon.data.formats.tokens import Megatron, NumpyTokens, PlainTokens
from zephon.data.formats.vortex import Vortex
from zephon.data.formats.webdataset import WebDataset
from zephon.data.storage import Listing
from zephon.errors import DataError, RecipeError

GROUP = "zephon.formats"
# What is about a dataset or a model, and has no rows of its own; tools write these beside the data.
_ABOUT = (
    "config dataset_info dataset_infos dataset_dict state index wids stats metadata croissant package tokenizer vocab "
    "tokenizer_config special_tokens_map added_tokens generation_config preprocessor_config model.safetensors.index"
)


@functools.cache
def formats() -> dict[str, Format]:
    """All formats by name, those of installed packages included.

    Raises:
        RecipeError: an installed package's format that cannot be loaded, or has the name of another one.
    """
    own = [Parquet(), JsonLines(), ArrowIpc(), WebDataset(), Megatron(), NumpyTokens()]
    own += [PlainTokens("uint16"), PlainTokens("uint32"), MosaicShards(), LitData(), Lance(), Vortex()]
    # An installation of an earlier version declares Zephon's own as well.
    added = [entry for entry in entry_points(group=GROUP) if not entry.value.startswith("zephon.")]
    known: dict[str, Format] = {}
    for fmt in (*own, *map(_loaded, added), PlainText()):
        if fmt.name in known:
            raise RecipeError(f"two formats are called '{fmt.name}'; uninstall the package of one of them")
        known[fmt.name] = fmt
    return known


def _loaded(entry: EntryPoint) -> Format:
    try:
        fmt = entry.load()
        fmt = fmt() if isinstance(fmt, type) else fmt
        if not isinstance(fmt, Format) or fmt.name != entry.name:
            raise TypeError(f"it is {fmt!r}; expected a zephon.data.formats.base.Format of that name")
    except Exception as error:
        raise RecipeError(
            f"the format '{entry.name}' ({entry.value}) cannot be loaded ({type(error).__name__}: {error}). Repair or "
            "uninstall its package"
        ) from error
    return fmt


def format_named(name: str) -> Format:
    """The format called `name`; a `RecipeError` with the nearest name when there is none."""
    known = formats()
    if name not in known:
        close = difflib.get_close_matches(str(name).lower(), known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "leave it out to have it found from the files"
        raise RecipeError(f"fmt is '{name}', but must be one of {', '.join(known)}; {hint}")
    return known[name]


def names_say(fmt: str, names: Sequence[str]) -> bool:
    """Whether files of these names are taken for a format that nobody names."""
    return all(kind is not None and kind.name == fmt for kind in _kinds(names))


def select_format(listing: Listing, fmt: str | None, path: str, spans: Spans | None = None) -> tuple[Format, Listing]:
    """The format of a dataset's files, and those files that have it; other kinds of file are passed over.

    Without `fmt` the names decide, and must agree. With `fmt`, files of that format are taken or, where there are none,
    files of no format (a single file that was named is taken as it is). What describes a dataset (an index, a saved
    state) decides which of these count; such files of a store are kept on the node by `spans`.

    Raises:
        DataError: two formats side by side, or no file of the format; a file that is named and not there.
    """
    names = listing.names
    kinds = _kinds(names)
    keep = [i for i, kind in enumerate(kinds) if kind is not None and not kind.is_fallback]
    keep = keep or [i for i, kind in enumerate(kinds) if kind is not None]
    if fmt is not None:
        chosen = format_named(fmt)
        if chosen.found_by_name:
            keep = [i for i, kind in enumerate(kinds) if kind is chosen]
        else:
            keep = [i for i, name in enumerate(names) if name.lower().endswith(chosen.suffixes)]
        keep = keep or [i for i, kind in enumerate(kinds) if kind is None or kind.is_fallback or len(kinds) == 1]
        if not keep:
            raise DataError(
                f"'{path}' holds no {fmt} file (endings {', '.join(chosen.suffixes)}), but for example "
                f"'{names[0]}'; correct the path, or fmt"
            )
    elif keep:
        found: dict[Format, str] = {}
        for i in keep:
            if (kind := kinds[i]) is not None:
                found.setdefault(kind, f"{kind.name} ('{names[i]}')")
        chosen = next(iter(found))
        if len(found) > 1:
            shown = " and ".join([*found.values()][:2])
            raise DataError(f"'{path}' holds files of two formats, {shown}; name the one to read with fmt")
        _refuse_json_beside_lines([names[i] for i in keep], path)
    else:
        known = formats().values()
        endings = dict.fromkeys(suffix for each in known for suffix in each.suffixes if suffix.count(".") == 1)
        lacking = [each for each in known if each.companion and any(n.lower().endswith(each.suffixes) for n in names)]
        companions = " or ".join(each.companion for each in lacking)
        more = f"; a {lacking[0].suffixes[0]} file needs {companions} beside it, or a fmt" if lacking else ""
        raise DataError(
            f"no file of '{path}' has an ending of a known format, for example '{names[0]}'; "
            f"the endings are {', '.join(endings)}, some with .gz, .zst or .bz2. Or name the format with fmt{more}"
        )
    return chosen, chosen.select(listing, keep, path, spans)


def _refuse_json_beside_lines(names: Sequence[str], path: str) -> None:
    """Refuse .json beside .jsonl, which mostly describes the data (a manifest, a schema) and would be read as a row."""
    plain = [name for name in names if name.lower().endswith(".json")]
    lines = [name for name in names if re.search(r"\.(jsonl|ndjson)(\.\w+)?$", name.lower())]
    if plain and lines:
        raise DataError(
            f"'{path}' holds files ending with .json and .jsonl ('{plain[0]}', '{lines[0]}'); expected one ending: "
            'a .json may describe the others. Name the files with a glob such as *.jsonl, or all with fmt = "jsonl"'
        )


def _kinds(names: Sequence[str]) -> list[Format | None]:
    """The format of each file by its name and by what lies beside it; None for files of no format."""
    beside = frozenset(names)
    known = formats().values()
    kinds = [next((fmt for fmt in known if fmt.claims(name, beside)), None) for name in names]
    about = {f"{name}.json" for name in _ABOUT.split()}
    data = [None if posixpath.basename(name) in about else fmt for name, fmt in zip(names, kinds, strict=True)]
    return data if any(data) else kinds
