"""Chat templates: Jinja as Hugging Face uses it, in a sandbox, bounded, and the same in every process.

A template is code that comes with a model, so it runs in Jinja's sandbox, and beyond that nothing that would let it run
for ever or fill the memory is there: turns of loops and calls are counted, texts and nested values have a limit, and so
have the arguments of filters; what widens text to a given width is missing. Nothing depends on time or chance either:
`strftime_now` gives the one date that it was told, and is missing where it was told none; there is no `random`.

`{% generation %} ... {% endgeneration %}` is understood, and marks what the assistant said. A conversation may be
traced: then the rendering tells which of its characters came from the conversation (see `chat_traced`).
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType, GeneratorType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from zephon.errors import PipelineError
from zephon.ops.chat_traced import (
    EVEN,
    MAY,
    ODD,
    SAID,
    Traced,
    TracingFailure,
    blurred,
    holds_traced,
    in_block,
    joined,
    merged,
    runs,
    traced,
)

__all__ = ["ChatTemplate", "Rendered", "TemplateFailure"]

MAX_TEMPLATE_CHARS = 1 << 20
MAX_TEXT_CHARS = 16 << 20
MAX_LOOPS = 1_000_000
MAX_NUMBER = 1_000_000
"""Largest number that a filter takes as an argument."""
MAX_VALUES = 1_000_000
"""Most values inside one that is turned into text."""

_WIDENING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"})
_MISSING_FILTERS = ("random", "center", "format", "wordwrap", "pprint", "filesizeformat", "urlize", "xmlattr")

_COMPARING = (
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "lt",
    "<",
    "lessthan",
    "le",
    "<=",
    "gt",
    ">",
    "greaterthan",
    "ge",
    ">=",
    "in",
)
# These look at a value, but not into what is in it.
_SHALLOW = frozenset(
    {"count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse"}
    | {"select", "selectattr"}
)
# What these make of a traced text is traced rightly.
_FOLLOWED = frozenset({"attr", "capitalize", "lower", "max", "min", "replace", "trim", "upper"})

_TEXTS = frozenset({str, Traced})

_Span = tuple[int, int]


class TemplateFailure(Exception):
    """A template could not make text of a conversation. Never leaves this package."""


class _Meter(threading.local):
    """What the rendering in this thread may still do."""

    def __init__(self) -> None:
        self.loops = 0
        self.block = ODD
        self.tracing = False


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
            items = [*items.keys(), *items.values()] if isinstance(items, dict) else items
            count += len(items)
            if count > MAX_VALUES:
                raise TemplateFailure(
                    f"the template prints, compares or looks through a value with more than {MAX_VALUES:,} others in it"
                )
            inside += [item for item in items if isinstance(item, list | tuple | dict)]
        _charge(count >> 3)
    return value


def _text(value: Any) -> str:
    """What a template shows of a value; of what holds a conversation's words all counts as the conversation's."""
    if isinstance(value, str):
        return str(value)
    text = str(_checked(value))
    if _meter.tracing and not isinstance(value, int | float | jinja2.Undefined | None):
        return blurred(text)
    return text


def _shown(value: Any) -> Any:
    return value if isinstance(value, str) else _text(value)


def _too_long() -> TemplateFailure:
    return TemplateFailure(f"the template makes a text of more than {MAX_TEXT_CHARS:,} characters")


def _bounded(name: str, function: Any) -> Any:
    """A filter of Jinja's that takes no large numbers, looks through no endless values and makes no endless text."""
    subject = 1 if getattr(function, "jinja_pass_arg", None) else 0
    shallow = name in _SHALLOW
    walks = name not in ("count", "d", "default", "first", "last", "length")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _charge(1)
        value, given = args[subject] if len(args) > subject else None, [*args[subject + 1 :], *kwargs.values()]
        if isinstance(value, GeneratorType):
            value = list(_charged(value))
            args = (*args[:subject], value, *args[subject + 1 :])
        if not shallow:
            _checked(value)
        elif walks and isinstance(value, str | list | tuple | dict):
            _charge(len(value) >> 3)
        if any(isinstance(number, int) and abs(number) > MAX_NUMBER for number in given):
            raise TemplateFailure(f"the template gives the filter {name} a number above {MAX_NUMBER:,}")
        widest = max([len(text) for text in given if isinstance(text, str)], default=0)
        if isinstance(value, str | list | tuple | dict) and (len(value) + 1) * max(1, widest) > 8 * MAX_TEXT_CHARS:
            raise _too_long()
        if _meter.tracing and not shallow and any(map(holds_traced, (value, *map(_checked, given)))):
            return _followed(name, function, list(args), subject, kwargs)
        return function(*args, **kwargs)

    return run


