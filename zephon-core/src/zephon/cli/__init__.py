"""The command `zephon`: each of its commands is a function with its arguments, in the module of its name."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
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
