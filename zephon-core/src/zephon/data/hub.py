"""hf://: datasets of the Hugging Face Hub, at one commit.

    hf://ORG/NAME[@REVISION][/CONFIG]/SPLIT          a split, found as `datasets` finds it
    hf://datasets/ORG/NAME[@REVISION]/PATH           files of the repository by path, folder or pattern

A split is the files that the dataset's card names for it, else those whose path names the split, else (where the
repository has no data files that can be read, only a script) the Parquet files that the Hub made of it. Endpoint,
token and proxies are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, ``hf auth login``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from zephon.data.patterns import select_names, split_pattern
from zephon.data.store import ATTEMPT_SECONDS, Found, Store, StoreFault, check_length

__all__ = ["HubStore"]

_CONVERTED = "refs/convert/parquet"
_PACKED = ("", ".gz", ".zst", ".bz2")
_SUFFIXES = (".parquet", ".arrow", *(kind + packed for kind in (".jsonl", ".ndjson") for packed in _PACKED))
# JSON lines too, where a card or the name of a split says that they are data; much else is called that way.
_JSON = tuple(".json" + packed for packed in _PACKED)
_NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "index.json", "metadata.json"}
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_USAGE = "write hf://ORG/NAME[@REVISION][/CONFIG]/SPLIT, or hf://datasets/ORG/NAME[@REVISION]/PATH"

_T = TypeVar("_T")
_Files = dict[str, tuple[int, str]]  # (bytes, hash of the content) by path


class HubStore(Store):
    """The Hub. A key is the URL of a file of a commit.

    Read by the requests that HfFileSystem makes too, without its look at repository and folder in every process.
    """

    def list(self, path: str) -> Found:
        by_path = path.startswith("datasets/")
        parts = path.removeprefix("datasets/").strip("/").split("/")
        if len(parts) < (2 if by_path else 3):
            _refuse(f"'hf://{path}' names no split; {_USAGE}")
        if "@" in parts[1] and "refs" in parts[1:3]:  # refs/convert/parquet and refs/pr/N have slashes of their own
            parts[1:4] = ["/".join(parts[1:4])]
        name, _, revision = parts[1].partition("@")
        repo, rest = f"{parts[0]}/{name}", parts[2:]
        if len(rest) > 2 and not by_path:
            _refuse(f"'hf://{path}' has too many parts; {_USAGE}")
        commit, configs, files = self._repository(repo, revision or None)
        if by_path:
            return _found(repo, commit, files, _below(files, "/".join(rest)))
        config, split = (rest[0] if len(rest) == 2 else None), rest[-1]
        chosen = _own_files(repo, configs, files, config, split)
        if not chosen:
            commit, files = self._converted(repo, revision, files)
            chosen = _converted_files(repo, files, config, split)
        return _found(repo, commit, files, chosen)

    def ask(self, function: Callable[..., _T], *args: Any, **keywords: Any) -> _T:
        from huggingface_hub import errors

        try:
            return super().ask(function, *args, **keywords)
        except StoreFault as fault:
            if isinstance(fault.__cause__, errors.RevisionNotFoundError | errors.EntryNotFoundError):
                raise StoreFault("missing", "the Hub knows no such revision or file") from fault
            if isinstance(fault.__cause__, errors.GatedRepoError):
                _refuse("access to this dataset must be granted on the Hub first; then log in with 'hf auth login'")
            if isinstance(fault.__cause__, errors.RepositoryNotFoundError):
                _refuse("the Hub knows no such dataset, or not with this token; check the name, HF_TOKEN or 'hf auth'")
            raise

    def head(self, key: str) -> tuple[int, str]:
        from huggingface_hub import get_hf_file_metadata

        found = self.ask(get_hf_file_metadata, key)
        return found.size or 0, found.etag or ""

    def get(self, key: str, start: int, length: int, version: str, size: int) -> Any:
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        headers = {**build_hf_headers(library_name="zephon"), "Range": f"bytes={start}-{start + length - 1}"}
        answer = self.ask(http_backoff, "GET", key, headers=headers, timeout=ATTEMPT_SECONDS, max_retries=1)
        self.ask(hf_raise_for_status, answer)
        # Files of a commit never change, so only the number of bytes can be wrong.
        return check_length(answer.content, length)

    def _repository(self, repo: str, revision: str | None) -> tuple[str, Any, _Files]:
        """(commit, configurations of the card, files) of a dataset at a revision."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        # huggingface_hub reads HF_ENDPOINT when it is imported; whoever sets it later means it too.
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        info = self.ask(api.dataset_info, repo, revision=revision)
        tree = self.ask(
            lambda: list(api.list_repo_tree(repo, recursive=True, revision=info.sha, repo_type="dataset", expand=False))
        )
        files = {
            entry.path: (entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
            for entry in tree
            if isinstance(entry, RepoFile)
        }
        card: Any = info.card_data or {}
        return str(info.sha), card.get("configs"), files

    def _converted(self, repo: str, revision: str, own: Iterable[str]) -> tuple[str, _Files]:
        """The Hub's own conversion; only of the newest revision, so asking for another must not give it silently."""
        kinds = sorted({os.path.splitext(name)[1] for name in own} - {""})
        none = f"dataset '{repo}' has no Parquet, JSONL or Arrow files for that split (it holds {kinds or 'nothing'})"
        if revision and revision != _CONVERTED:
            _refuse(f"{none} at revision '{revision}', and the Hub converts only the newest; name {_CONVERTED}")
        try:
            commit, _, files = self._repository(repo, _CONVERTED)
        except StoreFault as fault:
            if fault.kind == "missing":
                _refuse(f"{none}, and the Hub has not converted it; check the split")
            raise
        return commit, files


def _refuse(reason: str) -> NoReturn:
    raise StoreFault("refused", reason)


def _found(repo: str, commit: str, files: _Files, chosen: Iterable[str]) -> Found:
    from huggingface_hub import hf_hub_url

    keys = {"repo_type": "dataset", "revision": commit, "endpoint": os.environ.get("HF_ENDPOINT") or None}
    found = [(name, *files[name], hf_hub_url(repo, name, **keys)) for name in chosen]
    return Found(f"hf://datasets/{repo}@{commit}", found, commit)


def _below(files: Iterable[str], path: str) -> list[str]:
    """The files that a path, folder or pattern means."""
    path = path.strip("/").removeprefix("./")
    if path in files:
        return [path]
    folder, pattern = split_pattern(path)
    start = f"{folder}/" if folder else ""
    return [start + name for name in select_names(files, folder, pattern)]


def _own_files(repo: str, configs: Any, files: _Files, config: str | None, split: str) -> list[str]:
    """The files of a split in the repository itself: by its card, else by their paths; none where there are none."""
    shown = _below(files, "")
    if not any(name.lower().endswith(_SUFFIXES + _JSON) for name in shown):
        return []
    named = {
        str(card.get("config_name", "default")): card
        for card in configs or ()
        if isinstance(card, dict) and (card.get("data_files") or card.get("data_dir"))
    }
    folder = ""
    if named:
        config = _configuration(repo, named, config)
        folder = str(named[config].get("data_dir") or "").removeprefix("./").strip("/")
        if named[config].get("data_files"):
            chosen = _by_card(repo, named[config]["data_files"], config, folder, files, split)
            # What the card names may be of a kind that only the Hub's conversion makes readable.
            return chosen if any(name.lower().endswith(_SUFFIXES + _JSON) for name in chosen) else []
        shown, config = _below(files, folder), None
        if not shown:
            _refuse(f"the card of dataset '{repo}' names the folder '{folder}', which has no files")
    data = [name for name in shown if name.lower().endswith(_SUFFIXES)]
    loose = [name for name in shown if name.lower().endswith(_JSON) and name.rpartition("/")[2].lower() not in _NO_DATA]
    if config is not None:
        folders = sorted({name.split("/")[0] for name in data if "/" in name})
        data, loose = ([name for name in some if config in name.split("/")[:-1]] for some in (data, loose))
        if not data and not loose:
            if not folders:
                return []
            _refuse(f"dataset '{repo}' has no configuration '{config}'; its folders are {folders}")
    by_split = _naming(_SPLIT_NAMES.get(split, (split,)), len(folder))
    for some in (data, loose):
        if chosen := [name for name in some if by_split(name)]:
            return chosen
    # Files that name no split at all are all for training; loose ones only where the card says that they are data.
    names_any = _naming([word for words in _SPLIT_NAMES.values() for word in words], len(folder))
    for some in (data, loose if folder else []):
        if some and split == "train" and not any(map(names_any, some)):
            return some
    if data:
        _refuse(f"no file of dataset '{repo}' belongs to a split '{split}', for example '{data[0]}'")
    return []


def _naming(words: Iterable[str], skip: int) -> Callable[[str], Any]:
    """Whether a path has one of some words in it, behind its first `skip` characters."""
    wanted = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(map(re.escape, words))})(?:[^a-z]|$)", re.IGNORECASE)
    return lambda name: wanted.search(name[skip:])


