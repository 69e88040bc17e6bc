"""The operators of a recipe, up to tokens: its settings, source by source, as the operators that they stand for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.ops.chat import TokenizeChat
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import DecodeText, Filter, TextTemplate
from zephon.ops.tokenize import Tokenize

__all__ = ["operators_of_recipe"]


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
