"""The pages of the documentation, and their blocks of code run as a reader would.

A block that begins with "# run" is run as it stands. Every other one has an entry in `support.snippets`: what it takes
for granted, what is replaced in it, and what is checked after it; or the test that takes it from the page.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", *sorted(ROOT.glob("*-zephon/README.md"))]
PAGES.append(ROOT / "zephon-core" / "README.md")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL_SECONDS = 1500


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, str, int]]:
    """Language, text and first line of every block of code."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield match[1], match[2], text.count("\n", 0, match.start(2))


@dataclass
class Place:
    """Where the blocks of a page run, one after the other: an empty folder, which is the current one.

    Attributes:
        fixture: the value of a fixture of pytest, by its name.
        names: names of Python, kept from block to block.
        values: those of the expressions of the last block of Python; of TOML and the like, the file's content.
        file: the last recipe.
        output: what the last block of shell printed.
        printed: what all of them did.
    """

    folder: Path
    fixture: Callable[[str], Any]
    names: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    file: Path = Path()
    output: str = ""
    printed: str = ""

    @property
    def setenv(self) -> Callable[[str, str], None]:
        return self.fixture("monkeypatch").setenv

    def shell(self, code: str, where: str = "") -> None:
        """Run a script of bash, which ends where a command fails, with the programs of this interpreter."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=SHELL_SECONDS,
        )
        self.output = ran.stdout + ran.stderr
        self.printed += self.output
        assert ran.returncode == 0, f"{where}: {self.output[-8000:]}"


Act = Callable[[Place], object]


@dataclass(frozen=True)
class Snippet:
    """A block of a page that does not begin with "# run".

    Attributes:
        page, begins: the only block of the page that begins with this text.
        given: makes what the block takes for granted.
        then: checks what it did. A recipe gives a batch without that.
        put: text of the block, and what stands in its place: addresses, paths, numbers of processes and of steps, and
            what this machine cannot do.
        why: in a clause, why something is put in its place.
        script: Python before and after the block, which is then a script of its own.
        deep: it takes long, and is run by the deep tests.
        test: the test that runs it instead, which has its text from `text_of`.
    """

    page: str
    begins: str
    given: Act | None = None
    then: Act | None = None
    put: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    script: tuple[str, str] | None = None
    deep: bool = False
    test: str = ""


def snippet_of(page: str, code: str) -> Snippet | None:
    """The entry of a block, or None for one that begins with "# run"."""
    from support.snippets import SNIPPETS

    found = [each for each in SNIPPETS if each.page == page and code.startswith(each.begins)]
    if re.match(r"# run(?: \(deep\))?\n", code):
        assert not found, f"{page}: {code.splitlines()[0]!r} needs no entry in tests/support/snippets.py"
        return None
    assert len(found) == 1, f"{page}: the block {code[:80]!r} has {len(found)} entries in tests/support/snippets.py"
    return found[0]


def text_of(page: str, begins: str) -> str:
    """The block of a page, for the test that its entry names; with what is put in place of parts of it."""
    (code,) = (code for _, code, _ in blocks(ROOT / page) if code.startswith(begins))
    snippet = snippet_of(page, code)
    assert snippet is not None and snippet.begins == begins
    return replaced(snippet, code)


def replaced(snippet: Snippet, code: str) -> str:
    for old, new in snippet.put.items():
        assert old in code, f"{snippet.page}: the block {snippet.begins!r} has no {old!r}"
        code = code.replace(old, new)
    return code


def run_page(page: Path, folder: Path, fixture: Callable[[str], Any], *, deep: bool = False) -> Place:
    """Run the blocks of a page in order, in `folder`, which is the current one; the deep ones with `deep`."""
    place = Place(folder, fixture, {"__name__": page.stem, "islice": islice})
    for language, code, line in blocks(page):
        snippet = snippet_of(name_of(page), code)
        if snippet is None:
            snippet = Snippet(name_of(page), code, deep=code.startswith("# run (deep)"))
        if snippet.test or (snippet.deep and not deep):
            continue
        if snippet.given:
            snippet.given(place)
        _run(place, snippet, language, replaced(snippet, code), line)
        if snippet.then:
            snippet.then(place)
    return place


def _run(place: Place, snippet: Snippet, language: str, code: str, line: int) -> None:
    where = f"{snippet.page}, line {line + 1}"
    if language == "python" and snippet.script:
        before, after = snippet.script
        (place.folder / "script.py").write_text(f"{before}\n{code}\n{after}\n", encoding="utf-8")
        place.shell("python script.py", where)
    elif language == "python":
        run_python(place, code, snippet.page, line)
    elif language == "sh":
        place.shell(code, where)
    elif language in ("toml", "yaml", "json"):
        place.values = [tomllib.loads(code) if language == "toml" else yaml.safe_load(code)]
        named = re.match(r"# ([\w-]+\.toml)\n", code)
        place.file = place.folder / (named[1] if named else f"recipe.{language}")
        place.file.write_text(code, encoding="utf-8")
        assert snippet.then, f"{where}: nothing is done with this {language}"
    else:
        pytest.fail(f"{where}: a block of {language} cannot be run")


def run_python(place: Place, code: str, page: str, line: int = 0) -> None:
    """Run Python with the names of the place; errors name the line of the page."""
    place.values = place.names["_values"] = []
    tree = ast.parse("\n" * line + code, page)
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.Expr):
            call = ast.Call(ast.Attribute(ast.Name("_values", ast.Load()), "append", ast.Load()), [node.value], [])
            tree.body[number] = ast.copy_location(ast.Expr(call), node)
    exec(compile(ast.fix_missing_locations(tree), page, "exec"), place.names)
