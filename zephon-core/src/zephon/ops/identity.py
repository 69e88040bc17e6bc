"""Code and what it is bound to as a short text that is the same in every process, for fingerprints.

What decides a function's result is its source text and the plain values it carries: defaults, values of an enclosing
function, arguments of a `functools.partial`, attributes of an object. Numbers, text, containers, arrays, patterns,
paths, enums, functions, classes and objects made of these are hashed by what they hold, never by where they lie in
memory nor in the order of a set. A value of any other kind cannot be told from another of its kind, which whoever
makes the fingerprint is to say; a `version` on the function or object stands for it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import itertools
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["Identity", "identity_of", "name_of"]

_MOST_VALUES = 1_000_000
_MOST_DEPTH = 60
_MOST_TOLD = 3
_FEW = 100


@dataclass(frozen=True, slots=True)
class Identity:
    """What a function, or an object that is called like one, does.

    Attributes:
        text: name and digests; the same in every process and for the same code and values.
        unseen: in words, values that it carries and that `text` does not tell apart.
    """

    text: str
    unseen: tuple[str, ...] = ()


def name_of(function: Any) -> str:
    """What messages call a function."""
    if isinstance(function, partial):
        return name_of(function.func)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def identity_of(function: Any) -> Identity:
    """Name of a function, or of the class of an object, and digests of its source and of the values it carries."""
    try:
        version = getattr(function, "version", "")
    except Exception:  # a property of the user's own
        version = ""
    told = f" version {version}" if isinstance(version, str | int) and version != "" else ""
    reader = _Reader()
    try:
        subject, values = _taken_apart(function)
    except Exception:  # an object with a part that Python does not see
        subject, values = type(function), {}
        reader.unseen.append(f"what a {name_of(subject)} holds")
    bound = reader.digest_of(values) if values else ""
    text = f"{name_of(subject)} {_short(_source(subject))}{f' with {bound}' if bound else ''}{told}"
    return Identity(text, () if told else tuple(reader.unseen))


def _short(text: str | bytes) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).hexdigest()[:12]


def _taken_apart(function: Any) -> tuple[Any, dict[str, Any]]:
    """What has the source, and the values that go with it by the words for each; none where the source says it all."""
    if isinstance(function, partial):
        subject, values = _taken_apart(function.func)
        arguments = {f"argument {n}": value for n, value in enumerate(function.args)}
        arguments |= {f"argument {name}": function.keywords[name] for name in sorted(function.keywords)}
        return subject, {**values, **{f"partial {name}": value for name, value in arguments.items()}}
    if inspect.ismethod(function):
        subject, values = _taken_apart(function.__func__)
        return subject, {**values, "the object that it is a method of": function.__self__}
    if hasattr(function, "__wrapped__") and not hasattr(function, "__code__"):  # functools.cache
        return _taken_apart(function.__wrapped__)
    if hasattr(function, "__code__"):
        return function, _of_function(function)
    if inspect.isclass(function):
        return function, _of_bases(function)
    if isinstance(function, types.BuiltinFunctionType):
        owner = function.__self__
        bound = owner is not None and not isinstance(owner, types.ModuleType)
        return function, {"the object that it is a method of": owner} if bound else {}
    return type(function), {**_of_bases(type(function)), **_of_object(function)}


def _of_function(function: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":  # for super()
            try:
                values[f"outer variable {name}"] = cell.cell_contents
            except ValueError:  # not assigned yet
                values[f"outer variable {name}"] = None
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    values |= {f"default of {name}": value for name, value in zip(names, defaults, strict=True)}
    keywords = function.__kwdefaults__ or {}
    return values | {f"default of {name}": keywords[name] for name in sorted(keywords)}


def _of_bases(kind: type) -> dict[str, Any]:
    """The classes of a user's own that a class is built on."""
    bases = [base for base in kind.__mro__[1:] if not _is_common(base) and base.__module__.split(".")[0] != "zephon"]
    return {f"base {base.__qualname__}": base for base in bases}


