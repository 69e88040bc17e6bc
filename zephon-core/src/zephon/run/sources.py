"""From a data recipe to a work source."""

from __future__ import annotations

import os
from typing import Any

from zephon.config.recipe import DataRecipe
from zephon.curriculum.schedule import Stage
from zephon.curriculum.source import DATASET_KEYS, ScheduledMixtureWorkSource, StaticMixtureWorkSource, WorkSource
from zephon.data.dataset import Dataset
from zephon.errors import RecipeError

__all__ = ["chain_of", "source_of"]

_MOST_RECIPES = 100


def chain_of(recipe: DataRecipe) -> list[DataRecipe]:
    """A recipe and those that it continues, the latest first.

    Raises:
        RecipeError: an earlier recipe cannot be read, or recipes continue each other in a circle.
    """
    chain, paths = [recipe], list[str]()  # not its own: a changed copy of a recipe may continue that recipe
    while (path := chain[-1].continue_from) is not None:
        paths.append(os.path.realpath(path))
        if paths[-1] in paths[:-1]:
            circle = [os.path.basename(each) for each in paths[paths.index(paths[-1]) :]]
            raise RecipeError(
                f'{recipe.origin}: key "continue_from" leads in a circle, {" -> ".join(circle)}; the first recipe of a '
                "run continues none."
            )
        if len(chain) == _MOST_RECIPES:
            raise RecipeError(
                f'{recipe.origin}: key "continue_from" leads through more than {_MOST_RECIPES} recipes, which is the '
                "most that a run may go through."
            )
        chain.append(DataRecipe.from_toml(path))
    return chain


def source_of(recipe: DataRecipe) -> WorkSource:
    """The work source that a recipe describes, and those of the recipes that it continues.

    Raises:
        RecipeError: an earlier recipe cannot be read, or the recipes continue each other in a circle.
    """
    source: WorkSource | None = None
    for each in reversed(chain_of(recipe)):
        source = _source(each, source, recipe.text_field)
    assert source is not None
    return source


def _source(recipe: DataRecipe, continues: WorkSource | None, text_field: str) -> WorkSource:
    # A source that is only kept for the sake of an earlier recipe has that recipe's column.
    column = recipe.text_field if recipe.text_field != text_field else None
    given: dict[str, Any] = {
        "datasets": [
            Dataset.from_path(s.name, s.path, s.fmt, s.text_field or column, group=s.group) for s in recipe.sources
        ],
        "token_estimation": recipe.token_estimation,
        "seed": recipe.seed,
        "chunk_size": recipe.chunk_size,
        "repeat": recipe.repeat,
        "per_dataset": {s.name: own for s in recipe.sources if (own := s.own_settings())},
        "continues": continues,
        **{key: getattr(recipe, key) for key in DATASET_KEYS},
    }
    if recipe.schedule:
        return ScheduledMixtureWorkSource(**given, schedule=[Stage(**stage.to_dict()) for stage in recipe.schedule])
    return StaticMixtureWorkSource(**given, mixture={s.name: s.weight for s in recipe.sources})
