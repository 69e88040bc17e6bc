"""The command `zephon`: each of its commands is a function with its arguments, in the module of its name."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")  # decoded text may hold what the encoding does not
        setattr(sys, name, stream)
    try:
        from zephon.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
