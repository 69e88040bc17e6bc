"""Code and what it is bound to as a short text that is the same in every process, for fingerprints.

What decides a function's result is its source text, that of what it names of its module (`source`), and the plain
values it carries: defaults, values of an enclosing function, what it wraps, arguments of a `functools.partial`,
attributes of an object and of its classes. Numbers, text, containers, arrays, patterns, paths, enums, functions,
classes and objects made of these are hashed by what they hold, never by where they lie in memory nor in the order of a
set. A value of any other kind cannot be told from another of its kind, which whoever makes the fingerprint is to say; a
`version` on the function or object stands for it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.ops.source import current_values, source_of_class, source_of_code

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
        unsourced: names of functions whose source is not to be found: `text` is of their bytecode, which another
            version of Python makes otherwise.
    """

    text: str
    unseen: tuple[str, ...] = ()
    unsourced: tuple[str, ...] = ()


def name_of(function: Any) -> str:
    """What messages call a function."""
    if isinstance(function, partial):
        return name_of(function.func)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def identity_of(function: Any) -> Identity:
    """Name of a function, or of the class of an object, and a digest of its source and of the values it carries."""
    try:
        version = getattr(function, "version", "")
    except Exception:  # a property of the user's own
        version = ""
    told = f" version {version}" if isinstance(version, str | int) and version != "" else ""
    reader = _Reader(bytecode=not told)
    text = f"{name_of(function)} {reader.digest(function)}{told}"
    return Identity(text) if told else Identity(text, tuple(reader.unseen), tuple(reader.unsourced))


def _of_function(function: Any) -> dict[str, Any]:
    """What a function carries besides its code, by the words for each."""
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
    values |= {f"default of {name}": keywords[name] for name in sorted(keywords)}
    own = dict(function.__dict__)
    return values | {f"attribute {name}": own[name] for name in sorted(own)}


def _of_common(function: Any) -> dict[str, Any]:
    """What a function of Python's own makes of functions of the user's."""
    if hasattr(function, "registry") and hasattr(function, "dispatch"):  # functools.singledispatch
        kinds = sorted(function.registry, key=lambda kind: (kind.__qualname__, kind.__module__))
        return {f"handler {n} of {kind.__qualname__}": function.registry[kind] for n, kind in enumerate(kinds)}
    wrapped = getattr(function, "__wrapped__", None)
    return {} if wrapped is None else {"what it wraps": wrapped}


