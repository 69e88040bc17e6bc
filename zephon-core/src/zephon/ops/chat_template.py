"""Chat templates: Jinja as Hugging Face uses it, in a sandbox, bounded, and the same in every process.

A template is code that comes with a model, so it runs in Jinja's sandbox, and beyond that nothing that would let it run
for ever or fill the memory is there: turns of loops and calls are counted, texts and nested values have a limit, and so
have the arguments of filters; what widens text to a given width is missing. Nothing depends on time or chance either:
`strftime_now` gives the one date that it was told, and is missing where it was told none; there is no `random`.

`{% generation %} ... {% endgeneration %}` is understood, and marks what the assistant said.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from ..errors import PipelineError

__all__ = ["ChatTemplate", "TemplateFailure"]

MAX_TEMPLATE_CHARS = 1 << 20
MAX_TEXT_CHARS = 16 << 20
MAX_LOOPS = 1_000_000
MAX_NUMBER = 1_000_000
"""Largest number that a filter takes as an argument."""
MAX_VALUES = 1_000_000
"""Most values inside one that is turned into text."""

# Noncharacters: they occur in no text that is to be exchanged, and never in a template's own words.
BEGIN, END = "\ufdd0", "\ufdd1"

_WIDENING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"})
_MISSING_FILTERS = ("random", "center", "format", "wordwrap", "pprint", "filesizeformat", "urlize", "xmlattr")


class TemplateFailure(Exception):
    """A template could not make text of a conversation. Never leaves this package."""


class _Meter(threading.local):
    """What the rendering in this thread may still do."""

    def __init__(self) -> None:
        self.loops = 0
        self.marks = 0


_meter = _Meter()


def _counted(iterable: Any) -> Any:
    """Charge a loop for its turns."""
    try:
        turns = len(iterable)
    except TypeError:
        return _charged(iterable)
    _charge(turns)
    return iterable


def _charged(iterable: Iterable[Any]) -> Iterable[Any]:
    for item in iterable:
        _charge(1)
        yield item


def _charge(turns: int) -> None:
    _meter.loops -= turns
    if _meter.loops < 0:
        raise TemplateFailure(f"the template goes round its loops, or calls something, more than {MAX_LOOPS:,} times")


def _checked(value: Any) -> Any:
    """The value, unless there is too much in it to be looked through: lists may hold each other many times over."""
    if isinstance(value, list | tuple | dict):
        inside, count = [value], 0
        while inside:
            items = inside.pop()
            items = list(items.values()) if isinstance(items, dict) else items
            count += len(items)
            if count > MAX_VALUES:
                raise TemplateFailure(f"the template makes text of a value with more than {MAX_VALUES:,} others in it")
            inside += [item for item in items if isinstance(item, list | tuple | dict)]
    return value


def _bounded(name: str, function: Any) -> Any:
    """A filter of Jinja's that takes no large numbers, looks through no endless values and makes no endless text."""
    subject = 1 if getattr(function, "jinja_pass_arg", None) else 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _charge(1)
        value, given = args[subject] if len(args) > subject else None, [*args[subject + 1 :], *kwargs.values()]
        _checked(value)
        if any(isinstance(number, int) and abs(number) > MAX_NUMBER for number in given):
            raise TemplateFailure(f"the template gives the filter {name} a number above {MAX_NUMBER:,}")
        widest = max([len(text) for text in given if isinstance(text, str)], default=0)
        if isinstance(value, str | list | tuple | dict) and (len(value) + 1) * max(1, widest) > 8 * MAX_TEXT_CHARS:
            raise TemplateFailure(f"the template makes a text of more than {MAX_TEXT_CHARS:,} characters")
        return function(*args, **kwargs)

    return run


def _joined(*parts: Any) -> str:
    texts = [str(_checked(part)) for part in parts]
    if sum(map(len, texts)) > MAX_TEXT_CHARS:
        raise TemplateFailure(f"the template makes a text of more than {MAX_TEXT_CHARS:,} characters")
    return "".join(texts)


