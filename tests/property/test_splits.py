"""The files of splits are those that `datasets` takes, in random repositories."""

import contextlib
import logging
import random

import pytest

from zephon.data.splits import readable_files, split_files

data_files = pytest.importorskip("datasets.data_files")
load = pytest.importorskip("datasets.load")
packaged = pytest.importorskip("datasets.packaged_modules")

WORDS = ["train", "test", "dev", "val", "valid", "training", "eval", "validation", "testing", "en", "sft", "Train", "x"]
TAILS = ["", "", "_sft", "_stations", "set", "-00000-of-00002", "1", "_1", "0", ".x", "-train", " test"]
ENDINGS = [
    ".jsonl",
    ".jsonl",
    ".jsonl",
    ".parquet",
    ".json",
    ".jsonl.gz",
    ".csv",
    ".md",
    ".py",
    ".arrow",
    ".tar",
    ".JSONL",
]
OTHERS = ["README.md", "dataset_infos.json", "config.json", "state.json", ".hidden.jsonl", "_x.jsonl", "metadata.jsonl"]
OTHERS += ["train.png", "a.png", "b.png", "a.eval", "__x.jsonl", "LICENSE"]
FOLDERS = ["data", "data", "data", ".cache", "__old", "_new", "data-train", "train_data", "en"]


def repository(generator: random.Random) -> list[str]:
    """Names of files; those of one repository are alike in kind."""
    endings = generator.choices(ENDINGS, k=generator.choice([1, 1, 2, 4]))
    depth, paths = generator.choice([0, 0, 1, 1, 2]), set()
    for _ in range(generator.randint(1, 8)):
        folders = [
            generator.choice([generator.choice(FOLDERS), generator.choice(WORDS) + generator.choice(TAILS)])
            for _ in range(generator.randint(0, depth))
        ]
        name = generator.choice(WORDS) + generator.choice(TAILS) + generator.choice(endings)
        paths.add("/".join([*folders, name if generator.random() < 0.85 else generator.choice(OTHERS)]))
    return sorted(paths)


def theirs(folder) -> dict[str, set[str]]:
    """The files of each split."""
    patterns = data_files.get_data_patterns(str(folder))
    allowed = packaged._ALL_ALLOWED_EXTENSIONS
    found = data_files.DataFilesDict.from_patterns(patterns, base_path=str(folder), allowed_extensions=allowed)
    if any(len(set(paths)) < len(paths) for paths in found.values()):
        raise ValueError("datasets reads a file twice where it matches two patterns")
    module, _ = load.infer_module_for_data_files(found)
    if module not in ("json", "parquet", "arrow", "webdataset"):
        return {split: set() for split in found}
    kept = found.filter(extensions=packaged._MODULE_TO_EXTENSIONS[module])
    return {split: {path.removeprefix(f"{folder}/") for path in paths} for split, paths in kept.items()}


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=[pytest.mark.deep, pytest.mark.timeout(1500)])])
def test_splits_have_the_files_that_datasets_takes(tmp_path, count):
    logging.getLogger("datasets").setLevel(logging.ERROR)
    generator, refused = random.Random(7), 0
    for number in range(count):
        folder, kept = tmp_path / str(number), []
        for path in repository(generator):
            with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(b"{}")
                kept.append(path)
        try:
            expected = theirs(folder)
        except (ValueError, FileNotFoundError, AssertionError):
            refused += 1
            continue
        assert {split: set(readable_files(files)) for split, files in split_files(kept).items()} == expected, kept
    assert refused < count / 2


SHARDS = [f"data/{split}-00000-of-00001.parquet" for split in ("train_sft", "train_gen")]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train/a.jsonl", "test/train_x.jsonl"], {"train": ["train/a.jsonl"], "test": ["test/train_x.jsonl"]}),
        (SHARDS, {"train_sft": SHARDS[:1], "train_gen": SHARDS[1:]}),
        (["a.jsonl", "b.jsonl", "dataset_infos.json"], {"train": ["a.jsonl", "b.jsonl"]}),
    ],
)
def test_the_first_rule_that_finds_any_files_decides_splits(names, splits):
    assert split_files(names) == splits
