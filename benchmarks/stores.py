"""What reading from an object store costs: S3 on loopback against local files, cold starts, a second rank.

    .venv/bin/python scripts/bench_stores.py [--megabytes 100] [--shards 1000] [--rounds 3]

The server is moto, in a process of its own on the same cores, so its work counts against the figures of S3.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.corpus import train_tokenizer
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

SERVER = """
from servers.s3 import moto_server
with moto_server() as address:
    print(f"http://{address}", flush=True)
    input()
"""
SERVERS = str(Path(__file__).parent.parent / "tests")
TEXT = Path(textwrap.__file__).read_text(encoding="utf-8")


def write_shard(path: Path, rows: int, seed: int, group_rows: int) -> None:
    """Documents of about 4 KB, each another cut of one text."""
    starts = [(seed * 7919 + n * 104729) % (len(TEXT) - 4096) for n in range(rows)]
    texts = [f"{seed} {n} " + TEXT[start : start + 4096] for n, start in enumerate(starts)]
    table = pa.table({"text": texts, "url": [f"https://host/{seed}/{n}" * 8 for n in range(rows)]})
    pq.write_table(table, path, row_group_size=group_rows, compression="zstd", write_statistics=False)


def pipeline(path: str, tokenizer: Path, cache: Path) -> Pipeline:
    source = StaticMixtureWorkSource([Dataset.from_path("d", path)], seed=1)
    return (
        Pipeline(source)
        .options(canonical_replicas=8, io_options={"cache": {"dir": cache}})
        .tokenize(tokenizer_id=str(tokenizer))
        .pack_flat(max_length=2048)
        .shuffle(buffer_size=256, seed=1)
        .batch(microbatch_size=8)
    )


def speed(path: str, tokenizer: Path, cache: Path, tokens: int) -> tuple[float, float]:
    """(seconds to the first batch, tokens per second after it)."""
    began = time.perf_counter()
    made = pipeline(path, tokenizer, cache)
    stream = iter(made)
    next(stream)
    first = time.perf_counter()
    done = 0
    while done < tokens:
        done += next(stream).tokens.size
    took = time.perf_counter() - first
    made.close()
    return first - began, done / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="text to stream")
    parser.add_argument("--shards", type=int, default=1000, help="shards of the dataset that is started cold")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env={**os.environ, "PYTHONPATH": SERVERS}, **pipes)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), url, arguments)
    finally:
        server.kill()


def measure(root: Path, url: str, arguments: argparse.Namespace) -> None:
    import boto3

    os.environ.update(
        AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_REGION="us-east-1"
    )
    client = boto3.client("s3")
    client.create_bucket(Bucket="bench")
    tokenizer = train_tokenizer([TEXT], root / "tokenizer", 8000, bos_token=None, eos_token="<|eos|>")
    (root / "large").mkdir()
    rows = arguments.megabytes * 10**6 // 4096 // 8
    for n in range(8):
        write_shard(root / f"large/{n}.parquet", rows, n, 1024)
        client.upload_file(str(root / f"large/{n}.parquet"), "bench", f"large/{n}.parquet")
    tokens = arguments.megabytes * 10**6 // 5
    for n in range(arguments.rounds):
        local = speed(str(root / "large"), tokenizer, root / f"local{n}", tokens)
        stored = speed("s3://bench/large", tokenizer, root / f"s3{n}", tokens)
        again = speed("s3://bench/large", tokenizer, root / f"s3{n}", tokens)
        print(
            f"tokens/s, millions: local {local[1] / 1e6:.1f}, S3 {stored[1] / 1e6:.1f} ({stored[1] / local[1]:.0%}), "
            f"S3 kept on the node {again[1] / 1e6:.1f} ({again[1] / local[1]:.0%})\n"
            f"first batch, seconds: local {local[0]:.2f}, S3 {stored[0]:.2f}, S3 kept on the node {again[0]:.2f}",
            flush=True,
        )
    write_shard(root / "small.parquet", 256, 0, 256)
    body = (root / "small.parquet").read_bytes()
    for n in range(arguments.shards):
        client.put_object(Bucket="bench", Key=f"many/{n:05}.parquet", Body=body)
    for what in ("without an index", "with an index", "with an index, nothing of it on the node"):
        if what.endswith("node"):
            shutil.rmtree(root / "many/data")
        print(f"first batch of {arguments.shards:,} shards on S3 {what}: ", end="", flush=True)
        code = (
            "import sys; from bench_stores import *; print('%.2f s' % speed(*sys.argv[1:3], Path(sys.argv[3]), 1)[0])"
        )
        command = [sys.executable, "-c", code, "s3://bench/many", str(tokenizer), str(root / "many")]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})


if __name__ == "__main__":
    main()
