"""The command `zephon`.

    zephon demo      build a small corpus, stream batches from it, resume on other numbers of ranks
    zephon stream    stream training batches from a recipe
    zephon show      what the model saw in a step
    zephon verify    compare runs, or prove that a recipe gives the same global batches on any topology

Each command is a module of its own, loaded when it is called.
"""

import sys
from typing import Any

__all__ = ["leave_out_pandas", "main"]


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    leave_out_pandas()
    from .app import app

    app()


def leave_out_pandas() -> None:
    """Keep pandas out of this process: pyarrow imports it, if installed, when it first makes an array.

    That costs half a second, and nothing here uses it.
    """
    sys.meta_path.insert(0, _NoPandas)


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Part of `importlib.abc.MetaPathFinder`."""
        if name == "pandas":
            raise ImportError("pandas is left out of this process")
