"""Chat templates: Jinja as Hugging Face renders it, in the immutable sandbox, and the same in every process.

A template comes with a model, and is code. Jinja's sandbox keeps it from files, from Python's own attributes and from
changing its variables. Nothing in it depends on time or chance: `strftime_now` gives one fixed date, and is missing
without one; `random` is missing. `{% generation %} ... {% endgeneration %}` marks what the assistant said.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zephon.config.keys import quote
from zephon.errors import PipelineError
from zephon.tokenizer.load import TokenizerId, read_chat_settings, read_template_file
from zephon.tokenizer.specials import ROLES

# Lone surrogates are in no text, so nothing that a conversation says is taken for one.
_BEGIN, _END = "\udce0", "\udce1"
_BLOCK_ENDS = re.compile(f"([{_BEGIN}{_END}])")


class TemplateFailure(Exception):
    """A template could not make text of a conversation. Never leaves this package."""


class ChatTemplate:
    """A compiled chat template, with texts of special tokens by name, and the day that `strftime_now` gives, or None.

    Any number of threads may use it. `marks_generation` says whether it has {% generation %} blocks.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], date: str | None = None) -> None:
        import jinja2.meta

        environment = _environment()
        if date is not None:
            try:
                environment.globals["strftime_now"] = datetime.datetime.fromisoformat(date).strftime
            except (TypeError, ValueError):
                raise PipelineError(f'tokenize_chat date is {date!r}; expected a day such as "2024-07-26".') from None
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise PipelineError(
                f"the chat template cannot be compiled{f' (line {line})' if line else ''}: {str(error) or 'too deep'}."
            ) from None
        self.marks_generation = any(node.data == _BEGIN for node in tree.find_all(jinja2.nodes.TemplateData))
        self.variables = jinja2.meta.find_undeclared_variables(tree)
        self.written = [source, *(text for name, text in tokens.items() if name in self.variables)]
        self.source, self.tokens = source, dict(tokens)
        self._fixed = {**tokens, "documents": None}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation; with `prompt`, followed by the header of the next turn. Or TemplateFailure.

        Also the characters [begin, end) of each {% generation %} block that is not empty, in order.
        """
        variables = {**self._fixed, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        try:
            text = self._template.render(variables)
        except TemplateFailure:
            raise
        except Exception as error:  # a template can make Python raise nearly anything
            reason = " ".join(str(error).split())[:200]
            if "strftime_now" in reason:
                reason += " (set chat_date, the date that templates see)"
            raise TemplateFailure(f"the template fails: {type(error).__name__}: {reason}") from None
        return _without_marks(text) if self.marks_generation else (text, [])


def chat_templates(
    tokenizer_id: TokenizerId, chat_template: str | os.PathLike[str] | None, date: str | None
) -> tuple[ChatTemplate, ChatTemplate]:
    """The template for conversations without tools, and the one for those with them.

    `chat_template` is one to use instead, its path, or the name of one of the tokenizer's.
    """
    templates, roles = read_chat_settings(tokenizer_id)
    names = ", ".join(sorted(templates)) or "none"
    if chat_template is not None:
        source = os.fspath(chat_template)
        is_path = source.endswith((".jinja", ".jinja2", ".j2")) and "\n" not in source
        is_path = is_path or isinstance(chat_template, os.PathLike)
        source = read_template_file(source) if is_path else templates.get(source, source)
        if "{" not in source:
            raise PipelineError(
                f"tokenize_chat chat_template is {quote(source)}; expected a Jinja template, the path of a .jinja "
                f"file, or the name of a template that the tokenizer has ({names})."
            )
        templates = {"default": source}
    if "default" not in templates:
        which = f"default chat template, only {names}" if templates else "chat template"
        raise PipelineError(
            f"the tokenizer {tokenizer_id} has no {which}; pass chat_template, "
            f"{f'such as {quote(min(templates))}, or ' if templates else ''}the template of the format that the model "
            "is to learn."
        )
    tokens = {name: text for name, text in roles.items() if text}
    found = [ChatTemplate(templates[name], tokens, date) for name in ("default", "tool_use") if name in templates]
    if missing := [name for name in ROLES if name not in roles and any(name in each.variables for each in found)]:
        raise PipelineError(
            f"the chat template uses {missing[0]}, which no file of the tokenizer {tokenizer_id} declares; name it in "
            "tokenizer_config.json beside tokenizer.json, as null where there is none."
        )
    return found[0], found[-1]


def digest_of(*templates: ChatTemplate) -> str:
    """A digest of the sources of templates and of their special tokens."""
    content = json.dumps([[template.source, sorted(template.tokens.items())] for template in templates])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _environment() -> Any:
    """Jinja's immutable sandbox, with what Hugging Face adds."""
    import jinja2.ext  # takes 30 ms, so not where nobody chats
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
            return jinja2.nodes.Scope([begin, *body, end]).set_lineno(line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    parts: list[str] = []
    blocks: list[tuple[int, int]] = []
    begin = size = 0
    for part in _BLOCK_ENDS.split(text):
        if part == _BEGIN:
            begin = size
        elif part != _END:
            parts.append(part)
            size += len(part)
        elif size > begin:
            blocks.append((begin, size))
            begin = size
    return "".join(parts), blocks


def _raise_exception(message: Any) -> None:
    raise TemplateFailure(f"the template says: {message}")
