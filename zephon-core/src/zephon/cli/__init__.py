"""The command `zephon`: each of its commands is a function with its arguments, in the module of its name."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")  # decoded text may hold what the encoding does not
        setattr(sys, name, stream)
    try:
        try:
            from zephon.cli.app import app

            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        closed = isinstance(error, BrokenPipeError)  # by a reader that has enough
        sys.exit(1 if closed else f"error: the output cannot be written: {error.strerror}")
