"""Which format the files of a dataset have, and formats that other packages add."""

import bz2
import gzip
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from support.io_data import json_lines, open_path, opened, texts_of, write_shard
from support.pages import text_of
from zephon.columns.damage import Damaged
from zephon.data.formats import registry
from zephon.errors import DataError, RecipeError
from zephon.io import Dataset, DecodeCache

ROOT = Path(__file__).parents[4]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def test_two_formats_in_one_folder_are_refused_unless_fmt_picks_one(tmp_path):
    write_shard(tmp_path / "a.jsonl", ["json"])
    write_shard(tmp_path / "b.parquet", ["parquet"])
    with pytest.raises(DataError, match=r"two formats, jsonl \('a.jsonl'\) and parquet \('b.parquet'\).*with fmt"):
        open_path(tmp_path)
    assert texts_of(open_path(tmp_path, fmt="jsonl")) == ["json"]
    assert texts_of(open_path(tmp_path, fmt="parquet")) == ["parquet"]
    with pytest.raises(DataError, match=r"no arrow file \(endings .arrow.*'a.jsonl'"):
        open_path(tmp_path, fmt="arrow")


def test_files_of_no_format_are_passed_over_and_a_named_file_needs_fmt(tmp_path):
    write_shard(tmp_path / "a.jsonl", ["json"])
    (tmp_path / "README.md").write_text("about")
    assert texts_of(open_path(tmp_path)) == ["json"]
    (tmp_path / "a.jsonl").rename(tmp_path / "data.log")
    with pytest.raises(DataError, match=r"no file of .* has an ending of a known format.*with fmt"):
        open_path(tmp_path / "data.log")
    for name in ("data.log", "data.txt"):  # an ending of text is no hindrance
        (tmp_path / "data.log").replace(tmp_path / name)
        assert texts_of(open_path(tmp_path / name, fmt="jsonl")) == ["json"]


ABOUT = ["dataset_infos", "dataset_info", "state", "index", "config", "stats", "tokenizer", "tokenizer_config"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz", ".arrow"])
def test_what_is_about_a_dataset_or_a_model_is_passed_over_beside_the_data(tmp_path, suffix):
    write_shard(tmp_path / f"a{suffix}", ["row"])
    for name in ABOUT if suffix != ".arrow" else ABOUT[3:]:  # where state.json is that of a saved dataset
        (tmp_path / f"{name}.json").write_text('{"text": "no row"}\n')
    (tmp_path / "README.md").write_text("no row")
    assert texts_of(open_path(tmp_path)) == ["row"]
    assert texts_of(open_path(tmp_path / "index.json")) == ["no row"]  # named itself


@pytest.mark.parametrize("name", ["manifest", "schema", "trainer_state"])
def test_json_beside_json_lines_is_refused(tmp_path, name):
    write_shard(tmp_path / "a.jsonl", ["row"])
    (tmp_path / f"{name}.json").write_text('{"text": "no row"}\n')
    with pytest.raises(DataError, match=rf"ending with .json and .jsonl \('{name}.json', 'a.jsonl'\)"):
        open_path(tmp_path)
    assert texts_of(open_path(tmp_path / "*.jsonl")) == ["row"]
    assert sorted(texts_of(open_path(tmp_path, fmt="jsonl"))) == ["no row", "row"]


@pytest.mark.parametrize(
    ("others", "warns"),
    [
        (["test/a"], True),
        (["validation-0"], True),
        (["train/b", "x/c"], True),
        (["train/b"], False),
        (["heldout"], True),
    ],
)
def test_a_folder_with_several_splits_is_read_with_a_warning(tmp_path, caplog, others, warns):
    for name in ["train/a" if "/" in others[0] else "train-0", *others]:
        write_shard(tmp_path / f"{name}.jsonl", ["row"])
    assert len(texts_of(open_path(tmp_path))) == 1 + len(others)
    assert ("and all are read; name files or a folder" in caplog.text) == warns


@pytest.mark.parametrize(
    ("names", "card", "warns"),
    [
        (["data/train_sft-00000-of-00001", "data/test_sft-00000-of-00001"], "", True),
        (["a", "b"], "data_files: a.jsonl", True),
        (["a", "b"], "data_files:\n  - split: train\n    path: '*.jsonl'", False),
        (["a", "b"], "data_files:\n  - split: train\n    path:\n    - a.jsonl\n    - b.jsonl", False),
        (["a", "b"], "license: mit", False),
    ],
)
def test_a_clone_is_read_with_a_warning_where_datasets_reads_fewer_files(tmp_path, caplog, names, card, warns):
    for name in names:
        write_shard(tmp_path / f"{name}.jsonl", ["row"])
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {card}\n---\n# Data\n")
    assert len(texts_of(open_path(tmp_path))) == 2
    assert ("and all are read; name files or a folder" in caplog.text) == warns


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", LFS, "is a pointer of Git LFS to the file.*git lfs pull"),
        ("a.jsonl", LFS, "is a pointer of Git LFS"),
        ("a.txt", LFS, "is a pointer of Git LFS"),
        ("a.jsonl.gz", LFS, "is a pointer of Git LFS"),
        ("a.tar", LFS, "is a pointer of Git LFS"),
        ("a.npy", LFS, "is a pointer of Git LFS"),
        ("a.jsonl", gzip.compress(json_lines(["a"]), mtime=0), "is compressed with gzip.*rename it to end with .gz"),
        ("a.json", bz2.compress(json_lines(["a"])), "is compressed with bz2"),
        ("a.jsonl.gz", json_lines(["a"]), "is not compressed, though its name says gzip"),
        ("a.jsonl.zst", gzip.compress(json_lines(["a"]), mtime=0), "is compressed with gzip"),
        ("a.jsonl", json_lines(["a"]).decode().encode("utf-16"), "is text in UTF-16.*convert it to UTF-8"),
        ("a.parquet", b"PK\x03\x04" + bytes(100), "is a zip archive"),
    ],
)
def test_content_of_another_kind_than_the_name_says_is_named_and_is_no_damage(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    fmt = "uint16" if name == "a.npy" else None
    with pytest.raises(DataError, match=f"{name}' {said}") as error:
        open_path(tmp_path, fmt=fmt, skips=True) if fmt is None else opened(tmp_path, "tokens", fmt=fmt, is_text=False)
    assert not isinstance(error.value, Damaged)


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("a.npy", ()),
        ("index.json", ("chunk-0-0.bin",)),
        ("index.json", ("shard.00000.mds",)),
        ("data/a.lance", ("_versions/1.manifest",)),
        ("_versions/1.manifest", ("data/a.lance",)),
    ],
)
def test_a_pointer_of_git_lfs_is_named_in_formats_of_several_files(tmp_path, name, beside):
    for each in (name, *beside):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_bytes(LFS if each == name else b"other content")
    with pytest.raises(DataError, match=f"{name}' is a pointer of Git LFS") as error:
        opened(tmp_path, "tokens", is_text=False, skips=True)
    assert not isinstance(error.value, Damaged)


