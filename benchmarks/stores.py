"""What reading from an object store costs: S3 on loopback against local files, cold starts, a second start.

The server is moto, in a process of its own on the same cores, so its work counts against the figures of S3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import Setup, in_process, records, rows
from examples.corpus import train_tokenizer

SERVER = """
from moto import backends
from moto.server import ThreadedMotoServer
modules = list(backends.list_of_moto_modules())  # else moto looks through its own folder at every request
backends.list_of_moto_modules = lambda: modules
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
input()
"""
TEXT = Path(textwrap.__file__).read_text(encoding="utf-8")
SHARDS, ROUNDS = 1000, 3


def write_shard(path: Path, count: int, seed: int, group_rows: int) -> None:
    """Documents of about 4 KB, each another cut of one text."""
    starts = [(seed * 7919 + n * 104729) % (len(TEXT) - 4096) for n in range(count)]
    texts = [f"{seed} {n} " + TEXT[start : start + 4096] for n, start in enumerate(starts)]
    table = pa.table({"text": texts, "url": [f"https://host/{seed}/{n}" * 8 for n in range(count)]})
    pq.write_table(table, path, row_group_size=group_rows, compression="zstd", write_statistics=False)


def speed(job: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first batch, and tokens per second after it."""
    began = time.perf_counter()
    pipeline = records(rows({**job, "lanes": 8}), job)
    stream = iter(pipeline)
    next(stream)
    first, done = time.perf_counter(), 0
    while done < job["tokens"]:
        done += next(stream).tokens.size
    took = time.perf_counter() - first
    pipeline.close()
    return first - began, done / took


def bench(setup: Setup) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), url, setup)
    finally:
        server.kill()


def measure(root: Path, url: str, setup: Setup) -> None:
    import boto3

    os.environ.update(
        AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_REGION="us-east-1"
    )
    client = boto3.client("s3")
    client.create_bucket(Bucket="bench")
    tokenizer = train_tokenizer([TEXT], root / "tokenizer", 8000, bos_token=None, eos_token="<|eos|>")
    (root / "large").mkdir()
    for n in range(8):
        write_shard(root / f"large/{n}.parquet", setup.source_mb * 10**6 // 4096 // 8, n, 1024)
        client.upload_file(str(root / f"large/{n}.parquet"), "bench", f"large/{n}.parquet")
    base = {"tokenizer": str(tokenizer), "threads": setup.threads, "tokens": setup.source_mb * 10**6 // 5}
    for n in range(ROUNDS):
        kinds = {"local": (str(root / "large"), "local"), "S3": ("s3://bench/large", "s3")}
        kinds["S3 kept on the node"] = kinds["S3"]
        taken = {
            name: speed({**base, "sources": {"d": path}, "cache": str(root / f"{cache}{n}")})
            for name, (path, cache) in kinds.items()
        }
        for name, (first, rate) in taken.items():
            share = rate / taken["local"][1]
            print(f"{name}: {rate / 1e6:.1f} M tokens/s ({share:.0%}), first batch {first:.2f} s", flush=True)
    write_shard(root / "small.parquet", 256, 0, 256)
    body = (root / "small.parquet").read_bytes()
    for n in range(SHARDS):
        client.put_object(Bucket="bench", Key=f"many/{n:05}.parquet", Body=body)
    job = {**base, "tokens": 1, "sources": {"d": "s3://bench/many"}, "cache": str(root / "many")}
    for what in ("without an index", "with an index", "with an index, no data on the node"):
        if what.endswith("node"):
            shutil.rmtree(root / "many/data")
        print(f"first batch of {SHARDS:,} shards on S3 {what}: {in_process(speed, job)[0]:.2f} s", flush=True)
