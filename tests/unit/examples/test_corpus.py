"""The demo corpus: real text, the same each time, whole or not there at all."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from examples import corpus
from examples.corpus import build_corpus, build_demo, grow, train_tokenizer
from zephon.config.recipe import DataRecipe

SMALL = 200_000

LIBRARY = {
    "a.py": '"""A module."""\n\nimport os\n\n# About f.\n@decorated\ndef f(x: int, *, y=2):\n    """Doc of f."""\n'
    + "    # filling\n" * 300
    + "\n# About C,\n# in two lines.\nclass C:\n    'Doc of C.'\n\n    def m(self):\n        'Doc of m.'\n\n\nx = 1\n",
    "feed.py": "x = 1\n\x0c\ndef g():\n    return '\u2028'\n",
    "latin.py": "# -*- coding: latin-1 -*-\ns = '\u00e9'\n",
    "package/__init__.py": '"""A package."""\n',
    "package/z.py": 'def h():\n    "Half a pair: \\ud800"\n',
    "package/notes.rst": "Notes\n=====\n",
    "pydoc_data/topics.py": "topics = {'for': 'The *for* statement.\\n', 'if': 'The *if* '\n 'statement.\\n'}\n",
    "broken.py": "def (:\n",
    "test/test_a.py": "never = 1\n",
    "_sysconfigdata_x.py": "never = 1\n",
    "LICENSE.txt": "A licence.\n",
    "empty.txt": " \n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few files in place of the interpreter's."""
    root = tmp_path / "lib"
    for name, text in LIBRARY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="latin-1" if name == "latin.py" else "utf-8", newline="\n")
    (root / "bytes.py").write_bytes(b"s = '\xff'\n")
    (root / "bytes.txt").write_bytes(b"\xff")
    monkeypatch.setattr(corpus, "_library", lambda: root)
    return root


def code_rows(folder: Path) -> list[dict[str, str]]:
    return [row for file in sorted(folder.iterdir()) for row in pq.read_table(file).to_pylist()]


def docs_rows(folder: Path) -> list[dict[str, str]]:
    rows = []
    for file in sorted(folder.iterdir()):
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        rows += [json.loads(line) for line in content.decode("utf-8").splitlines()]
    return rows


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# Of what is in this library


def test_code_rows_put_together_are_the_files(library: Path, tmp_path: Path) -> None:
    rows = code_rows(build_corpus(tmp_path / "out")["code"])
    files: dict[str, str] = {}
    for row in rows:
        files[row["path"]] = files.get(row["path"], "") + row["text"]
    names = ["a.py", "feed.py", "latin.py", "package/__init__.py", "package/z.py"]
    assert files == {name: LIBRARY[name] for name in names}
    assert list(files) == names


def test_docs_are_doc_strings_topics_and_text_files(library: Path, tmp_path: Path) -> None:
    rows = docs_rows(build_corpus(tmp_path / "out")["docs"])
    assert {row["name"]: row["text"] for row in rows} == {
        "a": "a\n\nA module.\n",
        "a.f": "a.f(x: int, *, y=2)\n\nDoc of f.\n",
        "a.C": "a.C\n\nDoc of C.\n\na.C.m(self)\n\nDoc of m.\n",
        "package": "package\n\nA package.\n",
        "help('for')": "The *for* statement.\n",
        "help('if')": "The *if* statement.\n",
        "LICENSE.txt": "A licence.\n",
        "package/notes.rst": "Notes\n=====\n",
    }


# Of the running interpreter's library


def test_the_real_library_gives_shards_of_both_kinds(tmp_path: Path) -> None:
    sources = build_corpus(tmp_path / "out", target_bytes=SMALL)
    assert [file.name for file in sorted(sources["code"].iterdir())] == [
        f"code-{i:05d}-of-00004.parquet" for i in range(4)
    ]
    assert [file.name for file in sorted(sources["docs"].iterdir())] == [
        "docs-00000-of-00003.jsonl",
        "docs-00001-of-00003.jsonl",
        "docs-00002-of-00003.jsonl.gz",
    ]
    for rows in (code_rows(sources["code"]), docs_rows(sources["docs"])):
        texts = [row["text"] for row in rows]
        assert all(text.strip() for text in texts)
        assert SMALL <= sum(len(text.encode()) for text in texts) < 2 * SMALL


