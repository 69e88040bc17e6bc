"""The hook of mkdocs.yml: pages that are made, and what differs between a page in the repository and on the site.

The pages of docs/ are plain Markdown and can be read as they lie there. On the site the front page is README.md,
figures are drawn (tools/figures.py), the API pages come from docstrings, and links to other files of the repository
lead to pages of the site. What cannot be resolved is a warning, and `mkdocs build --strict` fails on warnings.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from figures import FIGURES, svg_of
from promises import read_promises

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "torchtitan.md": "torchtitan-zephon/README.md",
    "megatron.md": "megatron-zephon/README.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site that are files elsewhere in the repository."""
FOLDERS = {
    "recipes": (
        "Example recipes",
        "They run as they stand once `make demo` has built its corpus: see the first lines.",
    ),
    "examples": ("Example programs", "Run them from the project's folder, as in `python -m examples.demo`."),
}
"""Folders whose files have a page together."""
TRAINERS = ("huggingface.md", "lightning.md", "pytorch.md", "automodel.md", "your-own-integration.md")
API = {
    "zephon": "zephon-core/src/zephon/__init__.py",
    "zephon.io": "zephon-core/src/zephon/io.py",
    "zephon.work": "zephon-core/src/zephon/work.py",
    "zephon.loader": "zephon-core/src/zephon/loader.py",
    "zephon.errors": "zephon-core/src/zephon/errors.py",
    "zephon.integrations": "zephon-core/src/zephon/integrations/__init__.py",
    "zephon.integrations.automodel": "zephon-core/src/zephon/integrations/automodel.py",
    "zephon.integrations.hugging_face": "zephon-core/src/zephon/integrations/hugging_face.py",
    "zephon.integrations.lightning": "zephon-core/src/zephon/integrations/lightning.py",
    "zephon.integrations.trl": "zephon-core/src/zephon/integrations/trl.py",
    "torchtitan_zephon": "torchtitan-zephon/src/torchtitan_zephon/__init__.py",
    "megatron_zephon": "megatron-zephon/src/megatron_zephon/__init__.py",
}
KEYED = {"DataRecipe", "Source"}
"""Classes whose fields are the keys of a recipe, which has a page of its own."""
OF_KEYS = "\n    options: {merge_init_into_class: false}"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
FILE_NAME = re.compile(r"\[(?:docs/)?([\w-]+\.md)\](?=\()")
FENCE = re.compile(r"^(```\w+\n)# run(?: \(deep\))?\n", re.MULTILINE)

_log = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: pages of trainers and guides that are there, and the API."""
    nav = {title: part for each in config.nav or [] for title, part in each.items()}
    named = set(re.findall(r"[\w-]+\.md", str(config.nav)))
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    nav["Trainers"] += [name for name in TRAINERS if name in pages and name not in named]
    nav["Guides"] += [name for name in pages if name not in named and name not in TRAINERS]
    for each in nav["Reference"]:
        if "API" in each:
            each["API"] = [{module: f"api/{module}.md"} for module in _modules()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures that are made."""
    made: dict[str, str | bytes] = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in PAGES.items()}
    made |= {f"api/{module}.md": _api_page(module) for module in _modules()}
    made |= {f"{folder}.md": _folder_page(folder, *head) for folder, head in FOLDERS.items()}
    made["promises.md"] = _promises_page()
    made |= {f"figures/{name}.svg": svg_of(name) for name in FIGURES}
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links of the site, named by titles, and without the marks of examples that tests run."""
    uri = page.file.src_uri
    source = PAGES.get(uri, f"docs/{uri}")
    for number in glued_lists(markdown):
        _log.warning("%s:%d: a list follows a paragraph without an empty line", source, number)

    def resolved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        anchor = match[2] or ""
        for name, elsewhere in PAGES.items():
            if target == elsewhere:
                return posixpath.relpath(name, posixpath.dirname(uri) or ".") + anchor
        folder, _, name = target.partition("/")
        if folder in FOLDERS:
            return f"{folder}.md#{_slug(name)}" if name else f"{folder}.md"
        if target == "tests/promises.toml":
            return "promises.md"
        if target.startswith("docs/"):
            return posixpath.relpath(target, posixpath.join("docs", posixpath.dirname(uri))) + anchor
        _log.warning("%s links to %s, for which the site has no page", source, match[1])
        return match[0]

    def titled(match: re.Match[str]) -> str:
        path = ROOT / "docs" / match[1]
        if not path.is_file():
            return match[0]
        return f"[{path.read_text(encoding='utf-8').splitlines()[0].strip('# ')}]"

    return FENCE.sub(r"\1", LINK.sub(resolved, FILE_NAME.sub(titled, markdown)))


def glued_lists(markdown: str) -> list[int]:
    """Lines where a list follows a paragraph at once, which Markdown elsewhere takes for a list and mkdocs does not."""
    lines, found, is_code = markdown.split("\n"), [], False
    item = re.compile(r"\s*([-*]|\d+\.) ")
    for number, line in enumerate(lines):
        is_code ^= line.lstrip().startswith("```")
        before = lines[number - 1] if number else ""
        if not is_code and item.match(line) and before.strip() and not item.match(before) and before[0] not in " <":
            found.append(number + 1)
    return found


def exported(path: Path) -> list[str]:
    """The names in a module's `__all__`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def _modules() -> list[str]:
    return [module for module, path in API.items() if (ROOT / path).is_file() and exported(ROOT / path)]


def _api_page(module: str) -> str:
    path = ROOT / API[module]
    head = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    elsewhere = [] if module == "zephon" else exported(ROOT / API["zephon"])
    names = [name for name in exported(path) if not name.startswith("__") and name not in elsewhere]
    if module == "zephon":  # the errors have a page of their own
        names = [name for name in names if not name.endswith("Error")]
    if module == "zephon.errors":
        names = exported(path)
    parts = [f"# {module}", head, *(f"::: {module}.{name}{OF_KEYS * (name in KEYED)}" for name in names)]
    return "\n\n".join(parts) + "\n"


def _folder_page(folder: str, title: str, text: str) -> str:
    parts = [f"# {title}", text]
    for path in sorted((ROOT / folder).glob("[!_]*.*")):
        language = {".toml": "toml", ".jinja": "jinja", ".py": "python", ".yaml": "yaml"}[path.suffix]
        parts.append(f"## {path.name}\n\n```{language}\n{path.read_text(encoding='utf-8').rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _promises_page() -> str:
    promises: dict[str, list[Any]] = {}
    for promise in read_promises():
        promises.setdefault(promise.page, []).append(promise)
    parts = ["# Promises and their tests", "What the documentation promises, page by page, and the tests that show it."]
    for page, of_page in promises.items():
        lines = ["- " + promise.says.replace("<", "&lt;").replace("[", "\\[") for promise in of_page]
        tests = ["; ".join(f"`{test.rpartition('::')[2]}`" for test in promise.tests) or "none" for promise in of_page]
        parts.append(f"## {page}\n\n" + "\n".join(f"{a} ({b})" for a, b in zip(lines, tests, strict=True)))
    return "\n\n".join(parts) + "\n"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\s-]", "", heading).strip().lower()
