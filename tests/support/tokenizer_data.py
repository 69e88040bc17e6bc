"""Small tokenizers of every family, trained on this Python's own sources, for the tests of zephon.tokenizer."""

import copy
import functools
import itertools
import json
import pathlib
import sysconfig
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from zephon.tokenizer.tokenizer import Tokenizer as Loaded
from zephon.tokenizer.tokenizer import load_tokenizer

Tree = dict[str, Any]

VOCAB_SIZE = 1500
END = "<|endoftext|>"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def sources() -> tuple[str, ...]:
    """About 500 kB of Python, with its comments."""
    names = [
        "argparse",
        "ast",
        "datetime",
        "difflib",
        "enum",
        "inspect",
        "pathlib",
        "pickle",
        "random",
        "tarfile",
        "typing",
    ]
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = [p for name in names for p in (folder / f"{name}.py", folder / name / "__init__.py") if p.exists()]
    return tuple(path.read_text(encoding="utf-8") for path in paths)


def gpt2() -> Tree:
    return copy.deepcopy(_byte_level(None, False))


def llama3(regex: str = LLAMA_3) -> Tree:
    return copy.deepcopy(_byte_level(regex, False))


def qwen() -> Tree:
    return copy.deepcopy(_byte_level(LLAMA_3, True))


def starcoder() -> Tree:
    tree = gpt2()
    digits = {"type": "Digits", "individual_digits": True}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level_step(use_regex=True)]}
    return tree


def metaspace(prepend_scheme: str = "first", split: bool = False) -> Tree:
    tree = copy.deepcopy(_sentencepiece())
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": split}
    return {**tree, "pre_tokenizer": step}


def llama2() -> Tree:
    tree = copy.deepcopy(_sentencepiece())
    tree["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACE_TO_METASPACE]}
    return {**tree, "pre_tokenizer": None}


def gemma() -> Tree:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {**copy.deepcopy(_sentencepiece()), "normalizer": dict(SPACE_TO_METASPACE), "pre_tokenizer": split}


SPACE_TO_METASPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
FAMILIES = {
    "gpt2": gpt2,
    "llama3": llama3,
    "o200k": lambda: llama3(O200K),
    "qwen": qwen,
    "starcoder": starcoder,
    "llama2": llama2,
    "gemma": gemma,
    "metaspace": metaspace,
}
# Of the kinds of model that libraries tell apart, one each; their cousins are among the deep tests.
EVERYDAY = ("gpt2", "llama2", "metaspace")
_folders = tempfile.TemporaryDirectory(prefix="zephon-tokenizers-")


def families(*everyday: str) -> list[Any]:
    """The families as parameters of a test, all but some of them for the deep tests."""
    return [name if name in (everyday or EVERYDAY) else pytest.param(name, marks=pytest.mark.deep) for name in FAMILIES]


def scratch() -> pathlib.Path:
    """A folder that is gone when this process ends."""
    return pathlib.Path(_folders.name)


def folder_of(family: str) -> pathlib.Path:
    """A folder with the tokenizer of a family."""
    folder = scratch() / family
    return folder if folder.exists() else save(folder, FAMILIES[family]())


@functools.cache
def loaded(family: str, backend: str = "auto") -> Loaded:
    """The tokenizer of a family, for tests that do not change it."""
    return load_tokenizer(folder_of(family), backend=backend)


def byte_level_step(*, use_regex: bool = False, add_prefix_space: bool = False) -> Tree:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def split_step(regex: str = LLAMA_3, behavior: str = "Isolated", invert: bool = False) -> Tree:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def split_then(*steps: Tree) -> Tree:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def add_token(tree: Tree, content: str, **flags: bool) -> Tree:
    """`tree` with one more added token, not special unless told so."""
    ids = [*tree["model"]["vocab"].values(), *(t["id"] for t in tree["added_tokens"])]
    entry = {"id": max(ids) + 1, "content": content, "special": False}
    entry |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tree["added_tokens"].append(entry | flags)
    return tree


def save(folder: pathlib.Path, tree: Tree, **files: Any) -> pathlib.Path:
    """Write tokenizer.json and, as `files`, tokenizer_config or special_tokens_map."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"tokenizer": tree, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def column(texts: list[str]) -> pa.Array:
    return pa.array(texts, type=pa.large_string())


def reference_ids(tree: Tree, texts: list[str]) -> list[list[int]]:
    """What `tokenizers` itself gives, special tokens in the text taken as text."""
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [row.ids for row in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def rows(encoded: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    values, offsets = encoded
    assert values.dtype == np.uint32 and offsets.dtype == np.int64
    assert offsets[0] == 0 and offsets[-1] == len(values)
    return [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]


@functools.cache
def _byte_level(regex: str | None, nfc: bool) -> Tree:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    splits = [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    tokenizer.decoder = decoders.ByteLevel()
    return _train(tokenizer, [END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


@functools.cache
def _sentencepiece() -> Tree:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"]
    tree = _train(tokenizer, special + [f"<0x{byte:02X}>" for byte in range(256)])
    tree["added_tokens"] = tree["added_tokens"][: len(special)]
    return tree


def _train(tokenizer: Tokenizer, special: list[str], **options: Any) -> Tree:
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator(sources(), trainer)
    return json.loads(tokenizer.to_str())
