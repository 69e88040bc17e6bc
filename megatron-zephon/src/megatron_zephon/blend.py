"""A data recipe from the `--data-path` of Megatron's own datasets.

    python -m megatron_zephon.blend --data-path 0.3 web_text_document 0.7 code_text_document > recipe.toml

The recipe reads the same .bin and .idx files, in the same shares of tokens; its order is Zephon's own. Take parts of
files for validation (`--split`) beforehand: a recipe reads whole files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from zephon import RecipeError


def recipe_of_blend(data_path: Sequence[str], *, seed: int = 1234) -> str:
    """The recipe as TOML.

    Args:
        data_path: a prefix, pairs of weight and prefix, or prefixes, whose weights are then their lengths.
        seed: Megatron's --seed.

    Raises:
        RecipeError: the list is none of these, or a prefix lacks its .bin or .idx file.
    """
    if not data_path:
        raise RecipeError("--data-path is empty; expected a prefix, or pairs of weight and prefix.")
    weights = [_number(text) for text in data_path[::2]]
    weighted = len(data_path) % 2 == 0 and None not in weights
    prefixes = list(data_path[1::2] if weighted else data_path)
    lengths = [_length(prefix) for prefix in prefixes]
    weights = weights if weighted else list(lengths)
    names = [os.path.basename(prefix) for prefix in prefixes]
    lines = [
        "# Token ids as Megatron's preprocess_data.py wrote them, with their EOD (--append-eod).",
        'documents = "tokens"',
        'special_tokens = "none"',
        f"seed = {seed}",
    ]
    for nth, (name, prefix, weight) in enumerate(zip(names, prefixes, weights, strict=True)):
        unique = name if names.count(name) == 1 else f"{name}-{nth}"
        path = json.dumps(os.path.abspath(prefix))
        lines += ["", "[[sources]]", f"name = {json.dumps(unique)}", f"path = {path}", f"weight = {weight}"]
    return "\n".join(lines) + "\n"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _length(prefix: str) -> float:
    """Bytes of the tokens, which stand for the length."""
    try:
        os.stat(f"{prefix}.idx")
        return float(os.path.getsize(f"{prefix}.bin"))
    except OSError:
        remedies = {".toml": " It is a recipe already: pass it to --zephon-data-config."}
        remedies |= dict.fromkeys((".bin", ".idx"), " Leave out the ending.")
        remedy = remedies.get(os.path.splitext(prefix)[1], "")
        raise RecipeError(
            f"--data-path has {prefix!r}; expected the prefix of a .bin and an .idx file.{remedy}"
        ) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Print the recipe."""
    parser = argparse.ArgumentParser(prog="python -m megatron_zephon.blend", description=__doc__)
    parser.add_argument("--data-path", nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(argv)
    try:
        sys.stdout.write(recipe_of_blend(args.data_path, seed=args.seed))
    except RecipeError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
