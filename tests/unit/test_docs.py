"""Examples of the documentation run, commands are as they say, links lead somewhere, messages are those of the code."""

import ast
import re
import shlex
import sys
import tomllib

import pytest
import typer

from support.pages import PAGES, ROOT, blocks, name_of, run_page, snippet_of
from support.snippets import SNIPPETS
from zephon.cli.app import app

sys.path.insert(0, str(ROOT / "tools"))

from figures import FIGURES, cpu_times

DOCS = ROOT / "docs"


def pages(*, deep):
    """Pages with blocks that are run here, in the deep tests or in the others."""
    chosen = {ROOT / each.page for each in SNIPPETS if each.deep == deep and not each.test}
    if not deep:
        chosen |= {page for page in PAGES if any(code.startswith("# run\n") for _, code, _ in blocks(page))}
    return [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.frameworks] * (page.name == "README.md"))
        for page in PAGES
        if page in chosen
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", pages(deep=False))
def test_blocks_of_a_page_run_as_written(page, tmp_path, monkeypatch, request):
    """In order, each with what the ones before have made, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path, request.getfixturevalue)


@pytest.mark.deep
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", pages(deep=True))
def test_all_blocks_of_a_page_run_as_written(page, tmp_path, monkeypatch, request):
    """With those that take long: trainers, and commands of many steps."""
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path, request.getfixturevalue, deep=True)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_first_five_minutes_end_with_a_proof(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    printed = run_page(DOCS / "start.md", tmp_path, request.getfixturevalue, deep=True).printed
    lines = printed.splitlines()
    assert "all 4 runs gave the same 4 global batches" in lines
    assert lines.index("all 2 runs are identical over the 3 steps that they share") > 0
    losses = re.findall(r"step:\s+(\d+)\D+?loss:\s+([\d.]+)", re.sub(r"\x1b\[[\d;]*m", "", printed))
    for step in ("4", "5", "6"):
        assert len({f"{float(loss):.3f}" for at, loss in losses if at == step}) == 1
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_every_block_of_every_page_is_run_by_a_test():
    """It begins with "# run", or has an entry in support/snippets.py; no entry is left over, and its test takes it."""
    used = [snippet_of(name_of(page), code) for page in PAGES for _, code, _ in blocks(page)]
    assert sorted(map(id, filter(None, used))) == sorted(map(id, SNIPPETS))
    for snippet in SNIPPETS:
        where = f"{snippet.page}, {snippet.begins!r}"
        assert bool(snippet.put) == bool(snippet.why), f"{where}: what is put into a block has a reason"
        if snippet.test:
            assert not (snippet.given or snippet.then or snippet.script or snippet.deep), where
            assert (snippet.page, snippet.begins) in taken_by(snippet.test), f"{where}: {snippet.test} does not take it"
        assert snippet.test or snippet.then or snippet.script or language_of(snippet) == "sh", f"{where}: not checked"


def language_of(snippet):
    (language,) = (of for of, code, _ in blocks(ROOT / snippet.page) if code.startswith(snippet.begins))
    return language


def taken_by(test):
    """(Page, begin) of the blocks that a test file takes by `text_of`, or lists for it, if it has the test."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{test} does not exist"
    texts = [
        [part.value for part in parts if isinstance(part, ast.Constant)]
        for node in ast.walk(tree)
        if (parts := getattr(node, "args" if isinstance(node, ast.Call) else "elts", None)) and isinstance(parts, list)
    ]
    return {tuple(each[:2]) for each in texts if len(each) >= 2}


def test_a_block_without_an_entry_is_found():
    with pytest.raises(AssertionError, match="has 0 entries"):
        snippet_of("docs/mixtures.md", "print('new')\n")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_all_pages_is_valid(page):
    """Python compiles, TOML parses, and the commands have the options that they are shown with."""
    for language, code, line in blocks(page):
        where = f"{name_of(page)}, line {line + 1}"
        if language == "python":
            compile(code, where, "exec")
        elif language == "toml":
            tomllib.loads(code)
        elif language == "sh":
            for command in commands(code):
                check_command(command, where)


def commands(code):
    """The words of every call of `zephon` in a shell script."""
    for line in code.replace("\\\n", " ").splitlines():
        if re.match(r"\s*(\S*/)?zephon ", line):
            yield shlex.split(line, comments=True)[1:]


def check_command(words, where):
    group = typer.main.get_command(app)
    if words[0].startswith("-"):
        known = {option for parameter in group.params for option in parameter.opts}
        assert set(words) <= known, f"{where}: {words} are no options of zephon"
        return
    assert words[0] in group.commands, f"{where}: zephon has no command {words[0]}"
    command = group.commands[words[0]]
    command.make_parser(command.context_class(command)).parse_args(list(words[1:]))


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if page.parent == DOCS and target.startswith("figures/"):
                assert re.fullmatch(rf"figures/({'|'.join(FIGURES)})\.svg", target), f"{page.name} shows {target}"
            else:
                assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_every_figure_is_shown():
    shown = set(re.findall(r"\(figures/(\w+)\.svg\)", "".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert shown == set(FIGURES)


# Messages


def text_of(node):
    """The text of a literal, with "…" for what is put in, or None."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def literals():
    """Every text in the code of the packages."""
    for path in ROOT.glob("*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if text := text_of(node):
                yield text


def test_messages_of_the_page_on_troubleshooting_are_those_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.*)`$", page, re.M)
    assert len(headings) >= 30 and len(headings) == page.count("\n### ")
    texts = "\0".join(literals())
    for heading in headings:
        parts = [re.escape(part) for part in heading.split("…")]
        assert re.search("[^\0]*?".join(parts), texts), f"no message is like {heading}"


def test_a_message_that_is_in_no_code_is_told_from_those_that_are():
    texts = "\0".join(literals())
    assert not re.search("the lanes are[^\0]*?tired", texts)


def test_figures_of_the_comparison_are_those_of_the_benchmark():
    page = (DOCS / "comparison.md").read_text(encoding="utf-8")
    measured = dict(cpu_times())
    tables = re.findall(r"\| CPU ms/M tokens \|\n\|[-:| ]+\n((?:\|.*\n)+)", page)
    assert len(tables) == 2
    for table in tables:
        shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        assert {name: measured[name] for name, _ in shown} == {name: float(n.replace(",", "")) for name, n in shown}
        assert [name for name, _ in shown] == sorted((name for name, _ in shown), key=measured.get)
