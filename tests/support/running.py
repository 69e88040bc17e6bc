"""A script as users write it, whose pipeline works in other processes; run by test_processes.py.

Its argument is JSON: options of the pipeline, the tokenizer, what to do.
"""

import json
import os
import sys
import time
from pathlib import Path

from support.process_data import slow
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource


def mine(row):
    """In the script itself: workers find it there."""
    return {"text": row["text"] + " and mine"}


class Sizes:
    """What the parent may use of files, memory files included."""

    def __init__(self, nbytes):
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


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
    if "file_bytes" in given:
        Sizes(given["file_bytes"])
    stream = iter(pipeline)
    digests = [digest.hex() for _ in range(given["batches"]) for digest in next(stream).digests]
    print(json.dumps(digests), flush=True)
    if given.get("forever"):
        while os.getppid() == tests:  # and no longer than the tests
            next(stream)
            time.sleep(0.01)
    Path(given["done"]).write_text("")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
