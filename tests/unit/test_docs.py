"""Examples of the documentation run, commands are as they say, links lead somewhere, messages are those of the code."""

import ast
import json
import re
import shlex
import sys
import tomllib

import pytest
import typer

from support.chat_data import CHATML, write_chat_tokenizer
from support.pages import PAGES, ROOT, blocks, name_of, run_examples
from zephon.cli.app import app
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

sys.path.insert(0, str(ROOT / "tools"))

from figures import FIGURES, cpu_times

DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    """The examples of a page in order, each with what the ones before have made, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    run_examples(page, tmp_path)


@pytest.mark.deep
def test_the_first_five_minutes_end_with_a_proof(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_examples(DOCS / "start.md", tmp_path, deep=True)
    lines = names["output"].splitlines()
    assert "all 4 runs gave the same 4 global batches" in lines
    assert lines.index("all 2 runs are identical over the 3 steps that they share") > 0
    losses = re.findall(r"step:\s+(\d+)\D+?loss:\s+([\d.]+)", re.sub(r"\x1b\[[\d;]*m", "", names["output"]))
    for step in ("4", "5", "6"):
        assert len({f"{float(loss):.3f}" for at, loss in losses if at == step}) == 1
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_example_of_the_core_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = (code for language, code, _ in blocks(ROOT / "zephon-core" / "README.md") if language == "python")
    exec(code, {})


class Enough(Exception):
    """Ends the training loop of an example."""


def test_examples_of_the_readme_run_as_written(tmp_path, monkeypatch):
    """That of a pipeline and that of operators, with files, tokenizers and a source of the kind that they name."""
    monkeypatch.chdir(tmp_path)
    texts = [f"Document {n}: " + "some words go on and on. " * 20 for n in range(200)]
    for name in ("wiki", "news"):
        (tmp_path / "data" / name).mkdir(parents=True)
        rows = "".join(json.dumps({"text": f"{name} {text}"}) + "\n" for text in texts)
        (tmp_path / "data" / name / "a.jsonl").write_text(rows)
    for name in ("gpt2", "my-tokenizer"):
        write_chat_tokenizer(tmp_path / name, CHATML)
    shapes = []

    def train_step(fields):
        shapes.append({name: tuple(each.shape) for name, each in fields.items()})
        raise Enough

    web = Dataset.from_dict("web", {"text": texts, "language": ["en", "de"] * 100})
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes. " * 30}]
    chat = Dataset.from_dict("chat", {"messages": [talk] * 50})
    page = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    first, second = (
        code for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "Pipeline(source)" in code
    )
    names = {"rank": 3, "train_step": train_step}
    with pytest.raises(Enough):
        exec(first, names)
    assert shapes == [dict.fromkeys(("input_ids", "labels", "position_ids"), (8, 2048))]
    names["source"] = StaticMixtureWorkSource(datasets=[web, chat])
    exec(second, names)
    assert len(next(iter(names["pipeline"]))) == 8 and names["pipeline"].mixture()["web"].dropped > 0
    assert min(each.given for each in names["pipeline"].mixture().values()) > 0
    names["pipeline"].close()


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
