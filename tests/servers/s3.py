"""moto's S3 server behind a proxy that counts and can spoil what passes."""

import http.client
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from servers.web import Request, Response, Server

_HOP = {"connection", "content-length", "transfer-encoding", "server", "date", "keep-alive"}


@contextmanager
def moto_server() -> Iterator[str]:
    """ "host:port" of an S3 server without any buckets."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


def proxy(upstream: str) -> Server:
    """A server that passes everything on to `upstream`."""
    local = threading.local()

    def route(request: Request) -> Response:
        if getattr(local, "connection", None) is None:
            local.connection = http.client.HTTPConnection(upstream, timeout=30)
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

    return Server(route)
