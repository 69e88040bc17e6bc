"""The data recipe: which documents a run reads, in what mixture and order. TOML in, one frozen `DataRecipe` out.

A recipe says everything about the *data* of a run and nothing about the *run*: tokenizer, sequence length, batch size
and topology belong to the training framework, or to whoever calls `Pipeline.from_recipe`, and a recipe that names one
is refused with that answer. A complete recipe::

    seed = 42
    cache_dir = "/local-ssd/zephon"
    cache_limit_bytes = "500gb"

    [[sources]]
    name = "web"
    path = "data/web"          # relative to the recipe's folder
    weight = 3.0               # three tokens of web ...

    [[sources]]
    name = "code"
    path = "data/code/*.jsonl.gz"
    weight = 1.0               # ... for each token of code

A mixture that changes in the course of the run is a list of stages, in place of the sources' weights::

    [[schedule]]
    mixture = { web = 9, code = 1 }

    [[schedule]]
    start_tokens = "10b"       # or start_steps
    change = "cosine"          # or "constant", "linear"
    end_tokens = "12b"
    mixture = { web = 1, code = 1 }

Sizes in bytes are integers, or text with a unit: "kb", "mb", "gb", "tb" are powers of 1000; "kib", "mib", "gib", "tib"
powers of 1024; "b" is one byte; a fraction ("1.5gb") and capitals are allowed.

A recipe is untrusted input: whatever is wrong with it is a `RecipeError` whose text names the file, the key, the value
seen and what was expected. Nothing is opened or looked up here but the recipe itself.
"""

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from zephon.config.checks import (
    MAX_INT64,
    Check,
    Choice,
    Count,
    Flag,
    Integer,
    Location,
    LongText,
    Share,
    Size,
    Text,
    Weight,
    Weights,
    checked,
    clip,
    is_uri,
    nearest,
    quote,
    seen,
)
from zephon.errors import RecipeError

__all__ = ["DataRecipe", "SourceRecipe", "StageRecipe", "parse_size"]

MAX_RECIPE_BYTES = 1 << 20
"""A larger recipe file is refused: one of 10,000 sources is about this large."""

FORMATS = (
    "parquet", "jsonl", "arrow", "webdataset", "mds", "litdata", "megatron", "numpy", "uint16", "uint32", "lance",
    "vortex", "text",
)  # fmt: skip
PACK_MODES = ("flat", "sequences")
PACK_ALGORITHMS = ("auto", "wrap", "first_fit", "best_fit", "best_fit_wrap")
HOMOGENEITIES = ("none", "group", "full")
OVERSIZED = ("auto", "split", "drop")
EXHAUSTED_POLICIES = ("repeat", "stop")
CHANGES = ("constant", "linear", "cosine")
BLOCK_WORDS = ("auto", "global", "none")
RUNNERS = ("inline", "threads", "process")
LATER_RUNNERS = ("ray",)
DOCUMENTS = ("text", "chat", "tokens")
CHAT_LOSSES = ("assistant", "last_assistant", "all")
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
SPECIAL_TOKEN_POLICIES = ("auto", "bos_eos", "bos", "eos", "none")


def _stages_check(value: object) -> object:
    """Stages are checked one by one, with better words than a check of the whole could find."""
    return value


def _key(check: Check, default: Any, *, decides_data: bool) -> Any:
    """A field that is a recipe key; None passes where it is the default."""
    return field(default=default, metadata={"check": check, "decides_data": decides_data})


