"""From a data recipe to the parts of a pipeline: work source, options and operators."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from zephon.config.keys import keys_of, within
from zephon.config.options import RunSettings
from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.config.settings import DATASET_KEYS, CurriculumSettings, RowSettings
from zephon.curriculum.source import ScheduledMixtureWorkSource, StaticMixtureWorkSource, WorkSource
from zephon.data.dataset import Dataset
from zephon.errors import RecipeError
from zephon.ops.chat import TokenizeChat
from zephon.ops.filter import Filter
from zephon.ops.images import TokenizeImages
from zephon.ops.mixture import EnsureMixture
from zephon.ops.pack import PackFlat, PackSequences
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.shuffle import Shuffle
from zephon.ops.text import DecodeText, TextTemplate
from zephon.ops.tokenize import Tokenize
from zephon.tokenizer.load import TokenizerId, portable_tokenizer
from zephon.vision.geometry import VisionSettings


def chain_of(recipe: DataRecipe) -> list[DataRecipe]:
    """A recipe and those that it continues, the latest first."""
    chain, paths = [recipe], list[str]()  # not its own: a changed copy of a recipe may continue that recipe
    while (path := chain[-1].continue_from) is not None:
        paths.append(os.path.realpath(path))
        if paths[-1] in paths[:-1]:
            circle = [os.path.basename(each) for each in paths[paths.index(paths[-1]) :]]
            raise RecipeError(
                f"{recipe.origin}: continue_from leads in a circle, {' -> '.join(circle)}; expected a first recipe "
                "without it."
            )
        chain.append(DataRecipe.from_toml(path))
    return chain


def source_of(recipe: DataRecipe) -> WorkSource:
    """The work source that a recipe describes, with those of the recipes that it continues."""
    source: WorkSource | None = None
    for each in reversed(chain_of(recipe)):
        with within(each.origin):
            source = _source(each, source, recipe.text_field)
    assert source is not None
    return source


def _source(recipe: DataRecipe, continues: WorkSource | None, text_field: str) -> WorkSource:
    # A source that is only kept for the sake of an earlier recipe has that recipe's column.
    column = recipe.text_field if recipe.text_field != text_field else None
    given: dict[str, Any] = {
        **_values(recipe, keys_of(CurriculumSettings)),
        "datasets": [
            Dataset.from_path(s.name, s.path, s.fmt, s.text_field or column, group=s.group) for s in recipe.sources
        ],
        "token_estimation": recipe.token_estimation,
        "per_dataset": {source.name: own for source in recipe.sources if (own := _values(source, DATASET_KEYS))},
        "continues": continues,
    }
    if recipe.schedule:
        return ScheduledMixtureWorkSource(**given, schedule=recipe.schedule)
    return StaticMixtureWorkSource(**given, mixture={s.name: s.weight for s in recipe.sources})


def options_of_recipe(recipe: DataRecipe) -> dict[str, Any]:
    """The options of a recipe, see `Pipeline.options`."""
    cache = {"dir": recipe.cache_dir, "limit_bytes": recipe.cache_limit_bytes}
    return {**_values(recipe, keys_of(RunSettings)), "io_options": {"cache": cache}}


def operators_of_recipe(
    recipe: DataRecipe, tokenizer: Any, seq_len: int, vision: VisionSettings | None = None
) -> list[Any]:
    """The operators of a recipe, from rows to shuffled records; one for all sources with the same settings."""
    shows_images = any(each.shows_images for each in chain_of(recipe))
    if shows_images and vision is None:
        raise RecipeError(
            f"{recipe.origin}: the recipe has images, and vision is missing, which the model owns; pass "
            "Pipeline.from_recipe(vision=VisionSettings(...)), or zephon stream --vision patch_size=16,merge_size=2. A "
            "trainer without images cannot use this recipe."
        )
    tokenizer = portable_tokenizer(tokenizer)
    of_sources: dict[str, tuple[_Operator | None, ...]] = {}
    for each in chain_of(recipe):  # sources that end have the settings of their recipe
        for source in each.sources:
            of_sources.setdefault(source.name, _operators_of(each, source, tokenizer, recipe.text_field, vision))
    kinds = zip(*of_sources.values(), strict=True)
    operators = [operator for kind in kinds for operator in _grouped(list(of_sources), kind)]
    if recipe.ensure_mixture:
        operators.append(EnsureMixture(recipe.ensure_mixture_buffer_size))
    pack = PackSequences if recipe.pack_mode == "sequences" else PackFlat
    automatic: dict[str, Any] = {"algorithm": recipe.pack_algorithm, "oversized": recipe.oversized}
    if shows_images and recipe.pack_algorithm == "auto":
        automatic["algorithm"] = "best_fit"
    operators.append(
        pack(
            seq_len,
            num_bins=recipe.num_bins,
            max_documents_per_record=recipe.max_documents_per_record,
            max_images=recipe.max_images,
            max_patches=recipe.max_patches,
            always_image=recipe.always_image,
            homogeneity=recipe.homogeneity,
            **{name: value for name, value in automatic.items() if value != "auto"},
        )
    )
    if recipe.shuffle_after_pack:
        operators.append(Shuffle(recipe.shuffle_buffer_size, recipe.seed))
    return operators


def _values(settings: Any, keys: Iterable[str]) -> dict[str, Any]:
    """The values of some keys, without those that are left to their defaults."""
    return {name: value for name in keys if (value := getattr(settings, name)) is not None}


_Operator = tuple[type, dict[str, Any]]


def _grouped(names: Sequence[str], operators: Sequence[_Operator | None]) -> list[Any]:
    """One operator for all sources for which it is the same, in order of their first ones."""
    groups: list[tuple[_Operator, list[str]]] = []
    for name, operator in zip(names, operators, strict=True):
        if operator is None:
            continue
        same = next((group for other, group in groups if other == operator), None)
        if same is None:
            groups.append((operator, [name]))
        else:
            same.append(name)
    return [kind(**values, datasets=group if len(group) < len(names) else None) for (kind, values), group in groups]


def _operators_of(
    recipe: DataRecipe, source: SourceRecipe, tokenizer: TokenizerId, text_field: str, vision: VisionSettings | None
) -> tuple[_Operator | None, ...]:
    """Decoding, template, filter and encoding of a source, None where it has none."""

    def setting(key: str) -> Any:
        return recipe.setting(source, key)

    encoding, template, condition = setting("text_encoding"), setting("text_template"), setting("filter")
    ignored = tuple((setting("ignored_fields") or "").split())
    common = {
        "tokenizer_id": tokenizer,
        "special_tokens": setting("special_tokens"),
        "parallelism": recipe.tokenize_parallelism,
        "max_length": setting("max_document_tokens"),
        "split_long_samples": setting("split_long_documents"),
    }
    if setting("documents") == "chat":
        tokens = setting("chat_assistant_tokens")
        encode: _Operator = (
            TokenizeChat,
            {
                **common,
                "field": setting("messages_field") or "auto",
                "response": setting("response_field") or "auto",
                "tools": setting("tools_field") or "auto",
                "input": setting("input_field") or "auto",
                "system": setting("system_field"),
                "ignored": ignored,
                "chat_template": setting("chat_template"),
                "loss": setting("chat_loss"),
                "date": setting("chat_date"),
                "images": setting("images_field"),
                "media_root": setting("media_root"),
                "vision": vision if setting("images_field") else None,
                **(
                    {}
                    if tokens is None
                    else {"assistant_tokens": {"all": "all", "none": []}.get(tokens, tokens.split())}
                ),
            },
        )
    elif setting("documents") == "tokens":
        encode = (
            Pretokenized,
            {
                **common,
                "field": setting("tokens_field") or "input_ids",
                "loss": setting("loss_field"),
                "labels": setting("labels_field"),
                "positions": setting("positions_field"),
                "ignored": ignored,
            },
        )
    elif setting("documents") == "images":
        text = setting("text_field")
        encode = (
            TokenizeImages,
            {
                **common,
                "field": "auto" if text == RowSettings.text_field else text,
                "images": setting("images_field") or "auto",
                "media_root": setting("media_root"),
                "vision": vision,
            },
        )
    else:
        encode = Tokenize, {**common, "field": text_field}
    return (
        (DecodeText, {"field": text_field, "encoding": encoding}) if encoding else None,
        (TextTemplate, {"template": template, "into": text_field}) if template else None,
        (Filter, {"condition": condition}) if condition else None,
        encode,
    )