def _of_object(value: Any) -> dict[str, Any]:
    """Attributes of an object, as pickle would take them along; `_Undescribed` where nobody knows."""
    kind: Any = type(value)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        # Refuses what holds something that Python does not see.
        _, (_, *arguments), state, items, pairs = (*value.__reduce_ex__(2), None, None, None)[:5]
    elif _is_common(kind):
        reduced = value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return {"name": reduced}
        _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    else:
        raise TypeError(kind)
    made = {f"argument {n}": argument for n, argument in enumerate(arguments)}
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    if all(part is None or isinstance(part, dict) for part in parts):
        for part in parts:
            made |= {f"attribute {name}": part[name] for name in sorted(part or {}, key=str)}
    else:
        made["state"] = state
    for name, some in (("items", items), ("pairs", pairs)):
        if some is not None:
            made[name] = list(itertools.islice(some, _MOST_VALUES + 1))
            if len(made[name]) > _MOST_VALUES:  # an iterator of the user's own may have no end
                raise TypeError(kind)
    return made


def _is_common(kind: Any) -> bool:
    """Whether a class or function comes with Python."""
    return str(getattr(kind, "__module__", None) or "builtins").partition(".")[0] in _STANDARD


_STANDARD = sys.stdlib_module_names - {"__main__", "this", "antigravity"}


def _source(subject: Any) -> str:
    if _is_common(subject) and not hasattr(subject, "__code__"):
        return ""
    try:
        source = textwrap.dedent(inspect.getsource(subject))
    except (OSError, TypeError, IndentationError):  # typed in at a prompt, or not written in Python
        return _bytecode(subject)
    if getattr(subject, "__name__", "") == "<lambda>" and source.count("lambda") > 1:
        # The source is all of the statement: which of its functions this is shows in what it uses.
        code = subject.__code__
        used = [each for each in code.co_consts if each is not None and not isinstance(each, types.CodeType)]
        source += f" {code.co_varnames} {code.co_names} {_Reader().digest(used)}"
    return source


def _bytecode(subject: Any) -> str:
    """What the interpreter made of a source that is not there; differs between versions of Python."""
    code = getattr(subject, "__code__", None)
    if code is not None:
        return _code_text(code)
    if not inspect.isclass(subject):
        return ""
    # What a class says: its methods, those behind decorators too, and its plain values.
    lines = []
    for name, value in sorted(vars(subject).items()):
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if hasattr(inner, "__code__"):
            lines.append(f"{name} {_code_text(inner.__code__)}")
        elif isinstance(value, str | int | float | bytes | bool | tuple) and not name.startswith("__"):
            lines.append(f"{name} {_Reader().digest(value)}")
    return "\n".join(lines)


