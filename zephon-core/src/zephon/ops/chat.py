"""Chat: conversations into documents of tokens that know what the assistant said."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from zephon.config.keys import Column, MediaRoot, check, key, quote
from zephon.config.settings import ChatLoss
from zephon.data.columns import has_column
from zephon.errors import PipelineError
from zephon.ops.chat_images import check_placeholders, expanded, with_images
from zephon.ops.chat_messages import (
    UNTRAINED,
    MessageFailure,
    normal_messages,
    normal_tools,
    paired_messages,
    python_values,
)
from zephon.ops.chat_specials import SpellableTokens
from zephon.ops.chat_template import TemplateFailure, chat_templates, digest_of
from zephon.ops.chat_tokens import ChatText, tokens_of
from zephon.ops.chat_turns import ASSISTANT, Conversation, Skeleton, skeleton_of
from zephon.ops.encode import Documents, Encoder, PartsOptions
from zephon.ops.media import BadRow, Image, Media, vision_ids
from zephon.ops.rows import Rows, check_names
from zephon.tokenizer.load import TokenizerId
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage

_FIELDS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"))
# Columns that change what a conversation says, with the option that takes them where there is one.
_PARTS = dict.fromkeys(("system", "system_prompt", "system_message"), "system")
_PARTS |= {
    **dict.fromkeys(("tools", "functions"), "tools"),
    **dict.fromkeys(("history", "documents", "chat_template_kwargs"), ""),
    **dict.fromkeys(("image", "images"), "images"),
}
_PARTS_OF_PROMPTS = {"input": "input", "context": "input", "reasoning_content": "", "reasoning": "", "thinking": ""}
_SKELETONS_KEPT = 4096


@dataclass(frozen=True)
class TokenizeChat(PartsOptions):
    """Turn conversations into tokens by a Hugging Face chat template.

    The ids are those of `apply_chat_template` in transformers, but for one thing: what a conversation says never
    becomes a special token, even where it spells one; `assistant_tokens` names those that the assistant may spell, as
    far as the tokenizer has them, or is "all".

    Attributes:
        tools: the column of tools; "auto" takes `tools` where it exists, None no column.
        chat_template: the template itself, the path of a file with one (a name that ends in .jinja, .jinja2 or .j2), or
            the name of one of the tokenizer's ("tool_use"); None takes the tokenizer's.
        response: the column of the assistant's answers to the prompts; "auto" is the one found with `field`, or none.
        input: a column whose text goes below the prompt; "auto" takes `input` where prompts are called instruction.
    """

    kind: ClassVar[str] = "tokenize_chat"
    layout: ClassVar[str] = (
        "chat {datasets} {field} {response} {input} {tools} loss={loss} assistant_tokens={assistant_tokens} date={date}"
    )
    resolved_settings: ClassVar[frozenset[str]] = PartsOptions.resolved_settings | {"chat_template"}
    whole: ClassVar[str] = "conversations"
    unless: ClassVar[str] = "put it into the messages in a map"
    tokenizer_id: TokenizerId
    field: Column = key(
        "auto",
        'The column of conversations, or of prompts where there is a `response`; "auto" finds messages, conversations '
        "or conversation, and then prompt with completion or response, or instruction with output or response.",
    )
    tools: str | None = "auto"
    chat_template: str | os.PathLike[str] | None = None
    loss: ChatLoss = key(
        "assistant",
        'What is trained on: "assistant" (every turn of the assistant, end-of-turn token included), "last_assistant" '
        '(the last of them alone) or "all" (every token). Templates with {% generation %} say themselves what the '
        "assistant's words are; for others see `zephon.ops.chat_turns`.",
    )
    date: str | None = key(
        None, 'The day that templates take for today ("2024-07-26"); without it they do not learn the date.'
    )
    response: str | None = "auto"
    input: str | None = "auto"
    system: Column | None = key(None, "The column of system messages, for conversations that have none of their own.")
    assistant_tokens: Sequence[str] | str = ("<think>", "</think>")
    images: Column | None = key(
        None,
        'The column of the images that parts such as {"type": "image"}, or `<image>` in texts, stand for in turn; '
        '"auto" takes images or image where one exists, beside parts that have their image; None is for texts alone.',
    )
    media_root: MediaRoot | None = key(
        None, "The folder, tar archive or prefix of a store that paths of images are below.", decides_data=False
    )
    vision: VisionSettings | None = None
    runner: Literal["process", "threads"] | None = key(
        None,
        "Where conversations are rendered and encoded; see `RowOperator`. Templates hold the interpreter lock, so "
        "processes are what makes them run side by side.",
        decides_data=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision is not None or self.images is not None:
            object.__setattr__(self, "images", self.images or "auto")
            object.__setattr__(self, "vision", self.vision or VisionSettings())
            if self.max_length is not None:
                raise PipelineError(
                    f"{self.kind} max_length is {self.max_length}, which would cut images; leave it out."
                )
        for name in ("tools", "response", "input"):
            check(Column | None, getattr(self, name), f"tokenize_chat {name}", PipelineError)
        if self.field == "auto" and self.response not in (None, "auto"):
            raise PipelineError(
                f"tokenize_chat response names column {self.response!r}; name the column of prompts in field too."
            )
        if self.assistant_tokens != "all":
            names = self.assistant_tokens and check_names("tokenize_chat", "assistant_tokens", self.assistant_tokens)
            object.__setattr__(self, "assistant_tokens", names or ())
        if self.chat_template is not None and not isinstance(self.chat_template, str | os.PathLike):
            raise PipelineError(f"tokenize_chat chat_template is {self.chat_template!r}; expected a template or path.")

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
        """Columns of tools, of input, of system messages and of images."""
        columns = self.tools_column, self.input_column, self.system, self.images_column
        return tuple(name for name in columns if name)

    @property
    def images_column(self) -> str | None:
        """The column of images, once it is found."""
        return None if self.images == "auto" else self.images

    @property
    def named_columns(self) -> tuple[str, ...]:
        """Columns that its options name."""
        return tuple(name for name in (self.field, self.response, *self._optional) if name not in (None, "auto"))

    @property
    def _optional(self) -> tuple[str | None, ...]:
        return self.tools, self.input, self.system, self.images

    def resolved(self, present: Sequence[str], dataset: str, read: Collection[str] = ()) -> TokenizeChat:
        """The same with the columns found among those of a dataset; see `PartsOptions`."""
        for option, name in zip(("tools", "input", "system", "images"), self._optional, strict=True):
            if name not in (None, "auto") and not has_column(name, present):
                raise PipelineError(
                    f'dataset "{dataset}": tokenize_chat {option} names column "{name}", which is missing; there are '
                    f"{', '.join(present)}."
                )
        return super(TokenizeChat, self.found(present)).resolved(present, dataset, read)

    def parts(self) -> dict[str, str]:
        """Columns that change what conversations say, with the option that takes each, or ""."""
        parts = _PARTS | (_PARTS_OF_PROMPTS if self.extra_columns else {})
        return {
            name: option for name, option in parts.items() if option not in ("input", "tools") or getattr(self, option)
        }

    def found(self, present: Sequence[str]) -> TokenizeChat:
        """The same with the columns of conversations found among those of a dataset."""
        if self.images == "auto" and (shown := next((name for name in ("images", "image") if name in present), None)):
            return replace(self, images=shown).found(present)
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
        return ChatEncoder(self, tokenizer, bos, eos)


class ChatEncoder(Encoder):
    """The worker of `TokenizeChat`; PipelineError where there is no template, or it does not compile."""

    def __init__(self, spec: TokenizeChat, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
        super().__init__(spec, bos, eos, bos_trained=False)
        self.runner = spec.runner
        self._spec, self._tokenizer = spec, tokenizer
        self._template, self._tool_template = chat_templates(spec.tokenizer_id, spec.chat_template, spec.date)
        written = [text for each in (self._template, self._tool_template) for text in each.written]
        for token in tokenizer.special_tokens:
            flag = "single_word" if token.single_word else "normalized" if tokenizer.is_hidden(token) else None
            if flag and any(token.content in text for text in written):
                raise PipelineError(
                    f"special token {quote(token.content)} of the tokenizer {spec.tokenizer_id} is {flag}, and "
                    f"transformers finds it in some places only; set its {flag} to false in tokenizer.json."
                )
        self._special = SpellableTokens(tokenizer.special_tokens, spec.assistant_tokens)
        self._media = None if spec.vision is None else Media(spec.vision, spec.media_root)
        self._ids = [] if spec.vision is None else vision_ids(spec.vision, tokenizer)
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatEncoder, (self._spec, self._tokenizer, self._bos, self._eos)

    def details(self, usual: tuple[int | None, int | None] = (None, None)) -> dict[str, str]:
        """Special tokens, and a digest of the templates with what they are filled with."""
        return {**super().details(usual), "chat_template": digest_of(self._template, self._tool_template)}

    def texts(self, rows: Rows) -> list[str]:
        """The conversations as text, without special tokens."""
        texts, *_ = self._rendered(rows, [])
        return [piece for each in texts for piece in self._special.split(each.text) if piece]

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        shown: list[list[Image]] = []
        texts, kept, blank = self._rendered(rows, shown)
        tokens, offsets, loss = tokens_of(texts, self._tokenizer, self._special)
        places, blanks = (rows.places[np.array(which, dtype=np.int64)] for which in (kept, blank))
        documents = Documents(tokens, offsets, places, blanks, loss if self._spec.loss != "all" else None)
        return self.finished(expanded(documents, shown, self._ids) if self._media else documents)

    def _rendered(self, rows: Rows, shown: list[list[Image]]) -> tuple[list[ChatText], list[int], list[int]]:
        """Rendered conversations, the rows they are of, and rows without content; appends the images of each."""
        spec, table = self._spec, rows.table
        texts: list[ChatText] = []
        kept: list[int] = []
        blank: list[int] = []
        columns = self._conversations(rows), *(_values(table, name) for name in (spec.system, spec.images_column))
        said = zip(*columns, strict=True)
        each = self._media.each(self._said, said) if self._media else (partial(self._said, *row) for row in said)
        for index, (messages_of, tools) in enumerate(zip(each, _values(table, spec.tools_column), strict=True)):
            try:
                messages, images = messages_of()
                if messages:
                    text = self._conversation(messages, normal_tools(tools))
                    if spec.vision:
                        check_placeholders(text.text, text.said, spec.vision.image_token, len(images))
                    texts.append(text)
                    shown.append(images)
                (kept if messages else blank).append(index)
            except UnicodeEncodeError:
                rows.fail(index, spec.kind, "the template makes text that is no Unicode")
            except RecursionError:
                rows.fail(index, spec.kind, "the conversation is nested too deeply to be followed")
            except (MessageFailure, TemplateFailure, BadImage, BadRow) as failure:
                rows.fail(index, spec.kind, str(failure))
        return texts, kept, blank

    def _said(self, value: Any, system: Any, beside: Any) -> tuple[list[dict[str, Any]], list[Image]]:
        """The messages of a row, and their images."""
        messages = value() if callable(value) else normal_messages(value, images=self._media is not None)
        messages = _with_system(messages, self._spec.system, system) if system else messages
        if not messages or not self._media:
            return messages, []
        messages, values = with_images(messages, beside)
        return messages, [self._media.image(each) for each in values]

    def _conversations(self, rows: Rows) -> list[Any]:
        """What each row holds: a conversation, or a function that puts one together."""
        spec = self._spec
        values = python_values(self.column(rows, spec.field))
        if not spec.extra_columns:
            return values
        answers = python_values(self.column(rows, spec.extra_columns[0]))
        inputs = _values(rows.table, spec.input_column)
        names = spec.field, spec.extra_columns[0], spec.input_column or ""
        paired = partial(paired_messages, names, images=self._media is not None)
        return [partial(paired, *row) for row in zip(values, answers, inputs, strict=True)]

    def _conversation(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> ChatText:
        template, loss, special = self._tool_template if tools else self._template, self._spec.loss, self._special
        silent = {n for n, message in enumerate(messages) if message.pop(UNTRAINED, False)}
        text, trained = template.render(messages, tools)
        data = text.encode()
        skeleton = None if tools else self._skeleton(messages)
        contents = [message["content"] for message in messages] if skeleton else []
        turns = skeleton.fill(contents, text) if skeleton else None
        if turns is not None and skeleton and not skeleton.touching:
            spells = special.spelled_in(contents)
        else:
            spells = special.may_spell(messages, tools)
        said = special.said(template, messages, tools, text) if spells else frozenset()
        if loss == "all" and silent:
            raise BadRow(
                f'message {min(silent)} has a flag that leaves it out of the loss, and loss is "all"; expected '
                '"assistant" or "last_assistant"'
            )
        if loss == "all":
            return ChatText(text, data, [], said)
        last = max((n for n, message in enumerate(messages) if message["role"] == ASSISTANT), default=-1)
        if turns is None and (silent or not template.marks_generation):
            turns = Conversation(template, messages, tools, text, special.ends, said).turns()
        if not template.marks_generation:
            trained = [(begin, end) for n, begin, end in turns or () if loss == "assistant" or n == last]
        elif loss == "last_assistant":
            # Its {% generation %} blocks are those that the conversation before it does not have.
            earlier = len(trained) if last < 0 else 0
            if last > 0:
                try:
                    earlier = len(template.render(messages[:last], tools)[1])
                except TemplateFailure:
                    earlier = len(trained) - 1
            trained = trained[earlier:]
        if silent:
            quiet = [(begin, end) for n, begin, end in turns or () if n in silent]
            if len(quiet) < sum(messages[n]["role"] == ASSISTANT for n in silent):
                raise BadRow(
                    "a message has a flag that leaves it out of the loss, and the template does not show where"
                )
            trained = [(a, b) for a, b in trained if all(b <= begin or end <= a for begin, end in quiet)]
        return ChatText(text, data, trained, said)

    def _skeleton(self, messages: list[dict[str, Any]]) -> Skeleton | None:
        if not all(len(message) == 2 and isinstance(message["content"], str) for message in messages):
            return None
        roles = tuple(message["role"] for message in messages)
        if roles not in self._skeletons:
            if len(self._skeletons) >= _SKELETONS_KEPT:
                self._skeletons.clear()
            self._skeletons[roles] = skeleton_of(self._template, roles, self._special.ends)
        return self._skeletons[roles]


def _values(table: Any, column: str | None) -> list[Any]:
    """The values of a column that may be missing."""
    return table.column(column).to_pylist() if column in table.column_names else [None] * table.num_rows


def _with_system(messages: list[dict[str, Any]], column: str | None, text: Any) -> list[dict[str, Any]]:
    """A conversation behind the system message of a column; MessageFailure where it has one of its own."""
    if not isinstance(text, str):
        raise MessageFailure(f'column "{column}"', text, "text")
    if messages and messages[0]["role"] == "system":
        raise MessageFailure(f'a system message beside that of column "{column}"', messages[0], "one of the two")
    return [{"role": "system", "content": text}, *messages] if messages else []