def _followed(name: str, function: Any, args: list[Any], subject: int, kwargs: dict[str, Any]) -> Any:
    """Send traced text through a filter."""
    value = args[subject]
    if name == "join":
        between = args[subject + 1] if len(args) > subject + 1 else kwargs.get("d", "")
        attribute = args[subject + 2] if len(args) > subject + 2 else kwargs.get("attribute")
        if attribute is not None:
            value = map(jinja2.filters.make_attrgetter(args[0].environment, attribute), value)
        return traced(_text(between)).join([_text(item) for item in value])
    if not isinstance(value, str):
        made = function(*args, **kwargs)
        return made if name in _FOLLOWED or not isinstance(made, str) else blurred(made)
    if name in ("safe", "string"):
        return value
    args[subject] = traced(value) if name in _FOLLOWED else "".join((value,))
    made = function(*args, **kwargs)
    return made if name in _FOLLOWED or not isinstance(made, str) else blurred(made, value)


def _compared(name: str, test: Any) -> Any:
    """A test that looks through no endless values."""

    @functools.wraps(test)
    def run(*args: Any) -> Any:
        return test(*map(_checked, args))

    return run


def _joined(*parts: Any) -> str:
    return _concat([part if type(part) is str else _text(part) for part in parts])


def _concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    size = sum(map(len, parts))
    if size > MAX_TEXT_CHARS:
        raise _too_long()
    if size > 1 << 16:
        _charge(size >> 8)
    return joined(parts) if Traced in map(type, parts) else "".join(parts)


