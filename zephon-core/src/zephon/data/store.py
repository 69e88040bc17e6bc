"""Stores: where the files of datasets lie besides this machine's own folders.

A `Store` makes one request and raises `StoreFault` where that fails; `attempt` is the one place that asks again. The
stores themselves are in `zephon.data.clients` (obstore, fsspec) and `zephon.data.hub` (huggingface_hub).
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from zephon.data.patterns import MAGIC, select_names, split_pattern, table_of
from zephon.errors import DataError

_log = logging.getLogger(__name__)

DEADLINE_SECONDS = 300.0
"""Time after which a request that fails ends the run; a store that throttles gets that long to recover."""
FIRST_DEADLINE_SECONDS = 5.0
"""The same for a fault of unclear kind at the first look, where it is more likely a mistake in path or settings."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.25, 20.0
ATTEMPT_SECONDS = 60.0
"""Longest time that one request may take."""

_NUMBERED = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_NUMBERED = 1 << 20
_HEADS_AT_ONCE = 16
# Kinds of `StoreFault` by the names of exceptions of fsspec, obstore and huggingface_hub, and by HTTP status.
_KINDS = {
    "FileNotFoundError": "missing", "NotFoundError": "missing", "RevisionNotFoundError": "missing",
    "PermissionError": "denied", "PermissionDeniedError": "denied", "UnauthenticatedError": "denied",
    "PreconditionError": "changed",
    "AlreadyExistsError": "refused",  # what obstore makes of 409
    "InvalidPathError": "refused", "NotSupportedError": "refused", "UnknownConfigurationKeyError": "refused",
    "IsADirectoryError": "refused", "NotADirectoryError": "refused", "NotImplementedError": "refused",
    "ValueError": "refused", "ImportError": "refused", "OfflineModeIsEnabled": "refused",
    "TimeoutError": "passing", "ConnectionError": "passing", "TransportError": "passing", "ClientError": "passing",
}  # fmt: skip
_STATUS = {401: "denied", 403: "denied", 404: "missing", 410: "missing", 412: "changed"}
_STATUS |= dict.fromkeys((408, 425, 429, *range(500, 600)), "passing")

_T = TypeVar("_T")


class StoreFault(Exception):
    """A request without a sound answer.

    Attributes:
        kind: "passing" (asking again will help), "unclear" (it may), "denied" (401, 403), "missing" (404), "changed"
            (another size or version than listed) or "refused" (asking again will not help).
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Unavailable(DataError):
    """A store did not answer, however often it was asked."""


class Changed(Exception):
    """The object has another size or version than when it was listed."""


class Found(NamedTuple):
    """The result of a listing."""

    root: str  # URI that names are relative to
    files: list[tuple[str, int, str, str]]  # (name below the root, bytes, version or "", key in the store)
    pin: str = ""  # the commit that was listed


class Store:
    """One bucket, server or repository. Thread-safe. Each method makes one attempt and raises `StoreFault`."""

    def __init__(self, scheme: str, bucket: str = "") -> None:
        self.scheme, self.bucket = scheme, bucket
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, str], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.scheme, self.bucket)

    def list(self, path: str) -> Found:
        """All objects behind `path`, what follows ``scheme://``: an object, a folder or a pattern."""
        if self.scheme in ("http", "https"):
            return self._list_numbered(path)
        key = self._key(path)
        if key and not MAGIC.search(key):
            try:
                size, version = self.head(key)
            except StoreFault as fault:
                if fault.kind != "missing":
                    raise
            else:
                folder, _, name = key.rpartition("/")
                return Found(self._uri(folder), [(name, size, version, key)])
        folder, pattern = split_pattern(key)
        found = {key: (size, version) for key, size, version in self._find(folder)}
        start = f"{folder}/" if folder else ""
        if not pattern and (table := table_of(found)):
            raise StoreFault("refused", table)
        names = select_names(found, folder, pattern)
        return Found(self._uri(folder), [(name, *found[start + name], start + name) for name in names])

    def head(self, key: str) -> tuple[int, str]:
        """(bytes, version) of an object now."""
        raise NotImplementedError

    def get(self, key: str, start: int, length: int, version: str, size: int) -> Any:
        """A buffer of exactly `length` bytes from `start` of the object whose version and size are those given."""
        raise NotImplementedError

    def key_below(self, path: str, name: str) -> str:
        """The key of one file by its name below a folder, which is what follows ``scheme://``."""
        if self.scheme in ("http", "https"):
            return f"{self.scheme}://{path.rstrip('/')}/{name}"
        return self._key(f"{path.rstrip('/')}/{name}")

    def renew(self) -> None:
        """Forget connections and credentials, so that the next request takes fresh ones."""
        with self._lock:
            self._clients.clear()

    def ask(self, function: Callable[..., _T], *args: Any, **keywords: Any) -> _T:
        """One call of a library, its errors as `StoreFault`."""
        try:
            return function(*args, **keywords)
        except StoreFault:
            raise
        except Exception as error:
            # Of an error that goes on with its history the first line, without signed queries.
            line = next(iter(str(error).strip().splitlines()), "")
            reason = f"{type(error).__name__}: {re.sub(r'[?][^ ]+', '', line)}"[:240]
            raise StoreFault(_kind(error), reason) from error

    def _key(self, path: str) -> str:
        """The key, or pattern of keys, of a path."""
        raise NotImplementedError

    def _find(self, folder: str) -> Iterable[tuple[str, int, str]]:
        """(key, bytes, version) of all objects below a folder."""
        raise NotImplementedError

    def _connect(self, name: str) -> Any:
        """A new client; `name` tells those of one store apart."""
        raise NotImplementedError

    def _client(self, name: str = "") -> Any:
        """The client of this process; a fork must not share sockets with its parent."""
        with self._lock:
            client = self._clients.get((os.getpid(), name))
            if client is None:
                client = self._clients[os.getpid(), name] = self._connect(name)
            return client

    def _uri(self, folder: str) -> str:
        return "/".join(part for part in (f"{self.scheme}:/", self.bucket, folder) if part)

    def _list_numbered(self, path: str) -> Found:
        """Web servers have no listings: one file, or many with ``{00000..00099}`` in the place of a number."""
        urls = [f"{self.scheme}://{name}" for name in _expanded(path)]

        def head(url: str) -> tuple[int, str]:
            # Each with patience of its own: a fault of one must not undo what the others gave.
            return attempt(lambda: self.head(url), self, f"'{shown(url)}'", is_first=True)

        with ThreadPoolExecutor(min(_HEADS_AT_ONCE, len(urls)), thread_name_prefix="zephon-list") as pool:
            try:
                found = list(pool.map(head, urls))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        paths = [shown(url).partition("://")[2] for url in urls]
        root = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [unquote(path[len(root) + 1 :]) for path in paths]
        files = [(name, *of, url) for name, of, url in zip(names, found, urls, strict=True)]
        return Found(f"{self.scheme}://{root}", files)


