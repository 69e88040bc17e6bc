"""The pages of the documentation, and their examples run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", *sorted(ROOT.glob("*-zephon/README.md"))]
PAGES.append(ROOT / "zephon-core" / "README.md")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, str, int]]:
    """Language, text and first line of every block of code."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield match[1], match[2], text.count("\n", 0, match.start(2))


def run_examples(page: Path, folder: Path, *, deep: bool = False) -> dict[str, Any]:
    """Run the blocks of a page that say "# run" in order, in `folder`, which is the current one.

    Python goes on with the names of the blocks before. TOML whose first line is "# NAME.toml" is saved. Shell has the
    `zephon` of this interpreter; blocks that say "# run (deep)" are run only with `deep`.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    for language, code, line in blocks(page):
        first = code.split("\n", 1)[0]
        if language == "toml" and re.fullmatch(r"# [\w-]+\.toml", first):
            (folder / first[2:]).write_text(code, encoding="utf-8")
        elif (first == "# run (deep)" and not deep) or not first.startswith("# run"):
            continue
        elif language == "python":
            exec(compile("\n" * line + code, str(page), "exec"), names)  # errors name the line of the page
        else:
            assert language == "sh", f"{name_of(page)}: a block of {language} cannot be run"
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            shell = ["bash", "-euo", "pipefail", "-c", code]
            ran = subprocess.run(
                shell, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, f"{name_of(page)}, line {line}: {ran.stdout}{ran.stderr}"
            names["output"] = names.get("output", "") + ran.stdout + ran.stderr
    return names
