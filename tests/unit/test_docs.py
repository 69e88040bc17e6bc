"""Every example of the documentation that says so runs."""

import json
import re
from pathlib import Path

import pytest

from support.chat_data import CHATML, write_chat_tokenizer
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"^```python\n(# run\n.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    """The examples of a page in order, each with what the ones before have made, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names = {"__name__": page.stem}
    for match in EXAMPLE.finditer(text):
        line = text.count("\n", 0, match.start(1))
        code = compile("\n" * line + match[1], str(page), "exec")  # so that errors name the line of the page
        exec(code, names)


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


def test_links_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
