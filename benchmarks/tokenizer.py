"""How fast a tokenizer loads and encodes through zephon.tokenizer, per backend and number of threads.

    .venv/bin/python scripts/bench_tokenizer.py [--tokenizer FOLDER] [--document-bytes 3000] [--threads 1 2]

Without --tokenizer, a GPT-2-like vocabulary of 50,257 is trained on the Python files of this environment (30 MB of
them), and kept in --folder. The text encoded is theirs too, in columns of 1 MB: "new" is text that the instance has not
seen yet, "seen" the same again. "free" is how fast another Python thread counts meanwhile, against alone: what is
missing is the GIL held, and on few cores the processor time itself.
"""

import argparse
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from zephon.errors import TokenizerError
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

BACKENDS = ("fastokens", "gigatoken", "tokenizers")


def documents(limit: int) -> Iterator[str]:
    """Texts of the Python files of this environment, up to `limit` bytes, none of them twice."""
    seen = set()
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")):
        for path in sorted(Path(root).rglob("*.py")):
            data = path.read_bytes()
            if not data or data in seen or not data.isascii():
                continue
            seen.add(data)
            yield data.decode()
            limit -= len(data)
            if limit <= 0:
                return


def train(folder: Path) -> Path:
    if not (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=50_257, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
        tokenizer.train_from_iterator(documents(30_000_000), trainer)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def columns(total: int, document_bytes: int) -> list[pa.Array]:
    made: list[pa.Array] = []
    texts: list[str] = []
    size = 0
    for document in documents(total):
        for start in range(0, len(document), document_bytes):
            texts.append(document[start : start + document_bytes])
            size += len(texts[-1])
            if size >= 1_000_000:
                made.append(pa.array(texts, pa.large_string()))
                texts, size = [], 0
    return made


def speed(tokenizer: Tokenizer, work: list[pa.Array], n_threads: int) -> float:
    """MB of text per second, all threads together."""
    waiting = iter(work)
    lock = threading.Lock()

    def encode() -> None:
        while True:
            with lock:
                column = next(waiting, None)
            if column is None:
                return
            tokenizer.encode(column)

    threads = [threading.Thread(target=encode) for _ in range(n_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(column.nbytes for column in work) / 1e6 / (time.perf_counter() - began)


def counts_meanwhile(work: Callable[[], object], seconds: float = 1.0) -> float:
    """Steps per second of a counting thread while this thread does `work` again and again."""
    stop = threading.Event()
    steps = 0

    def count() -> None:
        nonlocal steps
        while not stop.is_set():
            steps += 1

    counter = threading.Thread(target=count)
    began = time.perf_counter()
    counter.start()
    while time.perf_counter() - began < seconds:
        work()
    stop.set()
    counter.join()
    return steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; default: train one")
    parser.add_argument(
        "--folder", type=Path, default=Path(".zephon/bench/tokenizer-50k"), help="where to keep that one"
    )
    parser.add_argument("--megabytes", type=int, default=80, help="text to encode")
    parser.add_argument("--document-bytes", type=int, default=3000, help="size of a document")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS[:2])
    options = parser.parse_args()

    folder = options.tokenizer or train(options.folder)
    work = columns(options.megabytes * 1_000_000, options.document_bytes)
    idle = counts_meanwhile(lambda: time.sleep(0.1))
    for backend in options.backends:
        try:
            began = time.perf_counter()
            tokenizer = load_tokenizer(folder, backend=backend)
            print(f"{backend}: loaded and checked in {time.perf_counter() - began:.2f} s")
        except TokenizerError as error:
            print(f"{backend}: {error}")
            continue
        for n_threads in options.threads:
            tokenizer = load_tokenizer(folder, backend=backend)
            speed(tokenizer, work[:n_threads], n_threads)
            new, seen = speed(tokenizer, work[n_threads:], n_threads), speed(tokenizer, work[n_threads:], n_threads)
            print(f"  {n_threads} threads: new {new:.0f} MB/s, seen {seen:.0f} MB/s")
        held = counts_meanwhile(lambda t=tokenizer: t.encode(work[0])) / idle
        print(f"  free: {held:.2f}")


if __name__ == "__main__":
    main()
