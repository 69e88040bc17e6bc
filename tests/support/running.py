"""A script as users write it, whose pipeline works in other processes; run by test_processes.py.

Its argument is JSON: options of the pipeline, the tokenizer, what to do.
"""

import json
import os
import resource
import signal
import sys
import time

from support.process_data import slow
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource


def mine(row):
    """In the script itself: workers find it there."""
    return {"text": row["text"] + " and mine"}


def main(given):
    os.environ["PARENT"], tests = str(os.getpid()), os.getppid()
    numbers = list(range(2000))
    data = Dataset.from_dict("d", {"number": numbers, "text": [f"text number {n} " * 9 for n in numbers]})
    source = StaticMixtureWorkSource(datasets=[data], token_estimation=False, chunk_size=500)
    pipeline = Pipeline(source).options(canonical_replicas=2, check_operators=False, **given["options"])
    pipeline = pipeline.map_transform(mine)
    if given.get("slow"):
        pipeline = pipeline.map_transform(slow)
    pipeline = pipeline.tokenize(given["tokenizer"], parallelism=2).pack_flat(255).batch(2)
    if "file_bytes" in given:  # what may be used of files, memory files included
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (given["file_bytes"], resource.RLIM_INFINITY))
    stream = iter(pipeline)
    print(json.dumps([digest.hex() for _ in range(given["batches"]) for digest in next(stream).digests]), flush=True)
    while given.get("forever") and os.getppid() == tests:  # no longer than the tests
        next(stream)
        time.sleep(0.01)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
