"""The command `zephon`.

    zephon stream    stream training batches from a recipe
    zephon plan      shares and passes of each source over a run
    zephon show      what the model saw in a step
    zephon index     scan the files of a dataset once, so that runs start at once
    zephon verify    compare runs, or prove that a recipe gives the same global batches on any topology

Each command is a function with its arguments, in the module of its name.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    from zephon.cli.app import app

    app()
