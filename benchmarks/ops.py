"""What operators cost, each beside what it is to be measured against.

    .venv/bin/python scripts/bench_ops.py [--folder .zephon/bench-ops] [--seconds 4] [--only NAME ...]

Row operators are compared with a bare Python loop over the same rows, on one worker; filters and batch functions with
reading alone; chat with the Jinja rendering that it cannot do without, on all cores. Ratios are measured side by side,
several times in turn, and the middle one is told.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from examples.corpus import build_corpus, train_tokenizer
from zephon import Pipeline
from zephon.io import Dataset
from zephon.ops.filter import Filter
from zephon.ops.functions import MapBatches, MapTransform
from zephon.ops.rows import Rows
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource

TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call functions to help with the query.\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' and not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def prepare(folder: Path) -> tuple[pa.Table, Path, Path]:
    """Documents, a tokenizer with tokens for chat, and a Parquet file of conversations."""
    corpus = build_corpus(folder / "corpus")
    files = sorted(corpus["code"].glob("*.parquet"))
    documents = pa.concat_tables([pq.read_table(file, columns=["text"]) for file in files]).combine_chunks()
    tokenizer = folder / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        from tokenizers import AddedToken, Tokenizer

        train_tokenizer(documents.column("text").to_pylist()[:2000], tokenizer, 32_000)
        with_chat = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        with_chat.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
        with_chat.save(str(tokenizer / "tokenizer.json"))
    chats = folder / "chat" / "chat.parquet"
    if not chats.exists():
        chats.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(conversations(documents), chats, row_group_size=2048)
    return documents, tokenizer, chats


def conversations(documents: pa.Table, count: int = 30_000) -> pa.Table:
    """Two to eight turns of about 60 words from the user and 150 from the assistant, as instruction data has."""
    words = [word for text in documents.column("text").to_pylist()[:600] for word in text.split()]
    choose = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        messages = []
        for turn in range(2 * int(choose.integers(1, 5))):
            size = int(choose.exponential(150 if turn % 2 else 60)) + 3
            at = int(choose.integers(0, len(words) - size))
            role = "assistant" if turn % 2 else "user"
            messages.append({"role": role, "content": " ".join(words[at : at + size])})
        rows.append(messages)
    return pa.table({"messages": pa.array(rows)})


def side_by_side(jobs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Seconds of CPU time per call of each, taken in turn; the middle one of many."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    until = time.perf_counter() + seconds
    for job in jobs.values():
        job()
    while time.perf_counter() < until or len(next(iter(taken.values()))) < 3:
        for name, job in jobs.items():
            began = time.process_time()  # they run in this thread, which a busy machine takes turns with others
            job()
            taken[name].append(time.process_time() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def clean(row: dict[str, Any]) -> dict[str, Any]:
    """What such functions do: normalise the text a little."""
    return {"text": "\n".join(line.rstrip() for line in row["text"].splitlines())}


def bench_map(table: pa.Table, seconds: float) -> None:
    operator = MapTransform(clean)
    table = table.slice(0, 4096)
    rows = table.to_pylist()

    def bare() -> list[Any]:
        return [clean(row) for row in rows]

    def ours() -> None:
        operator.apply(Rows(table, np.arange(table.num_rows)))

    taken = side_by_side({"bare": bare, "ours": ours}, seconds)
    each = {name: time_ * 1e6 / table.num_rows for name, time_ in taken.items()}
    print(
        f"map_transform: {each['ours']:.2f} µs per row, a bare loop {each['bare']:.2f} µs; "
        f"{taken['bare'] / taken['ours']:.2f} of its speed, columns to rows and back included"
    )


def bench_columns(table: pa.Table, seconds: float) -> None:
    table = table.slice(0, 4096)
    nbytes = table.nbytes
    places = np.arange(table.num_rows)
    expression = Filter('length(text) > 200 and not contains(text, "import os")')
    function = Filter(lambda row: len(row["text"]) > 200 and "import os" not in row["text"])
    batches = MapBatches(lambda t: t.set_column(0, "text", pc.utf8_trim_whitespace(t.column("text"))))
    by_row = MapTransform(lambda row: {"text": row["text"].strip()})
    taken = side_by_side(
        {
            "filter by expression": lambda: expression.apply(Rows(table, places)),
            "filter by function": lambda: function.apply(Rows(table, places)),
            "map_batches": lambda: batches.apply(Rows(table, places)),
            "map_transform, the same": lambda: by_row.apply(Rows(table, places)),
        },
        seconds,
    )
    for name, time_ in taken.items():
        print(f"{name}: {nbytes / time_ / 1e6:,.0f} MB/s, {table.num_rows / time_ / 1e6:.2f} million rows/s")


def bench_chat(tokenizer: Path, chats: Path, seconds: float, threads: int) -> None:
    from zephon.ops.chat_template import ChatTemplate

    table = pq.read_table(chats).slice(0, 1000)
    messages = table.column("messages").to_pylist()
    template = ChatTemplate(TEMPLATE, {})
    began = time.perf_counter()
    texts = [template.render(one).text for one in messages]
    render = (time.perf_counter() - began) / len(messages)
    loaded = load_tokenizer(tokenizer)
    tokens = int(loaded.encode(pa.array(texts, pa.large_string()))[1][-1])
    print(
        f"jinja alone: {render * 1e6:.0f} µs per conversation of {tokens / len(texts):.0f} tokens, one thread; "
        f"{tokens / len(texts) / render / 1e6:.1f} million tokens/s"
    )
    pipeline = (
        Pipeline(StaticMixtureWorkSource(datasets=[Dataset.from_path("chat", chats)], seed=1))
        .tokenize_chat(tokenizer, chat_template=TEMPLATE, parallelism=threads)
        .pack_flat(max_length=2048)
        .shuffle(1024)
        .batch(8)
    )
    stream = iter(pipeline)
    for _ in range(200):
        next(stream)
    began, used, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < max(5, seconds):
        next(stream).to_training(as_numpy=True)
        count += 1
    took, used = time.perf_counter() - began, time.process_time() - used
    pipeline.close()
    print(
        f"chat: {count * 8 * 2048 / took / 1e6:.1f} million tokens/s with {threads} threads, "
        f"{count * 8 * 2048 / used / 1e6:.1f} per second of CPU time ({used / took:.2f} cores used)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".zephon/bench-ops"))
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=["map", "columns", "chat"])
    options = parser.parse_args()
    documents, tokenizer, chats = prepare(options.folder.absolute())
    if "map" in options.only:
        bench_map(documents, options.seconds)
    if "columns" in options.only:
        bench_columns(documents, options.seconds)
    if "chat" in options.only:
        bench_chat(tokenizer, chats, options.seconds, options.threads)


if __name__ == "__main__":
    main()
