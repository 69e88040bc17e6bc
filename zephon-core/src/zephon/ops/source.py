"""The source text of functions and classes, found by where the interpreter says that its code came from.

`inspect.getsource` gives the first line of a lambda that has several, one line for all lambdas in it, and what a
decorator wraps in place of the wrapper. Here the file is parsed, and the function is the node at the very position of
its code. What a node names of its own module (other functions, classes, assignments) is found as well: by its text,
which is the same in every process, where a value may be another one on every rank.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

__all__ = ["Source", "current_values", "source_of_class", "source_of_code"]

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


@dataclass(frozen=True, slots=True)
class Source:
    """What a function or class says.

    Attributes:
        text: its own text, decorators included, whatever its indentation.
        named: name and text of what it names of its module, directly or through others of these, by name.
        constants: those of the names that are given nothing but a literal there, once and for all.
    """

    text: str
    named: tuple[tuple[str, str], ...]
    constants: tuple[str, ...]


def source_of_code(code: types.CodeType) -> Source | None:
    """That of a function; None where there is none, or where it is not the one that was run."""
    module = _module_at(code)
    if module is None:
        return None
    if code.co_name == "<lambda>":
        node = _lambda_of(code, module.lambdas.get(code.co_firstlineno, []))
        return None if node is None else module.described([module.lambda_text(node)], _global_reads(code))
    found = module.functions.get((code.co_firstlineno, code.co_name))
    return None if found is None else module.described([module.text(found)], module.reads(found))


def source_of_class(kind: type) -> Source | None:
    """That of a class: where its methods stand, or without any what has its name; None where there is none."""
    module, nodes = None, dict[int, ast.ClassDef]()
    for member in list(vars(kind).values()):
        # Behind a static method, class method or property.
        value = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if not isinstance(value, types.FunctionType) or value.__globals__.get("__name__") != kind.__module__:
            continue  # a value, or taken over from a class elsewhere
        here = _module_at(value.__code__)
        owner = here.owners.get((value.__code__.co_firstlineno, value.__code__.co_name)) if here else None
        if owner is not None and module in (None, here):
            module, nodes[owner.lineno] = here, owner
    if module is None:
        module = _module_at(sys.modules.get(kind.__module__))
        if module is not None:
            nodes = {node.lineno: node for node in module.classes.get(kind.__qualname__, [])}
    if module is None or not nodes:
        return None
    ordered = [nodes[line] for line in sorted(nodes)]
    reads = {name for node in ordered for name in module.reads(node)}
    return module.described([module.text(node) for node in ordered], reads)


def _module_at(subject: types.CodeType | types.ModuleType | None) -> _Module | None:
    """The file that it came from, as it is now."""
    if subject is None:
        return None
    try:
        lines = inspect.findsource(subject)[0]
        return _parsed("".join(lines))
    except (OSError, TypeError, IndexError, SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=4)  # a file of 3,000 lines takes some MB
def _parsed(text: str) -> _Module:
    return _Module(text)


def _lambda_of(code: types.CodeType, nodes: Iterable[ast.Lambda]) -> ast.Lambda | None:
    """The one of those that begin in its line whose body has all of the code; None where that cannot be told."""
    arguments = code.co_argcount + code.co_kwonlyargcount
    places = [place for place in code.co_positions() if None not in place and place[:3:2] != place[1::2]]
    places = [place for place in places if place[2:] != (0, 0)]  # of the function, not of what it does
    fitting = []
    for node in nodes:
        given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        start, end = (node.body.lineno, node.body.col_offset), (node.body.end_lineno, node.body.end_col_offset)
        if tuple(given) == code.co_varnames[:arguments] and all(
            start <= (line, column) and (last, end_column) <= end for line, last, column, end_column in places
        ):
            fitting.append((start, node))
    if not places and len(fitting) > 1:  # no columns are known (python -X no_debug_ranges)
        return None
    return max(fitting, key=lambda each: each[0])[1] if fitting else None  # the innermost


def _global_reads(code: types.CodeType) -> set[str]:
    """Names that it looks up outside of functions."""
    reads = {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL_READS}
    return reads.union(*(_global_reads(each) for each in code.co_consts if isinstance(each, types.CodeType)))


@dataclass(slots=True)
class _Binding:
    """A statement that gives a name a value."""

    text: str
    reads: set[str]
    literal: bool = False


@dataclass(slots=True)
class _Walk:
    """What a walk through a file finds."""

    functions: dict[tuple[int, str], _Definition] = field(default_factory=dict)  # by first line and name
    owners: dict[tuple[int, str], ast.ClassDef] = field(default_factory=dict)  # of those that are methods
    classes: dict[str, list[ast.ClassDef]] = field(default_factory=dict)
    lambdas: dict[int, list[ast.Lambda]] = field(default_factory=dict)
    reset: set[str] = field(default_factory=set)  # names that functions declare global

    def through(self, node: ast.AST, path: str, owner: ast.ClassDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            inner, inside = path, owner if isinstance(child, ast.stmt) else None
            if isinstance(child, ast.Lambda):
                self.lambdas.setdefault(child.lineno, []).append(child)
            elif isinstance(child, ast.Global):
                self.reset.update(child.names)
            elif isinstance(child, ast.ClassDef):
                self.classes.setdefault(path + child.name, []).append(child)
                inner, inside = f"{path}{child.name}.", child
            elif isinstance(child, _FUNCTION_NODES):
                key = _first_line(child), child.name
                self.functions[key] = child
                if owner is not None:
                    self.owners[key] = owner
                inner, inside = f"{path}{child.name}.<locals>.", None
            self.through(child, inner, inside)


class _Module:
    """A source file, parsed."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        walk = _Walk()
        walk.through(tree, "", None)
        self.functions, self.owners = walk.functions, walk.owners
        self.classes, self.lambdas = walk.classes, walk.lambdas
        self._lines = text.split("\n")
        # Unlike the code that runs it is the same with python -O.
        whole = compile(text, "<source>", "exec", dont_inherit=True, optimize=0)
        self._codes = {(code.co_firstlineno, code.co_name): code for code in _all_codes(whole)}
        self._bindings: dict[str, list[_Binding]] = {}
        for name, binding in self._bound(tree.body):
            self._bindings.setdefault(name, []).append(binding)
        self._constants = {
            name for name, all_of_it in self._bindings.items() if all(each.literal for each in all_of_it)
        } - walk.reset

    def described(self, texts: list[str], reads: Iterable[str]) -> Source:
        named: dict[str, str] = {}
        open_names = [name for name in reads if name in self._bindings]
        while open_names:
            name = open_names.pop()
            if name in named:
                continue
            bindings = self._bindings[name]
            named[name] = "\n".join(each.text for each in bindings)
            open_names += [other for each in bindings for other in each.reads if other in self._bindings]
        return Source("\n".join(texts), tuple(sorted(named.items())), tuple(sorted(self._constants & set(named))))

    def reads(self, node: _Definition) -> set[str]:
        """Names of the module that a function or class looks up, also while it is made."""
        code = self._codes.get((_first_line(node), node.name))
        outer: list[ast.AST] = list(node.decorator_list)
        if isinstance(node, ast.ClassDef):
            outer += [*node.bases, *(each.value for each in node.keywords)]
        else:
            outer += [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
        names = {each.id for part in outer for each in ast.walk(part) if isinstance(each, ast.Name)}
        return names if code is None else names | _global_reads(code)

    def text(self, node: ast.stmt) -> str:
        """The lines of a statement without its indentation."""
        first, last, inside = _first_line(node), node.end_lineno or node.lineno, _in_texts(node)
        lines = self._lines[first - 1 : last]
        indent = len(lines[0]) - len(lines[0].lstrip())
        return "\n".join(
            line if first + n in inside or line[:indent].strip() else line[indent:].rstrip("\r")
            for n, line in enumerate(lines)
        )

    def lambda_text(self, node: ast.Lambda) -> str:
        """That of a lambda alone, wherever its lines begin."""
        inside, last = _in_texts(node), node.end_lineno or node.lineno
        made = []
        for number in range(node.lineno, last + 1):
            line = self._lines[number - 1].encode()
            line = line[: node.end_col_offset] if number == last else line
            line = line[node.col_offset :] if number == node.lineno else line
            made.append(line.decode() if number in inside else line.decode().lstrip().rstrip("\r"))
        return "\n".join(made)

    def _bound(self, body: Iterable[ast.stmt]) -> Iterator[tuple[str, _Binding]]:
        """Names that statements of the module give a value, and how."""
        for node in body:
            if isinstance(node, _Definition):
                yield node.name, _Binding(self.text(node), self.reads(node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                origin = f"from {'.' * node.level}{node.module or ''} " if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0], _Binding(f"{origin}import {alias.name}", set())
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                plain = not isinstance(node, ast.AugAssign) and _is_literal(node.value)
                binding = _Binding(
                    self.text(node), {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}, plain
                )
                for name in {each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}:
                    yield name, binding
            else:  # if, try, with, for: what is in them is of the module too
                for target in (
                    getattr(node, "target", None),
                    *(each.optional_vars for each in getattr(node, "items", ())),
                ):
                    for each in ast.walk(target) if target is not None else ():
                        if isinstance(each, ast.Name):
                            yield each.id, _Binding("", set())
                for part in ("body", "orelse", "finalbody"):
                    yield from self._bound(getattr(node, part, ()))
                for handler in getattr(node, "handlers", ()):
                    yield from self._bound(handler.body)


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(each.lineno for each in decorators)])


def _in_texts(node: ast.AST) -> set[int]:
    """Lines that begin within a text, so that their blanks belong to it."""
    return {
        line
        for each in ast.walk(node)
        if isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for line in range(each.lineno + 1, (each.end_lineno or each.lineno) + 1)
    }


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _all_codes(each)


def current_values(source: Source, scope: dict[str, Any]) -> dict[str, Any]:
    """What the constants of a source are now: numbers and texts may have been set from elsewhere."""
    return {f"global {name}": scope[name] for name in source.constants if _is_fixed(scope.get(name, []))}


def _is_fixed(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_fixed, value))
    return value is None or type(value) in (int, float, complex, str, bytes, bool)
