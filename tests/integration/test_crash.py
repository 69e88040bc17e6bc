"""Fifty ranks killed with SIGKILL, resumed on other topologies: the run must not notice."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import crashing, step_digests
from zephon.run.ledger import read_ledger


@pytest.mark.slow
def test_fifty_kills_leave_no_trace_in_the_global_batches(tmp_path, tiny_tokenizer):
    for name, count in (("a", 900), ("b", 400)):
        (tmp_path / name).mkdir()
        texts = [f"{name} {i} " + "some words to fill the document " * (i % 23) for i in range(count)]
        for shard in range(3):
            pq.write_table(pa.table({"text": texts[shard::3]}), tmp_path / name / f"{shard}.parquet", row_group_size=50)
    run = subprocess.run(
        [sys.executable, crashing.__file__, tmp_path, tiny_tokenizer, "50", "7"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert (
        sum(told["topologies"]) >= 50
        and len(set(told["topologies"])) >= 3
        and told["resumes"] >= crashing.LEAST_RESUMES
    )
    assert told["steps"] >= crashing.LEAST_STEPS
    # One account from all those processes: records consumed again after a kill must have been the same, or this raises.
    found = read_ledger(tmp_path / "ledger").step_digests(crashing.BATCH)
    undisturbed = crashing.build(tmp_path, tiny_tokenizer, 1, 0, tmp_path / "undisturbed")
    wanted = step_digests([undisturbed], told["steps"], crashing.BATCH)
    undisturbed.close()
    assert [found.get(step) for step in range(1, told["steps"] + 1)] == wanted
