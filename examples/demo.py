"""The main job from nothing: a corpus, training batches from it, and the same batches on other numbers of ranks.

    .venv/bin/python -m examples.demo [--folder .zephon/demo] [--steps 10000]
    .venv/bin/python -m examples.demo --vision

With `--vision` the corpus is pictures and text, drawn at run time: `examples.vision`. Without, each `zephon` command is
printed before it runs, so that it can be tried again with other values.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from examples.corpus import build_demo


def headline(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def zephon(*arguments: object) -> None:
    """Run a command of `zephon`; exit with its status where it fails."""
    words = [str(argument) for argument in arguments]
    print(f"$ zephon {shlex.join(words)}\n", flush=True)
    status = subprocess.run([sys.executable, "-m", "zephon.cli", *words], check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    """Build the corpus, stream from it, and prove that the batches are the same on 1, 2 and 4 ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/demo"), help="used again if complete")
    parser.add_argument("--steps", type=int, default=10_000, help="batches to stream")
    parser.add_argument("--vision", action="store_true", help="pictures and text, and a contact sheet of a batch")
    options = parser.parse_args()
    started = time.perf_counter()
    if options.vision:
        from examples import vision  # needs the extra "vision"

        vision.main(options.folder)
        print(f"\nthe demo took {time.perf_counter() - started:.1f} s")
        return

    headline("1. A corpus, a tokenizer and a recipe")
    corpus = build_demo(options.folder)
    print(f"{corpus.recipe} after {time.perf_counter() - started:.1f} s:\n")
    print("".join(f"    {line}".rstrip() + "\n" for line in corpus.recipe.read_text(encoding="utf-8").splitlines()))
    recipe = (corpus.recipe, "--tokenizer", corpus.tokenizer)

    headline("2. Training batches from it")
    zephon("stream", *recipe, "--seq-len", 1024, "--microbatch-size", 8, "--steps", options.steps)
    headline("   What the model saw in step 17")
    zephon("show", *recipe, "--seq-len", 1024, "--global-batch", 8, "--step", 17, "--record", 128, "--chars", 600)

    headline("3. The same global batches on 1, 2 and 4 ranks, each a process, killed and resumed after step 6")
    matrix = ("--global-batch", 16, "--dp", "1,2,4", "--resume-at", 6, "--steps", 16, "--microbatch-size", 2)
    zephon("verify", *recipe, "--seq-len", 512, *matrix, "--plot", options.folder / "barcode.png")
    print(f"\nthe demo took {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
