"""Every other store that fsspec knows, and s3://, gs://, az:// where obstore is not installed."""

from collections.abc import Callable
from typing import Any

from zephon.data.stores.base import ATTEMPT_SECONDS, Connections, Found, StoreFault
from zephon.data.stores.http import fault_kind, retry_after
from zephon.data.stores.names import MAGIC, matcher, split_pattern, visible

__all__ = ["FsspecStore"]

_VERSION_KEYS = (
    "ETag",
    "etag",
    "e_tag",
    "content_hash",
    "md5Hash",
    "checksum",
    "mtime",
    "LastModified",
    "modified",
    "created",
)


class FsspecStore:
    """One fsspec filesystem. Keys are its paths.

    fsspec has no conditional reads. What a store tells of an object's version is compared before each read where that
    costs no request, else once whenever a shard is opened (`head`).
    """

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._systems: Connections[Any] = Connections(lambda: _filesystem(scheme))

    def list(self, path: str) -> Found:
        system = self._systems.get()
        whole = _asked(system._strip_protocol, f"{self._scheme}://{path}")
        if MAGIC.search(whole):
            folder, pattern = split_pattern(whole)
            wanted: Callable[[str], object] = matcher(pattern)
        else:
            folder, wanted = whole, visible
            info = _asked(system.info, whole)
            if info.get("type") == "file":
                root, _, name = whole.rpartition("/")
                return Found(self._uri(root), [name], [info["size"]], [_version(info)], [whole])
        found = _asked(system.find, folder, detail=True)
        folder = folder.rstrip("/")
        rows = [
            (name, int(info["size"]), _version(info), key)
            for key, info in found.items()
            if info.get("type") == "file" and wanted(name := key[len(folder) :].lstrip("/"))
        ]
        names, sizes, versions, keys = zip(*rows, strict=True) if rows else ((), (), (), ())
        return Found(self._uri(folder), names, sizes, versions, keys)

    def head(self, key: str) -> tuple[int, str]:
        system = self._systems.get()
        _forget_listing(system, key)
        info = _asked(system.info, key)
        return int(info["size"]), _version(info)

    def get(self, key: str, start: int, length: int, version: str, size: int) -> bytes:
        system = self._systems.get()
        if not system.async_impl:  # in memory or on a mount; others are compared when a shard is opened
            now = self.head(key)
            if now != (size, version):
                raise StoreFault(
                    "changed", f"it had {size:,} bytes when it was listed and has {now[0]:,} now, or other ones"
                )
        data = _asked(_cat, system, key, start, start + length)
        if len(data) != length:
            now = self.head(key)
            if now[0] != size or now[1] != version:
                raise StoreFault("changed", f"it had {size:,} bytes when it was listed and has {now[0]:,} now")
            raise StoreFault("passing", f"{len(data):,} bytes came where {length:,} were asked for")
        return data

    def renew(self) -> None:
        self._systems.renew()

    def _uri(self, folder: str) -> str:
        return f"{self._scheme}://{folder.strip('/')}" if self._scheme != "memory" else f"memory://{folder}"


def _filesystem(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme, skip_instance_cache=scheme != "memory", use_listings_cache=False)
    except (ImportError, ValueError) as error:
        extra = " (or zephon-core[object-stores], which is faster)" if scheme in ("s3", "gs", "az") else ""
        raise StoreFault("refused", f"{' '.join(str(error).split())}{extra}") from error


def _cat(system: Any, key: str, start: int, stop: int) -> bytes:
    if system.async_impl:
        from fsspec.asyn import sync

        return sync(system.loop, system._cat_file, key, start=start, end=stop, timeout=ATTEMPT_SECONDS)
    return system.cat_file(key, start=start, end=stop)


def _forget_listing(system: Any, key: str) -> None:
    if hasattr(system, "invalidate_cache"):
        system.invalidate_cache(system._parent(key))


def _version(info: dict[str, Any]) -> str:
    for key in _VERSION_KEYS:
        if value := info.get(key):
            return str(value.timestamp() if hasattr(value, "timestamp") else value)
    return ""


def _asked(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """One call of fsspec, its errors, which are those of the store's own library, as `StoreFault`."""
    try:
        return function(*args, **keywords)
    except StoreFault:
        raise
    except FileNotFoundError as error:
        raise StoreFault("missing", "the store knows no such object") from error
    except PermissionError as error:
        raise StoreFault("denied", _brief(error)) from error
    except (NotImplementedError, IsADirectoryError, NotADirectoryError) as error:
        raise StoreFault("refused", _brief(error)) from error
    except Exception as error:
        status, headers = _answer(error)
        raise StoreFault(fault_kind(status) if status else "passing", _brief(error), retry_after(headers)) from error


def _answer(error: BaseException) -> tuple[int, Any]:
    """The HTTP status and headers that a library's exception, or its cause, carries somewhere; (0, {}) if none."""
    for one in (error, error.__cause__, error.__context__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore
            meta = response.get("ResponseMetadata", {})
            headers = {key.title(): value for key, value in meta.get("HTTPHeaders", {}).items()}
            return int(meta.get("HTTPStatusCode", 0)), headers
        for holder in (one, response):
            status = next((getattr(holder, k) for k in ("status", "status_code", "code") if hasattr(holder, k)), None)
            if isinstance(status, int):
                return status, getattr(holder, "headers", None) or {}
    return 0, {}


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240]
