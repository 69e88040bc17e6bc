"""The fields of a data recipe, and of a run's data, as an ordinary TorchTitan config."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Self

import tyro

from zephon import DataRecipe, RecipeError

from .forms import BaseDataLoader

__all__ = ["Source", "ZephonConfig"]


@dataclass(kw_only=True, slots=True)
class Source:
    """One dataset of the mixture; see `zephon.config.recipe.SourceRecipe`."""

    name: str
    """What the dataset is called in mixtures, logs and checkpoints."""
    path: str
    """File, folder or glob."""
    fmt: str | None = None
    """Format of the files; None finds it from them."""
    weight: float = 1.0
    """Share of the training tokens, relative to the other sources."""
    text_field: str | None = None
    """Column of the document's text where it is not the recipe's."""
    group: str | None = None
    """Sources of one group may share a record where homogeneity is group; None is a group of its own."""
    shuffle_shards: bool | None = None
    """This and the six below: as in the recipe, for this source alone."""
    shuffle_within_shard: bool | None = None
    shuffle_block_size: int | str | None = None
    reshuffle_on_repeat: bool | None = None
    exhausted_policy: str | None = None
    stop_after_passes: int | None = None
    max_repeats: int | None = None
    filter: str | None = None
    """This and those below: as in the config, for this source alone."""
    text_template: str | None = None
    text_encoding: str | None = None
    documents: str | None = None
    messages_field: str | None = None
    response_field: str | None = None
    tools_field: str | None = None
    chat_template: str | None = None
    chat_loss: str | None = None
    chat_date: str | None = None
    chat_assistant_tokens: str | None = None
    tokens_field: str | None = None
    loss_field: str | None = None
    labels_field: str | None = None
    positions_field: str | None = None
    max_document_tokens: int | None = None
    split_long_documents: bool | None = None
    special_tokens: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(kw_only=True, slots=True)
class ZephonConfig(BaseDataLoader.Config):
    """A data recipe as config: every key of `zephon.DataRecipe`, and what concerns one run only.

    Tokenizer, sequence length, batch sizes and parallelism are the trainer's and not repeated here.
    """

    dataset: Annotated[str, tyro.conf.Suppress] = ""
    dataset_path: Annotated[str | None, tyro.conf.Suppress] = None

    sources: list[Source] = field(default_factory=list)
    """The datasets, at least one."""
    text_field: str = "text"
    """Column that holds a document's text, for sources that do not name their own."""
    filter: str | None = None
    """Rows to keep: an expression on columns such as length(text) > 100."""
    text_template: str | None = None
    """Makes the document's text from several columns, as in {title} {body}."""
    text_encoding: str | None = None
    """Encoding of a text column that holds bytes; None where it holds text."""
    documents: str = "text"
    """What rows hold: text, chat (conversations) or tokens (token ids)."""
    messages_field: str | None = None
    """Column of conversations; None finds it."""
    response_field: str | None = None
    """Column of answers, where messages_field is one of prompts; None finds both."""
    tools_field: str | None = None
    """Column of the tools of conversations; None takes tools where it is there."""
    chat_template: str | None = None
    """Chat template, or the path of a .jinja file; None takes the tokenizer's own."""
    chat_loss: str = "assistant"
    """What is trained on in conversations: assistant, last_assistant or all."""
    chat_date: str | None = None
    """The day that chat templates take for today, as in 2024-07-26."""
    chat_assistant_tokens: str | None = None
    """Special tokens that the assistant may spell, with blanks between; None is "<think> </think>"."""
    tokens_field: str | None = None
    """Column of token ids; None is input_ids."""
    loss_field: str | None = None
    """Column of flags that say which token ids are trained on."""
    labels_field: str | None = None
    """Column of labels, -100 where a token id is not trained on."""
    positions_field: str | None = None
    """Column of the positions of token ids."""
    max_document_tokens: int | None = None
    """Longer documents are cut off, or split; None is no limit."""
    split_long_documents: bool = False
    """Split documents of more than max_document_tokens rather than cut them off."""
    on_error: str = "raise"
    """What happens to rows that cannot be used: raise ends the run, skip leaves them out, quarantine keeps them in the
    report besides."""
    error_budget: float = 0.01
    """Share of the rows of a chunk that may be left out before the run ends all the same."""
    error_budget_rows: int = 0
    """Rows of a chunk that may be left out although they are more than that share."""
    error_report: str | None = None
    """Folder in which every rank reports the rows that it leaves out; None reports them in the log alone."""
    cache_dir: str | None = None
    """Node-local folder for indexes; None takes zephon in the user's cache folder."""
    cache_limit_bytes: int | str | None = None
    """Most bytes that cached data may take; a number or text such as 500gb."""
    seed: int = 0
    """Seed of every permutation of the run."""
    chunk_size: int = 16384
    """Documents per chunk of a lane: the unit of fetching, and in which the mixture holds."""
    shuffle_shards: bool = True
    """Permute the segments of a dataset in each epoch."""
    shuffle_within_shard: bool = True
    """Permute the documents inside a shuffle block."""
    shuffle_block_size: int | str = "auto"
    """Documents that are permuted together: a number, auto, global or none."""
    flush_every_k_chunks: int = 1
    """Chunks per window: stateful operators start each window empty and end it flushed."""
    token_estimation: bool = True
    """Measure the tokens per document of each source at the start, so that weights are shares of tokens."""
    shuffle_after_pack: bool = True
    """Shuffle packed records inside a window."""
    shuffle_buffer_size: int = 1024
    """Records that are shuffled together after packing, for the whole job."""
    repeat: bool = True
    """Go on with the next epoch of a dataset that is used up. Validation never repeats."""
    reshuffle_on_repeat: bool = True
    """Every pass over a source has an order of its own."""
    exhausted_policy: str | None = None
    """A source that is used up: repeat goes on with another pass, stop leaves its share to the others."""
    stop_after_passes: int | None = None
    """The run ends as soon as a source has had so many passes."""
    max_repeats: int | None = None
    """Passes after the first one, after which a source stops."""
    schedule: Annotated[list[Any], tyro.conf.Suppress] = field(default_factory=list)
    """Stages of a mixture that changes, tables as in a recipe; set by from_toml."""
    ensure_mixture: bool = False
    """Hold the shares of tokens over every stretch of the run, in records of one source each."""
    ensure_mixture_buffer_size: int | None = None
    """Records that wait for their turn with it, for the whole job; None is 34 million tokens."""
    continue_from: str | None = None
    """The recipe of a run that this one takes over from, at a checkpoint of that run."""
    canonical_replicas: int | str = "auto"
    """Number of lanes, fixed for the life of a run; data-parallel degrees must divide it. auto: from the global
    batch."""
    tokenize_parallelism: int | str = "auto"
    """Blocks that are tokenized at the same time."""
    pack_parallelism: int | str = "auto"
    """Blocks that are packed at the same time."""
    fetch_parallelism: int | str = "auto"
    """Reads that are under way at the same time."""
    prefetch_buffer_size: int | str = "auto"
    """Bytes of text that may be under way or ready, for the whole process."""
    runner: str = "threads"
    """Where the work runs: threads, process for slow Python code, or inline in the calling thread."""
    isolate: bool = False
    """Run the whole pipeline in a process of its own, which leaves the training process's interpreter lock alone."""
    special_tokens: str = "auto"
    """Tokens put around each document: auto, bos_eos, bos, eos or none."""
    pack_mode: str = "flat"
    """flat: documents end to end; sequences: whole sequences in padded records, none of them ever cut."""
    pack_algorithm: str = "auto"
    """How documents come into records: wrap, first_fit, best_fit or best_fit_wrap; auto: wrap, or best_fit for
    sequences."""
    num_bins: int = 64
    """Records that each lane has in the making, except with wrap."""
    max_documents_per_record: int | None = None
    """Most documents, or parts of them, in a record; None is no limit."""
    homogeneity: str = "none"
    """full: a record holds documents of one source; group: of sources of one group; none: of any."""
    oversized: str = "auto"
    """Documents longer than a record: split, or drop, which leaves them out; auto: split, but drop sequences."""

    ledger: str | None = None
    """Folder in which every rank writes what it consumed, for `zephon verify`; None writes nothing."""
    flush_index: str | None = None
    """Folder in which every rank writes where windows begin; None writes nothing."""
    allow_changes: list[str] = field(default_factory=list)
    """Names of differences to accept when a checkpoint was taken with other data; the refusal lists them."""
    skip_steps: list[str] = field(default_factory=list)
    """Steps whose data are left out, for example after a loss spike: 1000-1010 leaves out these eleven. They are
    numbered from 1, as the steps of a run that leaves out none; a range that the checkpoint has left out already may
    stay."""
    start_afresh: bool = False
    """Begin the data at its start where the checkpoint holds no Zephon state, instead of refusing it. A checkpoint
    that holds one is loaded as ever, so a restarted job may keep the switch."""

    recipe: Annotated[str, tyro.conf.Suppress] = ""
    """The file that the values came from, for messages."""
    infinite: Annotated[bool | None, tyro.conf.Suppress] = None
    """Set by TorchTitan 0.3's validator, and by nobody else."""

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """The config of a data recipe; `overrides` are fields that take the place of what the recipe says.

        Raises:
            RecipeError: the recipe cannot be read or is not usable, or an override is none.
        """
        plain = DataRecipe.from_toml(path).to_dict()
        names = [f.name for f in fields(cls)]
        for name in overrides:
            if name not in names:
                raise RecipeError(
                    f"from_toml is given {name!r}, which is no field of the data loader's config; the fields are "
                    f"{', '.join(names)}."
                )
        values = {**plain, "recipe": os.fspath(path), **overrides}
        values["sources"] = [s if isinstance(s, Source) else Source(**s) for s in values["sources"]]
        made = cls(**values)
        made.to_recipe()
        return made

    def ranges_to_skip(self) -> list[tuple[int, int]]:
        """`skip_steps` as ranges [first, last) of steps counted from 0.

        Raises:
            RecipeError: one is not written as first-last.
        """
        ranges = []
        for text in self.skip_steps:
            found = re.fullmatch(r"\s*([1-9][0-9]{0,14})(?:-([1-9][0-9]{0,14}))?\s*", str(text))
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
            if last < first:
                raise RecipeError(
                    f"dataloader.skip_steps holds {text!r}; a step such as 1000, or a range such as 1000-1010 whose "
                    "last step is not before its first, is needed."
                )
            ranges.append((first - 1, last))
        return ranges

    def to_recipe(self) -> DataRecipe:
        """The recipe that these fields make up, checked.

        Raises:
            RecipeError: a value is not usable.
        """
        where = f"dataloader config (of {self.recipe})" if self.recipe else "dataloader config"
        if self.dataset or self.dataset_path:
            raise RecipeError(
                f"{where}: dataset is {self.dataset!r} and dataset_path {self.dataset_path!r}, which are fields of "
                "TorchTitan's own data loaders; name the data in sources, or use Config.from_toml(recipe)."
            )
        if not self.sources:
            raise RecipeError(
                f"{where}: there are no sources; make the config with ZephonDataLoader.Config.from_toml(recipe)."
            )
        known = {f.name for f in fields(DataRecipe)} - {"origin"}
        plain: dict[str, Any] = {name: getattr(self, name) for name in known}
        plain["sources"] = [source if isinstance(source, Mapping) else source.to_dict() for source in self.sources]
        return DataRecipe.from_dict(plain, where=where)
