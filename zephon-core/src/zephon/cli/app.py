"""The commands under one name, and what their errors look like."""

from __future__ import annotations

import errno
import functools
import logging
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zephon import __version__
from zephon.cli.bench import bench
from zephon.cli.index import index
from zephon.cli.inspect import inspect
from zephon.cli.plan import plan
from zephon.cli.report import report
from zephon.cli.show import show
from zephon.cli.stream import stream
from zephon.cli.verify import verify
from zephon.errors import DataError, ZephonError


def _local(command: Callable[..., None]) -> Callable[..., None]:
    """A command that refuses stores where a path on this machine is needed: a `Path` would name a folder below here."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(value)):
                raise DataError(
                    f"{name.replace('_', '-')} is {str(value).replace(':/', '://', 1)!r}; expected a path on this "
                    "machine, not a store. Name a folder or file here."
                )
        command(**values)

    return run


class _Group(TyperGroup):
    """Turns errors into one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ZephonError as error:
            text = str(error)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of stdout has closed it
            text = f"{error.filename or 'the operating system'}: {error.strerror or error}"
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(2)


# Boxes and colours are for people; elsewhere help and errors are plain lines, as on narrow terminals, where rich would
# cut the names of options.
_has_boxes = sys.stdout.isatty() and sys.stderr.isatty() and shutil.get_terminal_size().columns >= 80

app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if _has_boxes else None,
    help="Raw documents in, training batches out, the same on any number of GPUs.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zephon {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if sys.stderr.isatty():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("\r\x1b[K%(message)s"))  # over a line of progress that is rewritten
        progress = logging.getLogger("zephon.progress")
        progress.addHandler(handler)
        progress.setLevel(logging.INFO)


for command in (inspect, stream, bench, plan, index, show, verify, report):
    app.command(command.__name__)(_local(command))