@dataclass(frozen=True, kw_only=True)
class SourceRecipe:
    """One `[[sources]]` table: a dataset and its share of the mixture. Checked when built, like the recipe."""

    name: str = field(metadata={"check": Text("a name")})
    """What the dataset is called in mixtures, logs and checkpoints; unique in the recipe."""
    path: str = field(metadata={"check": Location("the path of a file or folder, a glob pattern, or a store's URI")})
    """File, folder, glob or URI; absolute once a recipe has been loaded."""
    fmt: str | None = _key(Choice(FORMATS), None, decides_data=False)
    """Format of the files, None to find it from them."""
    weight: float = _key(Weight(), 1.0, decides_data=True)
    """Share of the training tokens, relative to the other sources."""
    text_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of the document's text where it is not the recipe's."""
    group: str | None = _key(Text("a name"), None, decides_data=True)
    """Sources of one group may share a record under `homogeneity = "group"`; None is a group of its own."""
    shuffle_shards: bool | None = _key(Flag(), None, decides_data=True)
    """This and the six keys below: as in the recipe, for this source alone; None takes the recipe's value."""
    shuffle_within_shard: bool | None = _key(Flag(), None, decides_data=True)
    shuffle_block_size: int | str | None = _key(Integer(1, words=BLOCK_WORDS), None, decides_data=True)
    reshuffle_on_repeat: bool | None = _key(Flag(), None, decides_data=True)
    exhausted_policy: str | None = _key(Choice(EXHAUSTED_POLICIES), None, decides_data=True)
    """A source with one of the last three keys of its own has none of the recipe's."""
    stop_after_passes: int | None = _key(Integer(1), None, decides_data=True)
    max_repeats: int | None = _key(Integer(0), None, decides_data=True)
    # Where these are given, they take the place of the recipe's for this source.
    filter: str | None = _key(LongText("a filter expression", 8192), None, decides_data=True)
    """Rows to keep: an expression on columns, see `zephon.ops.expression`."""
    text_template: str | None = _key(LongText("a template such as {title} {body}", 1 << 16), None, decides_data=True)
    """Makes the document's text from several columns: "# {title}\\n\\n{body}"."""
    text_encoding: str | None = _key(Text("the name of an encoding"), None, decides_data=True)
    """Encoding of a text column that holds bytes; None where it holds text."""
    documents: str | None = _key(Choice(DOCUMENTS), None, decides_data=True)
    """What rows hold: "text", "chat" (conversations) or "tokens" (token ids)."""
    messages_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of conversations; None finds messages, conversations or conversation."""
    response_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of answers, where messages_field is one of prompts; None finds both."""
    tools_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of the tools of conversations; None takes tools where it is there."""
    chat_template: str | None = _key(LongText("a chat template, or the path of one"), None, decides_data=True)
    """Chat template, or the path of a .jinja file; None takes the tokenizer's own."""
    chat_loss: str | None = _key(Choice(CHAT_LOSSES), None, decides_data=True)
    """What is trained on in conversations: "assistant", "last_assistant" or "all"."""
    chat_date: str | None = _key(Text("a date such as 2024-07-26"), None, decides_data=True)
    """The day that chat templates take for today."""
    chat_assistant_tokens: str | None = _key(
        Text('special tokens with blanks between, "all" or "none"'), None, decides_data=True
    )
    """Special tokens that the assistant may spell, with blanks between; None is "<think> </think>"."""
    tokens_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of token ids; None is input_ids."""
    loss_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of flags that say which token ids are trained on."""
    labels_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of labels, -100 where a token id is not trained on."""
    positions_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of the positions of token ids."""
    max_document_tokens: int | None = _key(Integer(1), None, decides_data=True)
    """Longer documents are cut off, or split; None is no limit."""
    split_long_documents: bool | None = _key(Flag(), None, decides_data=True)
    """Split documents of more than max_document_tokens rather than cut them off."""
    special_tokens: str | None = _key(Choice(SPECIAL_TOKEN_POLICIES), None, decides_data=True)
    """Tokens put round each document of this source."""

    def __post_init__(self) -> None:
        _check_fields(self, "SourceRecipe")

    def own_settings(self) -> dict[str, Any]:
        """Order and repetition where they are not the recipe's, by key."""
        values = {key: getattr(self, key) for key in _OWN_KEYS}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StageRecipe:
    """One `[[schedule]]` table: which mixture holds from some place of the run on, and how it is reached."""

    mixture: Mapping[str, float] = field(metadata={"check": Weights()})
    """Weights by name of source; a source that is not named has none."""
    start_tokens: int | None = _key(Count(), None, decides_data=True)
    """Where the stage starts, in planned tokens of the run; "1.5b" and the like are allowed."""
    start_steps: int | None = _key(Count(), None, decides_data=True)
    """The same in steps of the run, in place of start_tokens. Neither is the start of the run."""
    change: str = _key(Choice(CHANGES), "constant", decides_data=True)
    """"constant": the mixture holds from the start; "linear", "cosine": it is reached at the end, from that before."""
    end_tokens: int | None = _key(Count(), None, decides_data=True)
    """Where a change ends, in planned tokens."""
    end_steps: int | None = _key(Count(), None, decides_data=True)
    """The same in steps. Neither is the start of the next stage."""

    def __post_init__(self) -> None:
        _check_fields(self, "StageRecipe")

    def to_dict(self) -> dict[str, Any]:
        """Plain data of the same shape as the TOML."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"mixture": dict(self.mixture)}


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What a run reads, and in what order; typed, frozen, and checked when built.

    Build it with `from_toml` or `from_dict`. Two recipes are equal when all their keys are; `data_fields` gives those
    that decide which tokens come when, the rest is speed and memory.

    Raises (whichever way it is built): `RecipeError`.
    """

    sources: tuple[SourceRecipe, ...]
    """The datasets, at least one, in the order of the file."""
    text_field: str = _key(Text("the name of a column"), "text", decides_data=True)
    """Column that holds a document's text, for sources that do not name their own."""
    cache_dir: Path | None = _key(Location("a folder of this machine", stores=False), None, decides_data=False)
    """Node-local folder for indexes and cached shards; None keeps nothing on disk."""
    cache_limit_bytes: int | None = _key(Size(), None, decides_data=False)
    """Most bytes that `cache_dir` may hold; None is no limit."""
    seed: int = _key(Integer(0, MAX_INT64), 0, decides_data=True)
    """Seed of every permutation of the run."""
    chunk_size: int = _key(Integer(1, 1 << 20), 16384, decides_data=True)
    """Documents per chunk of a lane: the unit of fetching, and in which the mixture holds."""
    shuffle_shards: bool = _key(Flag(), True, decides_data=True)
    """Permute the segments of a dataset in each epoch."""
    shuffle_within_shard: bool = _key(Flag(), True, decides_data=True)
    """Permute the documents inside a shuffle block."""
    shuffle_block_size: int | str = _key(Integer(1, words=BLOCK_WORDS), "auto", decides_data=True)
    """Documents that are permuted together: a number, "auto", "global" (the whole dataset) or "none"."""
    flush_every_k_chunks: int = _key(Integer(1), 1, decides_data=True)
    """Chunks per window: stateful operators start each window empty and end it flushed."""
    token_estimation: bool = _key(Flag(), True, decides_data=True)
    """Measure the tokens per document of each source at the start, so that weights are shares of tokens."""
    shuffle_after_pack: bool = _key(Flag(), True, decides_data=True)
    """Shuffle packed records inside a window."""
    shuffle_buffer_size: int = _key(Integer(1), 1024, decides_data=True)
    """Records that are shuffled together after packing, for the whole job."""
    repeat: bool = _key(Flag(), True, decides_data=True)
    """Go on with the next epoch of a dataset that is used up; false is short for `exhausted_policy = "stop"`."""
    reshuffle_on_repeat: bool = _key(Flag(), True, decides_data=True)
    """Every pass over a source has an order of its own."""
    exhausted_policy: str | None = _key(Choice(EXHAUSTED_POLICIES), None, decides_data=True)
    """A source whose documents have all been used: "repeat" goes on with another pass (None is the same), "stop" leaves
    its share to the others; the run ends when all have stopped."""
    stop_after_passes: int | None = _key(Integer(1), None, decides_data=True)
    """The run ends as soon as a source has had so many passes."""
    max_repeats: int | None = _key(Integer(0), None, decides_data=True)
    """Passes after the first one, after which a source stops."""
    schedule: tuple["StageRecipe", ...] = _key(_stages_check, (), decides_data=True)
    """`[[schedule]]` tables: a mixture that changes, in place of the sources' weights."""
    ensure_mixture: bool = _key(Flag(), False, decides_data=True)
    """Hold the shares of tokens over every stretch of the run, in records of one source each; for "wrap"."""
    ensure_mixture_buffer_size: int | None = _key(Integer(1), None, decides_data=True)
    """Records that wait for their turn with it, for the whole job; None is 34 million tokens."""
    continue_from: str | None = _key(Location("the path of a recipe", stores=False), None, decides_data=False)
    """The recipe of a run that one by this recipe takes over from, at a state of that run."""
    canonical_replicas: int | str = _key(Integer(1, 1 << 16, words=("auto",)), "auto", decides_data=True)
    """Number of lanes, fixed for the life of a run; data-parallel degrees must divide it."""
    tokenize_parallelism: int | str = _key(Integer(1, 1024, words=("auto",)), "auto", decides_data=False)
    """Blocks that are tokenized at the same time."""
    pack_parallelism: int | str = _key(Integer(1, 1024, words=("auto",)), "auto", decides_data=False)
    """Blocks that are packed at the same time."""
    fetch_parallelism: int | str = _key(Integer(1, 1024, words=("auto",)), "auto", decides_data=False)
    """Reads that are under way at the same time."""
    prefetch_buffer_size: int | str = _key(Size(words=("auto",)), "auto", decides_data=False)
    """Bytes of prepared data that may wait, for the whole process."""
    runner: str = _key(Choice(RUNNERS, later=LATER_RUNNERS), "threads", decides_data=False)
    """Where the work runs: "threads", "process" for slow Python code, or "inline" in the calling thread."""
    isolate: bool = _key(Flag(), False, decides_data=False)
    """Run the whole pipeline in a process of its own, which leaves the training process's interpreter lock alone."""
    special_tokens: str = _key(Choice(SPECIAL_TOKEN_POLICIES), "auto", decides_data=True)
    """Tokens put around each document; "auto": EOS, and BOS where the tokenizer declares one of its own."""
    pack_mode: str = _key(Choice(PACK_MODES), "flat", decides_data=True)
    """"flat": documents end to end; "sequences": whole sequences in padded records, none of them ever cut."""
    pack_algorithm: str = _key(Choice(PACK_ALGORITHMS), "auto", decides_data=True)
    """How documents come into records; "auto": "wrap", or "best_fit" for sequences."""
    num_bins: int = _key(Integer(1, 1 << 16), 64, decides_data=True)
    """Records that each lane has in the making, except with "wrap"."""
    max_documents_per_record: int | None = _key(Integer(1), None, decides_data=True)
    """Most documents, or parts of them, in a record; None is no limit."""
    homogeneity: str = _key(Choice(HOMOGENEITIES), "none", decides_data=True)
    """"full": a record holds documents of one source; "group": of sources of one group; "none": of any."""
    oversized: str = _key(Choice(OVERSIZED), "auto", decides_data=True)
    """Documents longer than a record: "split", or "drop", which leaves them out and counts them; "auto": split, but
    drop sequences."""
    filter: str | None = _key(LongText("a filter expression", 8192), None, decides_data=True)
    """Rows to keep: an expression on columns, see `zephon.ops.expression`."""
    text_template: str | None = _key(LongText("a template such as {title} {body}", 1 << 16), None, decides_data=True)
    """Makes the document's text from several columns: "# {title}\\n\\n{body}"."""
    text_encoding: str | None = _key(Text("the name of an encoding"), None, decides_data=True)
    """Encoding of a text column that holds bytes; None where it holds text."""
    documents: str = _key(Choice(DOCUMENTS), "text", decides_data=True)
    """What rows hold: "text", "chat" (conversations) or "tokens" (token ids)."""
    messages_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of conversations; None finds messages, conversations or conversation."""
    response_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of answers, where messages_field is one of prompts; None finds both."""
    tools_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of the tools of conversations; None takes tools where it is there."""
    chat_template: str | None = _key(LongText("a chat template, or the path of one"), None, decides_data=True)
    """Chat template, or the path of a .jinja file; None takes the tokenizer's own."""
    chat_loss: str = _key(Choice(CHAT_LOSSES), "assistant", decides_data=True)
    """What is trained on in conversations: "assistant", "last_assistant" or "all"."""
    chat_date: str | None = _key(Text("a date such as 2024-07-26"), None, decides_data=True)
    """The day that chat templates take for today."""
    chat_assistant_tokens: str | None = _key(
        Text('special tokens with blanks between, "all" or "none"'), None, decides_data=True
    )
    """Special tokens that the assistant may spell, with blanks between; None is "<think> </think>"."""
    tokens_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of token ids; None is input_ids."""
    loss_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of flags that say which token ids are trained on."""
    labels_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of labels, -100 where a token id is not trained on."""
    positions_field: str | None = _key(Text("the name of a column"), None, decides_data=True)
    """Column of the positions of token ids."""
    max_document_tokens: int | None = _key(Integer(1), None, decides_data=True)
    """Longer documents are cut off, or split; None is no limit."""
    split_long_documents: bool = _key(Flag(), False, decides_data=True)
    """Split documents of more than max_document_tokens rather than cut them off."""
    on_error: str = _key(Choice(("raise", "skip", "quarantine")), "raise", decides_data=False)
    """What happens to rows that cannot be used: the first one ends the run, they are left out, or they are left out and
    kept in the report."""
    error_budget: float = _key(Share(), 0.01, decides_data=False)
    """Share of the rows of a chunk that may be left out before the run ends all the same."""
    error_budget_rows: int = _key(Integer(0), 0, decides_data=False)
    """Rows of a chunk that may be left out although they are more than that share."""
    error_report: Path | None = _key(Location("a folder of this machine", stores=False), None, decides_data=False)
    """Folder in which every rank reports the rows that it leaves out; None reports them in the log alone."""
    origin: str = field(default="recipe", compare=False, repr=False)
    """The file this came from, or what stands for it in messages; not a key."""

    def __post_init__(self) -> None:
        _check_fields(self, self.origin)
        object.__setattr__(self, "sources", _check_sources(self.sources, self.origin))
        object.__setattr__(self, "schedule", _check_schedule(self.schedule, self.sources, self.origin))
        for key in ("cache_dir", "error_report"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, Path(getattr(self, key)))
        if self.on_error == "quarantine" and self.error_report is None:
            raise RecipeError(
                f'{self.origin}: on_error is "quarantine", which keeps the rows left out in a report; give the key '
                'error_report, a folder, or take "skip".'
            )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """The recipe in a TOML file.

        Relative paths in it are taken from the folder that `path` lies in, a leading "~/" is the home folder, and URIs
        stay as they are.

        Raises: `RecipeError` where the file is missing, larger than 1 MiB, not UTF-8 or not TOML (with the line), or
        anything in it is unknown, of the wrong type or out of range.
        """
        if not isinstance(path, str | os.PathLike):
            raise RecipeError(f"the recipe is {path!r}, but must be the path of a TOML file")
        where = clip(os.fspath(path), 4096)
        data = _parse_toml(_read(path, where), where)
        return cls.from_dict(data, base=os.path.dirname(os.path.abspath(path)), where=where)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, object], *, base: str | os.PathLike[str] | None = None, where: str = "recipe"
    ) -> Self:
        """The recipe in plain data of the same shape as the TOML; None stands for a key that is not given.

        `base` is the folder that relative paths are taken from (default: the working directory); `where` is how
        messages call the recipe.

        Raises: `RecipeError`.
        """
        folder = os.path.abspath(base if base is not None else ".")
        values = _given_keys(data, _RECIPE_KEYS, where)
        if "cache_dir" in values:
            values["cache_dir"] = _resolve(values["cache_dir"], folder)
        if "continue_from" in values:
            values["continue_from"] = _resolve(values["continue_from"], folder)
        if "error_report" in values:
            values["error_report"] = _resolve(values["error_report"], folder)
        if "schedule" in values:
            values["schedule"] = _stages(values["schedule"], where)
        values = _with_template_path(values, folder)
        tables = _source_tables(values.get("sources"), where)
        values["sources"] = tuple(_source(table, i, folder, where) for i, table in enumerate(tables, start=1))
        return cls(**values, origin=where)

    def setting(self, source: SourceRecipe, key: str) -> Any:
        """A key as it holds for a source: its own, else the recipe's."""
        own = getattr(source, key)
        return getattr(self, key) if own is None else own

    def to_dict(self) -> dict[str, Any]:
        """Plain data (str, int, float, bool, None, lists, dicts) from which `from_dict` makes an equal recipe."""
        plain = {key: getattr(self, key) for key in _RECIPE_KEYS}
        for key in ("cache_dir", "error_report"):
            plain[key] = None if plain[key] is None else str(plain[key])
        plain["sources"] = [{key: getattr(source, key) for key in _SOURCE_KEYS} for source in self.sources]
        plain["schedule"] = [stage.to_dict() for stage in self.schedule]
        return plain

    def data_fields(self) -> dict[str, Any]:
        """Plain data of the keys that decide the data, for the fingerprint of a run.

        Left out is what changes speed and memory alone (caches, parallelism, look-ahead, runner), and where the files
        lie: `path` and `fmt` say how to find documents, and it is the dataset's catalog that says which they are. The
        text column is given per source, as it is used.
        """
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("decides_data")}
        common = plain.pop("text_field")
        plain["sources"] = [
            {
                "name": source.name,
                "weight": source.weight,
                "text_field": source.text_field or common,
                **{key: getattr(source, key) for key in _OWN_SETTINGS if getattr(source, key) is not None},
            }
            for source in self.sources
        ]
        plain["schedule"] = [stage.to_dict() for stage in self.schedule]
        return plain

    def replace(self, **overrides: object) -> Self:
        """A copy with other values for some keys, checked like a recipe that says so.

        `sources` is a list of tables or of `SourceRecipe`; None puts a key back to its default; relative paths are
        taken from the working directory.

        Raises: `RecipeError`.
        """
        return self.from_dict({**self.to_dict(), **overrides}, where=self.origin)


