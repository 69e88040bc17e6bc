"""The worker of `TokenizeChat`: renders conversations, finds the assistant's turns in them, makes tokens.

Rendering is Python and goes row by row. The rest goes over a whole block: all texts lie in one buffer, special tokens
are found in it by one regular expression, what is between them is tokenized as one column, and the loss of each token
comes from where it lies in the buffer.

Which part of a text is a turn of the assistant is asked of the template: it is what a conversation has that the one
before the turn, rendered with the generation prompt, has not, up to the end-of-turn token. That takes two renderings
per turn, so it is asked once for every sequence of roles, on a skeleton whose messages are marks, and kept. A
conversation that turns out to be its skeleton with the messages put in has its turns in the same places; any other, for
example one whose template looks into the messages, is rendered turn by turn.

Only what the template wrote is a special token. Where a conversation fills its skeleton, it is plain what it brought
in; any other whose characters could spell a special token is rendered once more, traced (see `chat_traced`), which must
give the same text. Templates always see messages as they are.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
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
from zephon.ops.chat_template import ChatTemplate, TemplateFailure
from zephon.ops.chat_traced import merged, without
from zephon.ops.chat_traced import said as said_text
from zephon.ops.documents import Documents, shortened, split_up
from zephon.ops.rows import Rows, missing_column
from zephon.ops.tokenize import add_special_tokens
from zephon.tokenizer.chat import TEMPLATE_SUFFIXES, read_chat_settings, read_template_file
from zephon.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatEncoder"]

_APART = b"\xff"  # between the texts of a buffer; in no UTF-8, so nothing is found across it
_MARK = "\ue0b1{}\ue0b2"  # stands for a message in a skeleton
_SKELETONS_KEPT = 4096
_ASSISTANT = "assistant"
_SPEECH = ("content", "reasoning_content", "reasoning", "thinking")
# White space, as the tokenizers see it that strip it round a special token.
_SPACE = rb"(?:\s|\xc2\x85|\xc2\xa0|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)*"

_Span = tuple[int, int]
_Turn = tuple[int, int, int]
"""A message, and the characters [begin, end) of it that are trained on."""


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A conversation of certain roles without its words.

    Attributes:
        between: n_messages + 1 texts round the messages.
        turns: for each turn of the assistant, its message, how far into the text before it the turn begins, and how
            far into the text after it it ends.
        touching: whether there is nothing between two of the messages.
    """

    between: tuple[str, ...]
    turns: tuple[_Turn, ...]
    touching: bool