def _code_text(code: types.CodeType) -> str:
    constants = [
        _code_text(each) if isinstance(each, types.CodeType) else _Reader().digest(each) for each in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


class _Reader:
    """Hashes values by what they hold."""

    def __init__(self) -> None:
        self.unseen: list[str] = []
        self._read = 0
        self._open: dict[int, int] = {}  # what is being read, by id, and how deep
        self._where: list[str] = []

    def digest(self, value: Any) -> str:
        """A few hexadecimal digits for a value."""
        return self._hash(value).hex()[:12]

    def digest_of(self, values: Mapping[str, Any]) -> str:
        """The same for values by the words for each."""
        hasher = hashlib.sha256()
        self._parts(hasher.update, values)
        return hasher.hexdigest()[:12]

    def _hash(self, value: Any) -> bytes:
        hasher = hashlib.sha256()
        self._add(hasher.update, value)
        return hasher.digest()

    def _inside(self, update: Callable[[bytes], object], where: str, value: Any) -> None:
        self._where.append(where)
        self._add(update, value)
        self._where.pop()

    def _add(self, update: Callable[[bytes], object], value: Any) -> None:
        plain = _PLAIN.get(type(value))
        if plain is not None:
            content = plain(value)
            update(b"%s %d:" % (type(value).__name__.encode(), len(content)))
            update(content)
            return
        if id(value) in self._open:
            update(b"again %d" % self._open[id(value)])
            return
        self._read += 1
        if self._read > _MOST_VALUES or len(self._open) > _MOST_DEPTH:
            self._miss("too many values" if self._read > _MOST_VALUES else "values nested too deeply")
            update(b"and so on")
            return
        self._open[id(value)] = len(self._open)
        try:
            self._add_open(update, value)
        except Exception:
            kind = type(value).__name__
            self._miss(f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}")
            update(f"some {type(value).__module__}.{type(value).__qualname__}".encode())
        finally:
            del self._open[id(value)]

    def _add_open(self, update: Callable[[bytes], object], value: Any) -> None:
        kind = type(value)
        if kind in (list, tuple, set, frozenset) and len(value) > _FEW and set(map(type, value)) == {str}:
            self._add_texts(update, value)
        elif kind in (list, tuple):
            update(b"%s %d:" % (kind.__name__.encode(), len(value)))
            for item in value:
                self._add(update, item)
        elif kind in (set, frozenset):
            update(b"set %d:" % len(value))
            for each in sorted(self._hash(item) for item in value):
                update(each)
        elif kind in (dict, types.MappingProxyType):
            # In its order, which may be that in which rules are tried.
            update(b"dict %d:" % len(value))
            for key, item in value.items():
                self._add(update, key)
                self._add(update, item)
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
            self._add(update, ["objects", list(value.shape), value.tolist()])
        elif isinstance(value, np.ndarray | np.generic):
            update(f"array {value.dtype.descr} {value.shape}:".encode())
            update(hashlib.sha256(value.tobytes()).digest())
        elif isinstance(value, np.dtype | pa.DataType | pa.Schema):
            update(f"type {value}".encode())
        elif isinstance(value, pa.Array | pa.ChunkedArray | pa.Table | pa.RecordBatch | pa.Scalar):
            content = value.as_py() if isinstance(value, pa.Scalar) else value.to_pylist()
            self._add(update, ["arrow", str(value.schema if hasattr(value, "schema") else value.type), content])
        elif isinstance(value, re.Pattern):
            self._add(update, ["pattern", value.pattern, value.flags])
        elif isinstance(value, enum.Enum):
            self._add(update, ["enum", kind.__qualname__, value.name, value.value])
        elif isinstance(value, os.PathLike):
            self._add(update, ["path", os.fspath(value)])
        elif isinstance(value, types.ModuleType):
            self._add(update, ["module", value.__name__])
        elif inspect.isclass(value) or isinstance(value, _FUNCTIONS):
            subject, values = _taken_apart(value)
            common = _is_common(subject)
            self._add(update, ["code", name_of(subject), "" if common else _short(_source(subject))])
            self._parts(update, {} if common and not isinstance(value, _BOUND) else values)
        else:
            values = _of_object(value)
            source = "" if _is_common(kind) else _source(kind)
            self._add(update, ["object", kind.__qualname__, _short(source)])
            self._parts(update, {**({} if _is_common(kind) else _of_bases(kind)), **values})

    def _add_texts(self, update: Callable[[bytes], object], value: Any) -> None:
        """Many texts at once, ten times as fast: a lexicon may have a million."""
        kind = "set" if isinstance(value, set | frozenset) else type(value).__name__
        texts = sorted(value) if kind == "set" else list(value)
        update(f"{kind} of {len(texts)} texts:".encode())
        update(np.fromiter(map(len, texts), dtype="<i8", count=len(texts)).tobytes())
        update("".join(texts).encode("utf-8", "surrogatepass"))

    def _parts(self, update: Callable[[bytes], object], values: Mapping[str, Any]) -> None:
        update(b"parts %d:" % len(values))
        for name, item in values.items():
            self._add(update, name)
            self._inside(update, name, item)

    def _miss(self, what: str) -> None:
        where = " of ".join(reversed(self._where))
        told = f"{what} in {where}" if where else what
        if told not in self.unseen and len(self.unseen) < _MOST_TOLD:
            self.unseen.append(told)


_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    partial,
    type(functools.cache(repr)),
)
_BOUND = (partial, types.MethodType, types.BuiltinFunctionType)
_PLAIN: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    type(...): lambda value: b"",
    type(NotImplemented): lambda value: b"",
    bool: lambda value: b"1" if value else b"0",
    int: lambda value: hex(value).encode(),
    float: lambda value: value.hex().encode(),
    complex: lambda value: f"{value.real.hex()} {value.imag.hex()}".encode(),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: bytes,
    bytearray: bytes,
    range: lambda value: repr(value).encode(),
}
