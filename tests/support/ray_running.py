"""A rank of a training job whose workers are on a Ray cluster; run by test_ray.py.

Its argument is JSON: tokenizer, group, groups, options of the pipeline, batches to take, and a file for its state, from
which it goes on where there is one. Every batch is a line of its output: [sequence numbers, digests].
"""

import json
import os
import sys
from pathlib import Path

from support.ray_cluster import rank_pipeline


def main(given):
    pipeline = rank_pipeline(given["tokenizer"], given["group"], given["groups"], **given["options"])
    state = Path(given["state"])
    if state.exists():
        pipeline.restore(json.loads(state.read_text()))
    for batch, _ in zip(pipeline, range(given["batches"]), strict=False):
        print(json.dumps([batch.sequence_numbers.tolist(), [each.hex() for each in batch.digests]]), flush=True)
        unfinished = state.with_suffix(".tmp")
        unfinished.write_text(json.dumps(pipeline.checkpoint()))
        os.replace(unfinished, state)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
