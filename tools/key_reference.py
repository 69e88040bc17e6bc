"""The reference of all keys of a recipe, made from their declarations.

python tools/key_reference.py            writes docs/recipe.md
python tools/key_reference.py --check    exit status 1 where docs/recipe.md is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

from zephon.config.keys import Key, expectation, keys_of
from zephon.config.options import CacheOptions, Options, RunSettings
from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.config.settings import CurriculumSettings, OrderSettings, RowSettings, Stage

PATH = Path(__file__).parents[1] / "docs" / "recipe.md"

INTRODUCTION = """\
# Keys of a recipe

<!-- Made by tools/key_reference.py from the declarations in zephon.config; do not edit. -->

A recipe is a TOML file with keys of the whole recipe, a `[[sources]]` table for each dataset, and `[[schedule]]` tables
where the mixture changes. Relative paths are taken from the recipe's folder, `~/` is the home folder, and URIs stay as
they are. A key that is unknown, or of the wrong type, is refused with file, key, value and expectation.

Sizes are integers in bytes, or text with a unit: "kb", "mb", "gb", "tb" are powers of 1000; "kib", "mib", "gib", "tib"
powers of 1024. Counts of tokens and steps may have the units "k", "m", "b" and "t", powers of 1000.

Tokenizer, sequence length, batch sizes and topology belong to the training framework; a recipe that has them is
refused.

Keys with a ● decide data: a resumed run keeps them, accepts what can be accepted (`allow_changes`), or another recipe
takes over (`continue_from`), as the refusal says. The others concern speed, memory and reports alone.
"""

RUN = "Keys of the whole recipe; in Python, options of a pipeline."
SECTIONS: list[tuple[str, str, type, Collection[type]]] = [
    ("Sources", "Keys of a `[[sources]]` table.", SourceRecipe, (OrderSettings, RowSettings)),
    ("Rows and their tokens", "Keys of the whole recipe, or of a source, for that source alone.", RowSettings, ()),
    (
        "Order and repetition",
        "Keys of the whole recipe, or of a source, for that source alone; see [order.md](order.md). A source with one "
        "of `exhausted_policy`, `stop_after_passes` and `max_repeats` has none of the recipe's.",
        OrderSettings,
        (),
    ),
    ("Curriculum", "Keys of the whole recipe.", CurriculumSettings, (OrderSettings,)),
    (
        "Mixture, packing and shuffling",
        "Keys of the whole recipe; see [mixtures.md](mixtures.md) and [packing.md](packing.md).",
        DataRecipe,
        (CurriculumSettings, RowSettings, RunSettings),
    ),
    ("Schedule", "Keys of a `[[schedule]]` table; see [schedules.md](schedules.md).", Stage, ()),
    (
        "Run",
        f"{RUN} See [runners.md](runners.md), [faults.md](faults.md) and [storage.md](storage.md).",
        RunSettings,
        (),
    ),
    ("Options in Python", "Options of a pipeline that a recipe does not have.", Options, (RunSettings,)),
    ("Cache in Python", 'Keys of the option `io_options={"cache": {...}}`.', CacheOptions, ()),
]


def row(key: Key) -> str:
    """The line of a key in its table."""
    values = expectation(key.kind)
    default = "required" if key.required else json.dumps(key.default)
    if key.default is None:
        default = '"auto"' if '"auto"' in values else ""
    cells = (f"`{key.name}`", values, default, "●" if key.decides_data else "", key.doc)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells) + " |"


def reference() -> str:
    """The page."""
    lines = [INTRODUCTION]
    for title, introduction, cls, bases in SECTIONS:
        inherited = {name for base in bases for name in keys_of(base)}
        lines += [f"## {title}\n", f"{introduction}\n", "| key | value | default | data | |", "|---|---|---|---|---|"]
        lines += [row(key) for key in keys_of(cls).values() if key.name not in inherited]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    if "--check" in sys.argv:
        if not PATH.exists() or PATH.read_text(encoding="utf-8") != reference():
            print("docs/recipe.md is out of date; run python tools/key_reference.py.")
            return 1
        return 0
    PATH.write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
