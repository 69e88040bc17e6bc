"""The fields of a data recipe, and of a run's data, as an ordinary TorchTitan config."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass
from typing import Annotated, Any, Self

import tyro

from torchtitan_zephon.forms import BaseDataLoader
from zephon import DataRecipe, RecipeError
from zephon.loader import SourceRecipe, keys_of


def _config_of(recipe: type, name: str, *bases: type) -> Any:
    """A config class with a field for each key of a recipe, or of one of its sources."""
    return make_dataclass(
        name,
        [
            (
                key.name,
                Annotated[key.plain, tyro.conf.arg(help=key.doc)],
                field(default=MISSING if key.required else key.default),
            )
            for key in keys_of(recipe).values()
        ],
        bases=bases,
        kw_only=True,
        slots=True,
        namespace={"__module__": __name__},
    )


Source = _config_of(SourceRecipe, "Source")
_RecipeConfig = _config_of(DataRecipe, "_RecipeConfig", BaseDataLoader.Config)


@dataclass(kw_only=True, slots=True)
class ZephonConfig(_RecipeConfig):  # type: ignore[misc, valid-type]
    """A data recipe as config: every key of docs/recipe.md, and settings of a single run.

    Tokenizer, sequence length, batch sizes and parallelism are the trainer's and not repeated here.
    """

    dataset: Annotated[str, tyro.conf.Suppress] = ""
    dataset_path: Annotated[str | None, tyro.conf.Suppress] = None

    sources: list[Source] = field(default_factory=list)  # type: ignore[valid-type]
    """The datasets, at least one."""
    schedule: Annotated[list[Any], tyro.conf.Suppress] = field(default_factory=list)
    """Stages of the mixture, as tables of a recipe; set by from_toml."""

    vision: Annotated[Any, tyro.conf.Suppress] = None
    """For models that see images, the config of TorchTitan's own multimodal loader, or Zephon's `VisionSettings`."""
    ledger: str | None = None
    """Folder in which every rank records what it consumed, for `zephon verify`; None writes nothing."""
    flush_index: str | None = None
    """Folder in which every rank writes where windows begin; None writes nothing."""
    allow_changes: list[str] = field(default_factory=list)
    """Names of differences to accept when a checkpoint was taken with other data; the refusal lists them."""
    skip_steps: list[str] = field(default_factory=list)
    """Steps whose data are left out, for example after a loss spike: 1000-1010 leaves out eleven. Numbers
    start at 1 and are those of a run without skip_steps; ranges that the checkpoint has left out already may stay."""
    start_afresh: bool = False
    """Begin the data at its start if the checkpoint has no state of Zephon, instead of refusing it. Other checkpoints
    are loaded as usual, so a restarted job may keep the switch."""

    recipe: Annotated[str, tyro.conf.Suppress] = ""
    """Path of the recipe, for messages."""
    infinite: Annotated[bool | None, tyro.conf.Suppress] = None
    """Set by TorchTitan 0.3's validator, and by nobody else."""

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """The config of a data recipe; `overrides` are fields that replace those of the recipe.

        Raises:
            RecipeError: the recipe cannot be read or is invalid, or an override is unknown.
        """
        plain = DataRecipe.from_toml(path).to_dict()
        names = [f.name for f in fields(cls)]
        for name in overrides:
            if name not in names:
                raise RecipeError(
                    f"unknown override {name!r}; expected a field of the data loader's config: {', '.join(names)}."
                )
        values = {**plain, "recipe": os.fspath(path), **overrides}
        values["sources"] = [s if isinstance(s, Source) else Source(**s) for s in values["sources"]]
        config = cls(**values)
        config.to_recipe()
        return config

    def ranges_to_skip(self) -> list[tuple[int, int]]:
        """`skip_steps` as ranges [first, last) of steps counted from 0.

        Raises:
            RecipeError: an entry is not of the form first-last.
        """
        ranges = []
        for text in self.skip_steps:
            match = re.fullmatch(r"\s*([1-9][0-9]{0,14})(?:-([1-9][0-9]{0,14}))?\s*", str(text))
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if last < first:
                raise RecipeError(
                    f"dataloader.skip_steps holds {text!r}; expected a step such as 1000, or a range such as "
                    "1000-1010, whose last step is not before its first."
                )
            ranges.append((first - 1, last))
        return ranges

    def to_recipe(self) -> DataRecipe:
        """The recipe that these fields make up, checked.

        Raises:
            RecipeError: a value is invalid.
        """
        where = f"dataloader config (of {self.recipe})" if self.recipe else "dataloader config"
        if self.dataset or self.dataset_path:
            raise RecipeError(
                f"{where}: dataset is {self.dataset!r} and dataset_path {self.dataset_path!r}, which are fields of "
                "TorchTitan's own data loaders; name the data in sources, or use Config.from_toml(recipe)."
            )
        if not self.sources:
            raise RecipeError(
                f"{where}: sources is empty; expected at least one. Use ZephonDataLoader.Config.from_toml(recipe)."
            )
        values = {name: getattr(self, name) for name in (*keys_of(DataRecipe), "schedule")}
        sources = [source if isinstance(source, Mapping) else asdict(source) for source in self.sources]
        return DataRecipe.from_dict({**values, "sources": sources}, where=where)
