"""Output of the command: results on stdout, progress on stderr, plain lines where the output is not a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from zephon.errors import DataError

_TERMINAL_SECONDS = 0.1
_PIPE_SECONDS = 5.0


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> None:
    """Print a table of text; `right` has an "r" at the index of each right-aligned column."""
    lines = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, right.ljust(len(widths)), strict=True)
        print(
            "  ".join(cell.rjust(width) if side == "r" else cell.ljust(width) for cell, width, side in cells).rstrip()
        )


class LiveLine:
    """One line of progress: rewritten in place on a terminal, else printed every few seconds.

    Args:
        line: returns the line; called only when it is shown.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._terminal = sys.stderr.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _PIPE_SECONDS
        self._due = time.monotonic() + self._every

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Show the line if it is due."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + self._every
        line = printable(self._line())
        if self._terminal:
            line = f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K"
        print(line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Turn errors of the operating system into a `DataError` that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(
            f"{path}: the {what} cannot be written: {error.strerror or error}; name another path."
        ) from None


def printable(text: str, *, lines: bool = False) -> str:
    """`text` without anything that could steer a terminal; newlines and tabs stay with `lines`."""
    keep = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def count(number: float) -> str:
    """A number, short: 950, 12.3k, 4.56M, 7.89G."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.0f}T"


def plural(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
