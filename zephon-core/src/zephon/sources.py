"""From a data recipe to a work source."""

from __future__ import annotations

from typing import Any

from .errors import RecipeError
from .io import Dataset
from .recipe import DataRecipe
from .work import DATASET_KEYS, ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource, WorkSource

__all__ = ["source_of"]

_MOST_RECIPES = 100


def source_of(recipe: DataRecipe) -> WorkSource:
    """The work source that a recipe describes, and those of the recipes that it continues.

    Raises:
        RecipeError: an earlier recipe cannot be read, or the recipes continue each other in a circle.
    """
    chain = [recipe]
    while chain[-1].continue_from is not None:
        chain.append(DataRecipe.from_toml(chain[-1].continue_from))
        if len(chain) > _MOST_RECIPES:
            raise RecipeError(
                f'{recipe.origin}: key "continue_from" leads through more than {_MOST_RECIPES} recipes, so some must '
                "continue each other in a circle; the first recipe of a run continues none."
            )
    source: WorkSource | None = None
    for each in reversed(chain):
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
