"""s3:// against an S3 server that is not ours: moto, in a process of its own on loopback."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import step_digests
from zephon import Pipeline
from zephon.data import clients
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
input()
"""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """The address of a server with one bucket of three Parquet shards, and the same shards as local files."""
    import boto3

    folder = tmp_path_factory.mktemp("shards")
    for shard in range(3):
        texts = [f"document {n} of shard {shard}: " + "word " * (n % 40) for n in range(400)]
        pq.write_table(pa.table({"text": texts}), folder / f"{shard}.parquet", row_group_size=100)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:
        url = server.stdout.readline().strip()
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
        )
        client.create_bucket(Bucket="corpus")
        for file in folder.iterdir():
            client.upload_file(str(file), "corpus", f"web/{file.name}")
        yield url, folder
        server.kill()


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_global_batches_from_s3_are_those_from_local_files(bucket, tiny_tokenizer, tmp_path, monkeypatch, client):
    url, folder = bucket
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(clients, "_stores", {})
    if client == "fsspec":
        monkeypatch.setattr(clients, "find_spec", lambda name: None)

    def digests(path):
        pipelines = [
            Pipeline(StaticMixtureWorkSource([Dataset.from_path("web", path)], seed=3, chunk_size=64))
            .options(
                canonical_replicas=4,
                global_batch=8,
                dp_degree=2,
                dp_group_id=group,
                io_options={"cache": {"dir": tmp_path / client}},
            )
            .tokenize(tiny_tokenizer)
            .pack_flat(63)
            .shuffle(16)
            .batch(2)
            for group in range(2)
        ]
        return step_digests(pipelines, 5, 8)

    assert digests("s3://corpus/web") == digests(folder)
