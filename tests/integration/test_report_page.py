"""The page of `zephon report` in a real browser: no errors, nothing from outside, charts and steps by the keyboard.

Without a Chromium these tests fail in CI, and are left out by name elsewhere (see conftest.py).
"""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.corpus import train_tokenizer, write_recipe
from zephon import Pipeline
from zephon.cli.app import app

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from browser import Browser

EVIL = "</script><img src=http://127.0.0.1:9/x onerror=document.title='stolen'><!-- \u2028 & <b>bold</b>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a run of two ranks beside another run, with texts that try to be markup."""
    folder = tmp_path_factory.mktemp("page")
    words = ["lane", "shard", "record", "round", "step", "token"]
    for name, size in (("web", 300), ("<i>code", 120)):
        texts = [f"{name} {n}: {EVIL} " + " ".join(words[(n + i * i) % 6] for i in range(n % 50)) for n in range(size)]
        texts[5] = " "
        (folder / f"{name[-3:]}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        if name == "web":
            train_tokenizer(texts, folder / "tokenizer", 400)
    sources = {"web": folder / "web.jsonl", "<i>code": folder / "ode.jsonl"}
    for run, seed in (("run", 1), ("other", 2)):
        keys = {"chunk_size": 16, "seed": seed, "cache_dir": "cache", "pack_algorithm": "best_fit"}
        write_recipe(folder / f"{run}.toml", sources, keys=keys)
        for rank in range(2):
            shape = {"global_batch": 4, "dp_degree": 2, "dp_group_id": rank, "ledger": folder / run}
            pipeline = Pipeline.from_recipe(
                folder / f"{run}.toml", tokenizer=folder / "tokenizer", seq_len=256, microbatch_size=2, **shape
            )
            for _, _ in zip(range(12), pipeline, strict=False):
                pass
            pipeline.close()
    options = "--tokenizer", folder / "tokenizer", "--seq-len", 256, "--show", "2,5-6", "-o", folder / "report.html"
    targets = folder / "run", folder / "other", folder / "run.toml"
    result = CliRunner().invoke(app, [*map(str, ("report", *targets, *options))])
    assert result.exit_code == 0, result.output
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(page):
    """A browser that has loaded the page."""
    with Browser() as browser:
        browser.open(page)
        yield browser


def test_the_page_loads_without_errors_and_asks_for_nothing(browser, page):
    assert browser.errors == []
    assert {address for address in browser.requests if not address.startswith("data:")} == {page.as_uri()}
    assert browser.value("document.title").startswith("run")
    titles = browser.value("[...document.querySelectorAll('h2')].map(each => each.textContent)")
    expected = ["Sources, planned and seen", "Packing", "Rows left out", "Waiting for data", "Barcode"]
    assert titles == [*expected, "Documents of steps", "Recipe"]
    assert browser.value("document.querySelectorAll('section b, section img, section i + b').length") == 0


def test_texts_of_documents_are_text_and_no_markup(browser):
    shown = browser.value("document.querySelector('.document pre').textContent")
    assert "</script><img src=http" in shown and "<b>bold</b>" in shown
    names = browser.value("[...document.querySelectorAll('.source h3')].map(each => each.textContent)")
    assert names == ["web", "<i>code"]


def test_the_step_viewer_goes_from_step_to_step_and_from_record_to_record_by_the_keyboard(browser):
    state = (
        "[document.querySelector('#documents [role=tab][aria-selected=true]').textContent, "
        "document.querySelector('.documents h3').textContent.split(':')[0]]"
    )
    browser.value("document.querySelector('#documents [role=tab]').focus()")
    assert browser.value(state) == ["step 2", "Record 4"]
    browser.press("ArrowRight", "ArrowRight")
    assert browser.value(state) == ["step 6", "Record 20"]
    browser.value("document.querySelector('.records [aria-selected=true]').focus()")
    browser.press("ArrowDown", "ArrowDown")
    assert browser.value(state) == ["step 6", "Record 22"]
    assert "rank" in browser.value("document.querySelector('.records small').textContent")
    places = browser.value("[...document.querySelectorAll('.document h4')].map(each => each.textContent)")
    assert places and all(" · row " in place and ".jsonl" in place for place in places)
    browser.value("document.querySelector('input[type=search]').focus()")
    browser.write("bold")
    assert browser.value("document.querySelectorAll('.document mark').length") >= 1
    assert browser.errors == []


def test_charts_and_the_barcode_are_read_by_the_keyboard(browser):
    browser.value("document.querySelector('.source svg').focus()")
    browser.press("Home", "ArrowRight")
    caption = browser.value("document.querySelector('.source figcaption').textContent")
    assert caption.startswith("step 2: seen ") and caption.endswith(", planned 50.0 %")
    browser.value("document.querySelectorAll('#runs svg')[1].focus()")
    browser.press("ArrowRight")
    assert "step 2: SHA-256 " in browser.value("document.querySelector('#runs figcaption').textContent")
    assert "other data" in browser.value("document.querySelector('#runs figcaption').textContent")
    verdicts = browser.value("[...document.querySelectorAll('.verdict')].map(each => each.textContent)")
    assert verdicts == ["first run", "✕ differs"]
    assert browser.value("document.querySelectorAll('#runs .differs').length") >= 6
    assert browser.errors == []


def test_dark_and_light_have_contrast_and_the_button_changes_them(browser):
    """At least 4.5 to 1 for texts, as WCAG asks."""
    contrast = """(() => {
        const light = name => {
            const c = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
            const [r, g, b] = [0, 2, 4].map(i => parseInt(c.slice(i, i + 2), 16) / 255)
                .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
            return .2126 * r + .7152 * g + .0722 * b;
        };
        return ["--ink", "--soft", "--accent", "--second", "--good", "--bad"].map(name => {
            const [a, b] = [light(name), light("--card")].sort((x, y) => y - x);
            return (a + .05) / (b + .05);
        });
    })()"""
    themes = []
    for _ in range(2):
        assert min(browser.value(contrast)) >= 4.5
        themes.append(browser.value("document.documentElement.dataset.theme"))
        browser.value("document.querySelector('#theme').click()")
    assert themes == ["light", "dark"]


def test_nothing_hangs_over_the_edge_of_a_narrow_window(page):
    with Browser() as narrow:
        narrow.open(page, width=390, height=800, dark=True)
        assert narrow.value("document.documentElement.dataset.theme") == "dark"
        assert narrow.value("document.documentElement.scrollWidth") <= 390
        assert narrow.errors == []
