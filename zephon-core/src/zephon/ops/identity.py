"""User code as a short text for fingerprints: advice that it has changed, and no proof that it has not.

The text is made of source texts and of the values that code carries, never of addresses, so it is the same in every
process and under every hash seed. docs/your-code.md says what is seen of a function and what is not.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import linecache
import pickle
import re
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any

_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"zephon", "numpy", "pyarrow"}


def name_of(function: Any) -> str:
    """What messages call a function, or an object that is called like one."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def identity_of(function: Any) -> tuple[str, list[str]]:
    """(name and digest of a function or object, types of values in it that the digest cannot tell apart).

    An attribute `version` counts too, and takes the place of such values.
    """
    version = getattr(function, "version", "")
    opaque: set[str] = set()
    text = f"{name_of(function)} {_digest(function, opaque)[:12]}"
    return (f"{text} version {version}", []) if version else (text, sorted(opaque))


def _digest(value: Any, opaque: set[str], inside: frozenset[int] = frozenset()) -> str:
    """A digest of a value by its content; for one that cannot be pickled its type, which is added to `opaque`.

    Args:
        inside: ids of the functions and classes that carry the value.
    """
    content = io.BytesIO()
    try:
        _Pickler(content, opaque, inside).dump(value)
    except Exception:
        opaque.add(type(value).__name__)
        return f"some {type(value).__qualname__}"
    return hashlib.sha256(content.getvalue()).hexdigest()


class _Pickler(pickle.Pickler):
    """Pickles values for their digest: code by its source text, sets in an order that no hash seed changes."""

    def __init__(self, file: io.BytesIO, opaque: set[str], inside: frozenset[int]) -> None:
        super().__init__(file, protocol=4)
        self.fast = True  # equal values give equal bytes, whether or not they are one object
        self._opaque, self._inside = opaque, inside

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return "set", sorted(_digest(item, self._opaque, self._inside) for item in value)
        if isinstance(value, ModuleType):
            return "module", value.__name__
        if isinstance(value, FunctionType | type):
            return self._code(value)
        return ("wrapper", value.__wrapped__) if hasattr(value, "__wrapped__") else None

    def _code(self, value: Any) -> tuple[Any, ...]:
        """Source texts of a function or class, and what a function carries."""
        if _is_library(value):
            return "library", value.__module__, value.__qualname__, getattr(value, "__wrapped__", None)
        if id(value) in self._inside:
            return "itself", value.__qualname__
        carried: list[Any] = []
        if isinstance(value, FunctionType):
            carried = [value.__defaults__, value.__kwdefaults__, vars(value)]
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            carried += [cell.cell_contents for name, cell in cells if name != "__class__"]
        inside = self._inside | {id(value)}
        return "code", _sources(value, self._opaque), [_digest(each, self._opaque, inside) for each in carried]


def _is_library(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] in _LIBRARIES


def _sources(value: Any, opaque: set[str]) -> list[tuple[str, str]]:
    """Names and sources of a function or class, of its bases, and of what they name of its module, directly or not."""
    scope = vars(sys.modules.get(value.__module__, sys))
    if isinstance(value, FunctionType):
        scope = value.__globals__
    sources: dict[int, tuple[str, str]] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        each = getattr(each, "__wrapped__", each) if not isinstance(each, FunctionType | type) else each
        if id(each) in sources or not isinstance(each, FunctionType | type) or _is_library(each):
            continue
        try:
            source = _source(each)
        except (OSError, TypeError):
            source = ""
            opaque.add("code without a source")
        sources[id(each)] = each.__qualname__, source
        words = set(re.findall(r"\w+", source)) & scope.keys()
        named = [scope[word] for word in words]
        waiting += [other for other in named if getattr(other, "__module__", None) == value.__module__]
        waiting += each.__mro__ if isinstance(each, type) else []
    return sorted(sources.values())


def _source(value: Any) -> str:
    """Source text of a function or class, of a lambda the lines that it stands on, and what it is of them where they
    have several; OSError where there is none."""
    # The code of a wrapper made by functools.wraps; the wrapper itself would give the source of what it wraps.
    code = getattr(value, "__code__", value)
    if isinstance(value, type) or value.__name__ != "<lambda>":
        return textwrap.dedent(inspect.getsource(code))
    last = max(end or 0 for _, end, _, _ in code.co_positions())
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    if not lines:
        raise OSError
    text = textwrap.dedent("".join(lines))
    if text.count("lambda") == 1:
        return text
    places = [place for place in code.co_positions() if None not in place and place[2] != place[3]]
    return f"{text}{min(places)} to {max(place[1::2] for place in places)}"
