"""`zephon index` over a store: killed in the middle, it goes on where it was."""

import os
import signal
import subprocess
import sys
import time

from support.io_data import open_path, write_shard
from support.servers import web

SHARDS = 120
INDEX = """
import sys
from zephon.cli.app import app
from zephon.data import catalog
catalog._SAVE_SECONDS = 0.0  # what takes 20 seconds with 10,000 shards
app(["index", "s3://corpus/many", "--cache-dir", sys.argv[1], "--jobs", "4"])
"""


def test_an_index_of_a_store_that_was_killed_goes_on_where_it_was(s3, tmp_path):
    body = write_shard(tmp_path / "shard.parquet", ["one", "two", "three"]).read_bytes()
    for shard in range(SHARDS):
        s3.put(f"many/{shard:03}.parquet", body)
    command = [sys.executable, "-c", INDEX, str(tmp_path / "cache")]
    s3.server.fault = web.slow(0.02)
    killed = subprocess.Popen(command, env=os.environ.copy(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(s3.server.data("many/")) < SHARDS // 2 and time.monotonic() < until:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    s3.server.fault = None
    s3.server.forget()
    done = subprocess.run(command, check=False, env=os.environ.copy(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f" {3 * SHARDS} " in done.stdout
    assert 0 < len({line.path for line in s3.server.data("many/")}) < SHARDS - 16
    s3.server.forget()
    indexed = open_path("s3://corpus/many", index_dir=tmp_path / "cache/index")
    assert not s3.server.data("many/")
    assert indexed.catalog.fingerprint == open_path("s3://corpus/many").catalog.fingerprint
