"""The documentation as a site: builds without network and warnings, and its pages need nothing from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from support.pages import ROOT

LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
RELATIONS = {"stylesheet", "preload", "preconnect", "icon", "modulepreload", "dns-prefetch"}


class Page(HTMLParser):
    """What a page loads, where it links to, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "link" and RELATIONS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        elif tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    blocked = folder / "blocked"  # no network: a socket is an error in every process of the build
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import socket\n\ndef refuse(*arguments):\n    raise OSError('no network')\n\n"
        "socket.socket.connect = refuse\nsocket.getaddrinfo = refuse\n"
    )
    path = os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])
    command = ["bash", ROOT / "scripts/docs", folder / "site"]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=280
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "site"


def pages_of(site):
    return {page: Page(page.read_text(encoding="utf-8")) for page in site.rglob("*.html") if page.name != "404.html"}


def test_the_site_builds_without_warnings_and_has_its_parts(site):
    names = {page.relative_to(site).as_posix() for page in pages_of(site)}
    parts = "index start how-it-works packing recipe recipes troubleshooting performance comparison limits changelog"
    assert {f"{name}.html" for name in [*parts.split(), "promises", "torchtitan", "megatron", "command"]} <= names
    assert {f"api/{name}.html" for name in ("zephon", "zephon.io", "zephon.work", "zephon.loader")} <= names
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= names
    api = (site / "api/zephon.html").read_text(encoding="utf-8")
    assert 'id="zephon.Pipeline.checkpoint"' in api and 'id="zephon.Pipeline.restore"' in api
    start = (site / "start.html").read_text(encoding="utf-8")
    assert "# run" not in re.sub(r"<[^>]+>", "", start), "marks of tests are not for readers"


def test_pages_load_nothing_from_elsewhere(site):
    for name, page in pages_of(site).items():
        for target in page.loads:
            assert not re.match(r"(\w+:)?//", target), f"{name.name} loads {target}"
            assert (name.parent / target.partition("?")[0]).is_file(), f"{name.name} loads {target}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", text), f"{sheet.name} loads from elsewhere"


def test_links_and_anchors_within_the_site_exist(site):
    pages = pages_of(site)
    checked = 0
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"\w+:", link) or link in ("", "."):
                continue
            target, _, anchor = link.partition("#")
            other = (name.parent / target).resolve() if target else name
            other = other / "index.html" if other.is_dir() else other
            assert other in pages, f"{name.name} links to {link}"
            assert not anchor or anchor in pages[other].anchors or anchor.startswith("__"), f"{name.name}: {link}"
            checked += 1
    assert checked > 500


def test_figures_are_drawn_the_same_each_time(site):
    folder = site / "figures"
    assert {path.stem for path in folder.glob("*.svg")} >= {"lanes", "windows", "curriculum"}
    code = "import sys; sys.path.insert(0, 'tools'); import figures; print(figures.svg_of('windows'), end='')"
    again = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert again == (folder / "windows.svg").read_text(encoding="utf-8")
    assert all(
        "http" not in re.sub(r"https?://(www\.w3\.org|purl\.org|creativecommons\.org)\S*", "", p.read_text())
        for p in folder.glob("*.svg")
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    "mistake", ["[a](nowhere.md)", "[a](packing.md#nowhere)", "[a](../tests/conftest.py)", "Text\n- glued item"]
)
def test_a_mistake_in_a_page_is_an_error_of_the_build(tmp_path, mistake):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with open(tmp_path / "docs" / "limits.md", "a", encoding="utf-8") as page:
        page.write(f"\n{mistake}\n")
    settings = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {tmp_path / 'docs'}\nsite_dir: {tmp_path / 'site'}\n"
    (tmp_path / "mkdocs.yml").write_text(settings + f"hooks: [{ROOT / 'tools/docs_site.py'}]\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", tmp_path / "mkdocs.yml"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode != 0 and "limits.md" in ran.stdout + ran.stderr
