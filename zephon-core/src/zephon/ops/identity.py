"""User code as a short text for fingerprints: advice that it has changed, and no proof that it has not.

The text is made of source texts and of the values that code carries, never of addresses, so it is the same in every
process and under every hash seed. docs/your-code.md says what is seen of a function and what is not.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["identity_of", "name_of"]

_PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), range}
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"zephon", "numpy", "pyarrow"}


def name_of(function: Any) -> str:
    """What messages call a function, or an object that is called like one."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def identity_of(function: Any) -> tuple[str, list[str]]:
    """(name and digest of a function or object, kinds of values in it that the digest cannot tell apart).

    An attribute `version` counts too, and takes the place of such values.
    """
    version = getattr(function, "version", "")
    digest = _Digest()
    text = f"{name_of(function)} {digest(function)[:12]}"
    return (f"{text} version {version}", []) if version else (text, sorted(digest.unseen))


class _Digest:
    """Digests of values by their content; of one object always the same."""

    def __init__(self) -> None:
        self.unseen: set[str] = set()
        self._known: dict[int, tuple[Any, str]] = {}  # with the object, so that its id stays its own

    def __call__(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if id(value) not in self._known:
            self._known[id(value)] = value, "itself"
            try:
                text = repr(self._content(value))
            except Exception:  # nothing says what is in it; or it is nested too deeply
                self.unseen.add(type(value).__name__)
                text = f"some {type(value).__qualname__}"
            self._known[id(value)] = value, hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        return self._known[id(value)][1]

    def _content(self, value: Any) -> Any:
        """What decides a value, as plain values."""
        kind = type(value)
        if kind in (list, tuple):
            return kind.__name__, [self(item) for item in value]
        if kind in (set, frozenset):
            return "set", sorted(self(item) for item in value)
        if kind in (dict, types.MappingProxyType):  # in its order, which may be that in which rules are tried
            return "dict", [(self(key), self(item)) for key, item in value.items()]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", str(value.dtype.descr), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, types.MethodType):
            return "method", self(value.__func__), self(value.__self__)
        if isinstance(value, types.FunctionType | type):
            return self._code(value)
        if hasattr(value, "__wrapped__"):
            return "wrapper", kind.__qualname__, self(value.__wrapped__)
        reduced = copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return "name", reduced
        parts = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        return "object", self(kind), [self(part) for part in parts]

    def _code(self, value: Any) -> Any:
        """Source of a function or class, of what it names of its module, and what it carries."""
        named = [value.__module__ or "", value.__qualname__]
        if named[0].partition(".")[0] in _LIBRARIES:
            return "library", named, self(getattr(value, "__wrapped__", None))
        if isinstance(value, type):
            bases = [self(base) for base in value.__mro__[1:] if base.__module__.partition(".")[0] not in _LIBRARIES]
            parts = [part.__code__ for part in vars(value).values() if isinstance(part, types.FunctionType)]
            scope = vars(sys.modules.get(named[0], types))
            return "class", value.__qualname__, _source(value), bases, self._globals(parts, scope)
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self(cell.cell_contents))
            except ValueError:  # not assigned yet
                cells.append("empty")
        carried = self([value.__defaults__, value.__kwdefaults__, vars(value)])
        named_there = self._globals([value.__code__], value.__globals__)
        return "function", value.__qualname__, _source(value), cells, carried, named_there

    def _globals(self, codes: list[types.CodeType], scope: dict[str, Any]) -> list[tuple[str, str]]:
        """Functions and classes of the module that code names, by what they are; other names by how they are assigned.

        By the text of the assignment, since a value may be another one on every rank.
        """
        names = {name for code in codes for name in _names(code)} & scope.keys()
        made, module = [], scope.get("__name__")
        for name in sorted(names):
            value = scope[name]
            if isinstance(value, types.FunctionType | type):
                made.append((name, self(value) if value.__module__ == module else f"{value.__module__} {name}"))
            elif not isinstance(value, types.ModuleType):
                made.append((name, _assignments(scope.get("__file__") or "").get(name, "")))
        return made


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a function and in those inside it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


def _source(value: Any) -> str:
    """Source text of a function or class; the bytecode where there is none, which is of one version of Python."""
    try:
        if value.__qualname__.endswith("<lambda>"):
            return _source_of_lambda(value.__code__)
        # A wrapper made by functools.wraps has the source of its own code, and not of the function that it wraps.
        return textwrap.dedent(inspect.getsource(getattr(value, "__code__", value)))
    except (OSError, TypeError, ValueError):
        members = vars(value).values() if isinstance(value, type) else [value]
        return " ".join(_bytecode(each.__code__) for each in members if isinstance(each, types.FunctionType))


def _bytecode(code: types.CodeType) -> str:
    constants = [_bytecode(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _source_of_lambda(code: types.CodeType) -> str:
    """The body alone, by the places that the interpreter keeps: several lambdas may share a line."""
    spans = [(first or 0, start or 0, last or 0, end) for first, last, start, end in code.co_positions() if end]
    lines = [text.encode() for text in linecache.getlines(code.co_filename)]
    (first, start), (last, end) = min(span[:2] for span in spans), max(span[2:] for span in spans)
    body = b"".join(lines[first - 1 : last])
    if not body:
        raise OSError
    text = body[start : len(body) - len(lines[last - 1]) + end].decode()
    return f"{code.co_varnames} {text}"


@functools.lru_cache(maxsize=64)
def _assignments(path: str) -> dict[str, str]:
    """By name, the texts of the assignments of a module."""
    text = "".join(linecache.getlines(path))
    made: dict[str, str] = {}
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                made[target.id] = made.get(target.id, "") + (ast.get_source_segment(text, node) or "")
    return made