class Source(NamedTuple):
    """One object of a store, as it was when listed."""

    store: Store
    key: str
    version: str


def attempt(request: Callable[[], _T], store: Store, what: str, *, is_first: bool = False) -> _T:
    """The answer to `request`, asked again while that makes sense, within `DEADLINE_SECONDS`.

    Args:
        is_first: nothing is known of the object yet, so it can be neither gone nor `Changed`.

    Raises:
        Changed: the object is not what was listed.
        Unavailable: gone, refused, or still failing at the deadline.
    """
    began, wait, kinds = time.monotonic(), FIRST_WAIT_SECONDS, list[str]()
    while True:
        try:
            return request()
        except StoreFault as error:
            fault = error
        kinds.append(fault.kind)
        tries, spent, pause, why = len(kinds), time.monotonic() - began, 0.0, ""
        if fault.kind in ("passing", "unclear"):
            deadline = FIRST_DEADLINE_SECONDS if is_first and fault.kind == "unclear" else DEADLINE_SECONDS
            # Jitter around a doubling wait: ranks that were turned away together must not come back together.
            pause, wait = wait * random.uniform(0.5, 1.5), min(2 * wait, LONGEST_WAIT_SECONDS)
            if spent + pause > deadline:
                why = (
                    f"{fault.reason}, in {tries} tries over {spent:.0f} s; check the store and the network, then start "
                    "again, the run goes on from its last checkpoint"
                )
        elif fault.kind == "missing" and is_first:
            why = f"there is no such thing ({fault.reason}); check the path, with its bucket or repository and revision"
        elif fault.kind == "missing":
            why = f"the object is gone ({fault.reason}); restore it or start a new run"
        elif fault.kind == "refused" or (fault.kind == "changed" and is_first):
            why = fault.reason
        elif kinds.count(fault.kind) == 2:  # asked twice before it is believed
            if fault.kind == "changed":
                raise Changed(fault.reason) from fault
            why = (
                f"access is refused ({fault.reason}); renew the credentials of this store and start again, the run "
                "goes on from its last checkpoint"
            )
        if why:
            raise Unavailable(f"{what} cannot be read: {why}") from fault
        if fault.kind in ("denied", "changed") or tries == 3:  # of expired credentials some say that the request is bad
            store.renew()
        level = logging.WARNING if tries in (3, 10) else logging.DEBUG
        _log.log(level, "%s: %s; asked again in %.1f s", what, fault.reason, pause)
        _pause(pause, what)


def _pause(seconds: float, what: str) -> None:
    """Waits, unless the process is ending, which threads that read ahead must not hold up."""
    main = threading.main_thread()
    if threading.current_thread() is main:
        time.sleep(seconds)
    else:
        main.join(seconds)
        if not main.is_alive():
            raise Unavailable(f"{what} cannot be read: the process is ending")


def _kind(error: BaseException) -> str:
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and status >= 400:
                return _STATUS.get(status, "refused")
    return next((_KINDS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _KINDS), "unclear")


def check_length(data: Any, length: int) -> Any:
    """Refuses an answer of another length."""
    if len(data) != length:
        raise StoreFault("passing", f"{len(data):,} bytes came where {length:,} were asked for")
    return data


def shown(uri: str) -> str:
    """A URI for messages and logs, without passwords and signed queries."""
    scheme, _, rest = uri.partition("://")
    if not scheme.startswith("http"):
        return uri
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _expanded(path: str) -> list[str]:
    numbers = _NUMBERED.search(path)
    if numbers is None:
        return [path]
    first, last, width = int(numbers[1]), int(numbers[2]), len(numbers[1])
    if not 0 <= last - first < _MAX_NUMBERED:
        raise StoreFault("refused", f"the range {numbers[0]} must go up, over at most {_MAX_NUMBERED:,} files")
    parts = [f"{path[: numbers.start()]}{n:0{width}}{path[numbers.end() :]}" for n in range(first, last + 1)]
    return [name for part in parts for name in _expanded(part)]
