"""The demo corpus: real text that every Python brings along, a tokenizer trained on it, and a recipe for both.

Two sources are read from the standard library of the running interpreter, without importing or running any of it:

- ``code``: its Python files, cut between top-level definitions into rows of a few kilobytes (Parquet);
- ``docs``: the language reference behind `help()`, the doc strings of its modules, classes and functions, and its text
  files (JSONL, the last shard gzipped).

The same interpreter gives the same bytes each time. Folders appear whole or not at all, so that a build that was
interrupted is made again.
"""

import ast
import glob
import gzip
import json
import os
import platform
import random
import re
import shutil
import sysconfig
import tempfile
import tokenize
import warnings
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from zephon.columns.arrow import int64_array, string_array
from zephon.errors import DataError

__all__ = ["DemoCorpus", "build_corpus", "build_demo", "grow", "train_tokenizer", "write_recipe"]

ROW_CHARS = 2000
"""A row of code ends at the first top-level definition after this many characters."""

CODE_SHARDS = 4
DOCS_SHARDS = 3
ROW_GROUP_ROWS = 1024

BOS_TOKEN = "<|bos|>"
EOS_TOKEN = "<|eos|>"

_FORMAT = 1  # raise it when the corpus would come out differently, so that older folders are built anew
_MANIFEST = "manifest.json"
# Tests are generated data for the larger part; the others are not the standard library, or differ by machine.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "_bundled", "dist-packages", "idle_test", "lib-dynload", "site-packages", "test", "tests"}
)
_SKIPPED_FILES = re.compile(r"_sysconfigdata.*|sitecustomize\.py|usercustomize\.py")
_TOPICS = "pydoc_data/topics.py"

_Row = dict[str, str]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class DemoCorpus:
    """What `build_demo` has made: all there is to stream training batches from."""

    recipe: Path
    """Data recipe (TOML) of the two sources."""
    tokenizer: Path
    """Folder of the tokenizer trained on them."""
    sources: dict[str, Path]
    """Folder of each source's shards, by name."""
    samples: dict[str, Path]
    """Folders of conversations ("chat") and of documents as token ids ("tokens"), made of the docs."""


def build_demo(folder: str | os.PathLike[str], *, vocab_size: int = 8192) -> DemoCorpus:
    """Corpus, tokenizer and recipe under `folder`, made now unless they are there already.

    Raises: `DataError` where the standard library has no source files, or `folder` cannot be written.
    """
    folder = Path(folder).absolute()
    sources = build_corpus(folder / "corpus")
    manifest = (folder / "corpus" / _MANIFEST).read_text(encoding="utf-8")
    trained = {"corpus": json.loads(manifest), "vocab_size": vocab_size}
    build_folder(folder / "tokenizer", trained, lambda target: train_tokenizer(_all_texts(sources), target, vocab_size))
    recipe = write_recipe(
        folder / "recipe.toml", sources, weights={"code": 0.7, "docs": 0.3}, keys={"seed": 42, "cache_dir": "cache"}
    )
    samples = build_samples(folder / "samples", sources["docs"], folder / "tokenizer", trained)
    return DemoCorpus(recipe=recipe, tokenizer=folder / "tokenizer", sources=sources, samples=samples)


# ---------------------------------------------------------------------------------------------------------------------
# Corpus


def build_corpus(folder: str | os.PathLike[str], *, target_bytes: int | None = None) -> dict[str, Path]:
    """The folders of the sources "code" and "docs" under `folder`, made now unless they are there already.

    Parquet rows are {text, path}, JSONL rows {text, name}. `target_bytes` ends each source after about that many bytes
    of text; by default all there is comes along, about 11 MB of code and 3 MB of docs.

    Raises: `DataError` where the standard library has no source files, or `folder` cannot be written.
    """
    folder = Path(folder).absolute()
    library = _library()
    made_from = {
        "format": _FORMAT,
        "library": str(library),
        "python": platform.python_version(),
        "target_bytes": target_bytes,
    }

    def build(target: Path) -> None:
        code, docs = _library_rows(library, target_bytes)
        if not code or not docs:
            raise DataError(
                f"{library}: found no Python sources to build the demo corpus from; expected those of the standard "
                "library: install a Python that has them."
            )
        _write_parquet(target / "code", code, CODE_SHARDS)
        _write_jsonl(target / "docs", docs, DOCS_SHARDS)

    build_folder(folder, made_from, build)
    return {name: folder / name for name in ("code", "docs")}


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library_rows(library: Path, target_bytes: int | None) -> tuple[list[_Row], list[_Row]]:
    """The rows of code and of docs, each up to `target_bytes` bytes of text."""
    code, docs = _Rows(target_bytes), _Rows(target_bytes)
    for path, text, tree in _parsed_files(library):
        if path == _TOPICS:  # one string of documentation
            docs.extend(_topic_rows(tree))
        else:
            code.extend(_code_rows(path, text, tree))
            docs.extend(_doc_string_rows(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), tree))
        if code.full and docs.full:
            break
    docs.extend(_text_file_rows(library))
    return code.rows, docs.rows


