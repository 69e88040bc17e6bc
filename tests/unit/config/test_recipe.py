"""The data recipe: what loads, what is refused, and in what words."""

import math
import os
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from zephon.config.recipe import MAX_RECIPE_BYTES, DataRecipe, SourceRecipe, parse_size
from zephon.errors import RecipeError

EXAMPLE = """\
text_field = "text"
cache_dir = "/local-ssd/zephon"
cache_limit_bytes = "500gb"
seed = 42
chunk_size = 16384
shuffle_block_size = "auto"
tokenize_parallelism = 8
pack_parallelism = 8

[[sources]]
name = "web"
path = "s3://example-bucket/web"
fmt = "parquet"
weight = 3.0

[[sources]]
name = "code"
path = "hf://organization/code/train"
weight = 1.0
"""

ONE_SOURCE = '[[sources]]\nname = "a"\npath = "a"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    path = write(folder, text)
    with pytest.raises(RecipeError) as caught:
        DataRecipe.from_toml(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message.replace(str(path), "FILE")


def dict_refusal(**changes: object) -> str:
    with pytest.raises(RecipeError) as caught:
        DataRecipe.from_dict({"sources": [{"name": "a", "path": "a"}], **changes})
    return str(caught.value)


# What loads


def test_the_example_recipe_loads(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    assert recipe.text_field == "text"
    assert recipe.cache_dir == Path("/local-ssd/zephon")
    assert recipe.cache_limit_bytes == 500_000_000_000
    assert recipe.seed == 42
    assert recipe.chunk_size == 16384
    assert recipe.shuffle_block_size == "auto"
    assert (recipe.tokenize_parallelism, recipe.pack_parallelism) == (8, 8)
    assert recipe.sources == (
        SourceRecipe(name="web", path="s3://example-bucket/web", fmt="parquet", weight=3.0),
        SourceRecipe(name="code", path="hf://organization/code/train", fmt=None, weight=1.0),
    )


def test_every_key_but_name_and_path_has_a_default() -> None:
    recipe = DataRecipe.from_dict({"sources": [{"name": "a", "path": "/a"}]})
    expected: dict[str, Any] = {
        "text_field": "text",
        "cache_dir": None,
        "cache_limit_bytes": None,
        "seed": 0,
        "chunk_size": 16384,
        "shuffle_shards": True,
        "shuffle_within_shard": True,
        "shuffle_block_size": "auto",
        "flush_every_k_chunks": 1,
        "token_estimation": True,
        "shuffle_after_pack": True,
        "shuffle_buffer_size": 1024,
        "repeat": True,
        "reshuffle_on_repeat": True,
        "exhausted_policy": None,
        "stop_after_passes": None,
        "max_repeats": None,
        "schedule": [],
        "ensure_mixture": False,
        "ensure_mixture_buffer_size": None,
        "continue_from": None,
        "canonical_replicas": "auto",
        "tokenize_parallelism": "auto",
        "pack_parallelism": "auto",
        "fetch_parallelism": "auto",
        "prefetch_buffer_size": "auto",
        "runner": "threads",
        "isolate": False,
        "filter": None,
        "text_template": None,
        "text_encoding": None,
        "documents": "text",
        "messages_field": None,
        "response_field": None,
        "tools_field": None,
        "chat_template": None,
        "chat_loss": "assistant",
        "chat_date": None,
        "chat_assistant_tokens": None,
        "tokens_field": None,
        "loss_field": None,
        "labels_field": None,
        "positions_field": None,
        "max_document_tokens": None,
        "split_long_documents": False,
        "on_error": "raise",
        "error_budget": 0.01,
        "error_budget_rows": 0,
        "error_report": None,
        "special_tokens": "auto",
        "pack_mode": "flat",
        "pack_algorithm": "auto",
        "num_bins": 64,
        "max_documents_per_record": None,
        "homogeneity": "none",
        "oversized": "auto",
        "sources": [
            {
                "name": "a",
                "path": "/a",
                "fmt": None,
                "weight": 1.0,
                "text_field": None,
                "group": None,
                "shuffle_shards": None,
                "shuffle_within_shard": None,
                "shuffle_block_size": None,
                "reshuffle_on_repeat": None,
                "exhausted_policy": None,
                "stop_after_passes": None,
                "max_repeats": None,
            }
        ],
    }
    own = dict.fromkeys(
        key for key in expected if key not in ("on_error", "error_budget") and hasattr(recipe.sources[0], key)
    )
    expected["sources"][0] = {**own, **expected["sources"][0]}
    assert recipe.to_dict() == expected


def test_relative_paths_start_at_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    text = 'cache_dir = "cache"\n' + "".join(
        f'[[sources]]\nname = "{i}"\npath = "{p}"\n'
        for i, p in enumerate(["web", "../code/*.jsonl", "/abs/x", "file:///y", "s3://b/k", "~/z", "~"])
    )
    write(folder, text)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    recipe = DataRecipe.from_toml(os.path.join("recipes", "recipe.toml"))
    assert recipe.cache_dir == folder / "cache"
    assert [source.path for source in recipe.sources] == [
        f"{folder}/web",
        f"{folder}/../code/*.jsonl",
        "/abs/x",
        "file:///y",
        "s3://b/k",
        "/home/someone/z",
        "/home/someone",
    ]


def test_from_dict_takes_paths_from_base_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"sources": [{"name": "a", "path": Path("a")}]}
    monkeypatch.chdir(tmp_path)
    assert DataRecipe.from_dict(data).sources[0].path == str(tmp_path / "a")
    assert DataRecipe.from_dict(data, base="/b").sources[0].path == "/b/a"


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        ("500gb", 500 * 10**9),
        ("500 GB", 500 * 10**9),
        ("1kb", 1000),
        ("1MB", 10**6),
        ("2tb", 2 * 10**12),
        ("1KiB", 1024),
        ("256mib", 256 << 20),
        ("1gib", 1 << 30),
        ("1tib", 1 << 40),
        ("1.5gb", 1_500_000_000),
        ("0.1mb", 100_000),
        ("10b", 10),
    ],
)
def test_sizes_are_bytes_or_have_a_decimal_or_binary_unit(value: object, size: int) -> None:
    assert parse_size(value) == size
    assert DataRecipe.from_dict({"cache_limit_bytes": value, "sources": [SourceRecipe(name="a", path="a")]}) == (
        DataRecipe(cache_limit_bytes=size, sources=(SourceRecipe(name="a", path=os.path.abspath("a")),))
    )


