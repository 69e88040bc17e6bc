"""Chat: conversations into documents of tokens that know what the assistant said."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from zephon.errors import PipelineError
from zephon.ops.encode import EncodeOptions, check_column_name
from zephon.ops.rows import check_names, check_runner
from zephon.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zephon.ops.chat_encoder import ChatEncoder

__all__ = ["TokenizeChat"]

_FIELDS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"))
LOSSES = ("assistant", "last_assistant", "all")


@dataclass(frozen=True)
class TokenizeChat(EncodeOptions):
    """Turn conversations into tokens by a Hugging Face chat template.

    The ids are those of `apply_chat_template` in transformers, but for one thing: what a conversation says never
    becomes a special token, even where it spells one; `assistant_tokens` names those that the assistant may spell.

    Attributes:
        tokenizer_id: as in `Tokenize`; its template is used unless `chat_template` is given.
        field: the column of conversations, or of prompts where there is a `response`; "auto" finds messages,
            conversations or conversation, and then prompt with completion or response, or instruction with output or
            response.
        tools: the column of tools; "auto" takes `tools` where it exists, None no column.
        chat_template: the template itself, or the path of a file with one (a name that ends in .jinja, .jinja2 or
            .j2).
        loss: what is trained on: "assistant" (every turn of the assistant, end-of-turn token included),
            "last_assistant" (the last of them alone) or "all" (every token). Templates with {% generation %} say
            themselves what the assistant's words are; for others see `zephon.ops.chat_turns`.
        date: the day that templates take for today ("2024-07-26"); without it they do not learn the date.
        response: the column of the assistant's answers to the prompts; "auto" is the one found with `field`, or none.
        input: a column whose text goes below the prompt; "auto" takes `input` where prompts are called instruction.
        assistant_tokens: special tokens that content and thoughts of the assistant may spell, as far as the tokenizer
            has them, or "all"; an empty list for none.
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
    response: str | None = "auto"
    input: str | None = "auto"
    assistant_tokens: Sequence[str] | str = ("<think>", "</think>")
    runner: str | None = None

    def __post_init__(self) -> None:
        for key in ("field", "tools", "response", "input"):
            check_column_name("tokenize_chat", key, getattr(self, key), required=key == "field")
        if self.field == "auto" and self.response not in (None, "auto"):
            raise PipelineError(
                f"tokenize_chat response names column {self.response!r}; name the column of prompts in field too."
            )
        if self.assistant_tokens != "all":
            names = self.assistant_tokens and check_names("tokenize_chat", "assistant_tokens", self.assistant_tokens)
            object.__setattr__(self, "assistant_tokens", names or ())
        if self.loss not in LOSSES:
            raise PipelineError(f"tokenize_chat loss is {self.loss!r}; expected one of {', '.join(LOSSES)}.")
        if self.chat_template is not None and not isinstance(self.chat_template, str | os.PathLike):
            raise PipelineError(f"tokenize_chat chat_template is {self.chat_template!r}; expected a template or path.")
        check_runner("tokenize_chat", self.runner)
        super().__post_init__()

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """The column of answers."""
        return () if self.response in (None, "auto") else (self.response,)

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
        """Columns of tools and of input."""
        return tuple(name for name in (self.tools_column, self.input_column) if name)

    def resolved(self, present: Sequence[str], dataset: str) -> TokenizeChat:
        """The same with the columns found among those of a dataset.

        Raises:
            PipelineError: a column that is named is missing.
        """
        for key in ("tools", "input"):
            name = getattr(self, key)
            if name not in (None, "auto", *present):
                raise PipelineError(
                    f'dataset "{dataset}": tokenize_chat {key} names column "{name}", which is missing; there are '
                    f"{', '.join(present)}."
                )
        if self.field != "auto":
            return replace(self, response=None) if self.response == "auto" else self
        fields = [name for name in _FIELDS if name in present]
        pairs = [pair for pair in _PAIRS if pair[0] in present and pair[1] in present]
        if pairs and not fields and self.response == "auto":
            return replace(self, field=pairs[0][0], response=pairs[0][1])
        # Where none is there, a map of the user's may make it yet.
        return replace(self, field=fields[0] if fields else _FIELDS[0], response=None)

    def encoder(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> ChatEncoder:
        """The worker, for a tokenizer that is loaded and checked."""
        from zephon.ops.chat_encoder import ChatEncoder  # Jinja is not loaded where nobody chats

        return ChatEncoder(self, tokenizer, bos, eos)

    def identity(self) -> str:
        """What decides the tokens besides tokenizer, template and special tokens, for fingerprints."""
        return (
            f"chat {self.datasets or 'all'} {self.field} {self.response} {self.input} {self.tools} loss={self.loss} "
            f"assistant_tokens={self.assistant_tokens} date={self.date}{self.limit_identity}"
        )
