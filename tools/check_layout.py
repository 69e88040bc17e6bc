"""Holds the layout of zephon-core: rooms in order, imports one way and without circles, small files, a line budget.

python tools/check_layout.py            exit status 1 and a line per violation
python tools/check_layout.py --lines    lines per room
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "zephon-core" / "src" / "zephon"
INTEGRATIONS = ("torchtitan-zephon", "megatron-zephon")

MAX_CORE_LINES = sum(tomllib.loads((ROOT / "tools" / "core_lines.toml").read_text(encoding="utf-8")).values())
MAX_FILE_LINES = 500
MAX_ROOMS = 12

# A module imports modules of its own room and of rooms on earlier lines. Rooms on one line do not import each other.
ORDER = [
    ["errors"],
    ["config"],
    ["columns"],
    ["data"],
    ["tokenizer", "curriculum", "vision"],
    ["ops"],
    ["engine"],
    ["batch"],
    ["run"],
    ["torch_data"],
    ["pipeline"],
    ["io", "work", "__init__"],
    ["loader"],
    ["integrations"],
    ["cli"],
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
FACE = {"__init__", "errors", "pipeline", "batch", "torch_data", "io", "work", "loader"}
PUBLIC = {"zephon", "zephon.loader"}
"""What the integrations import of the core."""


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path, known: set[str]) -> set[str]:
    """Modules of the core that a file imports when it is run or type-checked, imports inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            short = name.removeprefix("zephon.") if name.startswith("zephon.") else "__init__"
            if (name == "zephon" or name.startswith("zephon.")) and short in known:
                found.add(short)
    return found


def violations() -> list[str]:
    files = {module_name(path, CORE): path for path in sorted(CORE.rglob("*.py"))}
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    graph = {name: imports_of(path, set(files)) - {name} for name, path in files.items()}
    told = []
    rooms = {name.split(".")[0] for name in files} - FACE
    if len(rooms) > MAX_ROOMS:
        told.append(f"{len(rooms)} rooms under zephon/; at most {MAX_ROOMS} are allowed: {', '.join(sorted(rooms))}.")
    for name in sorted(files):
        room = name.split(".")[0]
        if room not in RANK:
            told.append(f"{files[name].relative_to(ROOT)} lies in no room of the layout; the face is {sorted(FACE)}.")
            continue
        if lines[name] > MAX_FILE_LINES:
            told.append(
                f"{files[name].relative_to(ROOT)} has {lines[name]} lines; at most {MAX_FILE_LINES} are allowed."
            )
        for other in sorted(graph[name] - {"__init__"}):
            to = other.split(".")[0]
            if to != room and RANK.get(to, -1) >= RANK[room]:
                told.append(f"{files[name].relative_to(ROOT)} imports zephon.{other}, which is not of an earlier room.")
        if "__init__" in graph[name] and RANK[room] < RANK["__init__"]:
            told.append(
                f"{files[name].relative_to(ROOT)} imports the package itself; import the module that defines it."
            )
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        told.append(f"imports go in a circle: {' <- '.join(error.args[1])}.")
    if (total := sum(lines.values())) > MAX_CORE_LINES:
        told.append(f"zephon-core has {total:,} lines; the budget is {MAX_CORE_LINES:,} (tools/core_lines.toml).")
    for package in INTEGRATIONS:
        for path in sorted((ROOT / package / "src").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level and node.module else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                told += [
                    f"{path.relative_to(ROOT)} imports {name}; integrations import {' and '.join(sorted(PUBLIC))} only."
                    for name in names
                    if name.split(".")[0] == "zephon" and name not in PUBLIC
                ]
    return told


def main() -> int:
    if "--lines" in sys.argv:
        rooms = Counter[str]()
        for path in CORE.rglob("*.py"):
            name = module_name(path, CORE).split(".")[0]
            rooms["(face)" if name in FACE else name] += len(path.read_text(encoding="utf-8").splitlines())
        for room, count in sorted(rooms.items()):
            print(f"{count:6,}  {room}")
        print(f"{rooms.total():6,}  zephon-core")
        return 0
    told = violations()
    print("\n".join(told) or "layout: ok")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
