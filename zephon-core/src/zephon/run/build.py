"""From a data recipe to what a pipeline is made of: its work source and its operators."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.curriculum.schedule import Stage
from zephon.curriculum.source import DATASET_KEYS, ScheduledMixtureWorkSource, StaticMixtureWorkSource, WorkSource
from zephon.data.dataset import Dataset
from zephon.errors import RecipeError
from zephon.ops.chat import TokenizeChat
from zephon.ops.filter import Filter
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.text import DecodeText, TextTemplate
from zephon.ops.tokenize import Tokenize

__all__ = ["chain_of", "operators_of_recipe", "source_of"]

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


_TOKENS: dict[str, str | list[str]] = {"all": "all", "none": []}


def operators_of_recipe(recipe: DataRecipe, tokenizer: str | os.PathLike[str]) -> list[Any]:
    """Row operators and what makes tokens; one for all sources with the same settings.

    Raises:
        PipelineError: a template, filter or encoding is none, or settings exclude each other.
    """
    return [
        *_grouped(recipe, _decode),
        *_grouped(recipe, _template),
        *_grouped(recipe, _filter),
        *_grouped(recipe, lambda recipe, source: _encode(recipe, source, tokenizer)),
    ]


_Maker = Callable[[DataRecipe, SourceRecipe], tuple[type, dict[str, Any]] | None]


def _grouped(recipe: DataRecipe, maker: _Maker) -> list[Any]:
    """An operator for each group of sources for which `maker` says the same, in order of their first ones."""
    groups: list[tuple[tuple[type, dict[str, Any]], list[str]]] = []
    for source in recipe.sources:
        wanted = maker(recipe, source)
        if wanted is None:
            continue
        same = next((names for made, names in groups if made == wanted), None)
        if same is None:
            groups.append((wanted, [source.name]))
        else:
            same.append(source.name)
    everyone = len(recipe.sources)
    return [kind(**values, datasets=None if len(names) == everyone else names) for (kind, values), names in groups]


def _decode(recipe: DataRecipe, source: SourceRecipe) -> tuple[type, dict[str, Any]] | None:
    encoding = recipe.setting(source, "text_encoding")
    return None if encoding is None else (DecodeText, {"field": recipe.text_field, "encoding": encoding})


def _template(recipe: DataRecipe, source: SourceRecipe) -> tuple[type, dict[str, Any]] | None:
    template = recipe.setting(source, "text_template")
    return None if template is None else (TextTemplate, {"template": template, "into": recipe.text_field})


def _filter(recipe: DataRecipe, source: SourceRecipe) -> tuple[type, dict[str, Any]] | None:
    condition = recipe.setting(source, "filter")
    return None if condition is None else (Filter, {"condition": condition})


def _encode(recipe: DataRecipe, source: SourceRecipe, tokenizer: str | os.PathLike[str]) -> tuple[type, dict[str, Any]]:
    def setting(key: str) -> Any:
        return recipe.setting(source, key)

    parallelism = recipe.tokenize_parallelism
    common = {
        "tokenizer_id": tokenizer,
        "special_tokens": setting("special_tokens"),
        "parallelism": None if parallelism == "auto" else parallelism,
        "max_length": setting("max_document_tokens"),
        "split_long_samples": setting("split_long_documents"),
    }
    documents = setting("documents")
    if documents == "chat":
        tokens = setting("chat_assistant_tokens")
        return TokenizeChat, {
            **common,
            "field": setting("messages_field") or "auto",
            "response": setting("response_field") or "auto",
            "tools": setting("tools_field") or "auto",
            "chat_template": setting("chat_template"),
            "loss": setting("chat_loss"),
            "date": setting("chat_date"),
            **({} if tokens is None else {"assistant_tokens": _TOKENS.get(tokens, tokens.split())}),
        }
    if documents == "tokens":
        return Pretokenized, {
            **common,
            "field": setting("tokens_field") or "input_ids",
            "loss": setting("loss_field"),
            "labels": setting("labels_field"),
            "positions": setting("positions_field"),
        }
    return Tokenize, {**common, "field": recipe.text_field}
