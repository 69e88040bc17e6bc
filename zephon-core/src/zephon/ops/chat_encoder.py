"""The worker of `TokenizeChat`: renders conversations, finds the assistant's turns in them, makes tokens.

Rendering is Python and goes row by row. The rest goes over a whole block: all texts lie in one buffer, special tokens
are found in it by one regular expression, what is between them is tokenized as one column, and the loss of each token
comes from where it lies in the buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.columns.records import ragged_take
from zephon.errors import PipelineError
from zephon.ops.chat import TokenizeChat
from zephon.ops.chat_messages import MessageFailure, normal_messages, normal_tools, paired_messages, python_values
from zephon.ops.chat_specials import SpecialTokens
from zephon.ops.chat_template import ChatTemplate, TemplateFailure
from zephon.ops.chat_turns import ASSISTANT, Conversation, Skeleton, Turn, skeleton_of
from zephon.ops.documents import Documents
from zephon.ops.encode import DocumentEncoder
from zephon.ops.rows import Rows
from zephon.tokenizer.chat import TEMPLATE_SUFFIXES, read_chat_settings, read_template_file
from zephon.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatEncoder"]

_APART = b"\xff"  # between the texts of a buffer; in no UTF-8, so nothing is found across it
_SKELETONS_KEPT = 4096

_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Text:
    """A rendered conversation.

    Attributes:
        text: all of it.
        data: the same as UTF-8.
        trained: the characters [begin, end) that are trained on, in order and apart.
        said: the characters at which no special token begins.
    """

    text: str
    data: bytes
    trained: list[_Span]
    said: frozenset[int]


class ChatEncoder(DocumentEncoder):
    """Made by `TokenizeChat.encoder`.

    Args:
        spec: the description.
        tokenizer: loaded and checked.
        bos, eos: ids to put round each conversation, or None.

    Raises:
        PipelineError: there is no template, or it does not compile.
    """

    def __init__(self, spec: TokenizeChat, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
        super().__init__(spec, (spec.field, *spec.extra_columns, *spec.optional_columns), bos, eos, bos_trained=False)
        self.runner = spec.runner
        self._spec, self._tokenizer = spec, tokenizer
        self._template, self._tool_template = _templates(spec)
        self._special = SpecialTokens(tokenizer.special_tokens, spec.assistant_tokens)
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatEncoder, (self._spec, self._tokenizer, self._bos, self._eos)

    def texts(self, rows: Rows) -> list[str]:
        """The conversations as text, without special tokens."""
        made, *_ = self._rendered(rows)
        return [piece for one in made for piece in self._special.split(one.text) if piece]

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        made, kept, blank = self._rendered(rows)
        tokens, offsets, loss = self._tokens(made)
        places, blanks = (rows.places[np.array(which, dtype=np.int64)] for which in (kept, blank))
        return self.finished(Documents(tokens, offsets, places, blanks, loss if self._spec.loss != "all" else None))

    # Rendering

    def _rendered(self, rows: Rows) -> tuple[list[_Text], list[int], list[int]]:
        """Rendered conversations, the rows they are of, and rows without content."""
        spec, table = self._spec, rows.table
        made: list[_Text] = []
        kept: list[int] = []
        blank: list[int] = []
        tools: list[Any] = [None] * table.num_rows
        if spec.tools_column in table.column_names:
            tools = table.column(spec.tools_column).to_pylist()
        for index, (value, offered) in enumerate(zip(self._conversations(rows), tools, strict=True)):
            try:
                messages = value() if callable(value) else normal_messages(value)
                if messages:
                    made.append(self._conversation(messages, normal_tools(offered)))
                (kept if messages else blank).append(index)
            except UnicodeEncodeError:
                rows.fail(index, spec.kind, "the template makes text that is no Unicode")
            except RecursionError:
                rows.fail(index, spec.kind, "the conversation is nested too deeply to be followed")
            except (MessageFailure, TemplateFailure) as failure:
                rows.fail(index, spec.kind, str(failure))
        return made, kept, blank

    def _conversations(self, rows: Rows) -> list[Any]:
        """What each row holds: a conversation, or a function that puts one together."""
        spec = self._spec
        values = python_values(self.column(rows, spec.field))
        if not spec.extra_columns:
            return values
        answers = python_values(self.column(rows, spec.extra_columns[0]))
        inputs = [None] * len(values)
        if spec.input_column in rows.table.column_names:
            inputs = rows.table.column(spec.input_column).to_pylist()
        names = spec.field, spec.extra_columns[0], spec.input_column or ""
        return [partial(paired_messages, names, *row) for row in zip(values, answers, inputs, strict=True)]

    def _conversation(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> _Text:
        template, loss, special = self._tool_template if tools else self._template, self._spec.loss, self._special
        rendered = template.render(messages, tools)
        text, data = rendered.text, rendered.text.encode()
        skeleton = None if tools else self._skeleton(messages)
        contents = [message["content"] for message in messages] if skeleton else []
        turns = skeleton.fill(contents, text) if skeleton else None
        if turns is not None and skeleton and not skeleton.touching:
            spells = special.spelled_in(contents)
        else:
            spells = special.may_spell(messages, tools)
        said = special.said(template, messages, tools, text) if spells else frozenset()
        if loss == "all":
            return _Text(text, data, [], said)
        last = max((n for n, message in enumerate(messages) if message["role"] == ASSISTANT), default=None)
        if not template.marks_generation:
            if turns is None:
                turns = Conversation(template, messages, tools, text, special.ends, said).turns()
            return _Text(text, data, _spans(turns, None if loss == "assistant" else last), said)
        blocks = rendered.blocks
        if loss == "last_assistant":
            before = self._blocks_before(template, messages, tools, last, len(blocks))
            blocks = blocks[before:]
        return _Text(text, data, blocks, said)

    def _blocks_before(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, last: int | None, n: int
    ) -> int:
        """How many of the n {% generation %} blocks are before the last message of the assistant."""
        if last is None:
            return n
        try:
            return len(template.render(messages[:last], tools).blocks) if last else 0
        except TemplateFailure:
            return n - 1

    def _skeleton(self, messages: list[dict[str, Any]]) -> Skeleton | None:
        if not all(len(message) == 2 for message in messages):
            return None
        roles = tuple(message["role"] for message in messages)
        if roles not in self._skeletons:
            if len(self._skeletons) >= _SKELETONS_KEPT:
                self._skeletons.clear()
            self._skeletons[roles] = skeleton_of(self._template, roles, self._special.ends)
        return self._skeletons[roles]

    # Tokens

    def _tokens(self, texts: list[_Text]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens uint32[n], offsets int64[n_docs + 1] and loss bool[n] of rendered conversations."""
        buffer = _APART.join([one.data for one in texts])
        lengths = np.array([len(one.data) for one in texts], dtype=np.int64)
        ends = np.cumsum(lengths + 1) - 1
        starts = ends - lengths
        trained: list[int] = []
        said: list[int] = []
        for one, base in zip(texts, starts.tolist(), strict=True):
            trained += _in_bytes(one.text, base, [edge for span in one.trained for edge in span])
            said += _in_bytes(one.text, base, sorted(one.said))
        cuts, special_ids = self._special.find(buffer, frozenset(said))
        # Pieces of text lie between the cuts and the bounds of texts, which are paired when both are in order.
        first = np.sort(np.concatenate([starts, cuts[:, 1]]))
        last = np.sort(np.concatenate([ends, cuts[:, 0]]))
        leads = np.isin(first, starts)
        inner = self._tokenizer.inner
        parts = [(special_ids, np.arange(len(cuts) + 1), cuts[:, 0], cuts[:, 0], cuts[:, 1])]
        for tokenizer, wanted in (
            [(inner, slice(None))] if inner is self._tokenizer else [(self._tokenizer, leads), (inner, ~leads)]
        ):
            ids, bounds, begin, end = _encoded(tokenizer, buffer, first[wanted], last[wanted])
            parts.insert(0, (ids, bounds, first[wanted], begin, end))
        # Pieces and special tokens in the order of their places; an empty piece comes before the token at its place.
        at = np.concatenate([part[2] for part in parts])
        order = np.argsort(at, kind="stable")
        counts = np.concatenate([np.diff(part[1]) for part in parts])
        items, bounds = ragged_take(np.concatenate([[0], np.cumsum(counts)]), order)
        tokens, begin, end = (np.concatenate([part[k] for part in parts])[items] for k in (0, 3, 4))
        offsets = np.append(bounds[np.searchsorted(at[order], starts)], len(tokens))
        return tokens, offsets, _overlaps(begin, end, np.array(trained, dtype=np.int64).reshape(-1, 2))


