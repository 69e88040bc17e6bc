"""hf://: datasets of the Hugging Face Hub, at one commit, read by ranges from where the Hub keeps them.

    hf://ORG/NAME[@REVISION][/CONFIG]/SPLIT          a split, found as `datasets` finds it
    hf://datasets/ORG/NAME[@REVISION]/PATH           files of the repository by path, folder or pattern

A split is the files that the dataset's card names for it, else those whose path names the split, else (where the
repository has no data files that can be read, only a script) the Parquet files that the Hub made of it. Endpoint,
token and proxies are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, ``hf auth login``).
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

from zephon.data.stores.base import Found, StoreFault
from zephon.data.stores.http import Client, fault_kind, retry_after
from zephon.data.stores.names import MAGIC, matcher, split_pattern, visible
from zephon.errors import DataError

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
# Links that the Hub redirects to are good for an hour; a new one costs a request.
_LINK_SECONDS = 600.0
_USAGE = "write hf://ORG/NAME[@REVISION][/CONFIG]/SPLIT, or hf://datasets/ORG/NAME[@REVISION]/PATH"


class HubStore:
    """The Hub. A key is "repository@commit/path"."""

    def __init__(self) -> None:
        self._client = Client()
        self._lock = threading.Lock()
        self._links: dict[str, tuple[str, float]] = {}

    def list(self, path: str) -> Found:
        by_path = path.startswith("datasets/")
        parts = path.removeprefix("datasets/").strip("/").split("/")
        if len(parts) < 3 and not (by_path and len(parts) == 2):
            raise StoreFault("refused", f"'hf://{path}' names no split; {_USAGE}")
        if "@" in parts[1] and "refs" in parts[1:3]:  # refs/convert/parquet and refs/pr/N have slashes of their own
            parts[1:4] = ["/".join(parts[1:4])]
        name, _, revision = parts[1].partition("@")
        repo, rest = f"{parts[0]}/{name}", parts[2:]
        if by_path:
            commit, _, files = self._repository(repo, revision or None)
            return _found(repo, commit, files, _by_path(files, "/".join(rest)))
        if len(rest) > 2:
            raise StoreFault("refused", f"'hf://{path}' has too many parts; {_USAGE}")
        config, split = (rest[0] if len(rest) == 2 else None), rest[-1]
        commit, configs, files = self._repository(repo, revision or None)
        chosen = _own_files(repo, configs, files, config, split)
        if not chosen:
            commit, files = self._converted(repo, revision, files)
            chosen = _converted_files(repo, files, config, split)
        return _found(repo, commit, files, chosen)

    def head(self, key: str) -> tuple[int, str]:
        return self._client.head(self._url(key), self._headers())

    def get(self, key: str, start: int, length: int, version: str, size: int) -> bytearray:
        # A commit's files do not change, so the version (a hash of the content) needs no comparing, only the size.
        with self._lock:
            link, until = self._links.get(key, ("", 0.0))
        if link and time.monotonic() < until:
            try:
                return self._client.get(link, {}, start, length, "", size)[0]
            except StoreFault as fault:
                if fault.kind not in ("denied", "refused"):
                    raise
                with self._lock:
                    self._links.pop(key, None)
        asked = self._url(key)
        data, link = self._client.get(asked, self._headers(), start, length, "", size)
        if link != asked:
            with self._lock:
                if len(self._links) > 1 << 16:
                    self._links.clear()
                self._links[key] = link, time.monotonic() + _LINK_SECONDS
        return data

    def renew(self) -> None:
        self._client.renew()
        with self._lock:
            self._links.clear()

    def _url(self, key: str) -> str:
        repo, _, rest = key.partition("@")
        commit, _, path = rest.partition("/")
        return f"{_api().endpoint}/datasets/{repo}/resolve/{quote(commit, safe='')}/{quote(path)}"

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        return {k: v for k, v in build_hf_headers(library_name="zephon").items() if isinstance(v, str)}

    def _repository(self, repo: str, revision: str | None) -> tuple[str, Any, dict[str, tuple[int, str]]]:
        """(commit, configurations of the card, {path: (size, content hash)}) at a revision."""
        api = _api()
        info = _asked(lambda: api.dataset_info(repo, revision=revision))
        card = info.card_data.to_dict() if info.card_data is not None else {}
        tree = _asked(
            lambda: list(api.list_repo_tree(repo, recursive=True, revision=info.sha, repo_type="dataset", expand=False))
        )
        files = {
            entry.path: (entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
            for entry in tree
            if hasattr(entry, "blob_id")
        }
        return info.sha, card.get("configs"), files

    def _converted(self, repo: str, revision: str, own: Iterable[str]) -> tuple[str, dict[str, tuple[int, str]]]:
        """The Hub's own conversion; only of the newest revision, so asking for another must not give it silently."""
        kinds = sorted({os.path.splitext(name)[1] for name in own if visible(name)} - {""})
        none = f"dataset '{repo}' has no Parquet, JSONL or Arrow files for that split (it holds {kinds or 'nothing'})"
        if revision and revision != _CONVERTED:
            raise StoreFault(
                "refused",
                f"{none} at revision '{revision}', and the Hub converts only the newest; name {_CONVERTED}",
            )
        try:
            commit, _, files = self._repository(repo, _CONVERTED)
        except StoreFault as fault:
            if fault.kind == "missing":
                raise StoreFault("refused", f"{none}, and the Hub has not converted it; check the split") from fault
            raise
        return commit, files


