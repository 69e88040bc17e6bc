"""The data recipe: which ones load, which ones are refused, and the words of a refusal."""

import math
import os
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zephon.config.keys import keys_of
from zephon.config.options import CacheOptions, Options
from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.errors import PipelineError, RecipeError

EXAMPLE = """\
cache_dir = "/local-ssd/zephon"
cache_limit_bytes = "500gb"
seed = 42
shuffle_block_size = "auto"
tokenize_parallelism = 8
pack_parallelism = "auto"

[[sources]]
name = "web"
path = "s3://example-bucket/web"
fmt = "parquet"
weight = 3

[[sources]]
name = "code"
path = "hf://organization/code/train"
chat_template = "chat.jinja"
shuffle_shards = false
"""
ONE_SOURCE = '[[sources]]\nname = "a"\npath = "a"\n'
SCHEDULE = "[[schedule]]\nmixture = { a = 1 }\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    path = write(folder, text)
    with pytest.raises(RecipeError) as caught:
        DataRecipe.from_toml(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable() and len(message) < 1200
    return message.replace(str(path), "FILE")


def recipe_of(**keys: Any) -> DataRecipe:
    return DataRecipe.from_dict({"sources": [{"name": "a", "path": "a"}], **keys})


# Recipes that load


def test_the_example_recipe_loads(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    assert recipe.cache_dir == "/local-ssd/zephon"
    assert recipe.cache_limit_bytes == 500_000_000_000
    assert (recipe.seed, recipe.shuffle_block_size, recipe.text_field) == (42, "auto", "text")
    assert (recipe.tokenize_parallelism, recipe.pack_parallelism) == (8, None)
    assert recipe.sources == (
        SourceRecipe(name="web", path="s3://example-bucket/web", fmt="parquet", weight=3.0),
        SourceRecipe(
            name="code",
            path="hf://organization/code/train",
            chat_template=str(tmp_path / "chat.jinja"),
            shuffle_shards=False,
        ),
    )
    assert type(recipe.sources[0].weight) is float
    assert [recipe.setting(source, "shuffle_shards") for source in recipe.sources] == [True, False]


def test_every_key_but_name_and_path_has_a_default_and_a_description() -> None:
    for cls in (DataRecipe, SourceRecipe):
        for key in keys_of(cls).values():
            assert key.required == (key.name in ("name", "path")), key.name
            assert key.doc.endswith("."), key.name
    assert recipe_of(**dict.fromkeys(keys_of(DataRecipe))) == recipe_of()


def test_relative_paths_start_at_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    paths = ["web", "../code/*.jsonl", "/abs/x", "file:///y", "s3://b/k", "~/z", "~"]
    text = 'cache_dir = "cache"\n' + "".join(f'[[sources]]\nname = "{p}"\npath = "{p}"\n' for p in paths)
    write(folder, text)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    recipe = DataRecipe.from_toml(os.path.join("recipes", "recipe.toml"))
    assert recipe.cache_dir == f"{folder}/cache"
    assert [source.path for source in recipe.sources] == [
        f"{folder}/web",
        f"{folder}/../code/*.jsonl",
        "/abs/x",
        "file:///y",
        "s3://b/k",
        "/home/someone/z",
        "/home/someone",
    ]
    data = {"sources": [{"name": "a", "path": Path("a")}]}
    assert DataRecipe.from_dict(data).sources[0].path == str(tmp_path / "a")
    assert DataRecipe.from_dict(data, base="/b").sources[0].path == "/b/a"


@pytest.mark.parametrize(
    ("value", "size"),
    [(1, 1), ("10b", 10), ("500 GB", 500 * 10**9), ("256mib", 256 << 20), ("1.5gb", 1_500_000_000), ("1TiB", 1 << 40)],
)
def test_sizes_are_bytes_or_have_a_decimal_or_binary_unit(value: object, size: int) -> None:
    assert recipe_of(cache_limit_bytes=value).cache_limit_bytes == size
    assert CacheOptions.from_io_options({"cache": {"limit_bytes": value}}).limit_bytes == size


@pytest.mark.parametrize("value", [0, 2**63, "500", "gb", "5 pb", "-1gb", "1e3gb", "0.1b", "", 1.5, True])
def test_other_sizes_are_refused(value: object) -> None:
    for key in ("cache_limit_bytes", "prefetch_buffer_size"):
        with pytest.raises(RecipeError, match=f"{key} is .*; expected a number of bytes"):
            recipe_of(**{key: value})


def test_a_byte_order_mark_and_numpy_numbers_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf" + EXAMPLE.encode())
    assert DataRecipe.from_toml(path).seed == 42
    recipe = recipe_of(seed=np.int64(7), sources=[{"name": "a", "path": "a", "weight": np.float32(0.5)}])
    assert (type(recipe.seed), type(recipe.sources[0].weight)) == (int, float)


def test_a_recipe_is_frozen_pickles_and_comes_back_from_plain_data(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    with pytest.raises(FrozenInstanceError):
        recipe.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(DataRecipe.from_toml(tmp_path / "recipe.toml"))
    assert DataRecipe.from_dict(recipe.to_dict(), where="elsewhere") == recipe
    assert recipe.origin == str(tmp_path / "recipe.toml")


def test_replace_checks_like_a_recipe(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    other = recipe.replace(seed=7, cache_limit_bytes="1gb", cache_dir=None)
    assert (other.seed, other.cache_limit_bytes, other.cache_dir) == (7, 10**9, None)
    assert (other.sources, other.origin) == (recipe.sources, recipe.origin)
    for change, words in (
        ({"seed": "x"}, r'recipe\.toml: seed is "x"; expected a 64-bit integer'),
        ({"sed": 7}, r'recipe\.toml: unknown key "sed"\. Did you mean "seed"\?'),
        ({"seq_len": 7}, "The sequence length belongs to the training framework"),
    ):
        with pytest.raises(RecipeError, match=words):
            recipe.replace(**change)


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(RecipeError, match="chunk_size is 0; expected an integer from 1 to 1048576"):
        DataRecipe(sources=(SourceRecipe(name="a", path="a"),), chunk_size=0)
    with pytest.raises(RecipeError, match="weight is nan; expected a finite number of at least 0"):
        SourceRecipe(name="a", path="a", weight=math.nan)
    with pytest.raises(RecipeError, match="expected a SourceRecipe"):
        DataRecipe(sources=("a",))  # type: ignore[arg-type]


# Recipes that are refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('seed = "a"', 'FILE: seed is "a"; expected a 64-bit integer.'),
        ("seed = 2024-01-01", "FILE: seed is datetime.date(2024, 1, 1); expected a 64-bit integer."),
        ("chunk_size = 0", "FILE: chunk_size is 0; expected an integer from 1 to 1048576."),
        ("repeat = 1", "FILE: repeat is 1; expected true or false."),
        ("max_repeats = -1", "FILE: max_repeats is -1; expected an integer of at least 0."),
        ("error_budget = 1.5", "FILE: error_budget is 1.5; expected a number from 0 to 1."),
        (
            'shuffle_block_size = "globel"',
            'FILE: shuffle_block_size is "globel"; expected an integer of at least 1, "auto", "global" or "none". Did '
            'you mean "global"?',
        ),
        (
            "tokenize_parallelism = 0",
            'FILE: tokenize_parallelism is 0; expected an integer from 1 to 1024, or "auto".',
        ),
        ("text_field = {a = 1}", "FILE: text_field is {'a': 1}; expected the name of a column."),
        ('cache_dir = "s3://b/c"', 'FILE: cache_dir is "s3://b/c"; expected a path on this machine, not a store.'),
        (
            'on_error = "quarantine"',
            'FILE: on_error is "quarantine" and error_report is missing; set error_report to a folder, or take "skip".',
        ),
        (
            'exhausted_policy = "stop"\nmax_repeats = 2',
            'FILE: exhausted_policy is "stop" and max_repeats is 2; they contradict each other, so remove one of them.',
        ),
        ('Cache-Dir = "x"', 'FILE: unknown key "Cache-Dir". Did you mean "cache_dir"?'),
        (
            'path = "a"',
            'FILE: unknown key "path". It belongs to a source: write it inside that source\'s [[sources]] table.',
        ),
    ],
)
def test_a_wrong_line_is_refused_with_file_key_value_and_expectation(tmp_path: Path, line: str, message: str) -> None:
    assert refusal(tmp_path, f"{line}\n{ONE_SOURCE}") == message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{ONE_SOURCE}weight = -1\n", 'FILE: source 1 ("a"): weight is -1; expected a finite number of at least 0.'),
        (
            f'{ONE_SOURCE}weight = "0.5"\n',
            'FILE: source 1 ("a"): weight is "0.5"; expected a finite number of at least 0. Write it without quotes.',
        ),
        (f'seed = "7"\n{ONE_SOURCE}', 'FILE: seed is "7"; expected a 64-bit integer. Write it without quotes.'),
        (
            f'repeat = "false"\n{ONE_SOURCE}',
            'FILE: repeat is "false"; expected true or false. Write it without quotes.',
        ),
        (
            f"{ONE_SOURCE}weight = 0\n",
            'FILE: the weight of "a" is 0.0 and all weights add up to 0.0; expected shares above 1e-15, or 0.',
        ),
        (
            f'{ONE_SOURCE}weight = 1e-300\n[[sources]]\nname = "b"\npath = "b"\n',
            'FILE: the weight of "a" is 1e-300 and all weights add up to 1.0; expected shares above 1e-15, or 0.',
        ),
        (f"{ONE_SOURCE}wieght = 1.0\n", 'FILE: source 1 ("a"): unknown key "wieght". Did you mean "weight"?'),
        (f"{ONE_SOURCE}zzz = 1\n", 'unknown key "zzz". Expected one of '),
        (f"{ONE_SOURCE}seed = 1\n", "It belongs to the whole recipe: write it above the first [[sources]] line."),
        ("", "FILE: sources is missing; add a [[sources]] table with name and path for each dataset."),
        ('sources = "a"', 'sources is "a"; expected a list of tables: write [[sources]].'),
        ('sources = ["a"]', 'source 1: the value is "a"; expected a table of keys and values.'),
        ('[[sources]]\npath = "a"', "source 1: name is missing"),
        ('[[sources]]\nname = "a"\npath = ""', 'path is ""; expected the path of a file or folder'),
        ('[[sources]]\nname = " a"\npath = "a"', 'name is " a"; expected a name, without blanks at its ends.'),
        (ONE_SOURCE + ONE_SOURCE, 'source 2 has the name "a", which source 1 has too'),
        (SCHEDULE.replace("1", "0") + ONE_SOURCE, "FILE: stage 1: mixture is {'a': 0.0}; expected weights with"),
        (SCHEDULE.replace("1", "-1") + ONE_SOURCE, "FILE: stage 1: mixture is {'a': -1}; expected a table of weights"),
        (f'{SCHEDULE}start_tokens = "1x"\n{ONE_SOURCE}', 'start_tokens is "1x"; expected an integer of at least 0, or'),
        (f"{SCHEDULE}{ONE_SOURCE}weight = 2\n", 'source "a" has the weight 2, and the schedule has the mixture'),
        (
            ONE_SOURCE + ONE_SOURCE.replace('"a"', '"web"') + "[[schedule]]\nmixture = { a = 1, webb = 1 }\n",
            'FILE: unknown source in stage 1 of the schedule "webb". Did you mean "web"?',
        ),
    ],
)
def test_wrong_sources_and_stages_are_refused_with_their_place(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


@pytest.mark.parametrize("weights", [(1e308, 1e308), (5e-324, 1e300)])
def test_weights_without_shares_are_refused(weights: tuple[float, float]) -> None:
    with pytest.raises(RecipeError, match="all weights add up to"):
        recipe_of(sources=[{"name": str(i), "path": "a", "weight": weight} for i, weight in enumerate(weights)])


@pytest.mark.parametrize(
    ("owner", "keys"),
    [
        ("The tokenizer belongs", "tokenizer tokenizer_id tokeniser hf_tokenizer vocab_size"),
        (
            "The sequence length belongs",
            "seq_len sequence_length max_seq_len context_length max_length Seq-Len",
        ),
        (
            "Global batch and microbatch size belong",
            "batch_size global-batch-size micro_batch_size gbs num_microbatches gradient_accumulation_steps",
        ),
        (
            "The topology belongs",
            "dp_degree dp_rank tp tensor_model_parallel_size data_parallel_shard_degree world_size nproc_per_node",
        ),
    ],
)
def test_a_key_of_the_framework_is_refused_with_its_owner(tmp_path: Path, owner: str, keys: str) -> None:
    for key in keys.split():
        for text in (f"{key} = 8\n{ONE_SOURCE}", f"{ONE_SOURCE}{key} = 8\n", f"{ONE_SOURCE}[{key}]\nname = 'x'\n"):
            message = refusal(tmp_path, text)
            assert f'unknown key "{key}". {owner} to the training framework' in message
            assert "Pipeline.from_recipe" in message


def test_files_that_are_no_recipe_are_refused(tmp_path: Path) -> None:
    assert "not valid TOML: " in refusal(tmp_path, "seed = 1\nchunk_size = = 2\n")
    assert "line 3" in refusal(tmp_path, "seed = 1\n\nseed = 2\n")
    path = tmp_path / "recipe.toml"
    path.write_bytes(b'seed = 1\ntext_field = "\xff"\n')
    with pytest.raises(RecipeError, match="line 2: this is not UTF-8"):
        DataRecipe.from_toml(path)
    for missing in (tmp_path / "no.toml", tmp_path, "x" * 5000):
        with pytest.raises(RecipeError, match="the recipe cannot be read"):
            DataRecipe.from_toml(missing)


# Options of a pipeline


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runer": "inline"}, 'unknown option "runer". Did you mean "runner"?'),
        ({"prefetch_batches": 0}, "prefetch_batches is 0; expected an integer of at least 1."),
        ({"fetch_parallelism": 2000}, "fetch_parallelism is 2000; expected an integer from 1 to 1024"),
        ({"ledger": ""}, 'ledger is ""; expected a path on this machine'),
        ({"combine_flag": 3}, "combine_flag is 3; expected a function of one flag."),
        ({"on_error": "quarantine"}, "error_report is missing"),
        ({"io_options": 3}, "io_options is 3; expected a dict"),
        ({"io_options": {"cashe": {}}}, 'unknown io option "cashe". Did you mean "cache"?'),
        ({"io_options": {"cache": {"limit": 1}}}, 'unknown cache option "limit". Did you mean "limit_bytes"?'),
    ],
)
def test_options_are_checked_as_the_keys_of_a_recipe(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError) as caught:
        Options().changed(options)
    assert words in str(caught.value)


def test_options_are_in_normal_form(tmp_path: Path) -> None:
    options = Options().changed({"fetch_parallelism": "auto", "ledger": tmp_path, "prefetch_buffer_size": "1mib"})
    assert (options.fetch_parallelism, options.ledger) == (None, str(tmp_path))
    assert options.prefetch_buffer_size == 1 << 20
    assert options.changed({"runner": None}) == options
