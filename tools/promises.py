"""The promises of the documentation (tests/promises.toml) and the tests that show them.

python tools/promises.py            promises without a test, and those whose tests do not exist
python tools/promises.py --check    exit status 1 where a test does not exist
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMISES = ROOT / "tests" / "promises.toml"


@dataclass(frozen=True)
class Promise:
    """What a page says to users, and node ids of the tests that show it, without parameters."""

    page: str
    says: str
    tests: list[str]


def read_promises(path: Path = PROMISES) -> list[Promise]:
    """All promises. Raises `TypeError` where a key is missing or unknown."""
    return [Promise(**table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["promise"]]


def missing_pages(promises: list[Promise]) -> list[str]:
    """Pages that do not exist."""
    return sorted({promise.page for promise in promises if not (ROOT / promise.page).is_file()})


def off_page(promises: list[Promise]) -> list[Promise]:
    """Promises of which a page has less than half of the words, up to their endings: it says something else by now."""
    known: dict[str, set[str]] = {}
    found = []
    for promise in promises:
        if promise.page not in known:
            known[promise.page] = _stems((ROOT / promise.page).read_text(encoding="utf-8"))
        stems = _stems(promise.says)
        if 2 * len(stems & known[promise.page]) < len(stems):
            found.append(promise)
    return found


def _stems(text: str) -> set[str]:
    return {word[:6] for word in re.findall(r"[a-z_]{4,}", text.lower())}


def missing_tests(promises: list[Promise]) -> dict[str, list[str]]:
    """Tests that do not exist, each with what it is to show."""
    missing: dict[str, list[str]] = {}
    known: dict[str, set[str]] = {}
    for promise in promises:
        for test in promise.tests:
            file, _, name = test.partition("::")
            if file not in known:
                known[file] = _tests_of(ROOT / file)
            if name not in known[file]:
                missing.setdefault(test, []).append(f"{promise.page}: {promise.says}")
    return missing


def _tests_of(path: Path) -> set[str]:
    """Functions and methods of a test file, as "function" and "Class::method"."""
    if not path.is_file():
        return set()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.update(f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef))
    return names


def main() -> int:
    promises = read_promises()
    missing = missing_tests(promises)
    print(f"{len(promises)} promises; {len(missing)} tests do not exist")
    for test, shown in missing.items():
        print(f"\n{test}", *shown, sep="\n    ")
    if "--check" in sys.argv:
        return 1 if missing else 0
    untested = [promise for promise in promises if not promise.tests]
    print(f"\n{len(untested)} promises without a test")
    for promise in untested:
        print(f"    {promise.page}: {promise.says}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
