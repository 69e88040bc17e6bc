"""The data recipe: which documents a run reads, in what mixture and order. TOML in, one frozen `DataRecipe` out.

A recipe says everything about the *data* of a run and nothing about the *run*: tokenizer, sequence length, batch size
and topology belong to the training framework, or to whoever calls `Pipeline.from_recipe`, and a recipe that names one
is refused with that answer.

docs/recipe.md lists all keys; it is made from the declarations here and in `settings` and `options`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, TypeVar

from zephon.config.keys import (
    Folder,
    Limit,
    Location,
    Name,
    Positive,
    Size,
    Weight,
    Workers,
    key,
    keys_of,
    normal,
    quote,
    refuse_unknown,
    seen,
    within,
)
from zephon.config.options import RunSettings
from zephon.config.settings import (
    CurriculumSettings,
    OrderSettings,
    RowSettings,
    Stage,
    check_schedule,
    check_weights,
)
from zephon.errors import RecipeError

_T = TypeVar("_T")


def _overridable(cls: type[_T]) -> type[_T]:
    """A class whose inherited keys are None by default, which stands for the recipe's value."""
    for base in cls.__bases__:
        for each in keys_of(base).values():
            cls.__annotations__[each.name] = each.kind
            setattr(cls, each.name, key(None, each.doc, decides_data=each.decides_data))
    return cls


@dataclass(frozen=True, kw_only=True)
@_overridable
class SourceRecipe(OrderSettings, RowSettings):
    """One `[[sources]]` table: a dataset and its share of the mixture.

    The keys of `OrderSettings` and `RowSettings` hold for this source alone; None takes the recipe's value. A source
    with one of exhausted_policy, stop_after_passes and max_repeats has none of the recipe's.
    """

    name: Name = key(doc="Name of the dataset in mixtures, logs and checkpoints; unique in the recipe.")
    path: Location = key(
        doc="File, folder, glob or URI; relative paths are taken from the recipe's folder.", decides_data=False
    )
    fmt: Name | None = key(None, "Format of the files; by default found from them.", decides_data=False)
    weight: Weight = key(1.0, "Share of the training tokens, relative to the other sources.")
    group: Name | None = key(
        None, 'Sources of one group may share a record under homogeneity = "group"; by default a group of its own.'
    )