@pytest.mark.parametrize(
    "value", [0, -1, 2**63, "500", "gb", "5 pb", "-1gb", "1e3gb", "0.1b", "", 1.5, True, "99999999tb"]
)
def test_other_sizes_are_refused(value: object) -> None:
    assert 'key "cache_limit_bytes"' in dict_refusal(cache_limit_bytes=value)
    assert 'key "prefetch_buffer_size"' in dict_refusal(prefetch_buffer_size=value)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf" + EXAMPLE.encode())
    assert DataRecipe.from_toml(path).seed == 42


def test_integers_are_good_weights() -> None:
    recipe = DataRecipe.from_dict({"sources": [{"name": "a", "path": "a", "weight": 3}]})
    assert repr(recipe.sources[0].weight) == "3.0"


def test_numpy_numbers_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    recipe = DataRecipe.from_dict(
        {"seed": np.int64(7), "sources": [{"name": "a", "path": "a", "weight": np.float32(0.5)}]}
    )
    assert type(recipe.seed) is int
    assert type(recipe.sources[0].weight) is float


def test_dots_in_strings_and_comments_are_no_dotted_keys(tmp_path: Path) -> None:
    dots = "." * 100
    text = """\
# DOTS
cache_dir = "DOTS"
text_field = "\\"DOTS"
[[sources]]
name = '''a'DOTS'''
path = \"\"\""DOTS\\""\"DOTS""\""
weight = 1.5
"""
    recipe = DataRecipe.from_toml(write(tmp_path, text.replace("DOTS", dots)))
    assert recipe.text_field == f'"{dots}'
    assert recipe.sources[0].name == f"a'{dots}"


