"""What a store owes the rest of `zephon.io`, and how a range of bytes is got out of one in spite of faults.

A store answers one request with bytes or with a `StoreFault` that says of what kind the trouble is; it does not retry.
All patience is here: `fetch` retries what passes (with jitter, honouring what the server says of when to come back),
renews credentials once, and gives up at a deadline, so a read ends in bytes or in one clear error, never in a hang.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from zephon.errors import DataError

__all__ = [
    "ATTEMPT_SECONDS",
    "Changed",
    "Connections",
    "Found",
    "Source",
    "Store",
    "StoreFault",
    "Unavailable",
    "attempt",
    "fetch",
    "shown",
]

_log = logging.getLogger(__name__)

ATTEMPT_SECONDS = 60.0
"""Longest time that one request may take."""
DEADLINE_SECONDS = 300.0
"""Time after which a range that cannot be had ends the run; a store that throttles gets that long to recover."""
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 20.0
_LONGEST_RETRY_AFTER = 120.0
_RETRIED_AT_ONCE = 2  # a changed file and refused credentials are asked for this often before they are believed

_T = TypeVar("_T")


class StoreFault(Exception):
    """A request that gave no sound answer.

    kind: "passing" (server errors, cut connections, wrong lengths), "throttled" (429, 503), "denied" (401, 403),
        "missing" (404), "changed" (the object is not the one that was listed) or "refused" (anything that asking again
        will not mend).
    retry_after: seconds the server asked to wait, if it did.
    """

    def __init__(self, kind: str, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.retry_after = kind, reason, retry_after


class Unavailable(DataError):
    """A store did not give what was asked for, and asking again has been tried."""


class Changed(Exception):
    """The object has another size or version than when it was listed; `reason` says what was seen."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a listing found, as columns: paths below the root, sizes in bytes, versions ("" where there is none).

    root: URI that the names are relative to, for messages.
    keys: what the store calls each object, in the order of `names`; None where that is the root's key and the name.
    pin: what the listing was pinned to (the commit of a repository), or "".
    """

    root: str
    names: Sequence[str]
    sizes: Sequence[int]
    versions: Sequence[str]
    keys: Sequence[str]
    pin: str = ""


class Store(Protocol):
    """One bucket, server or repository. Thread-safe. Methods make one attempt each and raise `StoreFault`."""

    def list(self, path: str) -> Found:
        """All objects behind `path`, what follows ``scheme://``: an object, a folder or a pattern."""
        ...

    def head(self, key: str) -> tuple[int, str]:
        """(size, version) of an object now."""
        ...

    def get(self, key: str, start: int, length: int, version: str, size: int) -> Any:
        """A buffer of exactly `length` bytes from `start` of the object whose version and size are those given."""
        ...

    def renew(self) -> None:
        """Forget credentials and connections, so that the next request takes fresh ones."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One object of a store, as it was when listed."""

    store: Store
    key: str
    version: str


def shown(uri: str) -> str:
    """A URI for messages and logs, without passwords and signed queries."""
    head, scheme, rest = uri.partition("://")
    rest = rest.partition("?")[0] if head.startswith("http") else rest
    host, slash, path = rest.partition("/")
    return head + scheme + host.rpartition("@")[2] + slash + path if head.startswith("http") else head + scheme + rest


def fetch(source: Source, uri: str, size: int, start: int, length: int) -> Any:
    """`length` bytes from `start` as a buffer, however often it takes, within `DEADLINE_SECONDS`.

    Raises:
        Changed: the object is not what was listed.
        Unavailable: gone, not to be had with these credentials, or still failing at the deadline.
    """
    data = attempt(
        lambda: source.store.get(source.key, start, length, source.version, size),
        source.store,
        f"bytes {start:,} to {start + length:,} of '{shown(uri)}'",
    )
    assert len(data) == length
    return data


def attempt(request: Callable[[], _T], store: Store, what: str, *, is_first: bool = False) -> _T:
    """The answer to `request`, retried while that makes sense; errors as those of `fetch`.

    `is_first`: nothing is known of the object yet, so it can be neither gone nor `Changed`.
    """
    began = time.monotonic()
    wait, tries, asked = _FIRST_WAIT, 0, dict.fromkeys(("denied", "changed"), 0)
    while True:
        tries += 1
        try:
            return request()
        except StoreFault as fault:
            last = fault
        if last.kind == "missing" and is_first:
            raise Unavailable(
                f"{what} cannot be read: there is no such thing ({last.reason}); check the path, with its bucket or "
                "repository and revision"
            ) from last
        if last.kind == "missing":
            raise Unavailable(
                f"{what} cannot be read: the object is gone ({last.reason}); a dataset must not change during a run, "
                "so restore it or start a new run"
            ) from last
        if last.kind == "refused":
            raise Unavailable(f"{what} cannot be read: {last.reason}") from last
        if last.kind in asked:
            asked[last.kind] += 1
            if asked[last.kind] == _RETRIED_AT_ONCE:
                if last.kind == "changed" and is_first:
                    raise Unavailable(f"{what} cannot be read: {last.reason}; check the store") from last
                if last.kind == "changed":
                    raise Changed(last.reason) from last
                raise Unavailable(
                    f"{what} cannot be read: access is refused ({last.reason}); renew the credentials of this store "
                    "and start again, the run goes on from its last checkpoint"
                ) from last
            store.renew()
            continue
        # Full jitter around a doubling wait: ranks that were turned away together must not come back together.
        pause = wait * random.uniform(0.5, 1.5)
        if last.retry_after is not None:
            pause = min(last.retry_after, _LONGEST_RETRY_AFTER) + wait * random.random()
        spent = time.monotonic() - began
        if spent + pause > DEADLINE_SECONDS:
            raise Unavailable(
                f"{what} cannot be read: {last.reason}, in {tries} tries over {spent:.0f} s; check the store and the "
                "network, then start again, the run goes on from its last checkpoint"
            ) from last
        _log.log(
            logging.WARNING if tries in (5, 10) else logging.DEBUG, "%s: %s; again in %.1f s", what, last.reason, pause
        )
        _sleep(pause, what)
        wait = min(2 * wait, _LONGEST_WAIT)


def _sleep(seconds: float, what: str) -> None:
    """Sleeps, unless the process is ending, which threads that read ahead must not hold up."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not threading.main_thread().is_alive():
            raise Unavailable(f"{what} is not read any more, for the process is ending")
        time.sleep(min(left, 0.1))


class Connections(Generic[_T]):
    """Makes a client once per process and again after `renew`; a fork must not share sockets with its parent."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: tuple[int, _T] | None = None

    def get(self) -> _T:
        """The client of this process."""
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = (os.getpid(), self._make())
            return self._made[1]

    def renew(self) -> None:
        """Makes a new client for the next request."""
        with self._lock:
            self._made = None
