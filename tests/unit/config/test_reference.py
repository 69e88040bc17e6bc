"""docs/recipe.md is what the declarations of the keys say."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from key_reference import PATH, reference


def test_the_reference_of_keys_is_made_from_their_declarations() -> None:
    assert PATH.read_text(encoding="utf-8") == reference(), "run python tools/key_reference.py"
