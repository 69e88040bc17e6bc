"""Chat: conversations into documents of tokens that know what the assistant said."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..errors import PipelineError
from ..tokenizer import Tokenizer
from .base import check_workers
from .rows import check_names, check_runner
from .tokenize import check_limit

if TYPE_CHECKING:
    from .chat_encoder import ChatEncoder

__all__ = ["TokenizeChat"]

_FIELDS = ("messages", "conversations", "conversation")
LOSSES = ("assistant", "last_assistant", "all")


@dataclass(frozen=True, slots=True)
class TokenizeChat:
    """Turn conversations into tokens by a Hugging Face chat template.

    The ids are those of `apply_chat_template` in transformers, but for one thing: what a message says never becomes a
    special token, even where it spells one.

    Attributes:
        tokenizer_id: as in `Tokenize`; its template is used unless `chat_template` is given.
        field: the column of conversations; "auto" finds messages, conversations or conversation.
        tools: the column of tools; "auto" takes `tools` where it is there, None no column.
        chat_template: the template itself, or the path of a file with one (a name that ends in .jinja, .jinja2 or
            .j2).
        loss: what is trained on: "assistant" (every turn of the assistant, end-of-turn token included),
            "last_assistant" (the last of them alone) or "all" (every token). Templates with {% generation %} say
            themselves what the assistant's words are; for others it is what a prefix of the conversation, rendered with
            the generation prompt, does not contain yet.
        date: the day that templates take for today ("2024-07-26"); without it they do not learn the date.
        special_tokens: tokens to add round the conversation; "auto" and "none" leave that to the template.
        backend, parallelism, max_length, split_long_samples: as in `Tokenize`.
        datasets: names of the datasets with conversations, or None for all.
        runner: where conversations are rendered and encoded; see `RowOperator`. Templates hold the interpreter lock, so
            processes are what makes them run side by side.
    """

    kind: ClassVar[str] = "tokenize_chat"
    extra_columns: ClassVar[tuple[str, ...]] = ()
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
    runner: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise PipelineError(f"tokenize_chat field is {self.field!r}; the name of a column is needed.")
        if self.tools is not None and (not isinstance(self.tools, str) or not self.tools):
            raise PipelineError(f"tokenize_chat tools is {self.tools!r}; the name of a column, or None, is needed.")
        if self.loss not in LOSSES:
            raise PipelineError(f"tokenize_chat loss is {self.loss!r}; one of {', '.join(LOSSES)} is needed.")
        if self.chat_template is not None and not isinstance(self.chat_template, str | os.PathLike):
            raise PipelineError(f"tokenize_chat chat_template is {self.chat_template!r}; a template or path is needed.")
        check_workers("tokenize_chat", self.parallelism)
        check_limit("tokenize_chat", self.max_length, self.split_long_samples)
        check_runner("tokenize_chat", self.runner)
        object.__setattr__(self, "datasets", check_names("tokenize_chat", "datasets", self.datasets))

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns it reads where they are there."""
        return ("tools",) if self.tools == "auto" else (self.tools,) if self.tools else ()

    def resolved(self, present: Sequence[str], dataset: str) -> TokenizeChat:
        """The same with the column of conversations found among those of a dataset."""
        if self.tools not in (None, "auto", *present):
            raise PipelineError(
                f'dataset "{dataset}": tokenize_chat tools names column "{self.tools}", which is not there; there are '
                f"{', '.join(present)}."
            )
        if self.field != "auto":
            return self
        found = [name for name in _FIELDS if name in present]
        # A map of the user's may make it yet.
        return replace(self, field=found[0] if found else _FIELDS[0])

    def encoder(self, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> ChatEncoder:
        """The worker, for a tokenizer that is loaded and checked."""
        from .chat_encoder import ChatEncoder  # Jinja is not loaded where nobody chats

        return ChatEncoder(self, tokenizer, bos, eos)

    def identity(self) -> str:
        """What decides the tokens besides tokenizer, template and special tokens, for fingerprints."""
        limit = f" max_length={self.max_length} split={self.split_long_samples}" if self.max_length else ""
        return f"chat {self.datasets or 'all'} {self.field} {self.tools} loss={self.loss} date={self.date}{limit}"
