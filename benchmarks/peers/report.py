"""Tables and a picture of what `benchmarks.compare` found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOT_OFFERED = "not offered"


def _figure(found: dict[str, Any], part: str, write: Callable[[dict[str, Any]], str]) -> str:
    figures = found.get(part)
    if figures is None:
        return "-"
    if "not_offered" in figures:
        return NOT_OFFERED
    return "failed" if "error" in figures else write(figures)


def _ratio(found: dict[str, Any], which: str) -> str:
    if "ratios" not in found:
        return "-"
    return "{:.3g} ({:.3g}..{:.3g})".format(*found["ratios"][which])


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _restores(figures: dict[str, Any]) -> str:
    times = ", ".join(f"{each['seconds']:.2f}" for each in figures.values())
    return times if all(each["same"] for each in figures.values()) else f"{times} (other data)"


def _elastic(figures: dict[str, Any]) -> str:
    same = {"same": "yes", "not measured": "not measured"}
    return same.get(figures["outcome"], f"no: {figures['outcome']} at {figures.get('at')} ranks")


def markdown(document: dict[str, Any]) -> str:
    """The tables of a run."""
    results = document["results"]
    speed, run = [], []
    for name, found in results.items():
        if "million_tokens_per_s" in found:
            rates = [each["tokens"] / each["seconds"] / 1e6 for each in found["turns"]]
            speed.append([
                name,
                f"{found['million_tokens_per_s']:.3g} ({min(rates):.3g}..{max(rates):.3g})",
                f"{found['cpu_ms_per_million']:,.0f}",
                _ratio(found, "speed"),
                _ratio(found, "cpu"),
                f"{sum(each['tokens'] for each in found['turns']) / 1e6:,.1f}",
            ])  # fmt: skip
        else:
            why = next(
                (found[part]["error"] for part in ("warm", "cold") if "error" in found.get(part, {})), "no figures"
            )
            speed.append([name, f"failed: {why}", "", "", "", ""])
        if found["limit"]:
            continue
        prepare = found.get("prepare")
        run.append([
            name,
            f"{found['before']}, {prepare['cpu_seconds']:.0f} s of CPU" if prepare else "nothing",
            _figure(found, "cold", lambda f: f"{f['first_batch_s']:.2f}"),
            _figure(found, "warm", lambda f: f"{f['first_batch_s']:.2f}"),
            f"{found['peak_mb']:,.0f}" if "peak_mb" in found else "-",
            _figure(found, "state", lambda f: f"{f['bytes']:,} in {f['ms']:.2f} ms"),
            _figure(found, "restore", _restores),
            _figure(found, "quality", lambda f: f"{abs(f['first_share'] - 0.5) * 100:.1f}"),
            _figure(found, "quality", lambda f: f"{f['fill']:.1%}"),
            _figure(found, "elastic", _elastic),
        ])  # fmt: skip
    words = "; ".join(
        f"{name}: {each['megabytes']:.0f} MB in {each['documents']:,} documents, {each['distinct words']:.1%} of the "
        f"words distinct, zstd {each['compression']:.1f} times smaller"
        for name, each in document["corpus"].items()
    )
    head = ["", "before", "first batch, cold (s)", "warm (s)", "peak (MB)", "state (bytes)",
            "restore at 10, 50, 90 % (s)", "mixture off by (points)", "fill", "1 → 2 → 4 ranks"]  # fmt: skip
    return (
        f"{document['date']}: {document['machine']}. Text: {words}; {document['bytes_per_token']:.2f} bytes per token. "
        f"{document['rounds']} rounds of {document['seconds'] / document['rounds']:.1f} s per loader; medians "
        "(least..most)."
        "\n\n"
        + _table(["", "M tokens/s", "CPU ms/M tokens", "times as fast", "times the CPU", "M tokens streamed"], speed)
        + "\n\"Times\": Zephon's speed over its own, and its CPU time over Zephon's, per round.\n\n"
        + _table(head, run)
        + f"\nRestores and ranks: on an epoch of {document['small_epoch_tokens'] / 1e6:.1f} M tokens.\n"
    )


def plot(python: str, folder: Path) -> None:
    """results.png in a folder that has results.json, with an interpreter that has Matplotlib."""
    subprocess.run([python, __file__, str(folder)], check=True)


def _draw(folder: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    document = json.loads((folder / "results.json").read_text())
    found = {name: each for name, each in document["results"].items() if "million_tokens_per_s" in each}
    names = list(found)[::-1]
    figure, axes = plt.subplots(1, 2, figsize=(13, 0.4 * len(names) + 1.5), sharey=True, layout="constrained")
    for axis, key, title in (
        (axes[0], "million_tokens_per_s", "million tokens per second"),
        (axes[1], "cpu_ms_per_million", "ms of CPU per million tokens"),
    ):
        values = [found[name][key] for name in names]
        colors = ["0.7" if found[n]["limit"] else "C0" if n.startswith("Zephon") else "C1" for n in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
        axis.set(xscale="log", title=title)
        axis.margins(x=0.15)
    figure.suptitle(f"{document['machine']}; {document['date']}", fontsize=9)
    figure.savefig(folder / "results.png", dpi=120)


if __name__ == "__main__":
    _draw(Path(sys.argv[1]))
