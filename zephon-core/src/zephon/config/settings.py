"""Settings of the data that a recipe, one of its sources and a work source in Python share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from zephon.config.keys import (
    MAX_INT64,
    Column,
    Count,
    MediaRoot,
    Name,
    Positive,
    Prose,
    Weights,
    Whole,
    check_keys,
    key,
    keys_of,
    quote,
    refuse_unknown,
    seen,
)
from zephon.errors import RecipeError

SpecialTokens = Literal["auto", "bos_eos", "bos", "eos", "none"]
_LEAST_SHARE = 1e-15
ChatLoss = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """Order and repetition"""

    shuffle_shards: bool = key(True, "Permute the segments (row groups, or smaller parts) of a source in each pass.")
    shuffle_within_shard: bool = key(True, "Permute the rows inside a shuffle block.")
    shuffle_block_size: (
        Annotated[int, Meta(ge=1, le=1 << 48, title="an integer of at least 1")] | Literal["auto", "global", "none"]
    ) = key(
        "auto",
        'Rows that are permuted together, over all lanes: a number, "auto" (32 MiB of text), "global" (the whole '
        'source) or "none".',
    )
    reshuffle_on_repeat: bool = key(True, "Give every pass over a source an order of its own.")
    exhausted_policy: Literal["repeat", "stop"] | None = key(
        None,
        'A source whose rows have all been used: "repeat" (the default) goes on with another pass, "stop" leaves its '
        "share to the others; the run ends when all have stopped.",
    )
    stop_after_passes: Positive | None = key(None, "The run ends as soon as a source has had so many passes.")
    max_repeats: Whole | None = key(None, "Passes after the first one, after which a source stops.")

    def __post_init__(self) -> None:
        check_keys(self)
        ends = [name for name in END_KEYS if getattr(self, name) not in (None, "repeat")]
        if len(ends) > 1:
            first, second = ends[:2]
            raise RecipeError(
                f"{first} is {seen(getattr(self, first))} and {second} is {seen(getattr(self, second))}; they "
                "contradict each other, so remove one of them."
            )


END_KEYS = ("exhausted_policy", "stop_after_passes", "max_repeats")
"""When a source ends; a source with one of these has none of the recipe's."""
DATASET_KEYS = tuple(keys_of(OrderSettings))


