"""The barcode: one row per run, one cell per step, coloured by the SHA-256 of the step's global batch.

Runs with the same data form unbroken vertical stripes; a step in which a run had other data breaks one.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zephon.cli.output import plural, writing
from zephon.errors import PipelineError

__all__ = ["BarcodeRow", "check_plot", "draw_barcode"]

_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class BarcodeRow:
    """Attributes:
    label: name of the run.
    digests: SHA-256 of each step's global batch, by step.
    resumed: steps at which the run was resumed.
    """

    label: str
    digests: Mapping[int, bytes]
    resumed: Sequence[int] = ()


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


def draw_barcode(path: Path, rows: Sequence[BarcodeRow]) -> None:
    """Draw `rows` to a file that `check_plot` allows; a cross marks each cell that differs from the first row.

    Raises:
        DataError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = sorted({step for row in rows for step in row.digests})
    low, high = (steps[0], steps[-1] + 1) if steps else (0, 1)
    picture = np.full((len(rows), high - low, 3), 237, dtype=np.uint8)
    different = []
    for i, row in enumerate(rows):
        for step, digest in row.digests.items():
            picture[i, step - low] = _colour(digest)
            if digest != rows[0].digests.get(step, digest):
                different.append((step, i))
    size = min(16.0, max(7.0, 3.0 + 0.25 * (high - low))), 1.4 + 0.32 * len(rows)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=(low - 0.5, high - 0.5, len(rows) - 0.5, -0.5))
    for i, row in enumerate(rows):
        axes.axhline(i - 0.5, color="white", linewidth=2.5)
        for step in row.resumed:
            axes.plot([step - 0.5] * 2, [i - 0.42, i + 0.42], color="black", linewidth=1.6)
    if different:
        axes.scatter(*zip(*different, strict=True), marker="x", color="black", zorder=3)
    axes.set_yticks(range(len(rows)), [row.label[-48:] for row in rows])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    axes.set_xlabel("step; one colour per SHA-256 of its tokens, a black bar where a run was resumed", fontsize=8)
    verdict = f"{plural(len(different), 'cell')} unlike the first row" if different else "the same in all runs"
    title = f"Global batches, {plural(len(rows), 'run')}, {plural(high - low, 'step')}: {verdict}"
    axes.set_title(title, fontsize=10, weight="bold", loc="left")
    with writing(path, "picture"):
        figure.savefig(path, format=path.suffix[1:].lower())


def _colour(digest: bytes) -> np.ndarray:
    """sRGB uint8[3] of a digest: hue and lightness from its first bytes."""
    rgb = colorsys.hls_to_rgb(int.from_bytes(digest[:2]) / 65536, 0.35 + 0.4 * digest[2] / 255, 0.65)
    return np.rint(255 * np.array(rgb)).astype(np.uint8)