# Frozen, comparable, replaceable


def test_a_recipe_is_frozen_and_pickles(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    with pytest.raises(FrozenInstanceError):
        recipe.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(DataRecipe.from_toml(tmp_path / "recipe.toml"))


def test_plain_data_makes_the_same_recipe_again(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, 'cache_dir = "c"\n' + ONE_SOURCE))
    assert DataRecipe.from_dict(recipe.to_dict()) == recipe


def test_where_a_recipe_comes_from_is_not_part_of_it(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    assert recipe.origin == str(tmp_path / "recipe.toml")
    assert DataRecipe.from_dict(recipe.to_dict(), where="elsewhere") == recipe


def test_replace_checks_like_a_recipe(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    other = recipe.replace(seed=7, cache_limit_bytes="1gb", cache_dir=None)
    assert (other.seed, other.cache_limit_bytes, other.cache_dir) == (7, 10**9, None)
    assert other.sources == recipe.sources
    assert other.origin == recipe.origin
    with pytest.raises(RecipeError, match=r'recipe\.toml: key "seed" is "x"; expected an integer from 0'):
        recipe.replace(seed="x")
    with pytest.raises(RecipeError, match='did you mean "seed"'):
        recipe.replace(sed=7)
    with pytest.raises(RecipeError, match="sequence length"):
        recipe.replace(seq_len=7)


def test_direct_construction_is_checked_too() -> None:
    source = SourceRecipe(name="a", path="a")
    with pytest.raises(RecipeError, match='key "chunk_size" is 0; expected an integer from 1'):
        DataRecipe(sources=(source,), chunk_size=0)
    with pytest.raises(RecipeError, match='key "weight" is nan'):
        SourceRecipe(name="a", path="a", weight=math.nan)
    with pytest.raises(RecipeError, match="there are no sources"):
        DataRecipe(sources=())
    with pytest.raises(RecipeError, match="expected a SourceRecipe"):
        DataRecipe(sources=("a",))  # type: ignore[arg-type]


# What decides the data


def test_performance_keys_and_places_do_not_decide_the_data(tmp_path: Path) -> None:
    recipe = DataRecipe.from_toml(write(tmp_path, EXAMPLE))
    moved = [
        {"name": "web", "path": "/elsewhere", "weight": 3},
        {"name": "code", "path": "code", "fmt": "jsonl", "text_field": "text"},
    ]
    same = recipe.replace(
        sources=moved,
        cache_dir="x",
        cache_limit_bytes=1,
        tokenize_parallelism=1,
        pack_parallelism=2,
        fetch_parallelism=3,
        prefetch_buffer_size="1mb",
        runner="process",
        isolate=True,
    )
    assert same.data_fields() == recipe.data_fields()


@pytest.mark.parametrize(
    "change",
    [
        {"text_field": "body"},
        {"seed": 43},
        {"chunk_size": 1},
        {"shuffle_shards": False},
        {"shuffle_within_shard": False},
        {"shuffle_block_size": "global"},
        {"flush_every_k_chunks": 2},
        {"token_estimation": False},
        {"shuffle_after_pack": False},
        {"shuffle_buffer_size": 2},
        {"repeat": False},
        {"canonical_replicas": 4},
        {"special_tokens": "eos"},
        {"pack_mode": "sequences"},
        {"pack_algorithm": "best_fit"},
        {"num_bins": 8},
        {"max_documents_per_record": 4},
        {"homogeneity": "full"},
        {"oversized": "drop"},
        {"sources": [{"name": "web", "path": "s3://example-bucket/web", "weight": 3.0}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_all_other_keys_decide_the_data(change: dict[str, object]) -> None:
    sources = [{"name": "web", "path": "w", "weight": 3.0}, {"name": "code", "path": "c"}]
    recipe = DataRecipe.from_dict({"seed": 42, "sources": sources})
    assert recipe.replace(**change).data_fields() != recipe.data_fields()


# What is refused


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", '"a"', 'key "seed" is "a"; expected an integer from 0 to 9223372036854775807.'),
        ("seed", "true", 'key "seed" is true; expected an integer'),
        ("seed", "-1", 'key "seed" is -1; expected an integer from 0'),
        ("seed", "1.0", 'key "seed" is 1.0; expected an integer'),
        ("chunk_size", "0", 'key "chunk_size" is 0; expected an integer from 1 to 1048576.'),
        ("chunk_size", "[1, 2]", 'key "chunk_size" is a list of 2; expected'),
        ("repeat", "1", 'key "repeat" is 1; expected true or false.'),
        ("token_estimation", '"yes"', 'key "token_estimation" is "yes"; expected true or false.'),
        (
            "shuffle_block_size",
            '"globel"',
            'key "shuffle_block_size" is "globel"; expected an integer from 1 to 2147483647 or "auto" or "global" or '
            '"none"; did you mean "global"?',
        ),
        ("tokenize_parallelism", "0", 'key "tokenize_parallelism" is 0; expected an integer from 1 to 1024 or "auto".'),
        ("canonical_replicas", "1.5", 'key "canonical_replicas" is 1.5; expected an integer from 1'),
        ("text_field", '""', 'key "text_field" is ""; expected the name of a column'),
        ("text_field", '" text"', 'key "text_field" is " text"; expected the name of a column'),
        ("text_field", "{a = 1}", 'key "text_field" is a table; expected the name of a column'),
        ("cache_dir", '"s3://b/c"', 'key "cache_dir" is "s3://b/c"; expected a folder of this machine, not a store.'),
        ("cache_dir", "3", 'key "cache_dir" is 3; expected a folder of this machine.'),
        ("runner", '"thread"', 'expected "inline", "threads" or "process"; did you mean "threads"?'),
        (
            "runner",
            '"ray"',
            'expected "inline", "threads" or "process", as this version of Zephon does not have "ray" yet.',
        ),
        ("isolate", '"yes"', 'key "isolate" is "yes"; expected true or false.'),
        ("special_tokens", '"sep"', 'expected "auto", "bos_eos", "bos", "eos" or "none"'),
        (
            "pack_algorithm",
            '"best-fit"',
            'expected "auto", "wrap", "first_fit", "best_fit" or "best_fit_wrap"; did you',
        ),
        ("pack_mode", '"flats"', 'key "pack_mode" is "flats"; expected "flat" or "sequences"; did you mean "flat"?'),
        ("num_bins", "0", 'key "num_bins" is 0; expected an integer from 1 to 65536.'),
        ("max_documents_per_record", "0", 'key "max_documents_per_record" is 0; expected an integer from 1'),
        ("homogeneity", '"total"', 'key "homogeneity" is "total"; expected "none", "group" or "full".'),
        ("oversized", '"cut"', 'key "oversized" is "cut"; expected "auto", "split" or "drop".'),
    ],
)
def test_a_wrong_value_is_told_with_file_key_value_and_expectation(
    tmp_path: Path, key: str, value: str, words: str
) -> None:
    message = refusal(tmp_path, f"{key} = {value}\n{ONE_SOURCE}")
    assert message.startswith("FILE: ")
    assert words in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("weight = 0", 'FILE: source 1 ("a"): key "weight" is 0; expected a finite number above 0.'),
        ("weight = -1.0", 'key "weight" is -1.0'),
        ("weight = nan", 'key "weight" is nan'),
        ("weight = inf", 'key "weight" is inf'),
        ("weight = true", 'key "weight" is true'),
        ('weight = "3"', 'key "weight" is "3"'),
        ('fmt = "parqet"', 'expected "parquet", "jsonl", "arrow", "webdataset", "mds"'),
        ("text_field = 1", 'source 1 ("a"): key "text_field" is 1; expected the name of a column'),
    ],
)
def test_a_wrong_value_in_a_source_is_told_with_the_source(tmp_path: Path, line: str, words: str) -> None:
    assert words in refusal(tmp_path, f"{ONE_SOURCE}{line}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no sources; add a [[sources]] table"),
        ("sources = []", "there are no sources"),
        ('sources = "a"', 'key "sources" is "a"; expected [[sources]] tables'),
        ('sources = ["a"]', 'source 1: this is "a"; expected a table'),
        ('[sources]\nname = "a"', "expected a list of them: write [[sources]]"),
        ('[[sources]]\npath = "a"', 'source 1: key "name" is missing'),
        ('[[sources]]\nname = "a"', 'source 1 ("a"): key "path" is missing'),
        ('[[sources]]\nname = "a"\npath = ""', 'key "path" is ""; expected the path of a file or folder'),
        ('[[sources]]\nname = ""\npath = "a"', 'key "name" is ""; expected a name'),
        ('[[sources]]\nname = "a\\nb"\npath = "a"', 'key "name" is "a\\nb"; expected a name'),
        ('[[sources]]\nname = 3\npath = "a"', 'source 1: key "name" is 3; expected a name'),
        (ONE_SOURCE + ONE_SOURCE, 'key "name" of source 2 is "a", which is the name of source 1'),
    ],
)
def test_missing_or_malformed_sources_are_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