def _generated(caller: Any) -> str:
    _meter.marks += 1
    return f"{BEGIN}{caller()}{END}"


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}: its content is what a model is to learn to say."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = jinja2.nodes.Call(jinja2.nodes.Name("_generated", "load"), [], [], None, None)
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "+", "**", "%"})

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _charge(8)  # macros may call themselves, and so may loops; a call takes about as long as so many turns
        if isinstance(obj, jinja2.runtime.LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str) and attribute in _WIDENING:
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and isinstance(argument, str) and argument in _WIDENING:
            return self.unsafe_undefined(obj, argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+" and len(left) + len(right) <= MAX_TEXT_CHARS:
            return left + right  # by far the most
        if operator == "%" and isinstance(left, str):
            raise TemplateFailure("the template formats text with %, which is not allowed")
        if operator == "**":
            raise TemplateFailure("the template computes a power, which is not allowed")
        if operator in "*+":
            sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
            whole = [abs(size) for size in sizes if isinstance(size, int)]
            if len(whole) == 2 and (whole[0] * whole[1] if operator == "*" else sum(whole)) > MAX_TEXT_CHARS:
                raise TemplateFailure(f"the template makes a value of more than {MAX_TEXT_CHARS:,} parts")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = _call("_counted", [loop.iter], loop.lineno)
        for node in list(tree.find_all((jinja2.nodes.Concat,))):
            # `~` joins without asking the sandbox.
            node.nodes = [_call("_joined", node.nodes, node.lineno)]
        return tree


def _call(name: str, arguments: list[Any], line: int) -> Any:
    call = jinja2.nodes.Call(jinja2.nodes.Name(name, "load"), arguments, [], None, None)
    return call.set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not (isinstance(indent, int) and indent <= 16):
        raise TemplateFailure(f"the template indents JSON by {str(indent)[:40]!r}; a number up to 16 is allowed")
    _checked(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateFailure(f"the template says: {message}")


class ChatTemplate:
    """A compiled chat template. Any number of threads may use it; it pickles as its source.

    Args:
        source: Jinja.
        tokens: names and texts of special tokens, "bos_token" and so on.
        date: what `strftime_now` takes for today, as in "2024-07-26", or None.
        variables: further values for the template.

    Attributes:
        marks_generation: whether it says itself what the assistant said.

    Raises:
        PipelineError: it is no template.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        date: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise PipelineError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read."
            )
        self._arguments = source, dict(tokens), date, dict(variables or {})
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_checked,
        )
        for name in _MISSING_FILTERS:
            environment.filters.pop(name, None)
        environment.filters = {name: _bounded(name, made) for name, made in environment.filters.items()}
        environment.filters["tojson"] = _to_json
        for name in ("lipsum", "cycler", "joiner"):
            environment.globals.pop(name, None)
        environment.globals.update(
            raise_exception=_raise_exception, _counted=_counted, _joined=_joined, _generated=_generated
        )
        if date is not None:
            try:
                day = datetime.datetime.fromisoformat(date)
            except (TypeError, ValueError):
                raise PipelineError(
                    f'the date for chat templates is {date!r}; one such as "2024-07-26" is needed.'
                ) from None
            environment.globals["strftime_now"] = day.strftime
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise PipelineError(
                f"the chat template cannot be compiled{f' (line {line})' if line else ''}: {str(error) or 'too deep'}."
            ) from None
        names = environment.parse(source).find_all(jinja2.nodes.Name)
        self.marks_generation = any(node.name == "_generated" for node in names)
        self._fixed = {**tokens, **(variables or {}), "documents": None}

    def __getstate__(self) -> tuple[Any, ...]:
        return self._arguments

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, with `BEGIN` and `END` round what the template marks.

        Raises:
            TemplateFailure: the template refuses it, fails, or takes too much.
        """
        _meter.loops, _meter.marks = MAX_LOOPS, 0
        variables = {
            **self._fixed,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._template
        parts, size = [], 0
        try:
            for part in template.root_render_func(template.new_context(variables)):
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT_CHARS:
                    raise TemplateFailure(f"the template makes a text of more than {MAX_TEXT_CHARS:,} characters")
        except TemplateFailure:
            raise
        except Exception as error:  # a template can make Python raise nearly anything
            text = " ".join(str(error).split())[:200]
            raise TemplateFailure(f"the template fails: {type(error).__name__}: {text}") from None
        text = "".join(parts)
        if text.count(BEGIN) != _meter.marks or text.count(END) != _meter.marks:
            raise TemplateFailure("a message holds the noncharacter U+FDD0 or U+FDD1, which no text may")
        return text