class _Rows:
    """Collects rows until their texts have `target_bytes` bytes; None is no limit."""

    def __init__(self, target_bytes: int | None) -> None:
        self.rows: list[_Row] = []
        self.full = False
        self._left = float("inf") if target_bytes is None else target_bytes

    def extend(self, rows: Iterable[_Row]) -> None:
        for row in rows:
            if self.full:
                return
            try:
                self._left -= len(row["text"].encode())
            except UnicodeEncodeError:  # half a surrogate pair, from an escape in a doc string
                continue
            self.rows.append(row)
            self.full = self._left <= 0


def _parsed_files(library: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """Path relative to the library, text and syntax tree of each file that can be decoded and parsed, by path."""
    for path in _files(library, ".py"):
        try:
            with tokenize.open(path) as file:  # heeds the file's own encoding
                text = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the parsed code, about its escapes
                tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        yield path.relative_to(library).as_posix(), text, tree


def _files(library: Path, *suffixes: str) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(parent, name)
            if name.endswith(suffixes) and not _SKIPPED_FILES.fullmatch(name) and not path.is_symlink():
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(library).as_posix())


def _code_rows(path: str, text: str, tree: ast.Module) -> Iterator[_Row]:
    """The file in rows; put together, they are the file."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    cuts = [0]
    for node in tree.body:
        if isinstance(node, _Definition):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            while first > 0 and lines[first - 1].startswith("#"):  # a comment right above belongs to the definition
                first -= 1
            if starts[first] - cuts[-1] >= ROW_CHARS:
                cuts.append(starts[first])
    cuts.append(len(text))
    for begin, end in pairwise(cuts):
        if text[begin:end].strip():
            yield {"text": text[begin:end], "path": path}


def _topic_rows(tree: ast.Module) -> Iterator[_Row]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield {"text": value.value, "name": f"help({key.value!r})"}


def _doc_string_rows(module: str, tree: ast.Module) -> Iterator[_Row]:
    """A row for the module, and one for each top-level function and class, the latter with its methods."""
    summary = ast.get_docstring(tree)
    if summary:
        yield {"text": f"{module}\n\n{summary}\n", "name": module}
    for node in tree.body:
        if isinstance(node, _Definition):
            name = f"{module}.{node.name}"
            parts = [f"{title}\n\n{text}\n" for title, text in _doc_strings(name, node)]
            if parts:
                yield {"text": "\n".join(parts), "name": name}


def _doc_strings(name: str, node: _Definition) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name if isinstance(node, ast.ClassDef) else f"{name}({ast.unparse(node.args)})", text
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, _Definition):
                yield from _doc_strings(f"{name}.{inner.name}", inner)


def _text_file_rows(library: Path) -> Iterator[_Row]:
    for file in _files(library, ".txt", ".rst"):
        text = _read_text(file)
        if text and text.strip():
            yield {"text": text, "name": file.relative_to(library).as_posix()}


# ---------------------------------------------------------------------------------------------------------------------
# Larger corpora, for benchmarks


def grow(
    sources: Mapping[str, Path],
    folder: str | os.PathLike[str],
    target_bytes: int,
    *,
    shards: int = 4,
    seed: int = 0,
) -> dict[str, Path]:
    """Parquet sources of about `target_bytes` bytes of text each, made of the paragraphs of smaller ones.

    A document has as many paragraphs as some document of its source, each drawn from anywhere in that source, so that
    words and lengths are natural and no two documents are the same for long. `sources` is what `build_corpus` gives.
    Same sources, same seed: same bytes.

    Raises: `DataError` where `folder` cannot be written.
    """
    folder = Path(folder).absolute()
    sizes = {
        name: sorted((file.name, file.stat().st_size) for file in path.iterdir()) for name, path in sources.items()
    }
    made_from = {"format": _FORMAT, "from": sizes, "target_bytes": target_bytes, "shards": shards, "seed": seed}

    def build(target: Path) -> None:
        for name, path in sources.items():
            documents = [text.split("\n\n") for text in _texts(path)]
            grown = _Rows(target_bytes)
            grown.extend(_recombined(documents, random.Random(f"{seed}/{name}")))
            _write_parquet(target / name, grown.rows, shards)

    build_folder(folder, made_from, build)
    return {name: folder / name for name in sources}


def _recombined(documents: Sequence[Sequence[str]], rng: random.Random) -> Iterator[_Row]:
    paragraphs = [paragraph for document in documents for paragraph in document]
    counts = [len(document) for document in documents]
    number = 0
    while True:
        drawn = rng.choices(paragraphs, k=rng.choice(counts))
        text = "\n\n".join(drawn)
        if text.strip():
            yield {"text": text, "path": f"document-{number}"}
            number += 1


# ---------------------------------------------------------------------------------------------------------------------
# Conversations and token ids


def build_samples(folder: Path, docs: Path, tokenizer: Path, made_from: Mapping[str, object]) -> dict[str, Path]:
    """The docs once more, as samples for fine-tuning, unless they are there already.

    "chat" holds JSON lines {messages}, questions about things of one module and their doc strings as answers; "tokens"
    Parquet rows {input_ids, loss}, whose title is not trained on.

    Raises: `DataError` where `folder` cannot be written.
    """

    def build(target: Path) -> None:
        rows = [row for row in _rows_of(docs) if row["text"].partition("\n\n")[2].strip()]
        (target / "chat").mkdir()
        with open(target / "chat" / "chat.jsonl", "w", encoding="utf-8") as file:
            for talk in _conversations(rows):
                file.write(json.dumps({"messages": talk}, ensure_ascii=False) + "\n")
        (target / "tokens").mkdir()
        pq.write_table(_as_tokens(rows, tokenizer), target / "tokens" / "tokens.parquet", row_group_size=ROW_GROUP_ROWS)

    build_folder(folder, {"format": _FORMAT, **made_from}, build)
    return {name: folder / name for name in ("chat", "tokens")}


def _conversations(rows: Iterable[_Row]) -> Iterator[list[dict[str, str]]]:
    """Up to three questions and answers each, about things whose names begin alike."""
    talk: list[dict[str, str]] = []
    about = ""
    for row in rows:
        module = row["name"].rpartition(".")[0]
        if talk and (module != about or len(talk) >= 6):
            yield talk
            talk = []
        about = module
        _, _, answer = row["text"].partition("\n\n")
        talk.append({"role": "user", "content": f"What is {row['name']}?"})
        talk.append({"role": "assistant", "content": answer.strip()})
    if talk:
        yield talk


def _as_tokens(rows: Sequence[_Row], tokenizer: Path) -> pa.Table:
    from zephon.tokenizer.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    texts = string_array([row["text"] for row in rows], pa.large_string())
    titles = string_array([row["text"].partition("\n\n")[0] for row in rows], pa.large_string())
    ids, offsets = loaded.encode(texts)
    _, title_ends = loaded.encode(titles)
    place = np.arange(len(ids)) - np.repeat(offsets[:-1], np.diff(offsets))
    trained = place >= np.repeat(np.diff(title_ends), np.diff(offsets))
    bounds = int64_array(offsets)
    return pa.table(
        {
            "input_ids": pa.LargeListArray.from_arrays(bounds, int64_array(ids)),
            "loss": pa.LargeListArray.from_arrays(bounds, int64_array(trained)),
        }
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and recipe


def train_tokenizer(
    texts: Iterable[str],
    folder: str | os.PathLike[str],
    vocab_size: int,
    *,
    bos_token: str | None = BOS_TOKEN,
    eos_token: str = EOS_TOKEN,
) -> Path:
    """Trains a byte-level BPE of GPT-2's kind on `texts` and writes tokenizer.json and tokenizer_config.json.

    The special tokens come first in the vocabulary. One token for both ends, as GPT-2 has it, is
    ``bos_token=eos_token="<|endoftext|>"``; with ``bos_token=None`` none is declared for the beginning. Returns the
    folder.

    Raises: `DataError` where `folder` cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = list(dict.fromkeys(token for token in (bos_token, eos_token) if token is not None))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {
        "add_prefix_space": False,
        "bos_token": bos_token,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos_token,
        "model_max_length": 1 << 30,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    folder = Path(folder)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        _write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    return folder


def write_recipe(
    path: str | os.PathLike[str],
    sources: Mapping[str, Path],
    *,
    weights: Mapping[str, float] | None = None,
    keys: Mapping[str, str | int | float | bool] | None = None,
) -> Path:
    """Writes a data recipe of `sources`, with paths relative to it where they lie below its folder.

    `weights` are by source (default: 1.0 each); `keys` are further keys of the recipe. Returns the path.

    Raises: `DataError` where `path` cannot be written.
    """
    path = Path(path).absolute()
    lines = ["# A data recipe of Zephon: which documents, in what mixture. Paths start at this file's folder."]
    lines += [f"{key} = {_toml(value)}" for key, value in (keys or {}).items()]
    for name, location in sources.items():
        place = Path(location).absolute()
        if place.is_relative_to(path.parent):
            place = place.relative_to(path.parent)
        weight = float((weights or {}).get(name, 1.0))
        lines += ["", "[[sources]]", f"name = {_toml(name)}", f"path = {_toml(place.as_posix())}"]
        lines += [f"weight = {_toml(weight)}"]
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_text(path, "\n".join(lines) + "\n")
    return path


def _toml(value: str | int | float | bool) -> str:
    # JSON writes texts and numbers as TOML does, but for the one control character that JSON lets through.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def build_folder(folder: Path, made_from: Mapping[str, object], build: Callable[[Path], object]) -> None:
    """Makes `folder` by `build`, whole or not at all, unless one made from the same is there; one process at a time."""
    manifest = json.dumps(made_from, indent=2, sort_keys=True) + "\n"
    with _writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            present = _read_text(folder / _MANIFEST)
            if present == manifest:
                return
            if present is None and folder.exists() and any(folder.iterdir()):
                raise DataError(
                    f"{folder}: this folder is not empty and was not made by Zephon; expected one to write demo data "
                    "to: name another, or remove it."
                )
            prefix = f".{folder.name}-"
            for left_behind in folder.parent.glob(f"{glob.escape(prefix)}*"):  # by a build that was killed
                shutil.rmtree(left_behind, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
                target = Path(scratch, "new")
                target.mkdir()
                build(target)
                _write_text(target / _MANIFEST, manifest)
                if folder.exists():
                    os.replace(folder, Path(scratch, "old"))
                os.replace(target, folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: the demo's data cannot be written here: {error.strerror or error}.") from None


def _write_parquet(folder: Path, rows: Sequence[_Row], shards: int) -> None:
    folder.mkdir()
    parts = _parts(rows, shards)
    for number, part in enumerate(parts):
        table = pa.table(
            {
                "text": string_array([row["text"] for row in part], pa.large_string()),
                "path": string_array([row["path"] for row in part]),
            }
        )
        file = folder / f"{folder.name}-{number:05d}-of-{len(parts):05d}.parquet"
        pq.write_table(table, file, row_group_size=ROW_GROUP_ROWS, compression="zstd")


def _write_jsonl(folder: Path, rows: Sequence[_Row], shards: int) -> None:
    folder.mkdir()
    parts = _parts(rows, shards)
    for number, part in enumerate(parts):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part).encode()
        file = folder / f"{folder.name}-{number:05d}-of-{len(parts):05d}.jsonl"
        if number == len(parts) - 1:
            # No time of day in the header: the same rows are the same bytes.
            file.with_suffix(".jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            file.write_bytes(content)


def _parts(rows: Sequence[_Row], count: int) -> list[Sequence[_Row]]:
    """Neighbouring rows in `count` parts of about as many characters each; none is empty, so there may be fewer."""
    count = min(count, len(rows))
    ends = []
    total = 0
    for row in rows:
        total += len(row["text"])
        ends.append(total)
    cuts = [0]
    for part in range(1, count):
        cuts.append(min(max(bisect(ends, total * part / count), cuts[-1] + 1), len(rows) - count + part))
    cuts.append(len(rows))
    return [rows[begin:end] for begin, end in pairwise(cuts)]


def _all_texts(sources: Mapping[str, Path]) -> Iterator[str]:
    for path in sources.values():
        yield from _texts(path)


def _rows_of(folder: Path) -> Iterator[_Row]:
    """The rows of a JSONL source that this module wrote."""
    for file in sorted(folder.iterdir()):
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8") as f:
            for line in f:
                yield json.loads(line)


def _texts(folder: Path) -> Iterator[str]:
    """The texts of a source that this module wrote."""
    for file in sorted(folder.iterdir()):
        if file.suffix == ".parquet":
            for batch in pq.ParquetFile(file).iter_batches(columns=["text"]):
                yield from batch.column(0).to_pylist()
        else:
            with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8") as f:
                for line in f:
                    yield json.loads(line)["text"]


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _write_text(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