@pytest.mark.parametrize("weights", [(1e308, 1e308), (5e-324, 1e300)])
def test_weights_that_cannot_be_shared_out_are_refused(weights: tuple[float, float]) -> None:
    sources = [{"name": str(i), "path": "a", "weight": weight} for i, weight in enumerate(weights)]
    assert "add up to" in dict_refusal(sources=sources)


def test_an_unknown_key_is_told_with_the_nearest_known_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"shufle_shards = true\n{ONE_SOURCE}")
    assert message == 'FILE: key "shufle_shards" (with value true) is unknown; did you mean "shuffle_shards"?'
    assert 'did you mean "cache_dir"?' in refusal(tmp_path, f'Cache-Dir = "x"\n{ONE_SOURCE}')
    assert 'did you mean "sources"?' in refusal(tmp_path, '[[source]]\nname = "a"\npath = "a"')
    message = refusal(tmp_path, f"{ONE_SOURCE}wieght = 1.0\n")
    assert message == 'FILE: source 1 ("a"): key "wieght" (with value 1.0) is unknown; did you mean "weight"?'


def test_an_unknown_key_like_no_other_is_told_with_all_known_ones(tmp_path: Path) -> None:
    assert "expected one of name, path, fmt, weight, text_field, " in refusal(tmp_path, f"{ONE_SOURCE}zzz = 1\n")


