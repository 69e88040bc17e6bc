"""Stores: where the files of datasets lie, besides this machine's own folders.

One module per kind behind the `Store` protocol of `base`, which also holds the one place where requests are retried:

    objects   s3://, gs://, az:// through obstore
    http      http://, https://, and the links that other stores answer with
    hub       hf://
    generic   all of these protocols of fsspec, and the object stores where obstore is not installed
"""

import difflib
import re
import threading
from importlib.util import find_spec

from zephon.data.stores.base import Changed, Found, Source, Store, StoreFault, Unavailable, attempt, fetch, shown
from zephon.errors import DataError

__all__ = [
    "SCHEMES",
    "Changed",
    "Found",
    "Source",
    "Store",
    "StoreFault",
    "Unavailable",
    "attempt",
    "fetch",
    "shown",
    "store_of",
]

_ALIASES = {
    "s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "azure": "az",
}  # fmt: skip
# A recipe is untrusted input: of fsspec's protocols only those that read a store, none that wrap or run something.
_OTHERS = ("memory", "ftp", "sftp", "ssh", "hdfs", "webhdfs", "smb", "oss", "oci", "cos", "tos", "obs", "dbfs", "root")
SCHEMES = ("file", "s3", "gs", "az", "http", "https", "hf", *_OTHERS)
"""What may stand before ``://`` in the path of a dataset, aliases left out."""

_BUCKET = re.compile(r"[$A-Za-z0-9][A-Za-z0-9._-]*")  # $web and $root are containers of Azure

_lock = threading.Lock()
_stores: dict[tuple[str, str], Store] = {}


def store_of(uri: str) -> tuple[Store, str]:
    """The store that `uri` lies in, and what follows the scheme.

    Raises:
        DataError: a scheme that is unknown, or no bucket.
    """
    scheme, _, path = uri.partition("://")
    scheme = scheme.lower()
    kind = _ALIASES.get(scheme, scheme)
    if kind not in SCHEMES:
        near = difflib.get_close_matches(kind, SCHEMES, n=1)
        hint = f"did you mean {near[0]}://?" if near else "copy or mount the dataset locally"
        raise DataError(
            f"stores of kind {scheme}:// are not supported ('{shown(uri)}'); known are "
            f"{', '.join(known + '://' for known in SCHEMES[:8])} and what fsspec reads; {hint}"
        )
    bucket = path.partition("/")[0]
    if kind in ("s3", "gs", "az"):
        if not bucket:
            raise DataError(f"'{uri}' names no bucket; write {kind}://BUCKET/FOLDER")
        if kind == "az" and "@" in bucket:  # abfss://container@account.dfs.core.windows.net/path
            bucket = bucket.partition("@")[0]
            path = bucket + "/" + path.partition("/")[2]
        if not _BUCKET.fullmatch(bucket):
            raise DataError(
                f"'{uri}' names the bucket {bucket[:100]!r}, which no bucket can be called; correct the path"
            )
    with _lock:
        key = (kind, bucket if kind in ("s3", "gs", "az") else "")
        if key not in _stores:
            _stores[key] = _made(kind, bucket)
        return _stores[key], path


def _made(kind: str, bucket: str) -> Store:
    # Imported where they are needed, for the libraries below take their time and may not be installed.
    if kind in ("s3", "gs", "az") and find_spec("obstore"):
        from zephon.data.stores.objects import ObjectStore

        return ObjectStore(kind, bucket)
    if kind in ("http", "https"):
        from zephon.data.stores.http import HttpStore

        return HttpStore(kind)
    if kind == "hf":
        from zephon.data.stores.hub import HubStore

        return HubStore()
    from zephon.data.stores.generic import FsspecStore

    return FsspecStore(kind)
