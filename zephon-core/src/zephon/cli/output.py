"""Output of the command: results on stdout, progress on stderr, plain lines where the output is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zephon.errors import DataError

__all__ = ["LiveLine", "count", "make_console", "percent", "plural", "print_table", "printable", "writing"]

_PIPE_WIDTH = 1000
_TERMINAL_SECONDS = 0.1
_PIPE_SECONDS = 5.0


def make_console(*, stderr: bool = False) -> Console:
    """A console on the present stdout or stderr. What it prints is data: no markup, no emoji, nothing highlighted."""
    stream = sys.stderr if stderr else sys.stdout
    for each in (sys.stdout, sys.stderr):
        # Decoded text may hold what the encoding of this stream does not.
        if hasattr(each, "reconfigure"):
            each.reconfigure(errors="backslashreplace")
    return Console(
        file=stream,
        width=None if stream.isatty() else _PIPE_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
    )


def print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> None:
    """Print a table of text; `right` has an "r" at the index of each right-aligned column."""
    terminal = console.is_terminal
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if right[i : i + 1] == "r" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    if terminal:
        console.print(table, soft_wrap=False)
        return
    with console.capture() as capture:
        console.print(table, soft_wrap=False)
    for line in capture.get().splitlines():
        console.print(line.rstrip())


class LiveLine:
    """One line of progress: rewritten in place on a terminal, else printed every few seconds.

    Args:
        line: returns the line; called only when it is shown.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._console = make_console(stderr=True)
        terminal = self._console.is_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if terminal else None
        self._every = _TERMINAL_SECONDS if terminal else _PIPE_SECONDS
        self._due = time.monotonic() + self._every

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        """Show the line if it is due."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._every
            text = Text(self._line(), no_wrap=True, overflow="ellipsis")
            if self._live:
                self._live.update(text, refresh=True)
            else:
                self._console.print(text)


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


def percent(share: float) -> str:
    """A share of 1 as a percentage."""
    return f"{share:.1%}"


def plural(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