def test_the_same_interpreter_gives_the_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; from examples.corpus import *; d = sys.argv[1]; s = build_corpus(d + '/corpus', "
        "target_bytes=100_000); train_tokenizer(['some text for a tokenizer'] * 9 + [open(__import__('ast').__file__)"
        ".read()], d + '/tok', 400); grow(s, d + '/grown', 50_000)"
    )
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        subprocess.run([sys.executable, "-c", script, str(tmp_path / seed)], check=True, env=env, timeout=120)
    first, second = content(tmp_path / "1"), content(tmp_path / "2")
    assert list(first) == list(second)
    different = [name for name in first if first[name] != second[name] and not name.startswith("grown/manifest")]
    assert different == []


# Whole or not at all


def test_an_interrupted_build_leaves_nothing_and_is_made_again(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_jsonl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_corpus(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    killed = tmp_path / ".out-abc" / "new"  # what a killed process leaves
    killed.mkdir(parents=True)
    assert docs_rows(build_corpus(tmp_path / "out")["docs"])
    assert not killed.exists()


# Larger corpora


def test_a_grown_corpus_is_larger_and_varied(library: Path, tmp_path: Path) -> None:
    sources = build_corpus(tmp_path / "out")
    grown = grow(sources, tmp_path / "grown", 100_000, shards=2)
    for name, folder in grown.items():
        assert [file.suffix for file in folder.iterdir()] == [".parquet", ".parquet"]
        texts = [row["text"] for row in code_rows(folder)]
        assert 100_000 <= sum(len(text.encode()) for text in texts) < 120_000
        assert len(set(texts)) > len(texts) / 10
        originals = [row["text"] for row in (code_rows if name == "code" else docs_rows)(sources[name])]
        lines = {line for text in originals for line in text.split("\n")}
        assert {line for text in texts for line in text.split("\n")} <= lines


# Tokenizer and recipe


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, {"<|bos|>": 0, "<|eos|>": 1}),
        ({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, {"<|endoftext|>": 0}),
        ({"bos_token": None, "eos_token": "</s>"}, {"</s>": 0}),
    ],
)
def test_a_trained_tokenizer_is_byte_level_and_declares_its_special_tokens(
    tmp_path: Path, options: dict[str, Any], ids: dict[str, int]
) -> None:
    folder = train_tokenizer(["def f(x):\n    return x\n"] * 10, tmp_path / "tok", 300, **options)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert {token: tokenizer.token_to_id(token) for token in ids} == ids
    assert 256 + len(ids) <= tokenizer.get_vocab_size() <= 300
    text = "\u00e9 \u4e2d\u6587 \U0001f642\x00 return x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["eos_token"] == options.get("eos_token", "<|eos|>")
    assert config["bos_token"] == options.get("bos_token", "<|bos|>")


def test_the_demo_has_corpus_tokenizer_and_recipe(library: Path, tmp_path: Path) -> None:
    demo = build_demo(tmp_path / "demo", vocab_size=300)
    recipe = DataRecipe.from_toml(demo.recipe)
    assert {source.name: Path(source.path) for source in recipe.sources} == demo.sources
    assert Tokenizer.from_file(str(demo.tokenizer / "tokenizer.json")).get_vocab_size() == 300
    before = content(tmp_path / "demo")
    assert build_demo(tmp_path / "demo", vocab_size=300) == demo
    assert content(tmp_path / "demo") == before
    build_demo(tmp_path / "demo", vocab_size=290)
    assert Tokenizer.from_file(str(demo.tokenizer / "tokenizer.json")).get_vocab_size() == 290