@dataclass(frozen=True, kw_only=True)
class DataRecipe(CurriculumSettings, RowSettings, RunSettings):
    """The data of a run, and its order; typed, frozen, and checked when built.

    Build it with `from_toml` or `from_dict`. Its fields are the keys of docs/recipe.md; equal keys make equal recipes.

    Raises (whichever way it is built): `RecipeError`.
    """

    sources: tuple[SourceRecipe, ...]
    schedule: tuple[Stage, ...] = ()
    token_estimation: bool = key(
        True,
        "Measure the tokens per row of each source at the start, so that weights are shares of tokens; else of bytes.",
    )
    ensure_mixture: bool = key(
        False, 'Hold the shares of tokens over every stretch of the run, in records of one source each; for "wrap".'
    )
    ensure_mixture_buffer_size: Positive | None = key(
        None, "Records that wait for their turn with it, for the whole job; by default 34 million tokens."
    )
    continue_from: Folder | None = key(
        None, "The recipe of a run to take over from, at a state of that run.", decides_data=False
    )
    pack_mode: Literal["flat", "sequences"] = key(
        "flat", '"flat": documents end to end; "sequences": whole sequences in padded records, never cut.'
    )
    pack_algorithm: Literal["auto", "wrap", "first_fit", "best_fit", "best_fit_wrap"] = key(
        "auto", 'How documents come into records; "auto": "wrap", or "best_fit" for sequences and with images.'
    )
    num_bins: Limit = key(64, 'Records under construction in each lane, except with "wrap".')
    max_documents_per_record: Positive | None = key(None, "Most documents, or parts of them, in a record.")
    max_images: Positive | None = key(None, "Most images in a record.")
    max_patches: Positive | None = key(None, "Most patches of images in a record.")
    always_image: bool = key(False, "Show a grey image of one token, not trained on, in records without images.")
    homogeneity: Literal["none", "group", "full"] = key(
        "none", '"full": a record holds documents of one source; "group": of sources of one group; "none": of any.'
    )
    oversized: Literal["auto", "split", "drop"] = key(
        "auto",
        'Documents longer than a record: "split", or "drop", which leaves them out and counts them; "auto": split, but '
        "drop sequences.",
    )
    shuffle_after_pack: bool = key(True, "Shuffle packed records inside a window.")
    shuffle_buffer_size: Positive = key(1024, "Records that are shuffled together after packing, for the whole job.")
    tokenize_parallelism: Workers | None = key(None, "Blocks that are tokenized at the same time.", decides_data=False)
    cache_dir: Folder | None = key(
        None,
        "Node-local folder for indexes and data of stores; by default ZEPHON_CACHE_DIR, or zephon in the user's cache "
        "folder.",
        decides_data=False,
    )
    cache_limit_bytes: Size | None = key(
        None,
        "Most bytes that data of stores may take on disk; by default no limit where cache_dir is given, else 32 GB.",
        decides_data=False,
    )
    origin: str = field(default="recipe", compare=False, repr=False)
    """The file of the recipe, or its name in messages; not a key."""

    def __post_init__(self) -> None:
        CurriculumSettings.__post_init__(self)
        self._check_faults(RecipeError)
        sources, stages = tuple(self.sources), tuple(self.schedule)
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "schedule", stages)
        if not sources:
            raise RecipeError("sources is missing; add a [[sources]] table with name and path for each dataset.")
        names: list[str] = []
        for nth, source in enumerate(sources, start=1):
            if not isinstance(source, SourceRecipe):
                raise RecipeError(f"source {nth} is {seen(source)}; expected a SourceRecipe.")
            if source.name in names:
                raise RecipeError(
                    f"source {nth} has the name {quote(source.name)}, which source {names.index(source.name) + 1} has "
                    "too; expected a name of its own for each source."
                )
            names.append(source.name)
            if stages and source.weight != 1.0:
                raise RecipeError(
                    f"source {quote(source.name)} has the weight {source.weight:g}, and the schedule has the mixture; "
                    "remove one of them."
                )
        check_weights({source.name: source.weight for source in sources})
        if stages:
            check_schedule(stages, names)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """The recipe in a TOML file.

        Relative paths in it are taken from the folder that `path` lies in, a leading "~/" is the home folder, and URIs
        stay as they are.

        Raises: `RecipeError` where the file cannot be read, or anything in it is unknown, of the wrong type or out of
        range.
        """
        where = os.fspath(path)
        try:
            with open(where, "rb") as file:
                data = tomllib.loads(file.read().decode("utf-8-sig"))  # Windows editors write a byte order mark
        except OSError as error:
            raise RecipeError(f"{where}: the recipe cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise RecipeError(f"{where}, line {line}: this is not UTF-8 text; expected a recipe in TOML.") from None
        except ValueError as error:
            raise RecipeError(f"{where}: the file is not valid TOML: {error}.") from None
        return cls.from_dict(data, base=os.path.dirname(os.path.abspath(where)), where=where)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, object], *, base: str | os.PathLike[str] | None = None, where: str = "recipe"
    ) -> Self:
        """The recipe in plain data of the same shape as the TOML; None stands for a key that is not given.

        `base` is the folder that relative paths are taken from (default: the working directory); `where` is the
        recipe's name in messages.

        Raises: `RecipeError`.
        """
        folder = os.path.abspath(base if base is not None else ".")
        with within(where):
            values = _read(cls, data, folder, "sources", "schedule")
            for name, kind, what in (("sources", SourceRecipe, "source"), ("schedule", Stage, "stage")):
                if name in values:
                    values[name] = tuple(_tables(kind, values[name], name, what, folder))
            return cls(**{"sources": (), **values}, origin=where)

    @property
    def shows_images(self) -> bool:
        """Whether documents of a source have images."""
        return len(self.sources_of_text) < len(self.sources)

    @property
    def sources_of_text(self) -> list[str]:
        """Names of the sources whose documents have no images."""
        kinds = [(self.setting(each, "documents"), self.setting(each, "images_field")) for each in self.sources]
        shows = [kind == "images" or (kind == "chat" and bool(field)) for kind, field in kinds]
        return [source.name for source, has_images in zip(self.sources, shows, strict=True) if not has_images]

    def setting(self, source: SourceRecipe, key: str) -> Any:
        """A key as it holds for a source: its own, else the recipe's."""
        own = getattr(source, key)
        return getattr(self, key) if own is None else own

    def to_dict(self) -> dict[str, Any]:
        """Plain data (str, int, float, bool, None, lists, dicts) from which `from_dict` makes an equal recipe."""
        values = asdict(self)
        del values["origin"]
        return {**values, "sources": list(values["sources"]), "schedule": list(values["schedule"])}

    def replace(self, **overrides: object) -> Self:
        """A copy with other values for some keys, checked like a recipe that says so.

        `sources` is a list of tables or of `SourceRecipe`; None puts a key back to its default; relative paths are
        taken from the working directory.

        Raises: `RecipeError`.
        """
        return self.from_dict({**self.to_dict(), **overrides}, where=self.origin)


