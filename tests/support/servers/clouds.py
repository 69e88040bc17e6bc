"""The object stores of Amazon, Google and Azure, as far as their clients list and read: buckets in memory behind the
real APIs."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from xml.sax.saxutils import escape

from support.servers.web import XML_ERROR, Request, Response, Server, ranged

_PAGE = 50  # of 1000 and 5000 with the real ones; so that small tests turn pages too
_WRITTEN = 1_700_000_000.0


class Bucket:
    """One bucket "corpus". `put` and `delete` write past the `server`, which counts and can spoil what it serves."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, str]] = {}  # (content, ETag) by key
        self._lock = threading.Lock()
        self.server = Server(self._route)

    @property
    def environment(self) -> dict[str, str]:
        """What the cloud's own tools take from the environment."""
        raise NotImplementedError

    def put(self, key: str, body: bytes, part: str = "") -> None:
        """`part` gives the same content another ETag, as an upload in parts does."""
        with self._lock:
            self._objects[key] = body, hashlib.md5(body).hexdigest() + part

    def upload(self, folder: Path, prefix: str) -> None:
        """Every file below `folder` as an object below `prefix`."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def delete(self, key: str) -> None:
        with self._lock:
            del self._objects[key]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is written within is undone at the end."""
        before = dict(self._objects)
        try:
            yield
        finally:
            with self._lock:
                self._objects = before

    def _route(self, request: Request) -> Response:
        bucket, _, key = request.path.lstrip("/").partition("/")
        if bucket != "corpus" or request.method not in ("GET", "HEAD"):
            return error(404, "NoSuchBucket")
        if not key:
            return _xml(self._list(request))
        with self._lock:
            body, etag = self._objects.get(key, (None, ""))
        if body is None:
            return error(404, "NoSuchKey")
        if request.headers.get("If-Match", etag).strip('"') != etag:
            return error(412, "ConditionNotMet")
        found = ranged(request, body, f'"{etag}"')
        headers = {**found.headers, "Last-Modified": formatdate(_WRITTEN, usegmt=True)}
        if request.method == "HEAD":
            return Response(200, b"", {**headers, "Content-Length": str(len(body))})
        return Response(found.status, found.body, headers)

    def _list(self, request: Request) -> str:
        """The answer to a request for a page of a listing."""
        raise NotImplementedError

    def _page(self, prefix: str, after: str) -> tuple[list[tuple[str, int, str]], str]:
        """(key, bytes, ETag) of objects in order of their keys, and the last key if there are more."""
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
            found = [(escape(key), len(self._objects[key][0]), self._objects[key][1]) for key in keys[:_PAGE]]
            return found, escape(keys[_PAGE - 1]) if len(keys) > _PAGE else ""


class Amazon(Bucket):
    """The API of s3://, https://docs.aws.amazon.com/AmazonS3/latest/API."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.server.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _list(self, request: Request) -> str:
        found, more = self._page(_query(request, "prefix"), _query(request, "continuation-token"))
        lines = [
            f"<Contents><Key>{key}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
            f'<ETag>"{etag}"</ETag><Size>{size}</Size></Contents>'
            for key, size, etag in found
        ]
        token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><KeyCount>{len(found)}</KeyCount><IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
            f"{token}{''.join(lines)}</ListBucketResult>"
        )


class Google(Amazon):
    """The XML API of gs://, https://cloud.google.com/storage/docs/xml-api/overview."""

    @property
    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.server.url}


class Azure(Bucket):
    """The Blob service of az://, https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": "zephon",
            "AZURE_STORAGE_ACCOUNT_KEY": "emVwaG9u" * 8,
            "AZURE_STORAGE_ENDPOINT": self.server.url,
        }

    def _route(self, request: Request) -> Response:
        if not request.headers.get("Authorization", "").startswith("SharedKey zephon:"):
            return error(403, "AuthenticationFailed")
        return super()._route(request)

    def _list(self, request: Request) -> str:
        found, more = self._page(_query(request, "prefix"), _query(request, "marker"))
        lines = [
            f"<Blob><Name>{key}</Name><Properties><Last-Modified>{formatdate(_WRITTEN, usegmt=True)}"
            f"</Last-Modified><Etag>{etag}</Etag><Content-Length>{size}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key, size, etag in found
        ]
        blobs = f"<Blobs>{''.join(lines)}</Blobs><NextMarker>{more}</NextMarker>"
        return f'<EnumerationResults ContainerName="corpus">{blobs}</EnumerationResults>'


def error(status: int, code: str) -> Response:
    return Response(status, XML_ERROR.format(code=code).encode(), {"Content-Type": "application/xml"})


def _query(request: Request, name: str) -> str:
    return request.query.get(name, [""])[0]


def _xml(body: str) -> Response:
    return Response(200, f"<?xml version='1.0'?>{body}".encode(), {"Content-Type": "application/xml"})
