"""Chat: conversations into documents of tokens that know what the assistant said."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from zephon.config.options import check_workers
from zephon.errors import PipelineError
from zephon.ops.rows import check_names, check_runner
from zephon.ops.tokenize import check_limit
from zephon.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zephon.ops.chat_encoder import ChatEncoder

__all__ = ["TokenizeChat"]

_FIELDS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"))
_THOUGHTS = ("<think>", "</think>")
LOSSES = ("assistant", "last_assistant", "all")


@dataclass(frozen=True, slots=True)
class TokenizeChat:
    """Turn conversations into tokens by a Hugging Face chat template.

    The ids are those of `apply_chat_template` in transformers, but for one thing: what a conversation says never
    becomes a special token, even where it spells one; `assistant_tokens` names those that the assistant may spell.

    Attributes:
        tokenizer_id: as in `Tokenize`; its template is used unless `chat_template` is given.
        field: the column of conversations, or of prompts where there is a `response`; "auto" finds messages,
            conversations or conversation, and then prompt with completion or response, or instruction with output or
            response.
        response: the column of the assistant's answers to the prompts; "auto" is the one found with `field`, or none.
        input: a column whose text goes below the prompt; "auto" takes `input` where prompts are called instruction.
        tools: the column of tools; "auto" takes `tools` where it is there, None no column.
        chat_template: the template itself, or the path of a file with one (a name that ends in .jinja, .jinja2 or
            .j2).
        loss: what is trained on: "assistant" (every turn of the assistant, end-of-turn token included),
            "last_assistant" (the last of them alone) or "all" (every token). Templates with {% generation %} say
            themselves what the assistant's words are; for others it is what a prefix of the conversation, rendered with
            the generation prompt, does not contain yet.
        assistant_tokens: special tokens that content and thoughts of the assistant may spell, as far as the tokenizer
            has them, or "all"; an empty list for none.
        date: the day that templates take for today ("2024-07-26"); without it they do not learn the date.
        special_tokens: tokens to add round the conversation; "auto" and "none" leave that to the template.
        backend, parallelism, max_length, split_long_samples: as in `Tokenize`.
        datasets: names of the datasets with conversations, or None for all.
        runner: where conversations are rendered and encoded; see `RowOperator`. Templates hold the interpreter lock, so
            processes are what makes them run side by side.
    """

    kind: ClassVar[str] = "tokenize_chat"
    tokenizer_id: str | os.PathLike[str]
    field: str = "auto"
    tools: str | None = "auto"
    chat_template: str | os.PathLike[str] | None = None
    loss: str = "assistant"
    date: str | None = None
    special_tokens: str = "auto"
    backend: str = "auto"
    parallelism: int | None = None
    max_length: int | None = None
    split_long_samples: bool = False
    datasets: Sequence[str] | None = None
    response: str | None = "auto"
    input: str | None = "auto"
    assistant_tokens: Sequence[str] | str = _THOUGHTS
    runner: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise PipelineError(f"tokenize_chat field is {self.field!r}; the name of a column is needed.")
        for key in ("tools", "response", "input"):
            name = getattr(self, key)
            if name is not None and (not isinstance(name, str) or not name):
                raise PipelineError(f"tokenize_chat {key} is {name!r}; the name of a column, or None, is needed.")
        if self.field == "auto" and self.response not in (None, "auto"):
            raise PipelineError(
                f"tokenize_chat response names column {self.response!r}; name that of the prompts in field too."
            )
        if self.assistant_tokens != "all":
            names = (
                check_names("tokenize_chat", "assistant_tokens", self.assistant_tokens) if self.assistant_tokens else ()
            )
            object.__setattr__(self, "assistant_tokens", names)
        if self.loss not in LOSSES:
            raise PipelineError(f"tokenize_chat loss is {self.loss!r}; one of {', '.join(LOSSES)} is needed.")
        if self.chat_template is not None and not isinstance(self.chat_template, str | os.PathLike):
            raise PipelineError(f"tokenize_chat chat_template is {self.chat_template!r}; a template or path is needed.")
        check_workers("tokenize_chat", self.parallelism)
        check_limit("tokenize_chat", self.max_length, self.split_long_samples)
        check_runner("tokenize_chat", self.runner)
        object.__setattr__(self, "datasets", check_names("tokenize_chat", "datasets", self.datasets))

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns it needs besides `field`."""
        return (self.response,) if self.response not in (None, "auto") else ()

    @property
    def tools_column(self) -> str | None:
        """The column of tools."""
        return "tools" if self.tools == "auto" else self.tools

    @property
    def input_column(self) -> str | None:
        """The column of what goes below a prompt."""
        if self.input != "auto":
            return self.input
        return "input" if self.extra_columns and self.field == "instruction" else None

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns it reads where they are there."""
        return tuple(name for name in (self.tools_column, self.input_column) if name)

    def resolved(self, present: Sequence[str], dataset: str) -> TokenizeChat:
        """The same with the columns found among those of a dataset."""
        for key in ("tools", "input"):
            name = getattr(self, key)
            if name not in (None, "auto", *present):
                raise PipelineError(
                    f'dataset "{dataset}": tokenize_chat {key} names column "{name}", which is not there; there are '
                    f"{', '.join(present)}."
                )
        if self.field != "auto":
            return replace(self, response=None) if self.response == "auto" else self
        found = [name for name in _FIELDS if name in present]
        pairs = [pair for pair in _PAIRS if pair[0] in present and pair[1] in present]
        if pairs and not found and self.response == "auto":
            return replace(self, field=pairs[0][0], response=pairs[0][1])
        # A map of the user's may make it yet.
        return replace(self, field=found[0] if found else _FIELDS[0], response=None)

    def encoder(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> ChatEncoder:
        """The worker, for a tokenizer that is loaded and checked."""
        from zephon.ops.chat_encoder import ChatEncoder  # Jinja is not loaded where nobody chats

        return ChatEncoder(self, tokenizer, bos, eos)

    def identity(self) -> str:
        """What decides the tokens besides tokenizer, template and special tokens, for fingerprints."""
        limit = f" max_length={self.max_length} split={self.split_long_samples}" if self.max_length else ""
        return (
            f"chat {self.datasets or 'all'} {self.field} {self.response} {self.input} {self.tools} loss={self.loss} "
            f"assistant_tokens={self.assistant_tokens} date={self.date}{limit}"
        )
