"""Google's and Azure's object stores, as far as their clients list and read: buckets in memory behind the real APIs."""

import hashlib
import threading
from collections.abc import Mapping
from email.utils import formatdate
from xml.sax.saxutils import escape

from support.servers.web import XML_ERROR, Request, Response, Server, ranged

ACCOUNT, KEY = "zephon", "emVwaG9u" * 8
_PAGE = 50  # of 1000 and 5000 with the real ones; so that small tests turn pages too
_WRITTEN = 1_700_000_000.0


class Bucket:
    """One bucket "corpus". `put` and `delete` write past the `server`, which counts and can spoil what it serves."""

    environment: Mapping[str, str]

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.server = Server(self._route)

    def put(self, key: str, body: bytes) -> None:
        with self._lock:
            self._objects[key] = body

    def delete(self, key: str) -> None:
        with self._lock:
            del self._objects[key]

    def _route(self, request: Request) -> Response:
        raise NotImplementedError

    def _object(self, request: Request, key: str) -> Response:
        with self._lock:
            body = self._objects.get(key)
        if body is None:
            return _error(404, "NoSuchKey")
        etag = _etag(body)
        if request.headers.get("If-Match", etag).strip('"') != etag:
            return _error(412, "ConditionNotMet")
        found = ranged(request, body, f'"{etag}"')
        headers = {**found.headers, "Last-Modified": formatdate(_WRITTEN, usegmt=True)}
        if request.method == "HEAD":
            return Response(200, b"", {**headers, "Content-Length": str(len(body))})
        return Response(found.status, found.body, headers)

    def _page(self, prefix: str, after: str) -> tuple[list[tuple[str, bytes]], str]:
        """Objects in order of their keys, and the last of them if there are more."""
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
            return [(key, self._objects[key]) for key in keys[:_PAGE]], keys[_PAGE - 1] if len(keys) > _PAGE else ""


class Google(Bucket):
    """The XML API of gs://, https://cloud.google.com/storage/docs/xml-api/overview."""

    @property
    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.server.url}

    def _route(self, request: Request) -> Response:
        bucket, _, key = request.path.lstrip("/").partition("/")
        if bucket != "corpus" or request.method not in ("GET", "HEAD"):
            return _error(404, "NoSuchBucket")
        if key:
            return self._object(request, key)
        found, more = self._page(_asked(request, "prefix"), _asked(request, "continuation-token"))
        lines = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
            f"<ETag>{_etag(body)}</ETag><Size>{len(body)}</Size></Contents>"
            for key, body in found
        ]
        token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
        told = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{token}"
        return _xml(f"<ListBucketResult>{told}{''.join(lines)}</ListBucketResult>")


class Azure(Bucket):
    """The Blob service of az://, https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.server.url,
        }

    def _route(self, request: Request) -> Response:
        signed = request.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:") or "sig" in request.query
        if not signed:
            return _error(403, "AuthenticationFailed")
        bucket, _, key = request.path.lstrip("/").partition("/")
        if bucket != "corpus" or request.method not in ("GET", "HEAD"):
            return _error(404, "ContainerNotFound")
        if key:
            return self._object(request, key)
        found, more = self._page(_asked(request, "prefix"), _asked(request, "marker"))
        lines = [
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{formatdate(_WRITTEN, usegmt=True)}"
            f"</Last-Modified><Etag>{_etag(body)}</Etag><Content-Length>{len(body)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key, body in found
        ]
        blobs = f"<Blobs>{''.join(lines)}</Blobs><NextMarker>{escape(more)}</NextMarker>"
        return _xml(f'<EnumerationResults ContainerName="corpus">{blobs}</EnumerationResults>')


def _asked(request: Request, name: str) -> str:
    return request.query.get(name, [""])[0]


def _etag(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()


def _xml(body: str) -> Response:
    return Response(200, f"<?xml version='1.0'?>{body}".encode(), {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Response:
    return Response(status, XML_ERROR.format(code=code).encode(), {"Content-Type": "application/xml"})