@dataclass(frozen=True, kw_only=True)
class CurriculumSettings(OrderSettings):
    """The curriculum"""

    seed: Annotated[int, Meta(ge=-MAX_INT64, le=MAX_INT64, title="a 64-bit integer")] = key(
        0, "Seed of every permutation of the run."
    )
    chunk_size: Annotated[int, Meta(ge=1, le=1 << 20, title="an integer from 1 to 1048576")] = key(
        16384, "Rows per chunk of a lane: the unit of fetching, and the stretch over which the mixture holds."
    )
    repeat: bool = key(
        True, 'Go on with another pass over a source that is used up; false is short for exhausted_policy = "stop".'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in END_KEYS:
            if not self.repeat and getattr(self, name) not in (None, "stop", 0):
                raise RecipeError(
                    f"repeat is false and {name} is {seen(getattr(self, name))}; they contradict each other, so remove "
                    "one of them."
                )


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Rows and their tokens"""

    text_field: Column = key("text", "Column of the document's text.")
    filter: Prose | None = key(None, "Rows to keep: an expression on columns, such as length(text) > 100.")
    text_template: Prose | None = key(
        None, 'Template of the document\'s text over several columns, such as "# {title}\\n\\n{body}".'
    )
    text_encoding: Name | None = key(None, "Encoding of a column of bytes, of text files or of text in tar archives.")
    documents: Literal["text", "chat", "tokens", "images"] = key(
        "text", 'Content of the rows: "text", "chat" (conversations), "tokens" (token ids) or "images" (with text).'
    )
    images_field: Column | None = key(
        None,
        "Column of images, or of lists of them; by default, with images, images, image, or jpg, jpeg, png, webp and "
        'gif. Conversations show images where it is set: "auto" for images or image, or images inside the messages.',
    )
    media_root: MediaRoot | None = key(
        None, "The folder, tar archive or prefix of a store that paths of images are below.", decides_data=False
    )
    messages_field: Column | None = key(
        None, "Column of conversations; by default messages, conversations or conversation."
    )
    response_field: Column | None = key(
        None, "Column of answers, where messages_field is one of prompts; by default both are looked for."
    )
    tools_field: Column | None = key(None, "Column of the tools of conversations; by default tools, where it exists.")
    input_field: Column | None = key(None, "Column of what goes below a prompt; by default input, below instruction.")
    system_field: Column | None = key(None, "Column of system messages.")
    ignored_fields: Prose | None = key(
        None, "Columns that belong to conversations or token ids and are left out on purpose, separated by blanks."
    )
    chat_template: Prose | None = key(
        None, "Chat template, or the path of a .jinja file; by default the tokenizer's own."
    )
    chat_loss: ChatLoss = key(
        "assistant", 'The part of a conversation to train on: "assistant", "last_assistant" or "all".'
    )
    chat_date: Name | None = key(None, "The date of today for chat templates, such as 2024-07-26.")
    chat_assistant_tokens: Prose | None = key(
        None,
        'Special tokens that the assistant may spell, separated by blanks, "all" or "none"; by default '
        '"<think> </think>".',
    )
    tokens_field: Column | None = key(None, "Column of token ids; by default input_ids, or the only column.")
    loss_field: Column | None = key(None, "Column of flags, true where a token id is trained on.")
    labels_field: Column | None = key(None, "Column of labels, -100 where a token id is not trained on.")
    positions_field: Column | None = key(None, "Column of the positions of token ids.")
    max_document_tokens: Positive | None = key(None, "Longer documents are cut off, or split.")
    split_long_documents: bool = key(
        False, "Split documents of more than max_document_tokens rather than cut them off."
    )
    special_tokens: SpecialTokens = key(
        "auto",
        'Tokens around each document: "bos_eos", "bos", "eos", "none", or "auto": EOS, and BOS where the tokenizer '
        "declares one of its own.",
    )


@dataclass(frozen=True)
class Stage:
    """One stage of a schedule: a mixture, where it starts, and how it is reached from the stage before.

    Places are counted in planned tokens, or in steps of the run.
    """

    mixture: Weights = key(doc="Weights by name of source; a source that is not named has none.")
    start_tokens: Count | None = key(None, "Where the stage starts, in planned tokens; by default at the run's start.")
    start_steps: Count | None = key(None, "The same in steps, in place of start_tokens.")
    change: Literal["constant", "linear", "cosine"] = key(
        "constant",
        'How the mixture is reached: "constant", at the start; "linear" or "cosine", from the stage before, until the '
        "end.",
    )
    end_tokens: Count | None = key(
        None, "Where a change ends, in planned tokens; by default at the start of the next stage."
    )
    end_steps: Count | None = key(None, "The same in steps, in place of end_tokens.")

    def __post_init__(self) -> None:
        check_keys(self)
        if not 0 < sum(self.mixture.values()) < math.inf:
            raise RecipeError(
                f"mixture is {seen(self.mixture)}; expected weights with at least one above 0, and a finite sum."
            )
        for side in ("start", "end"):
            tokens, steps = (getattr(self, f"{side}_{unit}") for unit in ("tokens", "steps"))
            if tokens is not None and steps is not None:
                raise RecipeError(f"{side}_tokens is {tokens} and {side}_steps is {steps}; remove one of them.")
        if self.change == "constant" and (self.end_tokens is not None or self.end_steps is not None):
            raise RecipeError(
                'change is "constant", which holds until the next stage; remove the end, or let change be "linear" or '
                '"cosine".'
            )

    @property
    def in_steps(self) -> bool:
        """Whether the tokens per step have to be known to place the stage."""
        return self.start_steps is not None or self.end_steps is not None

    def start(self, tokens_per_step: int) -> int:
        """The start, in planned tokens."""
        return self.start_tokens or (self.start_steps or 0) * tokens_per_step

    def end(self, tokens_per_step: int) -> int | None:
        """The end of the change, in planned tokens, or None where it is the start of the next stage."""
        return self.end_steps * tokens_per_step if self.end_steps is not None else self.end_tokens

    def to_plain(self, tokens_per_step: int) -> list[Any]:
        """As JSON types, places in tokens and weights as shares, for a fingerprint."""
        total = math.fsum(self.mixture.values())
        shares = {name: round(weight / total, 12) for name, weight in sorted(self.mixture.items()) if weight}
        return [self.start(tokens_per_step), self.change, self.end(tokens_per_step), shares]


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that are all 0, or of which the sum is infinite or dwarfs one: lanes count shares in 2**-48."""
    total = sum(weights.values())
    for name, weight in weights.items():
        if not total or (weight and not weight / total > _LEAST_SHARE):
            raise RecipeError(
                f"the weight of {quote(name)} is {weight} and all weights add up to {total}; expected shares above "
                f"{_LEAST_SHARE:g}, or 0."
            )


def check_schedule(stages: Sequence[Stage], names: Sequence[str]) -> None:
    """Refuse stages that make no schedule over the sources `names`.

    Their places, which may need the number of tokens per step, are checked by `zephon.curriculum.schedule.spans_of`.
    """
    if not stages:
        raise RecipeError("the schedule has no stages; expected at least one, which starts at 0.")
    for nth, stage in enumerate(stages, start=1):
        if not isinstance(stage, Stage):
            raise RecipeError(f"stage {nth} of the schedule is {seen(stage)}; expected a zephon.work.Stage.")
        refuse_unknown(stage.mixture, names, f"source in stage {nth} of the schedule")
    idle = [name for name in names if not any(name in stage.mixture for stage in stages)]
    if idle:
        raise RecipeError(f"no stage of the schedule gives {idle} a weight; remove the source, or give it one.")
    first, last = stages[0], stages[-1]
    if first.start(1) or first.change != "constant":
        raise RecipeError(
            f"stage 1 of the schedule starts at {first.start(1)} with the change {quote(first.change)}; expected a "
            'start at 0 and the change "constant", since there is no mixture before it.'
        )
    if last.change != "constant" and last.end(1) is None:
        raise RecipeError(
            f"the last stage of the schedule has the change {quote(last.change)} and no end; add end_tokens or "
            "end_steps."
        )
