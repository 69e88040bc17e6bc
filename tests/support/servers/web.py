"""An HTTP server in a thread that keeps an account of what it served and can be told to serve it badly."""

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

XML_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"


@dataclass(frozen=True)
class Request:
    """`path` is unquoted; `number` counts the requests of this server from 0; `raw` is the target as it came."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    body: bytes
    number: int
    raw: str

    @property
    def range(self) -> tuple[int, int] | None:
        """[start, stop) of the bytes asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None

    @property
    def is_data(self) -> bool:
        """Whether this asks for bytes of a file, the look at its size left out."""
        return self.method == "GET" and self.range is not None and self.range != (0, 1)


@dataclass(frozen=True)
class Response:
    """`cut` ends the connection after so many bytes of the body; `delay` waits before the first."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class Served:
    """One line of the account."""

    at: float
    method: str
    path: str
    range: tuple[int, int] | None
    status: int
    sent: int


Fault = Callable[[Request, Response], Response]


class Server:
    """Give `route`, a function from `Request` to `Response`. A fault is set with `fault`, or with `during`."""

    def __init__(self, route: Callable[[Request], Response]) -> None:
        self.fault: Fault | None = None
        self.log: list[Served] = []
        self._route = route
        self._lock = threading.Lock()
        self._number = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16
            disable_nagle_algorithm = True

            def log_message(self, *_args: object) -> None: ...

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

            def answer(self) -> None:
                outer._answer(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def data(self, part: str = "") -> list[Served]:
        """The account of the ranges of files served whose path holds `part`."""
        with self._lock:
            return [
                line
                for line in self.log
                if line.method == "GET" and line.range not in (None, (0, 1)) and part in line.path
            ]

    def forget(self) -> None:
        """Begins a new account."""
        with self._lock:
            self.log.clear()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        target = urlsplit(handler.path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with self._lock:
            number, self._number = self._number, self._number + 1
        headers = {key.title(): value for key, value in handler.headers.items()}
        request = Request(
            handler.command, unquote(target.path), parse_qs(target.query), headers, body, number, handler.path
        )
        response = self._route(request)
        if self.fault is not None:
            response = self.fault(request, response)
        if response.delay:
            time.sleep(response.delay)
        sent = len(response.body) if handler.command != "HEAD" else 0
        passed = sent if response.cut is None else min(sent, response.cut)
        line = Served(time.monotonic(), request.method, request.path, request.range, response.status, passed)
        with self._lock:
            self.log.append(line)
        handler.send_response(response.status)
        headers = {"Content-Length": str(len(response.body)), **response.headers}
        for key, value in headers.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        handler.wfile.write(response.body[: response.cut] if response.cut is not None else response.body)
        if response.cut is not None:
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)


def ranged(request: Request, data: bytes, etag: str) -> Response:
    """A file, or the range of it that was asked for."""
    headers = {"ETag": etag, "Accept-Ranges": "bytes"}
    span = request.range
    if span is None:
        return Response(200, data, headers)
    start, stop = span[0], min(span[1], len(data))
    if start >= len(data):
        return Response(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
    return Response(206, data[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})


# ---------------------------------------------------------------------------------------------------------------------
# Faults


def answered(status: int, code: str = "InternalError", **headers: str) -> Fault:
    """Another answer in the place of the right one."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return lambda _request, _response: Response(status, XML_ERROR.format(code=code).encode(), named)


def slow(seconds: float) -> Fault:
    return lambda _request, response: replace(response, delay=seconds)


def cut(_request: Request, response: Response) -> Response:
    """The connection ends in the middle of the body."""
    return replace(response, cut=len(response.body) // 2)


def short(_request: Request, response: Response) -> Response:
    """Fewer bytes than asked for, and a length that says so."""
    return replace(response, body=response.body[: len(response.body) // 2])


def long(_request: Request, response: Response) -> Response:
    """A length that promises more than there is."""
    headers = {**response.headers, "Content-Length": str(len(response.body) + 7)}
    return replace(response, headers=headers, cut=len(response.body))


def corrupt(_request: Request, response: Response) -> Response:
    """Every 97th byte is another one."""
    body = bytearray(response.body)
    body[::97] = bytes(byte ^ 0x55 for byte in body[::97])
    return replace(response, body=bytes(body))


def on(wanted: Callable[[Request], bool], fault: Fault) -> Fault:
    """`fault` for the requests that are `wanted`."""
    return lambda request, response: fault(request, response) if wanted(request) else response


def every(nth: int, fault: Fault) -> Fault:
    """`fault` for one of `nth` requests for data; never twice for the same bytes, so that asking again helps."""
    seen: set[tuple[str, object]] = set()
    count = [0]
    lock = threading.Lock()

    def wanted(request: Request) -> bool:
        key = request.path.rpartition("/")[2], request.range
        with lock:
            if not request.is_data or key in seen:
                return False
            count[0] += 1
            if count[0] % nth:
                return False
            seen.add(key)
            return True

    return on(wanted, fault)


def in_turn(faults: Mapping[str, Fault], count: dict[str, int]) -> Fault:
    """Requests for data meet the next of `faults`, never twice in a row for the same bytes; `count`s them."""
    last: set[tuple[str, object]] = set()  # what met a fault when it was asked for last
    order = list(faults)
    lock = threading.Lock()

    def fault(request: Request, response: Response) -> Response:
        if not request.is_data:
            return response
        key = request.path.rpartition("/")[2], request.range
        with lock:
            if key in last:
                last.discard(key)
                return response
            last.add(key)
            name = min(order, key=lambda name: count.get(name, 0))
            count[name] = count.get(name, 0) + 1
        return faults[name](request, response)

    return fault