def _api() -> Any:
    from huggingface_hub import HfApi

    # huggingface_hub reads HF_ENDPOINT when it is imported; whoever sets it later means it too.
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _found(repo: str, commit: str, files: dict[str, tuple[int, str]], chosen: Iterable[str]) -> Found:
    names = sorted(chosen)
    return Found(
        f"hf://datasets/{repo}@{commit}",
        names,
        [files[name][0] for name in names],
        [files[name][1] for name in names],
        [f"{repo}@{commit}/{name}" for name in names],
        pin=commit,
    )


def _by_path(files: Iterable[str], path: str) -> list[str]:
    path = path.strip("/")
    if path in files:
        return [path]
    folder, pattern = split_pattern(path) if MAGIC.search(path) else (path, "**")
    wanted, start = matcher(pattern), f"{folder}/" if folder else ""
    return [name for name in files if name.startswith(start) and wanted(name[len(start) :])]


def _own_files(
    repo: str, configs: Any, files: dict[str, tuple[int, str]], config: str | None, split: str
) -> Iterable[str]:
    """The files of a split in the repository itself: by its card, else by their paths; none where there are none."""
    if not any(visible(name) and name.lower().endswith(_SUFFIXES + _JSON) for name in files):
        return ()
    keys = ("data_files", "data_dir")
    named = {
        str(c.get("config_name", "default")): c
        for c in configs or ()
        if isinstance(c, dict) and any(c.get(key) for key in keys)
    }
    if named:
        config = _configuration(repo, named, config)
        card = named[config]
        if card.get("data_files"):
            said = _by_card(repo, card, config, files, split)
            # What the card names may be of a kind that only the Hub's conversion makes readable.
            return said if any(name.lower().endswith(_SUFFIXES + _JSON) for name in said) else ()
        folder = _folder(card)
        files, config = {name: files[name] for name in _by_path(files, folder)}, None
        if not files:
            raise StoreFault("refused", f"the card of dataset '{repo}' names the folder '{folder}', which has no files")
    else:
        folder = ""
    data = [name for name in files if visible(name) and name.lower().endswith(_SUFFIXES)]
    loose = [
        name
        for name in files
        if visible(name) and name.lower().endswith(_JSON) and name.rpartition("/")[2].lower() not in _NO_DATA
    ]
    if config is not None:
        data, loose = ([name for name in some if config in name.split("/")[:-1]] for some in (data, loose))
        if not data and not loose:
            folders = sorted({name.split("/")[0] for name in files if "/" in name and name.lower().endswith(_SUFFIXES)})
            if not folders:
                return ()
            raise StoreFault("refused", f"dataset '{repo}' has no configuration '{config}'; its folders are {folders}")
    skip = len(folder) + 1 if folder else 0  # what is said of splits is said below the folder that the card names
    words = _SPLIT_NAMES.get(split, (split,))
    named_split = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(map(re.escape, words))})(?:[^a-z]|$)", re.IGNORECASE)
    others = re.compile(rf"(?:^|[^a-z])(?:{'|'.join(w for ws in _SPLIT_NAMES.values() for w in ws)})(?:[^a-z]|$)", re.I)
    for some in (data, loose):
        if chosen := [name for name in some if named_split.search(name[skip:])]:
            return chosen
    # Files that name no split at all are all for training; loose ones only where the card says that they are data.
    for some in (data, loose if folder else []):
        if some and split == "train" and not any(others.search(name[skip:]) for name in some):
            return some
    if data:
        raise StoreFault(
            "refused", f"no file of dataset '{repo}' belongs to a split '{split}', for example '{data[0]}'"
        )
    return ()