def test_an_unknown_format_is_refused_when_the_dataset_is_made():
    with pytest.raises(RecipeError, match=r"fmt is 'parqet'.*did you mean 'parquet'"):
        Dataset.from_path("web", "/data", fmt="parqet")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Installs the module `zephon_csv` of docs/formats.md with the given entry points."""
    module = text_of("docs/formats.md", "import hashlib")
    site = tmp_path / "site"
    info = site / "zephon_csv-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zephon-csv\nVersion: 1.0\n")
    (site / "zephon_csv.py").write_text(module)
    monkeypatch.syspath_prepend(str(site))
    registry.formats.cache_clear()

    def install(*entries: str) -> Path:
        (info / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *entries, ""]))
        assert entry_points(group=registry.GROUP)
        return site

    yield install
    registry.formats.cache_clear()
    sys.modules.pop("zephon_csv", None)


def test_a_package_adds_the_format_of_the_documentation(tmp_path, plugin):
    project = tomllib.loads(text_of("docs/formats.md", "[project.entry-points"))["project"]
    site = plugin(*(f"{name} = {value}" for name, value in project["entry-points"][registry.GROUP].items()))
    folder = tmp_path / "data"
    folder.mkdir()
    for shard in range(2):
        (folder / f"{shard}.csv").write_text(f'text,n\none {shard},1\n"two\nlines",2\n')
    dataset = open_path(folder, ["text", "n"])
    assert dataset.catalog.fmt == "csv" and dataset.catalog.n_shards == 2
    assert dataset.take(np.array([3, 0])).to_pylist() == [{"text": "two\nlines", "n": 2}, {"text": "one 0", "n": 1}]
    dataset.close()
    assert texts_of(open_path(folder / "0.csv", fmt="csv")) == ["one 0", "two\nlines"]
    with pytest.raises(DataError, match=r"no column 'title' in .*'text', 'n'|'n', 'text'"):
        Dataset.from_path("d", folder).open(["title"], size_column="title", cache=DecodeCache(0))
    (folder / "1.csv").write_text("text,n\none\n")
    with pytest.raises(DataError, match=r"1\.csv' cannot be read as csv \("):
        open_path(folder)
    code = f"from zephon.io import Dataset; print(Dataset.from_path('d', {str(folder / '0.csv')!r}).columns())"
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert shown.stdout == "{'text': None, 'n': None}\n"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("csv = zephon_missing:Csv", r"format 'csv' \(zephon_missing:Csv\) cannot be loaded \(ModuleNotFoundError"),
        ("table = zephon_csv:Csv", r"format 'table' .* is <zephon_csv.Csv .*of that name"),
        ("csv = zephon_csv:hashlib", "format 'csv' .* is <module 'hashlib'"),
        ("mds = zephon_csv:Csv", "format 'mds' .* is <zephon_csv.Csv .*of that name"),
    ],
)
def test_a_format_that_cannot_be_used_is_refused_by_name(plugin, entry, reason):
    plugin(entry)
    with pytest.raises(RecipeError, match=reason):
        registry.formats()