class ChatEncoder:
    """Made by `TokenizeChat.encoder`.

    Args:
        spec: the description.
        tokenizer: loaded and checked.
        bos, eos: ids to put round each conversation, or None.

    Raises:
        PipelineError: there is no template, or it does not compile.
    """

    joins = False

    def __init__(self, spec: TokenizeChat, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
        self.columns = (spec.field, *spec.extra_columns, *spec.optional_columns)
        self.runner = spec.runner
        self._spec, self._tokenizer = spec, tokenizer
        self._bos, self._eos = bos, eos
        self._template, self._tool_template = _templates(spec)
        self._skeletons: dict[tuple[str, ...], _Skeleton | None] = {}
        special = sorted(tokenizer.special_tokens, key=lambda token: -len(token.text))
        self._ids = {token.text.encode(): token.id for token in special}
        parts = []
        for token in special:
            # A run of white space is looked at from its beginning alone, or long ones would take for ever.
            before = rb"(?:(?<![ \t\n\r\f\v])" + _SPACE + b"|)" if token.lstrip else b""
            after = _SPACE if token.rstrip else b""
            parts.append(before + b"(?:" + re.escape(token.text.encode()) + b")" + after)
        self._cuts = re.compile(b"|".join(parts)) if parts else None
        self._cores = re.compile(b"|".join(map(re.escape, self._ids))) if parts else None
        ends = "|".join(re.escape(token.text) for token in special)
        self._spelled = re.compile(ends) if ends else None
        self._turn_end = re.compile(rf"\s*({ends})") if ends else None
        may = [token.text for token in special if spec.assistant_tokens == "all" or token.text in spec.assistant_tokens]
        self._assistants = re.compile("|".join(map(re.escape, may))) if may else None
        # The first character of special tokens, and what else there must be to spell one.
        self._letters: dict[str, set[frozenset[str]]] = {}
        for token in special:
            letters = token.text.casefold()
            self._letters.setdefault(letters[0], set()).add(frozenset(letters))

    def __getstate__(self) -> tuple[Any, ...]:
        return self._spec, self._tokenizer, self._bos, self._eos

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def alike(self, rows: Rows) -> Rows:
        """As it is: every dataset is encoded by itself."""
        return rows

    def texts(self, rows: Rows) -> list[str]:
        """The conversations as text, without special tokens."""
        texts, *_ = self._rendered(rows)
        return [piece for text in texts for piece in (self._spelled.split(text) if self._spelled else [text]) if piece]

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        texts, spans, said, kept, blank = self._rendered(rows)
        tokens, offsets, loss = self._tokens(texts, spans, said)
        places = rows.places[np.array(kept, dtype=np.int64)]
        masked = loss if self._spec.loss != "all" else None
        limit, extra = self._spec.max_length, (self._bos is not None) + (self._eos is not None)
        if limit is not None and not self._spec.split_long_samples:
            tokens, offsets, (masked,) = shortened(tokens, offsets, max(1, limit - extra), masked)
        if extra:
            plain = offsets
            tokens, offsets = add_special_tokens(tokens, offsets, self._bos, self._eos)
            if masked is not None:
                # A BOS is nothing to learn, an EOS is.
                ends = None if self._bos is None else 0, None if self._eos is None else 1
                masked = add_special_tokens(masked.astype(np.uint32), plain, *ends)[0].astype(bool)
        if limit is not None and self._spec.split_long_samples:
            offsets, document = split_up(offsets, limit)
            places = places[document]
        return Documents(tokens, offsets, places, rows.places[np.array(blank, dtype=np.int64)], masked)

    # ---- rendering

    def _rendered(self, rows: Rows) -> tuple[list[str], list[list[_Span]], list[list[_Span]], list[int], list[int]]:
        """Texts, trained spans, spans that spell no special token (characters), the rows they are of; blank rows."""
        spec, table = self._spec, rows.table
        texts, all_spans, all_said, kept, blank = [], [], [], [], []
        tools: list[Any] = [None] * table.num_rows
        if spec.tools_column in table.column_names:
            tools = table.column(spec.tools_column).to_pylist()
        for index, (value, offered) in enumerate(zip(self._conversations(table), tools, strict=True)):
            try:
                messages = value() if callable(value) else normal_messages(value)
                if not messages:
                    blank.append(index)
                    continue
                text, spans, said = self._conversation(messages, normal_tools(offered))
                if not text.isascii():
                    text.encode()
            except UnicodeEncodeError:
                rows.fail(index, spec.kind, "a message holds half a surrogate pair, which is no Unicode")
                continue
            except RecursionError:
                rows.fail(index, spec.kind, "the conversation is nested too deeply to be followed")
                continue
            except (MessageFailure, TemplateFailure) as failure:
                rows.fail(index, spec.kind, str(failure))
                continue
            texts.append(text)
            all_spans.append(spans)
            all_said.append(said)
            kept.append(index)
        return texts, all_spans, all_said, kept, blank

    def _conversations(self, table: pa.Table) -> list[Any]:
        """What each row holds: a conversation, or a function that puts one together."""
        spec = self._spec
        for name in self.columns[: 1 + len(spec.extra_columns)]:
            if name not in table.column_names:
                raise PipelineError(f"{spec.kind} {missing_column(name, table.column_names)}")
        values = python_values(table.column(spec.field))
        if not spec.extra_columns:
            return values
        answers = python_values(table.column(spec.extra_columns[0]))
        inputs = [None] * len(values)
        if spec.input_column in table.column_names:
            inputs = table.column(spec.input_column).to_pylist()
        names = spec.field, spec.extra_columns[0], spec.input_column or ""
        return [partial(paired_messages, names, *row) for row in zip(values, answers, inputs, strict=True)]

    def _conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[str, list[_Span], list[_Span]]:
        template = self._tool_template if tools else self._template
        made = template.render(messages, tools)
        text, loss = made.text, self._spec.loss
        turn_by_turn = loss != "all" and not template.marks_generation
        filled = self._filled(template, messages, text) if turn_by_turn and not tools else None
        if filled is not None:
            return text, *filled
        brought, said = self._said(template, messages, tools, text)
        if loss == "all":
            return text, [], said
        last = max((n for n, message in enumerate(messages) if message["role"] == _ASSISTANT), default=None)
        if turn_by_turn:
            turns = self._turns(template, messages, tools, text, brought)
            return text, [(begin, end) for n, begin, end in turns if loss == "assistant" or n == last], said
        blocks = made.blocks
        if loss == "last_assistant" and last and blocks:
            try:
                # As many blocks as there are before the last turn are not its own.
                blocks = blocks[len(template.render(messages[:last], tools).blocks) :]
            except TemplateFailure:
                blocks = blocks[-1:]
        return text, blocks if last is not None or loss == "assistant" else [], said

    # ---- what the conversation brought in

    def _said(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> tuple[list[_Span], list[_Span]]:
        """Where the text holds what the conversation brought in, and what of that makes no special token; nothing where
        it cannot spell one."""
        if self._spelled is None or not self._spelled.search(text) or not self._may_spell(messages, tools):
            return [], []
        filled = None if tools else self._filled(template, messages, text)
        if filled is not None:
            return [], filled[1]  # it knows its turns
        covered = [self._covered_message(message) for message in messages]
        made = template.trace(covered, _covered(tools))
        if made.text != text:
            raise TemplateFailure(
                "a message may spell a special token, and the template changes text in a way that hides whose it is"
            )
        return made.said, without(made.said, made.may)

    def _may_spell(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> bool:
        """Whether the conversation has all the characters of some special token, in whatever order and case."""
        words = "\n".join(_texts([messages, tools])).casefold()
        return any(
            first in words and any(all(letter in words for letter in letters) for letters in group)
            for first, group in self._letters.items()
        )

    def _covered_message(self, message: dict[str, Any]) -> dict[str, Any]:
        covered: dict[str, Any] = _covered(message)
        if message["role"] == _ASSISTANT and self._assistants:
            for key in _SPEECH:
                if isinstance(message.get(key), str):
                    covered[key] = said_text(message[key], self._assistants)
        return covered

    def _written(self, text: str, begin: int, end: int, said: list[_Span]) -> list[int]:
        """Where the special tokens end that the template wrote between two places."""
        ends = []
        while self._spelled and (match := self._spelled.search(text, begin, end)):
            if _within(said, *match.span()):
                begin = match.start() + 1
            else:
                begin = match.end()
                ends.append(begin)
        return ends

    # ---- where the assistant speaks

    def _filled(
        self, template: ChatTemplate, messages: list[dict[str, Any]], text: str
    ) -> tuple[list[_Span], list[_Span]] | None:
        """Trained and said parts of a text that is its skeleton with the messages put in; None where it is not."""
        if not all(len(message) == 2 for message in messages):
            return None
        roles = tuple(message["role"] for message in messages)
        if roles not in self._skeletons:
            if len(self._skeletons) >= _SKELETONS_KEPT:
                self._skeletons.clear()
            self._skeletons[roles] = self._skeleton(template, roles)
        skeleton = self._skeletons[roles]
        if skeleton is None:
            return None
        contents = [message["content"] for message in messages]
        edges = _edges(skeleton.between, contents, text)
        if edges is None:
            return None
        # Message n is part 2n + 1.
        spans = [(edges[2 * n] + begin, edges[2 * n + 2] + end) for n, begin, end in skeleton.turns]
        if self._spec.loss == "last_assistant":
            spans = spans[-1:]
        said: list[_Span] = []
        spelled = self._spelled
        if spelled and (skeleton.touching or any(spelled.search(content) for content in contents)):
            for n, role in enumerate(roles):
                begin, end = edges[2 * n + 1 : 2 * n + 3]
                if role == _ASSISTANT and self._assistants:
                    for match in self._assistants.finditer(text, begin, end):
                        said.append((begin, match.start()))
                        begin = match.end()
                said.append((begin, end))
        return spans, merged(said)

    def _skeleton(self, template: ChatTemplate, roles: Sequence[str]) -> _Skeleton | None:
        """None where the template does more than put messages between texts."""
        if self._spelled and any(self._spelled.search(role) for role in roles):
            return None
        marks = [_MARK.format(n) for n in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = template.render(messages).text
        except TemplateFailure:
            return None
        between, at, starts = [], 0, []
        for mark in marks:
            found = text.find(mark, at)
            if found < 0 or text.count(mark) != 1:
                return None
            between.append(text[at:found])
            starts.append(found)
            at = found + len(mark)
        between.append(text[at:])
        turns = []
        for n, role in enumerate(roles):
            if role == _ASSISTANT:
                prompted = self._begin(template, messages, None, n, text, [])
                begin = starts[n] if prompted is None else min(starts[n], prompted)
                stop = starts[n] + len(marks[n])
                end = max(stop, self._end(template, messages, None, n, text, stop, []))
                if starts[n] - begin > len(between[n]) or end - stop > len(between[n + 1]):
                    return None
                turns.append((n, len(between[n]) - (starts[n] - begin), end - stop))
        return _Skeleton(tuple(between), tuple(turns), "" in between[1:-1])

    def _turns(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        text: str,
        said: list[_Span],
    ) -> list[_Turn]:
        """The turns of the assistant in any rendered conversation."""
        turns: list[_Turn] = []
        done = 0
        for n, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            region = self._region(template, messages, tools, n, text)
            found = self._begin(template, messages, tools, n, text, said)
            if region is None:
                if found is None:
                    continue  # nobody can say what of it the model has to say
                begin = found
                end = self._end(template, messages, tools, n, text, begin, said)
            else:
                begin = region[0] if found is None else min(region[0], max(done, found))
                end = region[1]
                match = self._turn_end.match(text, end) if self._turn_end else None
                if match and not _within(said, *match.span(1)):
                    end = match.end()
                else:
                    end = max(end, self._end(template, messages, tools, n, text, end, said))
            if end > max(begin, done):
                turns.append((n, max(begin, done), end))
                done = end
        return turns

    def _region(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, n: int, text: str
    ) -> _Span | None:
        """Where the words of message n lie in the text: found by rendering it with others."""
        if not isinstance(messages[n].get("content"), str) or "tool_calls" in messages[n]:
            return None
        mark = _MARK.format(n)
        try:
            other = template.render([*messages[:n], {**messages[n], "content": mark}, *messages[n + 1 :]], tools).text
        except TemplateFailure:
            return None
        at = other.find(mark)
        if at < 0 or other.count(mark) != 1:
            return None
        before, after = other[:at], other[at + len(mark) :]
        if len(before) + len(after) > len(text) or not text.startswith(before) or not text.endswith(after):
            return None
        return len(before), len(text) - len(after)

    def _begin(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        n: int,
        text: str,
        said: list[_Span],
    ) -> int | None:
        """Where what the model has to say for message n begins: where its prompt ends. None without a prompt."""
        try:
            prompt = template.render(messages[:n], tools, prompt=True).text
        except TemplateFailure:  # many want a user first
            return None
        common = _common_length(prompt, text)
        if common < len(prompt):
            # The prompt goes on in another way, by a tag for thoughts for example: what both begin with may be chance.
            common = max(text.rfind("\n", 0, common) + 1, *self._written(text, 0, common, said)[-1:], 0)
        return common

    def _end(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        n: int,
        text: str,
        stop: int,
        said: list[_Span],
    ) -> int:
        """Where the turn of message n ends: with its end-of-turn token, without the white space after it."""
        try:
            end = _common_length(template.render(messages[: n + 1], tools).text, text)
        except TemplateFailure:
            end = stop
        ends = self._written(text, stop, end, said)
        return ends[-1] if ends else end

    # ---- tokens

    def _tokens(
        self, texts: list[str], spans: list[list[_Span]], said: list[list[_Span]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens uint32[n], offsets int64[n_docs + 1] and loss bool[n] of rendered conversations."""
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(data) for data in encoded], dtype=np.int64)
        starts = np.zeros(len(encoded), dtype=np.int64)
        np.cumsum(lengths[:-1] + 1, out=starts[1:])
        ends = starts + lengths
        buffer = _APART.join(encoded)
        trained: list[_Span] = []
        plain_text: list[_Span] = []
        for text, base, wanted, brought in zip(texts, starts.tolist(), spans, said, strict=True):
            for found, into in ((wanted, trained), (brought, plain_text)):
                if text.isascii():
                    into += [(base + a, base + b) for a, b in found]
                elif found:
                    at = _byte_places(text, [place for span in found for place in span])
                    into += [(base + a, base + b) for a, b in zip(at[::2], at[1::2], strict=True)]
        cut_start, cut_end, cut_id = self._cut(buffer, plain_text)
        # Pieces of text lie between the cuts and the bounds of texts, which are paired when both are in order.
        first = np.sort(np.concatenate([starts, cut_end]))
        last = np.sort(np.concatenate([ends, cut_start]))
        edges = np.stack([first, last], axis=1).reshape(-1)
        everything = pa.LargeStringArray.from_buffers(
            max(0, len(edges) - 1), pa.py_buffer(np.ascontiguousarray(edges)), pa.py_buffer(buffer)
        )
        pieces = everything.take(int64_array(np.arange(len(first), dtype=np.int64) * 2))
        leads = np.isin(first, starts)
        ids, bounds = self._encoded(pieces, leads)
        begin, end = self._places(ids, bounds, pieces, leads, first, last)
        # Special tokens go in where they were cut out: one after each piece but the last of a text.
        is_last = _last_pieces(first, starts)
        followed = ~is_last
        counts = np.diff(bounds) + followed
        out_ends = np.cumsum(counts)
        tokens = np.empty(int(out_ends[-1]) if len(out_ends) else 0, dtype=np.uint32)
        token_begin = np.empty(len(tokens), dtype=np.int64)
        token_end = np.empty(len(tokens), dtype=np.int64)
        is_special = np.zeros(len(tokens), dtype=bool)
        is_special[out_ends[followed] - 1] = True
        for column, plain, special in (
            (tokens, ids, cut_id),
            (token_begin, begin, cut_start),
            (token_end, end, cut_end),
        ):
            column[~is_special] = plain
            column[is_special] = special
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        if len(texts):
            offsets[1:] = out_ends[is_last]
        return tokens, offsets, _overlaps(token_begin, token_end, trained)

    def _cut(self, buffer: bytes, said: list[_Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where special tokens lie in the buffer (start, end), and their ids; int64[m] each."""
        spans: list[_Span] = []
        found: list[int] = []
        if self._cuts is not None and self._cores is not None:
            matches = self._cuts.finditer(buffer) if not said else self._cuts_outside(buffer, said)
            for match in matches:
                token = self._ids.get(match[0])
                if token is None:  # with the white space round it
                    token = self._ids[self._cores.search(match[0])[0]]  # type: ignore[index]
                spans.append(match.span())
                found.append(token)
        table = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1], np.array(found, dtype=np.int64)

    def _cuts_outside(self, buffer: bytes, said: list[_Span]) -> Iterator[re.Match[bytes]]:
        """Special tokens that do not lie wholly in what conversations brought in."""
        cuts, cores, at = self._cuts, self._cores, 0
        assert cuts is not None and cores is not None
        while match := cuts.search(buffer, at):
            core = cores.search(buffer, match.start(), match.end())
            assert core is not None
            if _within(said, *core.span()):
                at = core.start() + 1
            else:
                yield match
                at = match.end()

    def _encoded(self, pieces: pa.Array, leads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and bounds of the pieces; `leads` says which of them begin a text."""
        inner = self._tokenizer.inner
        if inner is self._tokenizer:
            return inner.encode(pieces)
        order = np.concatenate([np.flatnonzero(leads), np.flatnonzero(~leads)])
        count = int(leads.sum())
        one = self._tokenizer.encode(pieces.take(int64_array(order[:count])))
        other = inner.encode(pieces.take(int64_array(order[count:])))
        bounds = np.concatenate([one[1], other[1][1:] + one[1][-1]])
        items, bounds = ragged_take(bounds, np.argsort(order))
        return np.concatenate([one[0], other[0]])[items], bounds

    def _places(
        self,
        ids: np.ndarray,
        bounds: np.ndarray,
        pieces: pa.Array,
        leads: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where each token of the pieces lies in the buffer: begin and end, int64[n_tokens] each."""
        table = self._tokenizer.token_bytes
        counts = np.diff(bounds)
        widths = np.zeros(len(ids), dtype=np.int64) if table is None else table[ids].astype(np.int64)
        ends = np.cumsum(widths)
        before = np.concatenate([[0], ends])[bounds[:-1]]
        shift = np.repeat(first - before, counts)
        end = ends + shift
        begin = end - widths
        total = np.concatenate([[0], ends])[bounds[1:]] - before
        unclear = np.flatnonzero((total != last - first) | (table is None))
        for piece in unclear.tolist():
            low, high = int(bounds[piece]), int(bounds[piece + 1])
            if low == high:
                continue
            text = pieces[piece].as_py()
            # The reference says of each token which characters it stands for; its ids are the same.
            tokenizer = self._tokenizer if leads[piece] else self._tokenizer.inner
            _, spans = tokenizer.token_spans(text)
            if len(spans) != high - low:  # it was cut before it was tokenized, being of several MiB
                spans = [(0, len(text))] * (high - low)
            if text.isascii():
                places = np.array(spans, dtype=np.int64)
            else:
                widths_of = np.cumsum([0, *(len(char.encode()) for char in text)])
                places = widths_of[np.array(spans, dtype=np.int64)]
            begin[low:high] = first[piece] + places[:, 0]
            end[low:high] = first[piece] + places[:, 1]
        return begin, end


def _last_pieces(first: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """bool[n_pieces]: which piece is the last one of its text."""
    text = np.searchsorted(starts, first, side="right")
    return np.append(text[1:] != text[:-1], True) if len(text) else np.empty(0, dtype=bool)


def _overlaps(begin: np.ndarray, end: np.ndarray, spans: list[_Span]) -> np.ndarray:
    """bool[n]: which of the tokens [begin, end) overlap any of the spans, which are in order and apart."""
    if not spans:
        return np.zeros(len(begin), dtype=bool)
    bounds = np.array(spans, dtype=np.int64)
    nearest = np.searchsorted(bounds[:, 1], begin, side="right")
    inside = nearest < len(bounds)
    # A token without characters of its own lies where it begins.
    return inside & (np.maximum(end, begin + 1) > bounds[np.minimum(nearest, len(bounds) - 1), 0])


def _byte_places(text: str, places: list[int]) -> list[int]:
    """Where characters, ascending, lie in the text as UTF-8."""
    at, done, out = 0, 0, []
    for place in places:
        at += len(text[done:place].encode())
        done = place
        out.append(at)
    return out


def _within(spans: list[_Span], begin: int, end: int) -> bool:
    """Whether one of the spans, which are in order and apart, holds [begin, end)."""
    nth = bisect_right(spans, (begin, 1 << 62)) - 1
    return nth >= 0 and spans[nth][1] >= end


def _common_length(one: str, other: str) -> int:
    """How long the beginning is that both have."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: comparing slices is much faster than going character by character
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _edges(between: tuple[str, ...], contents: list[str], text: str) -> list[int] | None:
    """Where each part of a text ends that is these texts with messages between them, as they are or stripped."""
    for words in (contents, [content.strip() for content in contents]):
        parts = [between[0]]
        for content, after in zip(words, between[1:], strict=True):
            parts += (content, after)
        if "".join(parts) == text:
            edges = [0]
            for part in parts:
                edges.append(edges[-1] + len(part))
            return edges
    return None


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _covered(value: Any) -> Any:
    """The same with all texts traced, as the conversation's."""
    if isinstance(value, str):
        return said_text(value)
    if isinstance(value, dict):
        return {said_text(key): _covered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_covered(item) for item in value]
    return value


def _templates(spec: TokenizeChat) -> tuple[ChatTemplate, ChatTemplate]:
    """The template for conversations without tools, and the one for those with them."""
    settings = read_chat_settings(spec.tokenizer_id)
    given = spec.chat_template
    if given is not None:
        source = os.fspath(given)
        is_path = isinstance(given, os.PathLike) or ("\n" not in source and source.endswith(TEMPLATE_SUFFIXES))
        templates = {"default": read_template_file(source) if is_path else source}
    else:
        templates = dict(settings.templates)
    if not templates:
        raise PipelineError(
            f"the tokenizer {os.fspath(spec.tokenizer_id)} has no chat template; pass chat_template, the template of "
            "the format that the model is to learn."
        )
    default = templates.get("default") or next(iter(templates.values()))
    plain = ChatTemplate(default, settings.tokens, spec.date)
    with_tools = templates.get("tool_use")
    return plain, ChatTemplate(with_tools, settings.tokens, spec.date) if with_tools else plain
