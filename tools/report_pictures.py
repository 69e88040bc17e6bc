"""The pictures of docs/report.md: runs over the demo corpus, their page, and pieces of it as a browser draws them.

python tools/report_pictures.py [FOLDER]      by default docs/images; needs a Chromium
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser import Browser
from typer.testing import CliRunner

from examples.corpus import build_demo
from zephon import Pipeline
from zephon.cli.app import app

ROOT = Path(__file__).parents[1]
SEQ_LEN, BATCH = 512, 16
PICTURES = {
    "report-sources": ("#sources", False),
    "report-barcode": ("#runs", False),
    "report-documents": ("#documents", False),
    "report-documents-dark": ("#documents", True),
}
SHOWN = """
document.querySelectorAll('#documents [role=tab]')[3].click();
const button = i => document.querySelectorAll('.records button')[i];
const counts = [...document.querySelectorAll('.records button')].map((_, i) => {
    button(i).click();
    return document.querySelectorAll('.document').length;
});
button(counts.indexOf(Math.max(...counts))).click();
document.activeElement.blur();
"""
"""Opens the record with the most documents of a step."""
RECIPE = """
seed = {seed}
canonical_replicas = 16
chunk_size = 16
pack_algorithm = "best_fit"
filter = "length(text) > 200"
cache_dir = "{folder}/cache"

[[sources]]
name = "code"
path = "{code}"

[[sources]]
name = "docs"
path = "{docs}"

[[schedule]]
mixture = {{ code = 0.8, docs = 0.2 }}

[[schedule]]
mixture = {{ code = 0.4, docs = 0.6 }}
start_steps = 40
change = "linear"
end_steps = 120
"""


def run(folder: Path, name: str, recipe: Path, tokenizer: Path, *, legs: tuple[tuple[int, int], ...]) -> None:
    """A run on some numbers of ranks, one after the other."""
    states: list[object] = []
    for ranks, steps in legs:
        after = []
        for rank in range(ranks):
            shape = {"global_batch": BATCH, "dp_degree": ranks, "dp_group_id": rank, "ledger": folder / name}
            pipeline = Pipeline.from_recipe(recipe, tokenizer=tokenizer, seq_len=SEQ_LEN, microbatch_size=4, **shape)
            if states:
                pipeline.restore(states)
            for _, batch in zip(range(steps * BATCH // ranks // 4), pipeline, strict=False):
                batch.to_training(as_numpy=True)
            after.append(pipeline.checkpoint())
            pipeline.close()
        states = after


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        demo = build_demo(work / "demo")
        for name, seed in (("recipe", 42), ("other", 7)):
            text = RECIPE.format(seed=seed, folder=work, **demo.sources)
            (work / f"{name}.toml").write_text(text)
        run(work, "run", work / "recipe.toml", demo.tokenizer, legs=((2, 90), (1, 70)))
        run(work, "four-ranks", work / "recipe.toml", demo.tokenizer, legs=((4, 160),))
        run(work, "other-seed", work / "other.toml", demo.tokenizer, legs=((1, 160),))
        targets = [str(work / name) for name in ("run", "four-ranks", "other-seed", "recipe.toml")]
        options = ["--tokenizer", str(demo.tokenizer), "--seq-len", str(SEQ_LEN), "-o", str(work / "report.html")]
        result = CliRunner().invoke(app, ["report", *targets, *options])
        if result.exit_code:
            raise SystemExit(result.output)
        for name, (selector, dark) in PICTURES.items():
            with Browser() as browser:
                browser.open(work / "report.html", width=1120, dark=dark)
                browser.value(SHOWN)
                browser.screenshot(folder / f"{name}.png", selector)
                print(f"{folder / name}.png: {(folder / f'{name}.png').stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