def _generated(caller: Any) -> str:
    text, block = caller(), _meter.block
    _meter.block = ODD + EVEN - block
    return in_block(text, block)


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
    concat = staticmethod(_concat)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _charge(8)  # macros may call themselves, and so may loops; a call takes about as long as so many turns
        if isinstance(obj, jinja2.runtime.LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _charge(len(owner) >> 6)
            obj, args = _text_method(owner, obj, args)
        elif isinstance(obj, BuiltinMethodType) and any(isinstance(given, list | tuple | dict) for given in args):
            for value in (owner, *args):
                _checked(value)  # as list.index and dict.get compare
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
        if operator == "+" and type(left) in _TEXTS and type(right) in _TEXTS and len(left) + len(right) <= 1 << 16:
            return left + right  # by far the most
        if operator == "%" and isinstance(left, str):
            raise TemplateFailure("the template formats text with %, which is not allowed")
        if operator == "**":
            raise TemplateFailure("the template computes a power, which is not allowed")
        if operator in "*+":
            if not (hasattr(left, "__len__") or hasattr(right, "__len__")):
                made = super().call_binop(context, operator, left, right)
                if isinstance(made, int) and abs(made) > MAX_TEXT_CHARS:
                    raise TemplateFailure(f"the template computes a number above {MAX_TEXT_CHARS:,}")
                return made
            sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
            whole = [abs(size) for size in sizes if isinstance(size, int)]
            size = (whole[0] * whole[1] if operator == "*" else sum(whole)) if len(whole) == 2 else 0
            if size > MAX_TEXT_CHARS:
                if isinstance(left, str) or isinstance(right, str):
                    raise _too_long()
                raise TemplateFailure(f"the template makes a list of more than {MAX_TEXT_CHARS:,} items")
            _charge(size >> (8 if isinstance(left, str) or isinstance(right, str) else 4))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return _Bounds().visit(super()._parse(source, name, filename))


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts our own functions where Jinja asks no sandbox."""

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        node.iter = _call("_counted", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return _call("_joined", node.nodes, node.lineno)

    def visit_Compare(self, node: Any) -> Any:
        self.generic_visit(node)
        # A constant is soon compared with anything.
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if any(not _is_small(one) and not _is_small(other) for one, other in itertools.pairwise(sides)):
            node.expr = _call("_checked", [node.expr], node.lineno)
            for operand in node.ops:
                operand.expr = _call("_checked", [operand.expr], node.lineno)
        return node

    def visit_Pair(self, node: Any) -> Any:
        self.generic_visit(node)
        if not _is_small(node.key):
            node.key = _call("_checked", [node.key], node.lineno)  # it is hashed
        return node


def _is_small(node: Any) -> bool:
    if isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple):
        return all(map(_is_small, node.items))
    return isinstance(node, jinja2.nodes.Const)


def _text_method(owner: str, method: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A method of a text, and what it is given, if it makes no endless text."""
    name = getattr(method, "__name__", "")
    if name == "join" and args:
        parts = list(_charged(args[0]))
        if sum(len(part) for part in parts if isinstance(part, str)) + len(owner) * len(parts) > MAX_TEXT_CHARS:
            raise _too_long()
        args = (parts, *args[1:])
    elif name == "replace" and len(args) > 1 and isinstance(args[1], str):
        if (len(owner) + 1) * max(1, len(args[1])) > 8 * MAX_TEXT_CHARS:
            raise _too_long()
    else:
        return method, args
    return (getattr(traced(owner), name) if _meter.tracing else method), args


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
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return blurred(text) if _meter.tracing and holds_traced(value) else text


def _dated(day: datetime.datetime, form: str) -> str:
    text = day.strftime(form)
    return blurred(text, form) if type(form) is Traced else text


def _raise_exception(message: Any) -> None:
    raise TemplateFailure(f"the template says: {message}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template makes of a conversation.

    Attributes:
        text: all of it.
        blocks: the characters [begin, end) of what stands between {% generation %} and {% endgeneration %}, in order.
        said: the characters [begin, end) that traced text of the conversation brought in, in order and apart.
        may: those of them that may make special tokens.
    """

    text: str
    blocks: list[_Span]
    said: list[_Span]
    may: list[_Span]


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
            finalize=_shown,
        )
        for name in _MISSING_FILTERS:
            environment.filters.pop(name, None)
        environment.filters = {name: _bounded(name, made) for name, made in environment.filters.items()}
        environment.filters["tojson"] = _to_json
        for name in _COMPARING:
            environment.tests[name] = _compared(name, environment.tests[name])
        for name in ("lipsum", "cycler", "joiner"):
            environment.globals.pop(name, None)
        environment.globals.update(
            raise_exception=_raise_exception,
            _checked=_checked,
            _counted=_counted,
            _joined=_joined,
            _generated=_generated,
        )
        if date is not None:
            try:
                day = datetime.datetime.fromisoformat(date)
            except (TypeError, ValueError):
                raise PipelineError(
                    f'the date for chat templates is {date!r}; one such as "2024-07-26" is needed.'
                ) from None
            environment.globals["strftime_now"] = functools.partial(_dated, day)
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

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> Rendered:
        """The text of a conversation; `prompt` asks for the beginning of the assistant's next turn as well.

        Raises:
            TemplateFailure: the template refuses it, fails, or takes too much.
        """
        return self._run(messages, tools, prompt, False)

    def trace(self, messages: Any, tools: Any = None) -> Rendered:
        """The same of a conversation whose texts are `Traced`.

        Raises:
            TemplateFailure: as `render`, or where it cannot be followed what the template does.
        """
        return self._run(messages, tools, False, True)

    def _run(self, messages: Any, tools: Any, prompt: bool, tracing: bool) -> Rendered:
        _meter.loops, _meter.block, _meter.tracing = MAX_LOOPS, ODD, tracing
        variables = {**self._fixed, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        template = self._template
        parts, size = [], 0
        blocks: list[_Span] = []
        said: list[_Span] = []
        may: list[_Span] = []
        try:
            for part in template.root_render_func(template.new_context(variables)):
                if type(part) is Traced:
                    blocks += [(size + a, size + b) for a, b in sorted(runs(part, ODD) + runs(part, EVEN))]
                    if tracing:
                        said += [(size + a, size + b) for a, b in runs(part, SAID)]
                        may += [(size + a, size + b) for a, b in runs(part, MAY)]
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT_CHARS:
                    raise _too_long()
        except TemplateFailure:
            raise
        except TracingFailure as failure:
            raise TemplateFailure(
                f"a message spells a special token, and the template does what hides it: {failure}"
            ) from None
        except Exception as error:  # a template can make Python raise nearly anything
            text = " ".join(str(error).split())[:200]
            raise TemplateFailure(f"the template fails: {type(error).__name__}: {text}") from None
        finally:
            _meter.tracing = False
        return Rendered("".join(parts), blocks, merged(said), merged(may))
