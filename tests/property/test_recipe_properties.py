"""Properties of the data recipe over all values that its declarations allow, and over junk."""

from typing import Annotated, Any, Literal, get_args, get_origin

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from zephon.config import keys
from zephon.config.keys import Key, keys_of
from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.errors import RecipeError

WORDS = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=255)
SIZES = st.builds("{}{}".format, st.integers(1, 9000), st.sampled_from(["b", "kb", "TiB"]))
ENDINGS = {"exhausted_policy", "stop_after_passes", "max_repeats", "repeat"}  # may contradict each other


def values(key: Key) -> st.SearchStrategy[Any]:
    """Valid values of a key."""
    strategies = []
    for part in keys._parts(key.kind):
        (meta, *_), plain = keys._metas(part) or [Meta()], get_args(part)[0] if get_origin(part) is Annotated else part
        if get_origin(part) is Literal:
            strategies.append(st.sampled_from(get_args(part)))
        elif plain is bool:
            strategies.append(st.booleans())
        elif plain is int:
            strategies.append(st.integers(meta.ge, meta.le))
        elif plain is float:
            strategies.append(st.floats(1e-6, meta.le if meta.le == 1 else 1e6) | st.just(1))
        else:
            strategies.append(WORDS)
        if "units" in (meta.extra or {}):
            strategies.append(SIZES)
    return st.one_of(strategies)


def tables(cls: type, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    declared = {name: values(key) for name, key in keys_of(cls).items() if name not in {*ENDINGS, "continue_from"}}
    required = {name: each for name, each in declared.items() if keys_of(cls)[name].required}
    optional = {name: each | st.none() for name, each in declared.items() if name not in required}
    return st.fixed_dictionaries({**required, **more}, optional=optional)


SOURCE = tables(SourceRecipe)
RECIPE = tables(
    DataRecipe, sources=st.lists(SOURCE, min_size=1, max_size=4, unique_by=lambda each: each["name"])
).filter(lambda data: data.get("on_error") != "quarantine" or data.get("error_report"))
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=8,
)


@given(RECIPE, st.randoms())
def test_any_valid_recipe_survives_a_round_trip_in_any_order_of_its_keys(data: dict[str, Any], random: Any) -> None:
    recipe = DataRecipe.from_dict(data, base="/base")
    assert DataRecipe.from_dict(recipe.to_dict(), base="/other") == recipe
    assert recipe.replace() == recipe
    shuffled = list(data.items())
    random.shuffle(shuffled)
    assert DataRecipe.from_dict(dict(shuffled), base="/base") == recipe


@given(RECIPE, st.sampled_from([*keys_of(DataRecipe), "sources", "schedule"]) | st.text(), JUNK)
def test_no_value_of_a_key_raises_anything_but_a_recipe_error(data: dict[str, Any], key: str, value: Any) -> None:
    for changed in ({**data, key: value}, {"sources": [{**data["sources"][0], key: value}]}, value):
        try:
            DataRecipe.from_dict(changed)
        except RecipeError as error:
            assert str(error)


@given(st.integers(1, 10**6), st.sampled_from("kmgt"))
def test_decimal_units_are_powers_of_1000_and_binary_ones_of_1024(count: int, prefix: str) -> None:
    power = "kmgt".index(prefix) + 1
    assert keys.check(keys.Size, f"{count}{prefix}b", "size") == count * 1000**power
    assert keys.check(keys.Size, f"{count} {prefix.upper()}iB", "size") == count * 1024**power
