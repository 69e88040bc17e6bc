"""Which files of a folder belong to which split, by their names alone: the rules of Hugging Face `datasets`.

The first of these rules that finds anything decides: names like data/SPLIT-00000-of-00005.parquet, folders named after
a split, files named after a split, all files. See data_files.py and packaged_modules/__init__.py of `datasets`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch

_IGNORED = frozenset(
    ["README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"]
)
_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
_SHARDED = re.compile(r"data/([^/]+)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")
# A word stands by itself between these, case as it is. A folder may be just the word, a file has an ending behind it.
_FOLDER = r"(?:^|/)(?:[^/]*[-._ 0-9])?(?:{words})(?:[-._ 0-9][^/]*)?/"
_FILE = r"(?:^|/)(?:[^/]*[-._ 0-9])?(?:{words})[-._ 0-9][^/]*$"
_RULES = [{split: re.compile(rule.format(words=words)) for split, words in _WORDS.items()} for rule in (_FOLDER, _FILE)]
# Kinds of files by ending; those without a kind of ours, in the last entry, count where the kind of a split is chosen.
_KINDS = dict.fromkeys((".json", ".jsonl", ".ndjson"), "json")
_KINDS |= {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
_OTHERS = (
    "csv tsv txt xml hdf5 h5 eval lance zip geoparquet gpq blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc "
    "ftc ftu gbr gif grib png apng jp2 j2k jpc jpf jpx j2c icns ico im iim tif tiff jfif jpe jpg jpeg msp pcd pxr pbm "
    "pgm ppm pnm psd bw rgb rgba sgi ras tga icb vda vst webp wmf emf xbm xpm mpg aiff au avr caf flac htk svx mat4 "
    "mat5 mpc2k ogg paf pvf raw rf64 sd2 sds ircam voc w64 wav nist wavex wve xi mp3 opus 3gp 3g2 asf flv m4v webm f4v "
    "wmv wma ogm mxf nut mpeg avi mp4 mov mkv pdf nii"
)
_KINDS |= {f".{ending}": "" for ending in _OTHERS.split()}
# What a card names as `data_files: PATTERN`, as `path: PATTERN`, or in a list below one of these.
_CARD_FILES = re.compile(r"""^\s*(?:-\s+)?(?:(?:path|data_files):\s*|-\s+)["']?([^\s:"']+)["']?\s*$""", re.MULTILINE)
_ABOUT = frozenset(["metadata.csv", "metadata.jsonl", "metadata.parquet"])
_PREFERRED = (".parquet", ".jsonl", ".json", ".csv")


def is_visible(name: str) -> bool:
    """Whether patterns find a file that they do not name."""
    *folders, last = name.split("/")
    return last not in _IGNORED and not (last.startswith(".") or any(part.startswith((".", "__")) for part in folders))


def split_files(names: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """The files of each split, whatever their kind."""
    names = [name for name in names if is_visible(name)]
    sharded: dict[str, list[str]] = {}
    for name in names:
        if match := _SHARDED.fullmatch(name):
            sharded.setdefault(match[1], []).append(name)
    if sharded:
        return sharded
    if logs := [name for name in names if name.endswith(".eval")]:
        return {"logs": logs}
    for rule in _RULES:
        found = {split: [name for name in names if word.search(name)] for split, word in rule.items()}
        if any(found.values()):
            return {split: files for split, files in found.items() if files}
    return {"train": names} if names else {}


def split_warning(names: Sequence[str], card: str) -> str:
    """What speaks against reading all of the data files `names` as one dataset, "" if nothing does.

    `card` is the README.md of the folder. Where its head names data files, `datasets` reads no others.
    """
    splits = split_files(names)
    if len(splits) > 1:
        return f"holds the splits {[*splits]}"
    of_split = {name for files in splits.values() for name in files}
    head = card.split("\n---", 1)[0] if card.startswith("---") and "data_files:" in card else ""
    patterns = _CARD_FILES.findall(head)
    of_card = {name for name in names if not patterns or any(fnmatch(name, each) for each in patterns)}
    others = [name for name in names if is_visible(name) and not (name in of_split and name in of_card)]
    return f"holds '{others[0]}' and others beside the files of its split or card" if others else ""


def readable_files(names: Iterable[str]) -> list[str]:
    """Of the files of a split those of the kind that most have, none where that is not a kind of ours."""
    endings = {name: ["." + ending for ending in name.rpartition("/")[2].split(".")[1:]] for name in names}
    endings = {name: each for name, each in endings.items() if not _KINDS.keys().isdisjoint(each)}
    counts: Counter[tuple[bool, str]] = Counter()
    for name, each in endings.items():
        is_data = name.rpartition("/")[2] not in _ABOUT
        counts.update((is_data, ending.lower()) for ending in each if ending.lower() in _KINDS)
    if not counts:
        return []
    (_, most), _ = max(
        counts.items(), key=lambda item: (item[0][0], item[1], *(item[0][1] == each for each in _PREFERRED), item[0][1])
    )
    return [name for name, each in endings.items() if _KINDS[most] and _KINDS[most] in map(_KINDS.get, each)]