def _encoded(
    tokenizer: Tokenizer, buffer: bytes, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of a buffer as tokens.

    Args:
        first, last: int64[n], in order and apart: the bytes [first, last) of each piece.

    Returns:
        (ids uint32[m], bounds int64[n + 1], begin and end int64[m]: the bytes that each token stands for).
    """
    edges = np.stack([first, last], axis=1).reshape(-1)
    everything = pa.LargeStringArray.from_buffers(
        max(0, len(edges) - 1), pa.py_buffer(np.ascontiguousarray(edges)), pa.py_buffer(buffer)
    )
    pieces = everything.take(int64_array(np.arange(len(first), dtype=np.int64) * 2))
    ids, bounds = tokenizer.encode(pieces)
    table = tokenizer.token_bytes
    widths = np.zeros(len(ids), dtype=np.int64) if table is None else table[ids].astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(widths)])
    shift = np.repeat(first - ends[bounds[:-1]], np.diff(bounds))
    end = ends[1:] + shift
    begin = end - widths
    unclear = (ends[bounds[1:]] - ends[bounds[:-1]] != last - first) | (table is None)
    for piece in np.flatnonzero(unclear & (np.diff(bounds) > 0)).tolist():
        low, high = int(bounds[piece]), int(bounds[piece + 1])
        text = pieces[piece].as_py()
        # The reference says of each token which characters it stands for; its ids are the same.
        _, spans = tokenizer.token_spans(text)
        if len(spans) != high - low:  # it was cut before it was tokenized, being of several MiB
            spans = [(0, len(text))] * (high - low)
        widths_of = np.cumsum([0, *(len(char.encode()) for char in text)])
        begin[low:high], end[low:high] = first[piece] + widths_of[np.array(spans, dtype=np.int64)].T
    return ids, bounds, begin, end


def _overlaps(begin: np.ndarray, end: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """bool[n]: which of the tokens [begin, end) overlap any of the spans int64[m, 2], which are in order and apart."""
    if not len(spans):
        return np.zeros(len(begin), dtype=bool)
    nearest = np.searchsorted(spans[:, 1], begin, side="right")
    # A token without characters of its own lies where it begins.
    return (nearest < len(spans)) & (np.maximum(end, begin + 1) > spans[np.minimum(nearest, len(spans) - 1), 0])


def _in_bytes(text: str, base: int, places: Sequence[int]) -> list[int]:
    """Where characters, ascending, lie in a buffer that holds the text as UTF-8 from `base` on."""
    if text.isascii():
        return [base + place for place in places]
    at, done, out = base, 0, []
    for place in places:
        at += len(text[done:place].encode())
        done = place
        out.append(at)
    return out


def _spans(turns: Iterable[Turn], only: int | None) -> list[_Span]:
    return [(begin, end) for n, begin, end in turns if only in (None, n)]


def _templates(spec: TokenizeChat) -> tuple[ChatTemplate, ChatTemplate]:
    """The template for conversations without tools, and the one for those with them."""
    settings = read_chat_settings(spec.tokenizer_id)
    templates = dict(settings.templates)
    if spec.chat_template is not None:
        source = os.fspath(spec.chat_template)
        is_path = isinstance(spec.chat_template, os.PathLike) or (
            "\n" not in source and source.endswith(TEMPLATE_SUFFIXES)
        )
        templates = {"default": read_template_file(source) if is_path else source}
    if not templates:
        raise PipelineError(
            f"the tokenizer {os.fspath(spec.tokenizer_id)} has no chat template; pass chat_template, the template of "
            "the format that the model is to learn."
        )
    default = templates.get("default") or next(iter(templates.values()))
    plain = ChatTemplate(default, settings.tokens, spec.date)
    with_tools = templates.get("tool_use")
    return plain, ChatTemplate(with_tools, settings.tokens, spec.date) if with_tools else plain