def test_a_key_on_the_wrong_level_is_told_where_it_belongs(tmp_path: Path) -> None:
    assert "write it above the first [[sources]] line" in refusal(tmp_path, f"{ONE_SOURCE}seed = 1\n")
    assert "write it inside that source's [[sources]] table" in refusal(tmp_path, f'path = "a"\n{ONE_SOURCE}')


@pytest.mark.parametrize(
    ("owner", "keys"),
    [
        ("the tokenizer is the model's", ["tokenizer", "tokenizer_id", "tokeniser", "hf_tokenizer", "vocab_size"]),
        (
            "owns the sequence length",
            ["seq_len", "seq_length", "sequence_length", "max_seq_len", "context_length", "max_length", "Seq-Len"],
        ),
        (
            "owns global batch and microbatch size",
            [
                "batch_size",
                "global_batch_size",
                "global-batch-size",
                "micro_batch_size",
                "microbatch_size",
                "microbatch",
                "local_batch_size",
                "num_microbatches",
                "gbs",
                "mbs",
                "gradient_accumulation_steps",
            ],
        ),
        (
            "owns the topology",
            [
                "dp_degree",
                "dp_rank",
                "dp_group_id",
                "tp",
                "tensor_model_parallel_size",
                "data_parallel_shard_degree",
                "pipeline_parallel_degree",
                "context_parallel_size",
                "world_size",
                "rank",
                "num_gpus",
                "nnodes",
                "gpus_per_node",
                "nproc_per_node",
            ],
        ),
    ],
)
def test_a_key_of_the_framework_is_refused_with_its_owner(tmp_path: Path, owner: str, keys: list[str]) -> None:
    for key in keys:
        for text in (f"{key} = 8\n{ONE_SOURCE}", f"{ONE_SOURCE}{key} = 8\n", f"{ONE_SOURCE}[{key}]\nname = 'x'\n"):
            message = refusal(tmp_path, text)
            assert f'key "{key}"' in message
            assert owner in message
            assert "Pipeline.from_recipe" in message


