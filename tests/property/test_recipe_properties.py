"""Properties of the data recipe over all values that may be in one."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zephon.config.recipe import DataRecipe, parse_size
from zephon.errors import RecipeError

count = st.integers(1, 2**31 - 1)
parallelism = st.integers(1, 1024) | st.just("auto")
name = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=255)
size = st.integers(1, 2**63 - 1) | st.builds("{}{}".format, st.integers(1, 9000), st.sampled_from(["b", "kb", "TiB"]))

VALID: dict[str, st.SearchStrategy[Any]] = {
    "text_field": name,
    "cache_dir": name,
    "cache_limit_bytes": size,
    "seed": st.integers(0, 2**63 - 1),
    "chunk_size": st.integers(1, 1 << 20),
    "shuffle_shards": st.booleans(),
    "shuffle_within_shard": st.booleans(),
    "shuffle_block_size": count | st.sampled_from(["auto", "global", "none"]),
    "flush_every_k_chunks": count,
    "token_estimation": st.booleans(),
    "shuffle_after_pack": st.booleans(),
    "shuffle_buffer_size": count,
    "repeat": st.booleans(),
    "reshuffle_on_repeat": st.booleans(),
    "exhausted_policy": st.sampled_from(["stop", "repeat"]),
    "stop_after_passes": count,
    "max_repeats": count,
    "ensure_mixture": st.booleans(),
    "ensure_mixture_buffer_size": count,
    "canonical_replicas": st.integers(1, 1 << 16) | st.just("auto"),
    "tokenize_parallelism": parallelism,
    "pack_parallelism": parallelism,
    "fetch_parallelism": parallelism,
    "prefetch_buffer_size": size | st.just("auto"),
    "runner": st.sampled_from(["inline", "threads", "process"]),
    "isolate": st.booleans(),
    "special_tokens": st.sampled_from(["auto", "bos_eos", "bos", "eos", "none"]),
    "pack_mode": st.sampled_from(["flat", "sequences"]),
    "pack_algorithm": st.sampled_from(["auto", "wrap", "first_fit", "best_fit", "best_fit_wrap"]),
    "num_bins": st.integers(1, 1 << 16),
    "max_documents_per_record": count,
    "homogeneity": st.sampled_from(["none", "group", "full"]),
    "oversized": st.sampled_from(["auto", "split", "drop"]),
    "on_error": st.sampled_from(["raise", "skip"]),
    "error_budget": st.floats(0, 1) | st.integers(0, 1),
    "error_budget_rows": st.integers(0, 2**31 - 1),
    "error_report": st.sampled_from(["/reports", "reports"]),
}
OWN: dict[str, st.SearchStrategy[Any]] = {
    "filter": name,
    "text_template": name,
    "text_encoding": name,
    "documents": st.sampled_from(["text", "chat", "tokens"]),
    "messages_field": name,
    "response_field": name,
    "tools_field": name,
    "chat_template": name,
    "chat_loss": st.sampled_from(["assistant", "last_assistant", "all"]),
    "chat_date": name,
    "chat_assistant_tokens": name,
    "tokens_field": name,
    "loss_field": name,
    "labels_field": name,
    "positions_field": name,
    "max_document_tokens": count,
    "split_long_documents": st.booleans(),
}
VALID |= OWN
SOURCE = st.fixed_dictionaries(
    {"name": name, "path": name},
    optional={
        "fmt": st.sampled_from(["parquet", "jsonl", "arrow"]) | st.none(),
        "weight": st.floats(1e-6, 1e6) | st.integers(1, 10**6),
        "text_field": name | st.none(),
        "group": name | st.none(),
        "shuffle_shards": st.booleans() | st.none(),
        "shuffle_block_size": count | st.sampled_from(["auto", "global", "none"]) | st.none(),
        "exhausted_policy": st.sampled_from(["stop", "repeat"]) | st.none(),
        "max_repeats": count | st.none(),
        "special_tokens": VALID["special_tokens"] | st.none(),
        **{key: values | st.none() for key, values in OWN.items()},
    },
)
sources = st.lists(SOURCE, min_size=1, max_size=4, unique_by=lambda source: source["name"])
recipes = st.fixed_dictionaries({"sources": sources}, optional=VALID)
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.dates()
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=8,
)


@given(recipes)
def test_any_valid_recipe_survives_a_round_trip(data: dict[str, Any]) -> None:
    recipe = DataRecipe.from_dict(data, base="/base")
    assert DataRecipe.from_dict(recipe.to_dict(), base="/other") == recipe
    assert recipe.replace() == recipe
    for key in VALID.keys() & data.keys() - {
        "cache_dir",
        "error_report",
        "cache_limit_bytes",
        "prefetch_buffer_size",
    }:
        assert getattr(recipe, key) == data[key]


@given(recipes, st.sampled_from([*VALID, "sources", "schedule", "continue_from"]), junk)
def test_no_value_of_a_key_raises_anything_but_a_recipe_error(data: dict[str, Any], key: str, value: Any) -> None:
    try:
        DataRecipe.from_dict({**data, key: value})
    except RecipeError as error:
        assert str(error).isprintable()


@given(SOURCE, st.sampled_from(["name", "path", "fmt", "weight", "text_field"]) | st.text(), junk)
def test_no_value_in_a_source_raises_anything_but_a_recipe_error(source: dict[str, Any], key: str, value: Any) -> None:
    try:
        DataRecipe.from_dict({"sources": [{**source, key: value}]})
    except RecipeError as error:
        assert str(error).isprintable()


@given(junk)
def test_no_data_at_all_raises_anything_but_a_recipe_error(data: Any) -> None:
    try:
        DataRecipe.from_dict(data)
    except RecipeError as error:
        assert str(error).isprintable()


@given(recipes, st.permutations(list(VALID)))
def test_the_order_of_keys_does_not_matter(data: dict[str, Any], order: list[str]) -> None:
    shuffled = {key: data[key] for key in [*order, "sources"] if key in data}
    recipe, same = DataRecipe.from_dict(data), DataRecipe.from_dict(shuffled)
    assert same == recipe
    assert list(same.data_fields()) == list(recipe.data_fields())


@given(st.integers(1, 10**6), st.sampled_from("kmgt"))
def test_decimal_units_are_powers_of_1000_and_binary_ones_of_1024(count: int, prefix: str) -> None:
    power = "kmgt".index(prefix) + 1
    assert parse_size(f"{count}{prefix}b") == count * 1000**power
    assert parse_size(f"{count} {prefix.upper()}iB") == count * 1024**power
