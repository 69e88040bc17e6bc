"""Real text for benchmarks: source code of installed packages, and multilingual prose of Debian's documentation.

Nothing is copied into the repository. Code is what Python's environment holds. Prose comes from documentation packages
by ``apt-get download``, unpacked without being installed; where there is no apt, from the documentation that is there.
Every document is used once, so words repeat as in real corpora and not by construction.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

PACKAGES = (
    "linux-doc-6.1", "debian-handbook", "installation-guide-amd64",
    *(f"debian-reference-{language}" for language in ("de", "en", "es", "fr", "it", "ja", "pt", "zh-cn", "zh-tw")),
    *(f"manpages-{language}{kind}" for language in ("de", "es", "fr", "pl", "ru") for kind in ("", "-dev")),
    "manpages-ja", "manpages-ja-dev", "manpages", "manpages-dev",
)  # fmt: skip
GROUP_BYTES = 8 << 20
SHARD_BYTES = 64 << 20
_LEAST = 200  # characters of a document


def code(folder: Path, megabytes: int) -> Path:
    """Parquet files of the Python, C and Cython sources that are installed."""
    roots = dict.fromkeys([sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("include")])
    found = (path for root in roots for path in sorted(Path(root).rglob("*")) if path.suffix in (".py", ".h", ".pyx"))
    return _written(folder / "code", map(_read, found), megabytes)


def prose(folder: Path, megabytes: int) -> Path:
    """Parquet files of documentation in a dozen languages."""
    return _written(folder / "prose", _prose(folder), megabytes)


def described(path: Path, tokenizer: Any = None) -> dict[str, float]:
    """Figures that tell how hard a corpus is.

    Returns:
        megabytes, documents, share of distinct words among its words, and compression by zstd (level 3); with a
        tokenizer (texts -> number of tokens) also bytes per token.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pq.read_table(path, columns=["text"]).column("text").to_pylist()
    words = [word for text in texts for word in re.findall(r"\w+", text)]
    raw = "\n".join(texts).encode()
    figures = {
        "megabytes": len(raw) / 1e6,
        "documents": len(texts),
        "distinct words": len(set(words)) / len(words),
        "compression": len(raw) / len(pa.Codec("zstd", 3).compress(raw, asbytes=True)),
    }
    return figures | ({"bytes per token": len(raw) / tokenizer(texts)} if tokenizer else {})


def _prose(folder: Path) -> Iterator[str]:
    root = folder / "packages"
    if not root.exists() and shutil.which("apt-get"):
        _download(root)
    places = [root] if root.exists() else [Path("/usr/share/doc"), Path("/usr/share/man"), Path(sys.prefix)]
    for place in places:
        for path in sorted(place.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            name = path.name.removesuffix(".gz")
            if name.endswith((".html", ".htm")):
                yield _without_tags(_read(path))
            elif name.endswith((".txt", ".rst", ".md")):
                yield _read(path)
            elif "/man/" in str(path) and path.suffix == ".gz":
                yield _without_macros(_read(path))


def _download(root: Path) -> None:
    """Fetch and unpack the packages that this system's index has."""
    work = root.with_suffix(".tmp")
    work.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        fetched = subprocess.run(["apt-get", "download", "-qq", package], check=False, cwd=work, capture_output=True)
        if fetched.returncode:
            print(f"no package {package}: left out", flush=True)
    for archive in sorted(work.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, work / archive.stem], check=True)
        archive.unlink()
    work.rename(root)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, UnicodeDecodeError):
        return ""


class _Text(HTMLParser):
    """The text of a page, without scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def _without_tags(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    return re.sub(r"\n\s*\n+", "\n\n", "".join(parser.parts)).strip()


def _without_macros(page: str) -> str:
    """The text of a manual page in groff."""
    lines = (re.sub(r'^\.\w+ ?"?|^[.\'].*$', "", line) for line in page.splitlines())
    text = re.sub(r"\\f\(?\w\w?|\\[&c]|\\s[-+]?\d", "", "\n".join(lines))
    return html.unescape(text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\"))


def _written(folder: Path, texts: Iterable[str], megabytes: int) -> Path:
    """Shards of distinct documents in a random but fixed order, at most so many megabytes; kept for the next run."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    if folder.exists():
        return folder
    print(f"collecting {folder.name} ...", flush=True)
    by_digest = {hashlib.sha256(text.encode()).digest(): text for text in texts if len(text) >= _LEAST}
    chosen, size = [], 0
    for text in np.random.default_rng(0).permutation(np.array(list(by_digest.values()), dtype=object)).tolist():
        if size < megabytes * 1_000_000:
            chosen.append(text)
            size += len(text.encode())
    work = folder.with_suffix(".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    rows = max(1, GROUP_BYTES * len(chosen) // max(1, size))
    per_shard = max(1, SHARD_BYTES * len(chosen) // max(1, size))
    for shard, first in enumerate(range(0, len(chosen), per_shard)):
        table = pa.table({"text": pa.array(chosen[first : first + per_shard], pa.large_string())})
        pq.write_table(table, work / f"{shard:05d}.parquet", row_group_size=rows, compression="zstd")
    work.rename(folder)
    return folder
