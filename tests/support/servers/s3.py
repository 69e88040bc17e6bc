"""moto's S3 server behind a proxy that counts, remembers, and can spoil what passes."""

import http.client
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.servers.web import Request, Response, Server

_HOP = {"connection", "content-length", "transfer-encoding", "server", "date", "keep-alive"}


@contextmanager
def moto_server() -> Iterator[str]:
    """ "host:port" of an S3 server without any buckets."""
    from moto import backends
    from moto.server import ThreadedMotoServer

    # moto looks through its own folder at every request, some hundred calls of the system, which is most of its time.
    modules = list(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: modules
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


class Proxy:
    """A server that passes on to `upstream` what it has not passed on before, until it is told to `forget`.

    Tests read the same objects hundreds of times, and moto takes ten times as long as the proxy to answer.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._local = threading.local()
        self._known: dict[tuple[str, ...], Response] = {}
        self.server = Server(self._route)

    def forget(self) -> None:
        """Something has been written."""
        self._known.clear()

    def _route(self, request: Request) -> Response:
        # Everything that an answer to a reading request may depend on, signatures and dates left out.
        asked = [request.headers.get(name, "") for name in ("Range", "If-Match", "If-None-Match")]
        key = (request.method, request.path, json.dumps(_unsigned(request.query)), *asked)
        if request.method not in ("GET", "HEAD"):
            self.forget()
            return self._passed_on(request)
        known = self._known.get(key)
        if known is None:
            known = self._passed_on(request)
            if known.status < 300:
                self._known[key] = known
        return known

    def _passed_on(self, request: Request) -> Response:
        local = self._local
        if getattr(local, "connection", None) is None:
            local.connection = http.client.HTTPConnection(self._upstream, timeout=30)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        try:
            local.connection.request(request.method, request.raw, request.body, headers)
            answer = local.connection.getresponse()
            body = answer.read()
        except (http.client.HTTPException, OSError):
            local.connection = None
            raise
        passed = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP}
        if request.method == "HEAD":
            passed["Content-Length"] = answer.headers.get("Content-Length", "0")
        return Response(answer.status, body, passed)


def _unsigned(query: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: values for name, values in sorted(query.items()) if not name.startswith("X-Amz-")}
