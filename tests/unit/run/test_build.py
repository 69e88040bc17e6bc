"""From a recipe to operators."""

import pytest

from zephon import DataRecipe
from zephon.run.build import operators_of_recipe


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {"input": "auto", "system": None, "ignored": ()}),
        ({"input_field": "context", "system_field": "prompt"}, {"input": "context", "system": "prompt"}),
        ({"ignored_fields": " history  image"}, {"ignored": ("history", "image")}),
    ],
)
def test_columns_of_conversations_have_keys_in_a_recipe(keys, options):
    sources = [{"name": "talks", "path": "data", **keys}]
    recipe = DataRecipe.from_dict({"sources": sources, "documents": "chat"})
    encode = operators_of_recipe(recipe, "gpt2", 128)[0]
    assert {name: getattr(encode, name) for name in options} == options