def _configuration(repo: str, named: dict[str, Any], config: str | None) -> str:
    """The configuration of the card that is meant."""
    if config is None:
        marked = [name for name, card in named.items() if card.get("default")]
        config = marked[0] if marked else "default" if "default" in named or len(named) > 1 else next(iter(named))
    if config not in named:
        _refuse(f"dataset '{repo}' needs one of its configurations in the path: {sorted(named)}")
    return config


def _by_card(repo: str, data_files: Any, config: str, folder: str, files: _Files, split: str) -> list[str]:
    if isinstance(data_files, dict) and "path" not in data_files:
        data_files = [{"split": name, "path": paths} for name, paths in data_files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        card = entry if isinstance(entry, dict) else {"path": entry}
        paths = card.get("path", [])
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            _refuse(
                f"the card of dataset '{repo}', configuration '{config}', gives {str(paths)[:100]} as a path, where "
                "text or a list of it was expected; name the files: hf://datasets/ORG/NAME/PATH"
            )
        patterns.setdefault(str(card.get("split", "train")), []).extend(paths)
    if split not in patterns:
        _refuse(f"dataset '{repo}', configuration '{config}', has the splits {sorted(patterns)}")
    start = f"{folder}/" if folder else ""
    chosen = {name for pattern in patterns[split] for name in _below(files, start + pattern)}
    if not chosen:
        _refuse(f"the card of dataset '{repo}' names {patterns[split]}, and no such file is there")
    return sorted(chosen)


def _converted_files(repo: str, files: Iterable[str], config: str | None, split: str) -> list[str]:
    """Of CONFIG/SPLIT/0000.parquet, or CONFIG/partial-SPLIT/ where the Hub converted only the beginning."""
    data = [name for name in files if name.endswith(".parquet") and name.count("/") == 2]
    configs = sorted({name.split("/")[0] for name in data})
    if config is None and configs:
        config = "default" if "default" in configs or len(configs) > 1 else configs[0]
    splits = {name.split("/")[1] for name in data if name.split("/")[0] == config}
    if f"partial-{split}" in splits:
        _refuse(
            f"the Hub has converted only the beginning of '{repo}', split '{split}'; to use that, name it: "
            f"hf://datasets/{repo}@{_CONVERTED}/{config}/partial-{split}"
        )
    if split not in splits:
        known = sorted({"/".join(name.split("/")[:2]) for name in data})
        _refuse(f"dataset '{repo}' has no '{config}/{split}'; the Hub converted {known}")
    return [name for name in data if name.startswith(f"{config}/{split}/")]
