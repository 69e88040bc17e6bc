"""Stores with small datasets in them, for the tests of stores."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from support.servers.s3 import Proxy, moto_server

__all__ = ["s3_environment", "s3_store", "upload"]


@contextmanager
def s3_store() -> Iterator[SimpleNamespace]:
    """A bucket "corpus" in moto; `.server` is the proxy to go through, `.put(key, bytes)` goes past it."""
    with moto_server() as upstream:
        import boto3

        proxy = Proxy(upstream)

        client = boto3.client(
            "s3", endpoint_url=f"http://{upstream}", region_name="us-east-1",
            aws_access_key_id="test", aws_secret_access_key="test",
        )  # fmt: skip
        client.create_bucket(Bucket="corpus")

        def put(key: str, body: bytes) -> None:
            client.put_object(Bucket="corpus", Key=key, Body=body)
            proxy.forget()

        def delete(key: str) -> None:
            client.delete_object(Bucket="corpus", Key=key)
            proxy.forget()

        with proxy.server as server:
            environment = s3_environment(server.url)
            yield SimpleNamespace(server=server, client=client, put=put, delete=delete, environment=environment)


def s3_environment(url: str) -> dict[str, str]:
    """What the AWS clients take from the environment."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def upload(store: SimpleNamespace, folder: Path, prefix: str) -> None:
    """Every file below `folder` as an object below `prefix`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
