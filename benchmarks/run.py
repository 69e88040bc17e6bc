"""Run benchmarks, all of them or by name, on one corpus.

    .venv/bin/python -m benchmarks.run [NAME ...] [--folder .zephon/bench] [--source-mb 100] [--tokens 400e6]
                                       [--seconds 10] [--rounds 5] [--only PART ...]

Shared machines are noisy: what is compared is measured side by side within one run; look at the ratios.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from benchmarks.common import Setup

BENCHMARKS = {
    "throughput": "tokens per second, first batch and memory of one process",
    "compare": "every other loader on the same work, each in an environment of its own",
    "curves": "what a token costs by lanes, sources, shards, documents, row groups, lengths, microbatches, threads",
    "start": "the first batch by lanes and sources, cold, warm and from a state",
    "elastic": "states, restores and seeks",
    "packing": "how full records are, and how fast they are made, per algorithm",
    "operators": "row operators beside bare loops; chat beside Jinja alone",
    "runners": "worker processes and the isolated engine beside threads",
    "tokenizer": "tokenizer backends by threads, and the interpreter lock they hold",
    "stores": "an S3 server on loopback beside local files",
    "scale": "planning over a million shards",
    "waits": "what a step waits for its batch, in threads and with the isolated engine",
    "images": "pixels beside TorchTitan's path, packing, headers, and whole pipelines beside Grain's by workers",
    "trainers": "what the loader costs a step of TorchTitan and Megatron",
}


def main() -> None:
    """Run what the command line names."""
    listing = "\n".join(f"  {name:12}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="NAME", help="default: all")
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench"))
    parser.add_argument("--source-mb", type=int, default=100)
    parser.add_argument("--tokens", type=float, default=400e6)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loader in `compare`")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of a benchmark, by name")
    options = vars(parser.parse_args())
    names = options.pop("names") or list(BENCHMARKS)
    setup = Setup(**{**options, "folder": options["folder"].absolute(), "only": tuple(options["only"])})
    for name in names:
        print(f"\n## {name}: {BENCHMARKS[name]}\n", flush=True)
        importlib.import_module(f"benchmarks.{name}").bench(setup)


if __name__ == "__main__":
    main()
