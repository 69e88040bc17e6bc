"""Ranks killed with SIGKILL, resumed on other topologies: the run must not notice."""

import json
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import crashing, step_digests
from support.vision_data import file_of, image_tokenizer, picture
from zephon.run.ledger import read_ledger


def write_texts(folder):
    for name, count in (("a", 900), ("b", 400)):
        (folder / name).mkdir()
        texts = [f"{name} {i} " + "some words to fill the document " * (i % 23) for i in range(count)]
        for shard in range(3):
            pq.write_table(pa.table({"text": texts[shard::3]}), folder / name / f"{shard}.parquet", row_group_size=50)


def write_pairs(folder):
    """Images of three kinds with captions; some cannot be decoded."""
    (folder / "pairs").mkdir()
    choose = random.Random(0)
    files = [
        file_of(picture(choose.randint(10, 90), choose.randint(10, 90), seed=n), ("JPEG", "PNG", "WEBP")[n % 3])
        for n in range(60)
    ]
    files[17], files[28] = files[17][:-200], files[28][:-200]
    captions = [f"picture {i} " + "of some things " * (i % 9) for i in range(600)]
    table = pa.table({"image": [files[i % 60] for i in range(600)], "text": captions})
    pq.write_table(table, folder / "pairs" / "0.parquet", row_group_size=50)


def check_kills(folder, tokenizer, kills, timeout):
    """Kill ranks again and again: one account of all those processes, equal to that of an undisturbed run."""
    run = subprocess.run(
        [sys.executable, crashing.__file__, folder, tokenizer, str(kills), "7"],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert sum(told["topologies"]) >= kills
    assert len(set(told["topologies"])) >= 3
    assert told["resumes"] >= crashing.LEAST_RESUMES
    assert told["steps"] >= crashing.LEAST_STEPS
    # Records consumed again after a kill must have been the same, or this raises.
    found = read_ledger(folder / "ledger").step_digests(crashing.BATCH)
    undisturbed = crashing.build(folder, tokenizer, 1, 0, folder / "undisturbed")
    wanted = step_digests([undisturbed], told["steps"], crashing.BATCH)
    undisturbed.close()
    assert [found.get(step) for step in range(1, told["steps"] + 1)] == wanted


@pytest.mark.slow
def test_fifty_kills_leave_no_trace_in_the_global_batches(tmp_path, tiny_tokenizer):
    write_texts(tmp_path)
    check_kills(tmp_path, tiny_tokenizer, 50, 280)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, pytest.param(60, marks=pytest.mark.deep)])
def test_kills_leave_no_trace_in_images_and_their_pixels(tmp_path, kills):
    write_texts(tmp_path)
    write_pairs(tmp_path)
    tokenizer = image_tokenizer(tmp_path / "tokenizer")
    check_kills(tmp_path, tokenizer, kills, 280)
