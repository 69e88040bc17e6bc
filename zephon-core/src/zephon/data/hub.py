"""hf://: datasets of the Hugging Face Hub, at one commit.

    hf://ORG/NAME[@REVISION][/CONFIG]/SPLIT          a split, found as `datasets` finds it
    hf://datasets/ORG/NAME[@REVISION]/PATH           files of the repository by path, folder or pattern

A split is the files that the dataset's card names for it, else those that `zephon.data.splits` finds (below the folder
that the card or CONFIG names), else (where these are of no kind that is read here) the Parquet files that the Hub made
of it. Endpoint, token and proxies are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, ``hf auth login``).
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePosixPath
from typing import Any, TypeVar

from zephon.data.patterns import HIDDEN, MAGIC, select_names, split_pattern, table_of
from zephon.data.splits import is_visible, readable_files, split_files
from zephon.data.store import ATTEMPT_SECONDS, Found, Store, StoreFault, check_length

_CONVERTED = "refs/convert/parquet"
_USAGE = "write hf://ORG/NAME[@REVISION][/CONFIG]/SPLIT, or hf://datasets/ORG/NAME[@REVISION]/PATH"
_GATED = "access to this dataset must be granted on the Hub first; then 'hf auth login'"
_UNKNOWN = "the Hub knows no such dataset, or not with this token; check the name, HF_TOKEN or 'hf auth'"

_T = TypeVar("_T")
_Files = dict[str, tuple[int, str]]  # (bytes, hash of the content) by path


class HubStore(Store):
    """The Hub, by the requests that HfFileSystem makes too. A key is the URL of a file of a commit."""

    def list(self, path: str) -> Found:
        by_path, repo, revision, rest = _parts(path)
        if not (by_path or 1 <= len(rest) <= 2):
            raise _refused(f"'hf://{path}' names no split; {_USAGE}")
        commit, configs, files = self._repository(repo, revision or None)
        if by_path:
            chosen = _below(files, "/".join(rest))
        else:
            config, split = (rest[0] if len(rest) == 2 else None), rest[-1]
            chosen = _own_files(repo, configs, files, config, split)
            if not chosen:
                commit, files = self._converted(repo, revision, files)
                chosen = _converted_files(repo, files, config, split)
        return _found(repo, commit, files, chosen)

    def key_below(self, path: str, name: str) -> str:
        from huggingface_hub import hf_hub_url

        by_path, repo, revision, rest = _parts(path)
        if not by_path:
            raise _refused(f"'hf://{path}' names no folder; write hf://datasets/ORG/NAME[@REVISION]/PATH")
        endpoint = os.environ.get("HF_ENDPOINT") or None
        file = "/".join([*rest, name])
        return hf_hub_url(repo, file, repo_type="dataset", revision=revision or None, endpoint=endpoint)

    def ask(self, function: Callable[..., _T], *args: Any, **keywords: Any) -> _T:
        from huggingface_hub import errors

        try:
            return super().ask(function, *args, **keywords)
        except StoreFault as fault:
            if isinstance(fault.__cause__, errors.RepositoryNotFoundError):  # a gated one is of this kind too
                raise _refused(_GATED if isinstance(fault.__cause__, errors.GatedRepoError) else _UNKNOWN) from fault
            if isinstance(fault.__cause__, errors.RevisionNotFoundError | errors.EntryNotFoundError):
                raise StoreFault("missing", "the Hub knows no such revision or file") from fault
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
        tree = self.ask(lambda: list(api.list_repo_tree(repo, recursive=True, revision=info.sha, repo_type="dataset")))
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
            raise _refused(f"{none} at revision '{revision}', and the Hub converts only the newest; name {_CONVERTED}")
        try:
            commit, _, files = self._repository(repo, _CONVERTED)
        except StoreFault as fault:
            if fault.kind == "missing":
                raise _refused(f"{none}, and the Hub has not converted it; check the split") from fault
            raise
        return commit, files


def _parts(path: str) -> tuple[bool, str, str, list[str]]:
    """Whether it names files by their path, the repository, its revision ("" for the newest), and the rest."""
    parts = path.removeprefix("datasets/").strip("/").split("/")
    if len(parts) > 1 and "@" in parts[1] and "refs" in parts[1:3]:  # refs/convert/parquet and refs/pr/N
        parts[1:4] = ["/".join(parts[1:4])]
    if len(parts) < 2:
        raise _refused(f"'hf://{path}' names no split; {_USAGE}")
    name, _, revision = parts[1].partition("@")
    return path.startswith("datasets/"), f"{parts[0]}/{name}", revision, parts[2:]


def _refused(reason: str) -> StoreFault:
    return StoreFault("refused", reason)


def _found(repo: str, commit: str, files: _Files, chosen: Iterable[str]) -> Found:
    from huggingface_hub import hf_hub_url

    keys = {"repo_type": "dataset", "revision": commit, "endpoint": os.environ.get("HF_ENDPOINT") or None}
    found = [(name, *files[name], hf_hub_url(repo, name, **keys)) for name in chosen]
    return Found(f"hf://datasets/{repo}@{commit}", found, commit)


def _clean(path: str) -> str:
    """A path or pattern in a repository without "." and ".."; "" for all of it."""
    cleaned = posixpath.normpath(path.strip("/"))
    return "" if cleaned == "." else cleaned


def _below(files: Iterable[str], path: str, hidden: str = HIDDEN) -> list[str]:
    """The files of a path, folder or pattern."""
    path = _clean(path)
    if path in files:
        return [path]
    folder, pattern = split_pattern(path)
    start = f"{folder}/" if folder else ""
    if not pattern and (table := table_of(name for name in files if name.startswith(start))):
        raise _refused(table)
    return [start + name for name in select_names(files, folder, pattern, hidden)]


def _own_files(repo: str, configs: Any, files: _Files, config: str | None, split: str) -> list[str]:
    """The files of a split in the repository itself, none where they are of no kind that is read here."""
    cards = {str(card.get("config_name", "default")): card for card in configs or () if isinstance(card, dict)}
    if cards:
        marked = [name for name, card in cards.items() if card.get("default")]
        config = config or next(iter(marked), None) or _usual(cards)
        if config not in cards:
            raise _refused(f"dataset '{repo}' needs one of its configurations in the path: {sorted(cards)}")
        folder = _clean(str(cards[config].get("data_dir") or ""))
        if cards[config].get("data_files"):
            label = f"dataset '{repo}', configuration '{config}'"
            return readable_files(_by_card(label, cards[config]["data_files"], folder, files, split))
    else:
        config = None if config == "default" else config  # the name of the only one, also beside a folder called so
        folders = {str(each) for name in files for each in PurePosixPath(name).parents if each.name == config}
        if len(folders) > 1:
            raise _refused(f"dataset '{repo}' has several folders named '{config}', {sorted(folders)[:5]}; {_USAGE}")
        if config and not folders:
            return []
        folder = folders.pop() if folders else ""
    start = f"{folder}/" if folder else ""
    names = [name[len(start) :] for name in files if name.startswith(start)]
    if folder and not names:
        raise _refused(f"the card of dataset '{repo}' names the folder '{folder}', which has no files")
    splits = {name: some for name, each in split_files(names).items() if (some := readable_files(each))}
    if splits and split not in splits:
        raise _refused(f"dataset '{repo}' has no split '{split}'; its files make the splits {sorted(splits)}")
    return [start + name for name in splits.get(split, [])]


def _usual(configs: Collection[str]) -> str:
    """The configuration of a path that names none."""
    return next(iter(configs)) if len(configs) == 1 else "default"


def _by_card(label: str, entries: Any, folder: str, files: _Files, split: str) -> list[str]:
    """The files that a card names for a split: paths, or {split: paths}, or a list of {"split": ..., "path": ...}."""
    if isinstance(entries, dict) and "path" not in entries:
        entries = [{"split": name, "path": paths} for name, paths in entries.items()]
    patterns: dict[str, list[str]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        named = entry if isinstance(entry, dict) else {"path": entry}
        paths = [named["path"]] if isinstance(named.get("path"), str) else named.get("path", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise _refused(f"the card of {label}, gives {str(paths)[:100]} as a path; expected a text or a list of it")
        patterns.setdefault(str(named.get("split", "train")), []).extend(paths)
    if split not in patterns:
        raise _refused(f"{label}, has the splits {sorted(patterns)}")
    start = f"{folder}/" if folder else ""
    chosen = set[str]()
    for pattern in patterns[split]:
        found, whole = _below(files, start + pattern, hidden="."), _clean(start + pattern)
        if MAGIC.search(pattern):
            # Of what matches only files, and hidden ones only where the pattern spells that out.
            spells = any(part.startswith((".", "__")) for part in whole.split("/"))
            found = [name for name in found if spells or is_visible(name)]
            found = [name for name in found if "**" in whole or name.count("/") == whole.count("/")]
        chosen.update(found)
    if not chosen:
        raise _refused(f"the card of {label}, names {patterns[split]}, and no such file is there")
    return sorted(chosen)


def _converted_files(repo: str, files: Iterable[str], config: str | None, split: str) -> list[str]:
    """Of CONFIG/SPLIT/0000.parquet; the Hub writes CONFIG/partial-SPLIT/ where it converted only the beginning."""
    data = [name for name in files if name.endswith(".parquet") and name.count("/") == 2]
    config = config or _usual({name.split("/")[0] for name in data})
    chosen = [name for name in data if name.startswith(f"{config}/{split}/")]
    if not chosen:
        known = sorted({name.rpartition("/")[0] for name in data})
        raise _refused(
            f"dataset '{repo}' has no '{config}/{split}'; the Hub converted {known}. To read one of these, write "
            f"hf://datasets/{repo}@{_CONVERTED}/FOLDER"
        )
    return chosen
