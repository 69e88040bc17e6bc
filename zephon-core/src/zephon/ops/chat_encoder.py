"""The worker of `TokenizeChat`: renders conversations, finds the assistant's turns in them, makes tokens.

Rendering is Python and goes row by row. The rest goes over a whole block: all texts lie in one buffer, special tokens
are found in it by one regular expression, what is between them is tokenized as one column, and the loss of each token
comes from where it lies in the buffer.

Which part of a text is a turn of the assistant is asked of the template: it is what a conversation has that the one
before the turn, rendered with the generation prompt, has not, up to the end-of-turn token. That takes two renderings
per turn, so it is asked once for every sequence of roles, on a skeleton whose messages are marks, and kept. A
conversation that turns out to be its skeleton with the messages put in has its turns in the same places; any other, for
example one whose template looks into the messages, is rendered turn by turn.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from .._arrow import int64_array
from ..errors import PipelineError
from ..records import ragged_take
from ..tokenizer import Tokenizer
from ..tokenizer.chat import TEMPLATE_SUFFIXES, read_chat_settings, read_template_file
from .chat import TokenizeChat
from .chat_messages import MessageFailure, normal_messages, normal_tools, python_values
from .chat_template import BEGIN, END, ChatTemplate, TemplateFailure
from .documents import Documents, shortened, split_up
from .expression import missing_column
from .rows import Rows
from .tokenize import add_special_tokens

__all__ = ["ChatEncoder"]

_SHIELD = "\ufdd2"  # goes into a special token that a message spells, until the text has been cut at real ones
_APART = b"\xff"  # between the texts of a buffer; in no UTF-8, so nothing is found across it
_MARK = "\ue0b1{}\ue0b2"  # stands for a message in a skeleton
_SKELETONS_KEPT = 4096
_ASSISTANT = "assistant"

_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A conversation of certain roles without its words.

    Attributes:
        between: n_messages + 1 texts round the messages.
        turns: for each turn of the assistant, its message, how far into the text before it the turn begins, and how
            far into the text after it it ends.
    """

    between: tuple[str, ...]
    turns: tuple[tuple[int, int, int], ...]


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
        self.columns = (spec.field, *spec.optional_columns)
        self.runner = spec.runner
        self._spec, self._tokenizer = spec, tokenizer
        self._bos, self._eos = bos, eos
        self._template, self._tool_template = _templates(spec)
        self._skeletons: dict[tuple[str, ...], _Skeleton | None] = {}
        special = sorted(tokenizer.special_tokens, key=lambda token: -len(token.text))
        self._ids = {token.text.encode(): token.id for token in special}
        parts = []
        for token in special:
            before, after = (rb"\s*" if strip else b"" for strip in (token.lstrip, token.rstrip))
            parts.append(before + b"(?:" + re.escape(token.text.encode()) + b")" + after)
        self._cuts = re.compile(b"|".join(parts)) if parts else None
        self._spelled = re.compile("|".join(re.escape(token.text) for token in special)) if special else None
        ends = "|".join(re.escape(token.text) for token in special)
        self._turn_end = re.compile(rf"\s*(?:{ends})") if ends else None

    def __getstate__(self) -> tuple[Any, ...]:
        return self._spec, self._tokenizer, self._bos, self._eos

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def alike(self, table: pa.Table) -> pa.Table:
        """As it is: every dataset is encoded by itself."""
        return table

    def texts(self, rows: Rows) -> list[str]:
        """The conversations as text, without special tokens."""
        texts, _, _, _, _ = self._rendered(rows)
        return [piece for text in texts for piece in (self._spelled.split(text) if self._spelled else [text]) if piece]

    def encode(self, rows: Rows) -> Documents:
        """The documents of rows."""
        texts, spans, shields, kept, blank = self._rendered(rows)
        tokens, offsets, loss = self._tokens(texts, spans, shields)
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

    def _rendered(self, rows: Rows) -> tuple[list[str], list[list[_Span]], list[list[int]], list[int], list[int]]:
        """Texts, trained spans (characters), shielded places (characters), and the rows they are of; blank rows."""
        spec, table = self._spec, rows.table
        if spec.field not in table.column_names:
            raise PipelineError(f"{spec.kind} {missing_column(spec.field, table.column_names)}")
        conversations = python_values(table.column(spec.field))
        tools: list[Any] = [None] * len(conversations)
        if spec.optional_columns and spec.optional_columns[0] in table.column_names:
            tools = table.column(spec.optional_columns[0]).to_pylist()
        texts, all_spans, shields, kept, blank = [], [], [], [], []
        for index, (value, offered) in enumerate(zip(conversations, tools, strict=True)):
            try:
                messages = normal_messages(value)
                if not messages:
                    blank.append(index)
                    continue
                text, spans, shielded = self._conversation(messages, normal_tools(offered))
                if not text.isascii():
                    text.encode()
            except UnicodeEncodeError:
                rows.fail(index, spec.kind, "a message holds half a surrogate pair, which is no Unicode")
                continue
            except (MessageFailure, TemplateFailure) as failure:
                rows.fail(index, spec.kind, str(failure))
                continue
            texts.append(text)
            all_spans.append(spans)
            shields.append(shielded)
            kept.append(index)
        return texts, all_spans, shields, kept, blank

    def _conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[str, list[_Span], list[int]]:
        template = self._tool_template if tools else self._template
        shielded = False
        spelled = self._spelled
        if spelled is not None:
            for message in messages:
                content = message.get("content")
                if type(content) is str and len(message) == 2 and not spelled.search(content):
                    continue
                covered = _shielded(message, spelled)
                if covered is not message:
                    shielded = True
                    message.update(covered)
            if tools:
                covered = _shielded(tools, spelled)
                shielded |= covered is not tools
                tools = covered
        text = template.render(messages, tools)
        if template.marks_generation:
            text, spans = _unmarked(text)
        elif self._spec.loss == "all":
            spans = []
        else:
            spans = self._turns(template, messages, tools, text)
        if self._spec.loss == "last_assistant":
            spans = spans[-1:]
        if not shielded:
            return text, spans, []
        # Take the shields out again, and remember where they were.
        at = [match.start() for match in re.finditer(_SHIELD, text)]
        clean = text.replace(_SHIELD, "")
        spans = [(a - bisect_left(at, a), b - bisect_left(at, b)) for a, b in spans]
        return clean, spans, [place - nth for nth, place in enumerate(at)]

    # ---- where the assistant speaks

    def _turns(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> list[_Span]:
        """The trained parts of a rendered conversation."""
        if not tools and all(len(message) == 2 for message in messages):
            roles = tuple(message["role"] for message in messages)
            if _ASSISTANT not in roles:
                return []
            if roles not in self._skeletons:
                if len(self._skeletons) >= _SKELETONS_KEPT:
                    self._skeletons.clear()
                self._skeletons[roles] = self._skeleton(template, roles)
            skeleton = self._skeletons[roles]
            spans = None if skeleton is None else _filled(skeleton, [message["content"] for message in messages], text)
            if spans is not None:
                return spans
        return self._turns_one_by_one(template, messages, tools, text)

    def _skeleton(self, template: ChatTemplate, roles: Sequence[str]) -> _Skeleton | None:
        """None where the template does more than put messages between texts."""
        marks = [_MARK.format(n) for n in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = template.render(messages)
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
                prompted = self._begin(template, messages, None, n, text)
                begin = starts[n] if prompted is None else min(starts[n], prompted)
                stop = starts[n] + len(marks[n])
                end = max(stop, self._end(template, messages, None, n, text, stop))
                if starts[n] - begin > len(between[n]) or end - stop > len(between[n + 1]):
                    return None
                turns.append((n, len(between[n]) - (starts[n] - begin), end - stop))
        return _Skeleton(tuple(between), tuple(turns))

    def _turns_one_by_one(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> list[_Span]:
        spans: list[_Span] = []
        done = 0
        for n, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            region = self._region(template, messages, tools, n, text)
            if region is None:
                found = self._begin(template, messages, tools, n, text)
                if found is None:
                    continue  # nobody can say what of it the model has to say
                begin = found
                end = self._end(template, messages, tools, n, text, begin)
            else:
                found = self._begin(template, messages, tools, n, text)
                begin = region[0] if found is None else min(region[0], max(done, found))
                end = region[1]
                match = self._turn_end.match(text, end) if self._turn_end else None
                end = match.end() if match else max(end, self._end(template, messages, tools, n, text, end))
            if end > max(begin, done):
                spans.append((max(begin, done), end))
                done = end
        return spans

    def _region(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, n: int, text: str
    ) -> _Span | None:
        """Where the words of message n lie in the text: found by rendering it with others."""
        if not isinstance(messages[n].get("content"), str) or "tool_calls" in messages[n]:
            return None
        mark = _MARK.format(n)
        try:
            other = template.render([*messages[:n], {**messages[n], "content": mark}, *messages[n + 1 :]], tools)
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
    ) -> int | None:
        """Where what the model has to say for message n begins: where its prompt ends. None without a prompt."""
        try:
            prompt = template.render(messages[:n], tools, add_generation_prompt=True)
        except TemplateFailure:  # many want a user first
            return None
        common = _common_length(prompt, text)
        if common < len(prompt):
            # The prompt goes on in another way, by a tag for thoughts for example: what both begin with may be chance.
            cuts = [match.end() for match in self._spelled.finditer(text, 0, common)] if self._spelled else []
            common = max(text.rfind("\n", 0, common) + 1, *cuts[-1:], 0)
        return common

    def _end(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        n: int,
        text: str,
        stop: int,
    ) -> int:
        """Where the turn of message n ends: with its end-of-turn token, without the white space after it."""
        try:
            end = _common_length(template.render(messages[: n + 1], tools), text)
        except TemplateFailure:
            end = stop
        ends = [match.end() for match in self._spelled.finditer(text, stop, end)] if self._spelled else []
        return ends[-1] if ends else end

    # ---- tokens

    def _tokens(
        self, texts: list[str], spans: list[list[_Span]], shields: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens uint32[n], offsets int64[n_docs + 1] and loss bool[n] of rendered conversations."""
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(data) for data in encoded], dtype=np.int64)
        starts = np.zeros(len(encoded), dtype=np.int64)
        np.cumsum(lengths[:-1] + 1, out=starts[1:])
        ends = starts + lengths
        buffer = _APART.join(encoded)
        trained, shielded = [], []
        for text, base, wanted, hidden in zip(texts, starts.tolist(), spans, shields, strict=True):
            if text.isascii():
                trained += [(base + a, base + b) for a, b in wanted]
                shielded += [base + place for place in hidden]
            else:
                trained += [(base + _bytes(text, a), base + _bytes(text, b)) for a, b in wanted]
                shielded += [base + _bytes(text, place) for place in hidden]
        cut_start, cut_end, cut_id = self._cut(buffer, shielded)
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

    def _cut(self, buffer: bytes, shielded: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where special tokens lie in the buffer (start, end), and their ids; int64[m] each."""
        matches = list(self._cuts.finditer(buffer)) if self._cuts else []
        if shielded:
            hidden = sorted(shielded)
            # A shield was put behind the first character of the token that a message spelled.
            matches = [m for m in matches if bisect_left(hidden, m.start() + 1) == bisect_left(hidden, m.end())]
        ids = self._ids
        spans = [match.span() for match in matches]
        found = [ids.get(match[0]) or ids[match[0].strip()] for match in matches]
        table = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1], np.array(found, dtype=np.int64)

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


def _bytes(text: str, chars: int) -> int:
    return len(text[:chars].encode())


def _common_length(one: str, other: str) -> int:
    """How long the beginning is that both have."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: comparing slices is much faster than going character by character
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _filled(skeleton: _Skeleton, contents: list[str], text: str) -> list[_Span] | None:
    """The turns of a text that is the skeleton with these messages, as they are or stripped; None where it is not."""
    between = skeleton.between
    for words in (contents, [content.strip() for content in contents]):
        parts = [between[0]]
        for content, after in zip(words, between[1:], strict=True):
            parts += (content, after)
        if "".join(parts) == text:
            edges = [0]
            for part in parts:
                edges.append(edges[-1] + len(part))
            # Message n is part 2n + 1.
            return [(edges[2 * n] + begin, edges[2 * n + 2] + end) for n, begin, end in skeleton.turns]
    return None


def _unmarked(text: str) -> tuple[str, list[_Span]]:
    """The text without the marks of {% generation %}, and what was between them."""
    parts = re.split(f"({BEGIN}|{END})", text)
    plain, spans, at, opened = [], [], 0, []
    for part in parts:
        if part == BEGIN:
            opened.append(at)
        elif part == END:
            begin = opened.pop() if opened else at
            if not opened and at > begin:
                spans.append((begin, at))
        else:
            plain.append(part)
            at += len(part)
    return "".join(plain), spans


def _shielded(value: Any, spelled: re.Pattern[str]) -> Any:
    """The same with special tokens in its texts broken; the very object where there are none."""
    if isinstance(value, str):
        return spelled.sub(lambda m: m[0][0] + _SHIELD + m[0][1:], value) if spelled.search(value) else value
    if isinstance(value, dict):
        covered = {key: _shielded(item, spelled) for key, item in value.items()}
        return covered if any(covered[key] is not item for key, item in value.items()) else value
    if isinstance(value, list):
        items = [_shielded(item, spelled) for item in value]
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
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
