"""Every example of the documentation that says so runs."""

import re
from pathlib import Path

import pytest

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


def test_links_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
