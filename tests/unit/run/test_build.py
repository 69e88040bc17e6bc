"""From a recipe to operators."""

import pytest

from zephon import DataRecipe
from zephon.errors import RecipeError
from zephon.run.build import operators_of_recipe
from zephon.vision.geometry import VisionSettings


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


def test_columns_beside_token_ids_are_left_out_by_a_key_of_a_recipe():
    sources = [{"name": "ids", "path": "data", "documents": "tokens", "ignored_fields": "labels weight"}]
    encode = operators_of_recipe(DataRecipe.from_dict({"sources": sources}), "gpt2", 128)[0]
    assert encode.ignored == ("labels", "weight")


def test_images_have_keys_in_a_recipe_and_settings_of_the_model():
    images = {"name": "pairs", "path": "data", "documents": "images", "text_field": "caption", "media_root": "/media"}
    recipe = DataRecipe.from_dict({"sources": [images, {"name": "text", "path": "data"}], "max_patches": 99})
    vision = VisionSettings(patch_size=14)
    encode, _, pack, _ = operators_of_recipe(recipe, "gpt2", 128, vision)
    assert (encode.field, encode.images, encode.media_root, encode.vision) == ("caption", "auto", "/media", vision)
    assert (pack.algorithm, pack.max_images, pack.max_patches) == ("best_fit", None, 99)
    *_, pack, _ = operators_of_recipe(recipe.replace(pack_algorithm="first_fit"), "gpt2", 128, vision)
    assert pack.algorithm == "first_fit"
    talks = recipe.replace(sources=[{"name": "talks", "path": "data", "documents": "chat", "images_field": "auto"}])
    encode, pack, _ = operators_of_recipe(talks, "gpt2", 128, vision)
    assert (encode.images, encode.vision, pack.algorithm) == ("auto", vision, "best_fit")
    talks = talks.replace(sources=[{"name": "talks", "path": "data", "documents": "chat"}], max_patches=None)
    encode, pack, _ = operators_of_recipe(talks, "gpt2", 128, vision)
    assert (encode.images, encode.vision, pack.algorithm) == (None, None, "wrap")
    with pytest.raises(RecipeError, match="the recipe has images, and vision is missing, which the model owns; pass"):
        operators_of_recipe(recipe, "gpt2", 128)