def _of_class(kind: type) -> dict[str, Any]:
    """Classes of a user's own that a class is built on, and what it holds: its body does not say what is set later."""
    bases = [base for base in (*kind.__bases__, type(kind)) if not _is_common(base) and not _is_ours(base)]
    values: dict[str, Any] = {f"base {n} {base.__qualname__}": base for n, base in enumerate(bases)}
    if _is_ours(kind):
        return values
    own = dict(vars(kind))
    if issubclass(kind, enum.Enum):
        values |= {f"member {name}": member.value for name, member in kind.__members__.items()}
    generated = _MADE_FROM_FIELDS if "__dataclass_fields__" in own or "_fields" in own else ()
    for name in sorted(own):
        value = own[name]
        called = isinstance(value, _PYTHON_MEMBERS)
        if _is_dunder(name) or issubclass(kind, enum.Enum):
            # What Python itself puts there (for protocols, orderings, enums) follows from the body and its own version.
            told = called and (name == "__call__" or not _is_common(getattr(value, "__func__", value)))
        else:
            told = not isinstance(value, _C_MEMBERS) and name != "_abc_impl"
        if told and not (name in generated and _is_generated(value)):
            values[f"attribute {name} of class {kind.__qualname__}"] = value
    return values


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_generated(function: Any) -> bool:
    """Whether a method was made from the fields of a dataclass or named tuple, which the class shows."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__func__", None), "__code__", None)
    return code is None or code.co_filename.startswith("<") or _is_common(function)


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
    """Whether a class or function comes with Python; a wrapper is where its code is, whatever name it bears."""
    scope = getattr(kind, "__globals__", None)
    if isinstance(scope, dict):
        module = scope.get("__name__", "")
    else:
        module = getattr(kind, "__module__", None) or "builtins"
        if module == "builtins" and isinstance(kind, type) and kind.__flags__ & _HEAP_TYPE:
            return False  # made by exec with no name for its module
    return str(module).partition(".")[0] in _STANDARD


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "zephon"


def _is_installed(kind: type) -> bool:
    """Whether a class is of an installed package; decides only what is warned of."""
    path = str(getattr(sys.modules.get(kind.__module__), "__file__", None))
    return "site-packages" in path or "dist-packages" in path


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # in __flags__
_STANDARD = sys.stdlib_module_names - {"__main__", "this", "antigravity"}


def _code_text(code: types.CodeType) -> str:
    """What the interpreter made of a source that is not there; differs between versions of Python."""
    constants = [
        _code_text(each) if isinstance(each, types.CodeType) else _Reader().digest(each) for each in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


class _Reader:
    """Hashes values by what they hold."""

    def __init__(self, bytecode: bool = True) -> None:
        self._bytecode = bytecode
        self.unseen: list[str] = []
        self.unsourced: list[str] = []
        self._quiet = 0
        self._read = 0
        self._open: dict[int, int] = {}  # what is being read, by id, and how deep
        self._outermost = _MOST_DEPTH  # how deep what was met again lies that is still being read
        self._known: dict[int, tuple[Any, bytes]] = {}  # functions and classes that were read, and their digests
        self._where: list[str] = []

    def digest(self, value: Any) -> str:
        """A few hexadecimal digits for a value."""
        return self._hash(value).hex()[:12]

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
            # How far out it is, and not how deep, is the same from wherever this was come to.
            update(b"again %d" % (len(self._open) - self._open[id(value)]))
            self._outermost = min(self._outermost, self._open[id(value)])
            return
        if id(value) in self._known:
            update(self._known[id(value)][1])
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
            for key, item in list(value.items()):
                self._add(update, key)
                self._add(update, item)
        elif isinstance(value, np.ma.MaskedArray):
            self._add(update, ["masked", np.ma.getmaskarray(value), np.ma.getdata(value), value.fill_value])
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
            self._add(update, ["objects", list(value.shape), value.tolist()])
        elif isinstance(value, np.ndarray | np.generic):
            update(f"array {value.dtype.descr} {value.shape}:".encode())
            update(hashlib.sha256(value.tobytes()).digest())
            if not _is_common(kind) and kind.__module__.partition(".")[0] != "numpy":
                self._add(update, [kind, vars(value)])
        elif isinstance(value, np.dtype | pa.DataType | pa.Schema):
            update(f"type {value}".encode())
        elif isinstance(value, pa.Array | pa.ChunkedArray | pa.Table | pa.RecordBatch | pa.Scalar):
            content = value.as_py() if isinstance(value, pa.Scalar) else value.to_pylist()
            self._add(update, ["arrow", str(value.schema if hasattr(value, "schema") else value.type), content])
        elif isinstance(value, re.Pattern):
            self._add(update, ["pattern", value.pattern, value.flags])
        elif isinstance(value, enum.Enum):
            self._add(update, ["enum", kind, value.name, value.value])
        elif isinstance(value, os.PathLike):
            self._add(update, ["path", os.fspath(value)])
        elif isinstance(value, types.ModuleType):
            self._add(update, ["module", value.__name__])
        elif isinstance(value, types.FunctionType | type):
            self._add_code(update, value)
        else:
            self._add_bound(update, value)

    def _add_code(self, update: Callable[[bytes], object], value: Any) -> None:
        """A function or class, which is read only once: what many share would be read as often as there are ways."""
        depth, outermost, self._outermost = len(self._open) - 1, self._outermost, _MOST_DEPTH
        hasher = hashlib.sha256()
        self._add_code_once(hasher.update, value)
        update(hasher.digest())
        if self._outermost >= depth:  # all of it is within itself
            self._known[id(value)] = value, hasher.digest()
        self._outermost = min(outermost, self._outermost)

    def _add_code_once(self, update: Callable[[bytes], object], value: Any) -> None:
        is_class = isinstance(value, type)
        if _is_common(value):
            module = (value.__module__ or "builtins").partition(".")[0].lstrip("_")
            self._add(update, ["common", module, name_of(value)])
            self._parts(update, {} if is_class else _of_common(value))
            return
        source = source_of_class(value) if is_class else source_of_code(value.__code__)
        self._add(update, ["code", name_of(value)])
        if source is not None:
            self._add(update, [source.text, list(source.named)])
            scope = getattr(sys.modules.get(value.__module__), "__dict__", {}) if is_class else value.__globals__
            self._parts(update, current_values(source, scope))
        elif not is_class:
            self._add(update, _code_text(value.__code__) if self._bytecode else "")
            told = name_of(value)
            if not self._quiet and told not in self.unsourced and len(self.unsourced) < _MOST_TOLD:
                self.unsourced.append(told)
        if not is_class:
            self._parts(update, _of_function(value))
        elif value.__flags__ & _HEAP_TYPE and not value.__flags__ & _IMMUTABLE_TYPE:  # not one that is written in C
            # The author of a library knows what is in its classes, and the reader of a warning does not.
            installed = _is_installed(value)
            self._quiet += installed
            self._parts(update, _of_class(value))
            self._quiet -= installed

    def _add_bound(self, update: Callable[[bytes], object], value: Any) -> None:
        """What calls a function, or an object."""
        kind = type(value)
        if not _is_common(kind):
            self._add(update, kind)
        if isinstance(value, partial):
            arguments = {f"argument {n}": item for n, item in enumerate(value.args)}
            arguments |= {f"argument {name}": value.keywords[name] for name in sorted(value.keywords)}
            own = {f"attribute {name}": item for name, item in sorted(vars(value).items())}
            values = {f"partial {name}": item for name, item in arguments.items()}
            self._add(update, ["partial", value.func])
            self._parts(update, values | own)
        elif isinstance(value, types.MethodType):
            self._add(update, ["method", value.__func__])
            self._parts(update, {"the object that it is a method of": value.__self__})
        elif isinstance(value, property):
            self._add(update, ["property", value.fget, value.fset, value.fdel])
        elif isinstance(value, staticmethod | classmethod):
            self._add(update, [kind.__name__, value.__func__])
        elif isinstance(value, functools.cached_property):
            self._add(update, ["cached", value.func])
        elif isinstance(value, functools.singledispatchmethod):
            self._add(update, ["dispatched", value.dispatcher])
        elif isinstance(value, _CACHED):
            self._add(update, ["cached", value.__wrapped__])
        elif isinstance(value, _C_FUNCTIONS):
            owner = getattr(value, "__self__", None)
            bound = owner is not None and not isinstance(owner, types.ModuleType)
            module = str(getattr(value, "__module__", None) or "builtins").partition(".")[0].lstrip("_")
            self._add(update, ["common", module, name_of(value)])
            self._parts(update, {"the object that it is a method of": owner} if bound else {})
        else:
            self._add(update, ["object", kind.__qualname__])
            self._parts(update, _of_object(value))

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
        told = f"{what} in {where}" if where else f"what {what} holds" if what.startswith("a") else what
        if not self._quiet and told not in self.unseen and len(self.unseen) < _MOST_TOLD:
            self.unseen.append(told)


_CACHED = type(functools.cache(repr))
_C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
# What a class has besides values: what is written in Python, and what is not and so carries nothing.
_PYTHON_MEMBERS = (
    types.FunctionType,
    types.MethodType,
    staticmethod,
    classmethod,
    property,
    partial,
    functools.partialmethod,
    functools.cached_property,
    functools.singledispatchmethod,
    _CACHED,
)
_C_MEMBERS = (types.MemberDescriptorType, types.GetSetDescriptorType, *_C_FUNCTIONS)
_MADE_FROM_FIELDS = frozenset(
    (
        "__init__",
        "__new__",
        "__repr__",
        "__eq__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__hash__",
        "__setattr__",
        "__delattr__",
        "__getnewargs__",
        "__replace__",
        "__getstate__",
        "__setstate__",
        "_make",
        "_replace",
        "_asdict",
    )
)
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