# ---------------------------------------------------------------------------------------------------------------------
# Reading

_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def _read(cls: type, table: Any, folder: str, *more: str) -> dict[str, Any]:
    """The keys and values of a table, relative paths taken from `folder`; unknown and missing keys are refused."""
    if not isinstance(table, Mapping):
        raise RecipeError(f"the value is {seen(table)}; expected a table of keys and values.")
    keys = keys_of(cls)
    refuse_unknown(table, [*keys, *more], reason=lambda name: _why_unknown(cls, name))
    values = {name: value for name, value in table.items() if value is not None}
    for name, each in keys.items():
        if each.required and name not in values:
            raise RecipeError(f"{name} is missing; expected {quote(name)} in every table.")
        if each.is_path and name in values:
            values[name] = _absolute(values[name], folder)
    template = values.get("chat_template")
    if isinstance(template, str) and "\n" not in template and template.endswith(_TEMPLATE_SUFFIXES):
        values["chat_template"] = _absolute(template, folder)
    return values


def _tables(cls: type, value: Any, name: str, what: str, folder: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise RecipeError(f"{name} is {seen(value)}; expected a list of tables: write [[{name}]].")
    made = []
    for nth, table in enumerate(value, start=1):
        plain = asdict(table) if isinstance(table, SourceRecipe | Stage) else table
        called = plain.get("name") if isinstance(plain, Mapping) else None
        with within(f"{what} {nth}" + (f" ({quote(called)})" if isinstance(called, str) else "")):
            made.append(cls(**_read(cls, plain, folder)))
    return made


def _absolute(path: Any, folder: str) -> Any:
    """The absolute path; URIs, and values that are no path, stay as they are."""
    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path, str) or not path.strip() or re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path):
        return path
    # Joined, not normalised: with symbolic links, "a/../b" need not be "b".
    return os.path.join(folder, os.path.expanduser(path))


# ---------------------------------------------------------------------------------------------------------------------
# Keys that belong elsewhere

_OWNERS = {
    r"(hf_|base_)?tokeni[sz]er(_.+)?|vocab(ulary)?(_size|_file)?": (
        "The tokenizer belongs to the training framework; without one, pass it to Pipeline.from_recipe(tokenizer=...) "
        "or zephon stream --tokenizer."
    ),
    r"(max_)?(seq|sequence|context)(_?len(gth)?|_size)?|max_length|max_tokens|n_ctx": (
        "The sequence length belongs to the training framework; without one, pass it to "
        "Pipeline.from_recipe(seq_len=...) or zephon stream --seq-len."
    ),
    r"(.+_)?(mini|micro)?_?batch(_?size|_per_.+)?|[gm]bs|(num_)?micro_?batch(es|_.+)?"
    r"|grad(ient)?_acc(umulation)?(_steps)?": (
        "Global batch and microbatch size belong to the training framework; without one, pass the microbatch to "
        "Pipeline.from_recipe(microbatch_size=...) or zephon stream --microbatch-size."
    ),
    r"(dp|tp|pp|cp|ep|vp|sp|fsdp|ddp)(_.+)?|topology|(global_|local_)?rank|(local_)?world_size"
    r"|(data|tensor|pipeline|context|expert|sequence|model)_?(model_)?parallel.*"
    r"|(n_?|num_)?(gpu|node|device|host|rank)s?(_per_node)?|n_?proc_per_node|num_(replicas|processes)": (
        "The topology belongs to the training framework, and one recipe serves them all; without one, pass "
        "Pipeline.from_recipe(dp_degree=..., dp_group_id=...) or zephon stream --dp-degree --dp-rank."
    ),
}


def _why_unknown(cls: type, name: str) -> str | None:
    for pattern, owner in _OWNERS.items():
        if re.fullmatch(pattern, normal(name)):
            return owner
    if cls is DataRecipe and name in keys_of(SourceRecipe):
        return "It belongs to a source: write it inside that source's [[sources]] table."
    if cls is not DataRecipe and name in keys_of(DataRecipe):
        return "It belongs to the whole recipe: write it above the first [[sources]] line."
    return None