# What is no recipe at all


def test_a_syntax_error_is_told_with_its_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, "seed = 1\nchunk_size = = 2\n").startswith("FILE, line 2: this is not valid TOML: ")
    assert refusal(tmp_path, "seed = 1\n\nseed = 2\n").startswith("FILE, line 3: ")
    assert refusal(tmp_path, 'seed = 1\ntext_field = "a').startswith("FILE, line 2: ")


def test_text_that_is_not_utf8_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b'seed = 1\ntext_field = "\xff"\n')
    with pytest.raises(RecipeError, match="line 2: this is not UTF-8"):
        DataRecipe.from_toml(path)


def test_a_missing_file_or_a_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no\.toml: there is no such file"):
        DataRecipe.from_toml(tmp_path / "no.toml")
    with pytest.raises(RecipeError, match=r"this is a folder|not a regular file"):
        DataRecipe.from_toml(tmp_path)
    with pytest.raises(RecipeError, match="cannot be read"):
        DataRecipe.from_toml("a\0b")
    with pytest.raises(RecipeError, match="cannot be read"):
        DataRecipe.from_toml("x" * 5000)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX's")
def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="not a regular file"):
        DataRecipe.from_toml(tmp_path / "pipe")


def test_a_data_file_is_refused_without_being_parsed(tmp_path: Path) -> None:
    assert "larger than 1048576 bytes" in refusal(tmp_path, "#" * (MAX_RECIPE_BYTES + 1))
    write(tmp_path, ONE_SOURCE + "#" * (MAX_RECIPE_BYTES - len(ONE_SOURCE)))
    DataRecipe.from_toml(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    "text",
    [
        f"seed = {'[' * 100_000}",
        f"seed = {'9' * 10_000}",
        f"{'k' * 1_000_000} = 1",
        f"{'a.' * 500_000}a = 1",
        '"a". ' * 200_000 + "a = 1",
        'y = {x = """a"""", ' + "a." * 500_000 + "a = 1}",
        f"[{'a . ' * 200_000}a]",
        f"x = {{{'a.' * 500_000}a = 1}}",
        "x = " + "{a = " * 100_000,
        'x = """' + '\\"""' * 200_000,
        "x = 1\n" + "'" * 1_000_000,
        f'seed = "{"v" * 1_000_000}"',
        "seed = 2024-01-01",
        '"\\u0000\\u001b[31m" = 1',
    ],
    ids=str.__len__,
)
def test_hostile_recipes_give_one_short_line(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, text + "\n")
    assert message.isprintable()
    assert len(message) < 1200


@pytest.mark.parametrize("data", [None, 3, "a", [], object(), {3: 4}, {None: 1}, {"seed": object()}])
def test_data_that_is_no_table_is_refused(data: Any) -> None:
    with pytest.raises(RecipeError):
        DataRecipe.from_dict(data)
