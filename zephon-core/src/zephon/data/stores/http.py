"""Ranges over HTTP: plain web servers, and what other stores answer with links to."""

import email.utils
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import urllib3

from zephon.data.stores.base import ATTEMPT_SECONDS, Connections, Found, StoreFault, attempt, shown

__all__ = ["Client", "HttpStore"]

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 30.0  # without a byte
_CONNECTIONS = 64
_BLOCK = 1 << 18
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_FILES = 1 << 20
_HEADS = 16
_MOST_BYTES = 1 << 53
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5


class Client:
    """Requests of byte ranges, each tried once, with time limits on every step. Thread-safe, safe to fork."""

    def __init__(self) -> None:
        self._pools: Connections[urllib3.PoolManager] = Connections(_pool)

    def renew(self) -> None:
        self._pools.renew()

    def head(self, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """(size, version); the version is the ETag, else the time of the last change, else ""."""
        # A range of one byte and not HEAD: links that are signed for GET refuse HEAD, and many servers leave out sizes.
        response, _ = self.open(url, {**headers, "Range": "bytes=0-0"})
        try:
            if response.status == 206:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                size = _size(total)
            elif response.status == 416:  # an empty file has no first byte
                size = 0
            else:
                size = _size(response.headers.get("Content-Length", ""))
                if size > 0:
                    raise StoreFault(
                        "refused", "the server does not serve ranges of bytes, which random access needs; copy the file"
                    )
        finally:
            _put_back(response)
        if size < 0:
            raise StoreFault("refused", "the server does not tell a size of the file that can be true; copy the file")
        return size, version_of(response.headers)

    def get(
        self, url: str, headers: Mapping[str, str], start: int, length: int, version: str, size: int
    ) -> tuple[bytearray, str]:
        """`length` bytes from `start`, and the URL that served them after redirects.

        `version` "" is not compared.
        """
        asked = {**headers, "Range": f"bytes={start}-{start + length - 1}"}
        response, url = self.open(url, asked)
        try:
            _check_range(response, start, length, version, size)
            data = _body(response, length)
        except BaseException:
            response.close()
            raise
        _put_back(response)
        return data, url

    def open(self, url: str, headers: Mapping[str, str]) -> tuple[urllib3.BaseHTTPResponse, str]:
        """An answer that is neither an error nor a redirect, its body unread, and where it came from."""
        sent = {"Accept-Encoding": "identity", "User-Agent": "zephon", **headers}
        for _ in range(_MOST_REDIRECTS):
            try:
                response = self._pools.get().request(
                    "GET", url, headers=sent, preload_content=False, redirect=False, retries=False
                )
            except urllib3.exceptions.LocationValueError as error:
                raise StoreFault("refused", f"'{shown(url)}' is not a URL; correct it") from error
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise StoreFault("passing", _brief(error)) from error
            except ValueError as error:  # of the standard library, which takes the host apart
                raise StoreFault("refused", f"'{shown(url)}' is not a URL; correct it") from error
            if response.status in _REDIRECTS and response.headers.get("Location"):
                try:
                    target = urljoin(url, response.headers["Location"])
                    scheme, host = urlsplit(target)[:2]
                except ValueError as error:
                    response.close()
                    raise StoreFault("refused", "the server redirects to what is not a URL") from error
                if scheme not in ("http", "https"):
                    raise StoreFault("refused", f"the server redirects to '{shown(target)}', which is no web address")
                if host != urlsplit(url).netloc:  # a token is for the host that it was made for
                    sent = {k: v for k, v in sent.items() if k.lower() not in ("authorization", "cookie")}
                _put_back(response)
                url = target
                continue
            if response.status in (200, 206) or (response.status == 416 and "Range" in sent):
                return response, url
            reason = f"the server answered {response.status} {response.reason or ''}".rstrip()
            kind = fault_kind(response.status)
            response.close()
            raise StoreFault(kind, reason, retry_after(response.headers))
        raise StoreFault("refused", "the server redirects in circles")


class HttpStore:
    """Files of web servers: ``https://host/file``, or many with ``{00000..00099}`` in the place of a number."""

    def __init__(self, scheme: str) -> None:
        self._scheme, self._client = scheme, Client()

    def list(self, path: str) -> Found:
        urls = [f"{self._scheme}://{name}" for name in _expanded(path)]
        found = self._heads(urls)
        root = shown(urls[0]).rpartition("/")[0]
        while not all(shown(url).startswith(root + "/") for url in urls):
            root = root.rpartition("/")[0]
        names = [unquote(shown(url)[len(root) + 1 :]) for url in urls]
        return Found(root, names, [size for size, _ in found], [version for _, version in found], urls)

    def _heads(self, urls: Sequence[str]) -> Sequence[tuple[int, str]]:
        """Several at once, each with patience of its own: what one of many meets must not undo what the others gave."""

        def head(url: str) -> tuple[int, str]:
            return attempt(lambda: self._client.head(url, {}), self, f"'{shown(url)}'", is_first=True)

        pool = ThreadPoolExecutor(min(_HEADS, len(urls)), thread_name_prefix="zephon-list")
        try:
            return list(pool.map(head, urls))
        finally:
            pool.shutdown(cancel_futures=True)

    def head(self, key: str) -> tuple[int, str]:
        return self._client.head(key, {})

    def get(self, key: str, start: int, length: int, version: str, size: int) -> bytearray:
        return self._client.get(key, {}, start, length, version, size)[0]

    def renew(self) -> None:
        self._client.renew()


def _size(text: str) -> int:
    """A number of bytes that a server tells, -1 where that is none."""
    size = int(text) if text.isdecimal() and len(text) < 20 else -1
    return size if size <= _MOST_BYTES else -1


def version_of(headers: Mapping[str, str]) -> str:
    """What an answer tells of the version of its file."""
    return (headers.get("ETag") or "").removeprefix("W/").strip('"') or headers.get("Last-Modified") or ""


def fault_kind(status: int) -> str:
    """The kind of `StoreFault` that an HTTP status stands for."""
    if status in (404, 410):
        return "missing"
    if status in (401, 403):
        return "denied"
    if status in (409, 412):
        return "changed"
    if status in (429, 503):
        return "throttled"
    return "passing" if status >= 500 or status in (408, 425) else "refused"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait: a number or a date (RFC 9110, section 10.2.3)."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _pool() -> urllib3.PoolManager:

    options: dict[str, Any] = {
        "maxsize": _CONNECTIONS,
        "timeout": urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
    }
    certificates = os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE")
    if certificates:
        options["ca_certs"] = certificates
    return _Proxied(options)


class _Proxied(urllib3.PoolManager):
    """Goes through the proxies of the environment (HTTPS_PROXY, NO_PROXY, ...), as other clients do."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(**options)
        self._options = options
        self._proxies: dict[str, urllib3.ProxyManager] = {}

    def request(self, method: str, url: str, **keywords: Any) -> urllib3.BaseHTTPResponse:  # type: ignore[override]
        from urllib.request import getproxies, proxy_bypass

        split = urlsplit(url)
        proxy = getproxies().get(split.scheme)
        if proxy is None or proxy_bypass(split.hostname or ""):
            return super().request(method, url, **keywords)
        manager = self._proxies.setdefault(proxy, urllib3.ProxyManager(proxy, **self._options))
        return manager.request(method, url, **keywords)


def _check_range(response: urllib3.BaseHTTPResponse, start: int, length: int, version: str, size: int) -> None:
    """Raises `StoreFault` unless the answer is for exactly the bytes of the file that were asked for."""
    if version:
        now = version_of(response.headers)
        if now and now != version:
            raise StoreFault("changed", f"its version was {version} when it was listed and is {now} now")
    if response.status == 416:
        raise StoreFault("changed", f"it had {size:,} bytes when it was listed and is shorter now")
    if response.status == 200 and not (start == 0 and length == size):
        raise StoreFault("refused", "the server does not serve ranges of bytes, which random access needs")
    if response.status == 206:
        told = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if told is None or (int(told[1]), int(told[2])) != (start, start + length - 1):
            if told is not None and told[3].isdecimal() and int(told[3]) != size:
                raise StoreFault("changed", f"it had {size:,} bytes when it was listed and has {int(told[3]):,} now")
            raise StoreFault("passing", "the server answered with other bytes than those asked for")
        if told[3].isdecimal() and int(told[3]) != size:
            raise StoreFault("changed", f"it had {size:,} bytes when it was listed and has {int(told[3]):,} now")
    claimed = response.headers.get("Content-Length")
    if claimed is not None and claimed != str(length):
        raise StoreFault("passing", f"the server announced {claimed} bytes where {length} were asked for")


def _body(response: urllib3.BaseHTTPResponse, length: int) -> bytearray:
    """The body into one buffer; a server that sends by drops is cut off at the time limit."""
    data = bytearray(length)
    view, filled = memoryview(data), 0
    give_up = time.monotonic() + ATTEMPT_SECONDS + length / 1e6  # 1 MB/s is slow but no standstill
    try:
        while filled < length:
            count = response.readinto(view[filled : filled + max(_BLOCK, length // 8)])
            if not count:
                raise StoreFault("passing", f"the connection ended after {filled:,} of {length:,} bytes")
            filled += count
            if time.monotonic() > give_up:
                raise StoreFault("passing", f"only {filled:,} of {length:,} bytes came within {ATTEMPT_SECONDS:.0f} s")
        if response.headers.get("Content-Length") is None and response.read(1):
            raise StoreFault("passing", f"the server sent more than the {length:,} bytes asked for")
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise StoreFault("passing", f"{_brief(error)} after {filled:,} of {length:,} bytes") from error
    return data


def _put_back(response: urllib3.BaseHTTPResponse) -> None:
    """Return the connection for reuse where what is left of the body is small, else close it."""
    left = response.length_remaining
    if left is None or left > 1 << 16:
        response.close()
    else:
        response.drain_conn()
        response.release_conn()


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    named = type(error).__name__
    return (f"{named}: {text}" if text else named)[:200]


def _expanded(path: str) -> list[str]:
    numbers = _RANGE.search(path)
    if numbers is None:
        return [path]
    first, last, width = int(numbers[1]), int(numbers[2]), len(numbers[1])
    if not 0 <= last - first < _MOST_FILES:
        raise StoreFault("refused", f"the range {numbers[0]} must go up, over at most {_MOST_FILES:,} files")
    return [
        name
        for number in range(first, last + 1)
        for name in _expanded(f"{path[: numbers.start()]}{number:0{width}}{path[numbers.end() :]}")
    ]
