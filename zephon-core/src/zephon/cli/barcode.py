"""The barcode: one row per run, one cell per step, coloured by the SHA-256 of the step's global batch.

Runs with the same data form unbroken vertical stripes; a step in which a run had other data breaks one.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from zephon.cli.output import plural, writing
from zephon.errors import PipelineError

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Check that a picture can be drawn to `path`.

    Raises:
        PipelineError: matplotlib is missing, or the suffix is not that of a picture.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise PipelineError(f"--plot is {path}; expected a name that ends in {', '.join(_SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PipelineError(
            "the barcode needs matplotlib, which is not installed: pip install 'zephon-core[plot]'."
        ) from None


def colour_of(digest: bytes) -> tuple[float, float, float]:
    """The red, green and blue, from 0 to 1, of a SHA-256."""
    return colorsys.hls_to_rgb(int.from_bytes(digest[:2]) / 65536, 0.35 + 0.4 * digest[2] / 255, 0.65)


def draw_barcode(path: Path, rows: Sequence[tuple[str, Mapping[int, bytes], Sequence[int]]]) -> None:
    """Draw runs (name, SHA-256 by step, steps where it was resumed) to a file that `check_plot` allows; a cross marks
    each cell that differs from the first run."""
    from matplotlib.figure import Figure

    steps = sorted({step for _, digests, _ in rows for step in digests}) or [0]
    low, high, reference = steps[0], steps[-1] + 1, rows[0][1]
    picture = np.full((len(rows), high - low, 3), 237, dtype=np.uint8)
    figure = Figure(figsize=(min(16.0, max(7.0, 3.0 + 0.25 * (high - low))), 1.4 + 0.32 * len(rows)), dpi=150)
    axes, different = figure.add_subplot(), 0
    for i, (_, digests, resumed) in enumerate(rows):
        for step, digest in digests.items():
            picture[i, step - low] = np.rint(255 * np.array(colour_of(digest)))
            if digest != reference.get(step, digest):
                axes.plot(step, i, "x", color="black")
                different += 1
        axes.axhline(i - 0.5, color="white", linewidth=2.5)
        axes.vlines([step - 0.5 for step in resumed], i - 0.42, i + 0.42, color="black", linewidth=1.6)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=(low - 0.5, high - 0.5, len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [name[-48:] for name, *_ in rows])
    axes.set_xlabel("step; one colour per SHA-256 of its tokens, a black bar where a run was resumed")
    verdict = f"{plural(different, 'cell')} unlike the first row" if different else "the same in all runs"
    axes.set_title(f"{plural(len(rows), 'run')}, {plural(high - low, 'step')}: {verdict}", loc="left")
    with writing(path, "picture"):
        figure.savefig(path, format=path.suffix[1:].lower(), bbox_inches="tight")
