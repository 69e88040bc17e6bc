"""How well the shares of tokens hold: over any stretch of 2 million tokens, and over 100 million.

Two corpora are made of what the installed Python brings along: its documentation as it is, and its sources put
together to documents ten times as long and more. Both are mixed, the records of the run are counted in the order in
which they are trained on, and the worst stretch of each length is told, without and with ensure_mixture.

    python scripts/mixture_accuracy.py [--tokens 110e6] [--lanes 1 16 64 256] [--share 0.5]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from examples.corpus import build_corpus, train_tokenizer
from zephon import Pipeline
from zephon.data.cache import DecodeCache
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

SEQ_LEN = 2048
TIMES_LONGER = 10


def corpora(folder: Path) -> tuple[dict[str, Path], Path]:
    """Paths of "short" and "long", whose documents are ten times as long and more, and a tokenizer trained on them."""
    sources = build_corpus(folder / "corpus")

    def texts(name: str) -> list[str]:
        opened = Dataset.from_path(name, sources[name]).open(["text"], size_column="text", cache=DecodeCache(1 << 20))
        return opened.take(np.arange(opened.catalog.rows)).column("text").to_pylist()

    short, pieces = texts("docs"), texts("code")
    wanted = TIMES_LONGER * sum(map(len, short)) / len(short)
    # Neighbouring sources in equal numbers of documents as wanted characters make, whatever single ones have.
    ends = np.cumsum([len(text) for text in pieces])
    cuts = np.searchsorted(ends, np.arange(1, int(ends[-1] / wanted)) * wanted)
    long = ["".join(pieces[low:high]) for low, high in zip([0, *cuts], [*cuts, len(pieces)], strict=True) if high > low]
    made = {}
    for name, rows in (("short", short), ("long", long)):
        made[name] = folder / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        lengths = np.array([len(text) for text in rows])
        print(
            f"{name}: {len(rows):,} documents of {lengths.mean():,.0f} characters on average "
            f"(standard deviation {lengths.std():,.0f})"
        )
    return made, train_tokenizer([*short, *long], folder / "tokenizer", 8192)


def shares_of(pipeline: Pipeline, tokens: float) -> np.ndarray:
    """Tokens of the first dataset in each record of a run, int64[n_records]."""
    counts, done = [], 0
    for batch in pipeline:
        block = batch.block
        first = np.where(block.span_dataset == 0, block.span_lengths(), 0)
        counts.append(np.add.reduceat(first, block.span_offsets[:-1]))
        done += int(block.lengths.sum())
        if done >= tokens:
            break
    return np.concatenate(counts)


def worst(counts: np.ndarray, tokens: float, share: float) -> float:
    """The largest distance from `share`, in percentage points, over all stretches of so many tokens."""
    records = int(tokens // (SEQ_LEN + 1))
    sums = np.concatenate([[0], np.cumsum(counts)])
    return float(np.abs((sums[records:] - sums[:-records]) / (records * (SEQ_LEN + 1)) - share).max() * 100)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=110e6)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--share", type=float, default=0.5, help="wanted share of the long documents")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        paths, tokenizer = corpora(Path(name))
        for lanes in options.lanes:
            for ensure in (False, True):
                source = StaticMixtureWorkSource(
                    datasets=[Dataset.from_path(key, paths[key]) for key in ("long", "short")],
                    mixture={"long": options.share, "short": 1 - options.share},
                    seed=42,
                )
                pipeline = Pipeline(source).options(canonical_replicas=lanes).tokenize(tokenizer)
                if ensure:
                    pipeline = pipeline.ensure_mixture()
                pipeline = pipeline.pack_flat(SEQ_LEN).shuffle(1024, seed=42).batch(8)
                counts = shares_of(pipeline, options.tokens)
                pipeline.close()
                long_run = f"{worst(counts, 100e6, options.share):.3f}" if options.tokens >= 100e6 else "-"
                print(
                    f"{lanes:3} lanes, {'with' if ensure else 'without'} ensure_mixture: at most "
                    f"{worst(counts, 2e6, options.share):.3f} points off over any 2 million tokens, {long_run} over "
                    "any 100 million",
                    flush=True,
                )


if __name__ == "__main__":
    main()