_OWN_KEYS = (
    "shuffle_shards",
    "shuffle_within_shard",
    "shuffle_block_size",
    "reshuffle_on_repeat",
    "exhausted_policy",
    "stop_after_passes",
    "max_repeats",
)
_STAGE_KEYS = tuple(f.name for f in fields(StageRecipe))
_OWN_SETTINGS = tuple(
    f.name for f in fields(SourceRecipe) if f.metadata.get("decides_data") and f.name not in ("weight", "text_field")
)
_SOURCE_KEYS = tuple(f.name for f in fields(SourceRecipe))
_RECIPE_KEYS = tuple(f.name for f in fields(DataRecipe) if f.name != "origin")


def parse_size(value: object, *, key: str = "size", where: str = "recipe") -> int:
    """The bytes that an integer or a text such as "500gb" stands for (units: see the module).

    Raises: `RecipeError` naming `where` and `key`.
    """
    size: int = checked(Size(), value, key, where)
    return size


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _read(path: str | os.PathLike[str], where: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RecipeError(f"{where}: this is not a regular file; a recipe is a TOML file.")
            content = file.read(MAX_RECIPE_BYTES + 1)
    except FileNotFoundError:
        raise RecipeError(f"{where}: there is no such file; name the recipe's TOML file.") from None
    except IsADirectoryError:
        raise RecipeError(f"{where}: this is a folder; name the recipe's TOML file in it.") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RecipeError(f"{where}: the recipe cannot be read: {reason}.") from None
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError(
            f"{where}: this file is larger than {MAX_RECIPE_BYTES} bytes, the most that a recipe may have; "
            "name a TOML file, not a data file."
        )
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a named pipe would wait for its writer, for ever if there is none.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _parse_toml(content: bytes, where: str) -> dict[str, object]:
    try:
        text = content.decode("utf-8-sig")  # editors on Windows put a byte order mark in front
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{where}, line {line}: this is not UTF-8 text; TOML files are.") from None
    _refuse_endless_keys(text, where)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        match = re.search(r" \(at line (\d+), column \d+\)$", message)
        line = int(match.group(1)) if match else text.rstrip().count("\n") + 1
        reason = message[: match.start()] if match else message.removesuffix(" (at end of document)")
        raise RecipeError(f"{where}, line {line}: this is not valid TOML: {clip(reason)}.") from None
    except RecursionError:
        raise RecipeError(f"{where}: values are nested too deeply; a recipe is one table and its sources.") from None
    except ValueError:  # no syntax error, but an integer of more digits than Python takes
        raise RecipeError(f"{where}: a number has too many digits; recipes hold 64-bit integers.") from None


# Comments and strings (to their end, or the text's), then what stands before a key or in it. No alternative fails after
# a long way, so that the scan takes linear time.
_TOML_PIECES = re.compile(
    r"""\#[^\n]*
    | \"{3} (?: \\. | [^\\] )*? (?: \"{3,5} | \Z )
    | '{3} .*? (?: '{3,5} | \Z )
    | " (?: \\. | [^"\\\n] )*+ "?
    | ' [^'\n]*+ '?
    | (?P<mark> [.=,{\n] )""",
    re.VERBOSE | re.DOTALL,
)


def _refuse_endless_keys(text: str, where: str) -> None:
    """tomllib takes the square of the dots in a key (a.b.c): hours for a hostile recipe."""
    dots = 0
    for piece in _TOML_PIECES.finditer(text):
        if piece["mark"] == ".":
            dots += 1
            if dots > 16:
                line = text.count("\n", 0, piece.start()) + 1
                raise RecipeError(f"{where}, line {line}: a key has more than 16 dots; no key of a recipe has any.")
        elif piece["mark"]:
            dots = 0


def _given_keys(table: Mapping[Any, Any], known: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise RecipeError(f"{where}: this is {seen(table)}; expected a table of keys and values.")
    for key, value in table.items():
        if key not in known:
            raise RecipeError(f"{where}: {_why_unknown(key, value, known)}")
    return {key: value for key, value in table.items() if value is not None}


def _why_unknown(key: object, value: object, known: Sequence[str]) -> str:
    if not isinstance(key, str):
        return f"a key is {seen(key)}; keys are text."
    given = f"key {quote(key)} (with value {seen(value)})"
    owner = _owner(key)
    if owner:
        return f"{given} does not belong in a data recipe: {owner}."
    if key in _SOURCE_KEYS:
        return f"{given} belongs to a source; write it inside that source's [[sources]] table."
    if key in _RECIPE_KEYS:
        return f"{given} belongs to the whole recipe; write it above the first [[sources]] line."
    near = nearest(key, known)
    remedy = f"did you mean {quote(near)}?" if near else f"expected one of {', '.join(known)}."
    return f"{given} is unknown; {remedy}"


def _source_tables(value: object, where: str) -> Sequence[object]:
    if value is None or (isinstance(value, list | tuple) and not value):
        raise RecipeError(
            f"{where}: there are no sources; add a [[sources]] table with name and path for each dataset."
        )
    if isinstance(value, Mapping):
        raise RecipeError(f'{where}: key "sources" is one table; expected a list of them: write [[sources]].')
    if not isinstance(value, list | tuple):
        raise RecipeError(f'{where}: key "sources" is {seen(value)}; expected [[sources]] tables.')
    return value


def _stages(value: object, where: str) -> tuple[StageRecipe, ...]:
    if isinstance(value, Mapping):
        raise RecipeError(f'{where}: key "schedule" is one table; expected a list of them: write [[schedule]].')
    if not isinstance(value, list | tuple):
        raise RecipeError(f'{where}: key "schedule" is {seen(value)}; expected [[schedule]] tables.')
    made = []
    for index, table in enumerate(value, start=1):
        inside = f"{where}: stage {index} of the schedule"
        plain = table.to_dict() if isinstance(table, StageRecipe) else table
        values = _given_keys(plain, _STAGE_KEYS, inside)
        if "mixture" not in values:
            raise RecipeError(f'{inside}: key "mixture" is missing; every stage has one.')
        for spec in fields(StageRecipe):
            if spec.name in values:
                values[spec.name] = checked(spec.metadata["check"], values[spec.name], spec.name, inside)
        made.append(StageRecipe(**values))
    return tuple(made)


def _source(table: Any, index: int, folder: str, where: str) -> SourceRecipe:
    if isinstance(table, SourceRecipe):
        table = {key: getattr(table, key) for key in _SOURCE_KEYS}
    name = table.get("name") if isinstance(table, Mapping) else None
    inside = f"{where}: source {index}" + (f" ({quote(name)})" if isinstance(name, str) else "")
    values = _given_keys(table, _SOURCE_KEYS, inside)
    for key in ("name", "path"):
        if key not in values:
            raise RecipeError(f'{inside}: key "{key}" is missing; every source has a name and a path.')
    for spec in fields(SourceRecipe):
        if spec.name in values:
            values[spec.name] = checked(spec.metadata["check"], values[spec.name], spec.name, inside)
    values["path"] = _resolve(values["path"], folder)
    return SourceRecipe(**_with_template_path(values, folder))


def _with_template_path(values: dict[str, Any], folder: str) -> dict[str, Any]:
    """The values with the path of a chat template made absolute, where it is one."""
    template = values.get("chat_template")
    if isinstance(template, str) and "\n" not in template and template.endswith(TEMPLATE_SUFFIXES):
        return {**values, "chat_template": _resolve(template, folder)}
    return values


def _resolve(path: object, folder: str) -> object:
    """The absolute path; what is no path is left for the check to refuse."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str) or not path.strip() or is_uri(path):
        return path
    if path == "~" or path.startswith("~/"):
        path = os.path.expanduser(path)
    # Joined, not normalised: with symbolic links, "a/../b" need not be "b".
    return os.path.join(folder, path)


# ---------------------------------------------------------------------------------------------------------------------
# Checking


def _check_fields(instance: Any, where: str) -> None:
    for spec in fields(instance):
        check, value = spec.metadata.get("check"), getattr(instance, spec.name)
        if check is not None and not (value is None and spec.default is None):
            # Frozen; but nobody has seen the instance yet, and values are kept in normal form.
            object.__setattr__(instance, spec.name, checked(check, value, spec.name, where))


def _check_sources(sources: object, where: str) -> tuple[SourceRecipe, ...]:
    result: list[SourceRecipe] = []
    first_index: dict[str, int] = {}
    for index, source in enumerate(_source_tables(sources, where), start=1):
        if not isinstance(source, SourceRecipe):
            raise RecipeError(f"{where}: source {index} is {seen(source)}; expected a SourceRecipe.")
        first = first_index.setdefault(source.name, index)
        if first != index:
            raise RecipeError(
                f'{where}: key "name" of source {index} is {quote(source.name)}, which is the name of source {first}; '
                "expected a name of its own for each source."
            )
        result.append(source)
    total = sum(source.weight for source in result)
    for index, source in enumerate(result, start=1):
        if not source.weight / total > 0:  # the sum is infinite, or the share rounds to nothing
            raise RecipeError(
                f'{where}: key "weight" of source {index} ({quote(source.name)}) is {source.weight}, and all weights '
                f"add up to {total}; expected weights whose shares of the sum are above 0."
            )
    return tuple(result)


def _check_schedule(stages: object, sources: Sequence[SourceRecipe], where: str) -> tuple[StageRecipe, ...]:
    made = _stages(stages, where)
    for source in sources if made else ():
        if source.weight != 1.0:
            raise RecipeError(
                f'{where}: source {quote(source.name)} has the key "weight" ({source.weight:g}), but the schedule says '
                "the mixture; remove one of them."
            )
    names = [source.name for source in sources]
    for index, stage in enumerate(made, start=1):
        for name in stage.mixture:
            if name not in names:
                near = nearest(name, names)
                remedy = f"did you mean {quote(near)}?" if near else f"the sources are {', '.join(map(quote, names))}."
                raise RecipeError(
                    f"{where}: stage {index} of the schedule names {quote(name)}, which is no source; {remedy}"
                )
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Who owns what a recipe does not say

_OWNERS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"(hf_|base_)?tokeni[sz]er(_.+)?|vocab(ulary)?(_size|_file)?"),
        "the tokenizer is the model's, so the training framework owns it; where you call Zephon yourself, pass it to "
        "Pipeline.from_recipe(tokenizer=...) or zephon stream --tokenizer",
    ),
    (
        re.compile(r"(max_)?(seq|sequence|context)(_?len(gth)?|_size)?|max_length|max_tokens|n_ctx"),
        "the training framework owns the sequence length; where you call Zephon yourself, pass it to "
        "Pipeline.from_recipe(seq_len=...) or zephon stream --seq-len",
    ),
    (
        re.compile(
            r"(.+_)?(mini|micro)?_?batch(_?size|_per_.+)?|[gm]bs|(num_)?micro_?batch(es|_.+)?"
            r"|grad(ient)?_acc(umulation)?(_steps)?"
        ),
        "the training framework owns global batch and microbatch size; where you call Zephon yourself, pass the "
        "microbatch to Pipeline.from_recipe(microbatch_size=...) or zephon stream --microbatch-size",
    ),
    (
        re.compile(
            r"(dp|tp|pp|cp|ep|vp|sp|fsdp|ddp)(_.+)?|topology|(global_|local_)?rank|(local_)?world_size"
            r"|(data|tensor|pipeline|context|expert|sequence|model)_?(model_)?parallel.*"
            r"|(n_?|num_)?(gpu|node|device|host|rank)s?(_per_node)?|n_?proc_per_node|num_(replicas|processes)"
        ),
        "the training framework owns the topology, and one recipe serves them all; where you call Zephon yourself, "
        "pass Pipeline.from_recipe(dp_degree=..., dp_group_id=...) or zephon stream --dp-degree --dp-rank",
    ),
)


def _owner(key: str) -> str | None:
    normal = re.sub(r"[\s.-]+", "_", key[:100].strip().lower())
    return next((owner for pattern, owner in _OWNERS if pattern.fullmatch(normal)), None)