def _configuration(repo: str, named: dict[str, Any], config: str | None) -> str:
    """The configuration of the card that is meant."""
    if config is None:
        marked = [name for name, card in named.items() if card.get("default")]
        config = marked[0] if marked else "default" if "default" in named or len(named) > 1 else next(iter(named))
    if config not in named:
        raise StoreFault("refused", f"dataset '{repo}' needs one of its configurations in the path: {sorted(named)}")
    return config


def _folder(card: Any) -> str:
    return str(card.get("data_dir") or "").removeprefix("./").strip("/")


def _by_card(repo: str, card: Any, config: str, files: Iterable[str], split: str) -> set[str]:
    data_files = card["data_files"]
    if isinstance(data_files, dict) and "path" not in data_files:
        entries: list[Any] = [{"split": name, "path": paths} for name, paths in data_files.items()]
    else:
        entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        spec = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = spec.get("path", [])
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise StoreFault(
                "refused",
                f"the card of dataset '{repo}', configuration '{config}', gives {str(paths)[:100]} as a path, where "
                "text or a list of it was expected; name the files: hf://datasets/ORG/NAME/PATH",
            )
        patterns.setdefault(str(spec.get("split", "train")), []).extend(paths)
    if split not in patterns:
        raise StoreFault("refused", f"dataset '{repo}', configuration '{config}', has the splits {sorted(patterns)}")
    folder = _folder(card)
    chosen = {
        name
        for pattern in patterns[split]
        for name in _by_path(files, f"{folder}/{pattern}" if folder else str(pattern).removeprefix("./"))
    }
    if not chosen:
        raise StoreFault("refused", f"the card of dataset '{repo}' names {patterns[split]}, and no such file is there")
    return chosen


def _converted_files(repo: str, files: Iterable[str], config: str | None, split: str) -> list[str]:
    """Of CONFIG/SPLIT/0000.parquet, or CONFIG/partial-SPLIT/ where the Hub converted only the beginning."""
    data = [name for name in files if name.endswith(".parquet") and name.count("/") == 2]
    configs = sorted({name.split("/")[0] for name in data})
    if config is None and configs:
        config = "default" if "default" in configs or len(configs) > 1 else configs[0]
    splits = {name.split("/")[1] for name in data if name.split("/")[0] == config}
    if f"partial-{split}" in splits:
        raise StoreFault(
            "refused",
            f"the Hub has converted only the beginning of '{repo}', split '{split}'; to use that, name it: "
            f"hf://datasets/{repo}@{_CONVERTED}/{config}/partial-{split}",
        )
    if split not in splits:
        known = sorted({"/".join(name.split("/")[:2]) for name in data})
        raise StoreFault("refused", f"dataset '{repo}' has no '{config}/{split}'; the Hub converted {known}")
    return [name for name in data if name.startswith(f"{config}/{split}/")]


def _asked(request: Callable[[], Any]) -> Any:
    """One request of huggingface_hub, its errors as `StoreFault`."""
    from huggingface_hub import errors

    try:
        return request()
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        gated = isinstance(error, errors.GatedRepoError)
        raise StoreFault(
            "refused",
            "access to this dataset must be granted on the Hub first; then log in with 'hf auth login' or set HF_TOKEN"
            if gated
            else "the Hub knows no such dataset, or not with this token; check the name, 'hf auth login' or HF_TOKEN",
        ) from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise StoreFault("missing", "the Hub knows no such revision") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 500
        headers = error.response.headers if error.response is not None else {}
        raise StoreFault(fault_kind(status), f"the Hub answered {status}", retry_after(headers)) from error
    except (errors.HFValidationError, errors.OfflineModeIsEnabled) as error:
        raise StoreFault("refused", " ".join(str(error).split())[:200]) from error
    except DataError:
        raise
    except Exception as error:  # the exceptions of the HTTP library below, which differs between versions
        raise StoreFault("passing", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from error
