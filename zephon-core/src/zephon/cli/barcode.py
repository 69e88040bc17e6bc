"""The barcode: one row per run, one cell per step, coloured by the SHA-256 of the step's global batch.

Runs that got the same data form unbroken vertical stripes; any step in which a run got other data breaks one.
"""

from __future__ import annotations

import colorsys
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zephon.cli.output import plural, writing
from zephon.errors import PipelineError

__all__ = ["BarcodeRow", "check_plot", "draw_barcode"]

_KINDS = (".png", ".svg", ".pdf")
_LEAST_INCHES = 7.0  # the heading
_MOST_INCHES = 16.0
_MOST_CHARS = 48


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


def check_plot(path: str | os.PathLike[str]) -> None:
    """Find out early whether a picture can be drawn to `path`.

    Raises:
        PipelineError: matplotlib is missing, or the name is not that of a picture.
    """
    if Path(path).suffix.lower() not in _KINDS:
        raise PipelineError(f"{os.fspath(path)}: a picture's name ends in {', '.join(_KINDS)}; name it so.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PipelineError(
            "the barcode needs matplotlib, which is not installed: pip install 'zephon-core[plot]'."
        ) from None


def draw_barcode(path: str | os.PathLike[str], rows: Sequence[BarcodeRow]) -> None:
    """Draw `rows` to a PNG, SVG or PDF file; each is compared with the first.

    Raises:
        PipelineError: see `check_plot`.
        DataError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = sorted({step for row in rows for step in row.digests})
    low, high = (steps[0], steps[-1] + 1) if steps else (0, 1)
    n_steps, n_rows = high - low, len(rows)
    cell = min(0.42, max(0.085, 10.0 / n_steps))
    bar = 0.34 if n_rows <= 10 else 0.24
    label_width = 0.35 + 0.075 * max(len(_short(row.label)) for row in rows)
    cells_width = min(_MOST_INCHES, max(_LEAST_INCHES - label_width, cell * n_steps))
    width, height = label_width + cells_width + 0.3, 1.35 + bar * n_rows
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((label_width / width, 0.62 / height, 1 - (label_width + 0.3) / width, bar * n_rows / height))

    picture = np.full((n_rows, n_steps, 3), 237, dtype=np.uint8)
    different = []
    for i, row in enumerate(rows):
        for step, digest in row.digests.items():
            picture[i, step - low] = _colour(digest)
            if digest != rows[0].digests.get(step, digest):
                different.append((step, i))
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=(low - 0.5, high - 0.5, n_rows - 0.5, -0.5))
    for i in range(1, n_rows):
        axes.axhline(i - 0.5, color="white", linewidth=2.5)
    for i, row in enumerate(rows):
        for step in row.resumed:
            axes.plot([step - 0.5] * 2, [i - 0.42, i + 0.42], color="black", linewidth=1.6, solid_capstyle="butt")
    if different:
        x, y = zip(*different, strict=True)
        axes.scatter(x, y, marker="x", s=min(60.0, 500 * cell * bar), color="black", linewidths=1.6, zorder=3)
    _label(axes, rows, low, high)
    runs = f"{plural(n_rows, 'run')}, {plural(n_steps, 'step')}"
    verdict = "the same in all runs"
    if different:
        verdict = f"{plural(len(different), 'cell')} differ{'s' * (len(different) == 1)} from the first row (x)"
    top = 1 - 0.28 / height
    figure.text(0.1 / width, top, f"Global batches, {runs}: {verdict}", fontsize=11, weight="bold", va="center")
    note = "One colour per SHA-256 of the tokens of a step."
    if any(row.resumed for row in rows):
        note += " A black bar: resumed there from a checkpoint, on other ranks."
    figure.text(0.1 / width, 1 - 0.52 / height, note, fontsize=8, color="0.35", va="center")

    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:].lower())
    with writing(Path(path), "picture"):
        Path(path).write_bytes(content.getvalue())


def _label(axes: Any, rows: Sequence[BarcodeRow], low: int, high: int) -> None:
    axes.set_yticks(range(len(rows)), [_short(row.label) for row in rows])
    axes.set_xlim(low - 0.5, high - 0.5)
    # About 20 labels, at multiples of 1, 2 or 5 times a power of ten.
    rough = max(1, (high - low) / 20)
    power = 10 ** int(np.log10(rough))
    stride = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    axes.set_xticks(range(-(-low // stride) * stride, high, stride))
    axes.tick_params(axis="both", length=0, labelsize=8)
    axes.set_xlabel("step", fontsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def _short(label: str) -> str:
    return label if len(label) <= _MOST_CHARS else f"...{label[3 - _MOST_CHARS :]}"


def _colour(digest: bytes) -> np.ndarray:
    """sRGB uint8[3] of a digest: hue and lightness from its first bytes."""
    red, green, blue = colorsys.hls_to_rgb(int.from_bytes(digest[:2]) / 65536, 0.35 + 0.4 * digest[2] / 255, 0.65)
    return np.rint(255 * np.array([red, green, blue])).astype(np.uint8)
