"""What a start is doing, in the log whenever that takes more than a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("zephon.progress")

FIRST_SECONDS = 1.0
NEXT_SECONDS = 10.0


@contextmanager
def progress_of(describe: Callable[[], str]) -> Iterator[None]:
    """Log `describe()` at INFO once what happens inside has taken a second, and every ten seconds from then on."""
    done = threading.Event()

    def report() -> None:
        seconds = FIRST_SECONDS
        while not done.wait(seconds):
            _log.info("%s ...", describe())
            seconds = NEXT_SECONDS

    threading.Thread(target=report, name="zephon-progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()
