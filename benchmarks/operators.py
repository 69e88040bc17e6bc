"""What operators cost, each beside what it is to be measured against.

Row operators are compared with a bare Python loop over the same rows, on one worker; filters and batch functions with
each other; chat with the Jinja rendering that it cannot do without, on all threads.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.common import MICROBATCH, SEQ_LEN, Setup, cpu_seconds, in_turns, rows
from examples.corpus import build_corpus, train_tokenizer
from zephon.ops import Filter, MapBatches, MapTransform
from zephon.ops.rows import Rows

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
    files = sorted(build_corpus(folder / "small")["code"].glob("*.parquet"))
    documents = pa.concat_tables([pq.read_table(file, columns=["text"]) for file in files]).combine_chunks()
    tokenizer = folder / "chat-tokenizer"
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


def clean(row: dict[str, Any]) -> dict[str, Any]:
    """What such functions do: normalise the text a little."""
    return {"text": "\n".join(line.rstrip() for line in row["text"].splitlines())}


def bench_rows(table: pa.Table, seconds: float) -> None:
    table = table.slice(0, 4096)
    plain, places = table.to_pylist(), np.arange(table.num_rows)
    operators = {
        "map_transform": MapTransform(clean),
        "filter by expression": Filter('length(text) > 200 and not contains(text, "import os")'),
        "filter by function": Filter(lambda row: len(row["text"]) > 200 and "import os" not in row["text"]),
        "map_batches": MapBatches(lambda t: t.set_column(0, "text", pc.utf8_trim_whitespace(t.column("text")))),
    }
    jobs = {"bare loop": cpu_seconds(lambda: [clean(row) for row in plain])}
    jobs |= {
        name: cpu_seconds(lambda operator=operator: operator.apply(Rows(table, places)))  # type: ignore[misc]
        for name, operator in operators.items()
    }
    taken = {name: figures["seconds"] for name, figures in in_turns(jobs, seconds).items()}
    for name, each in taken.items():
        print(f"{name}: {each * 1e6 / len(plain):.2f} µs per row, {table.nbytes / each / 1e6:,.0f} MB/s")
    ratio = taken["bare loop"] / taken["map_transform"]
    print(f"map_transform runs at {ratio:.2f} of the bare loop, columns to rows and back included")


def chat_speed(job: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second of wall time and of CPU time."""
    pipeline = rows(job).tokenize_chat(job["tokenizer"], chat_template=TEMPLATE, parallelism=job["threads"])
    stream = iter(pipeline.pack_flat(max_length=SEQ_LEN).shuffle(1024).batch(MICROBATCH))
    for _ in range(200):
        next(stream)
    began, used, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < job["seconds"]:
        next(stream).to_training(as_numpy=True)
        count += MICROBATCH * SEQ_LEN
    return count / (time.perf_counter() - began), count / (time.process_time() - used)


def bench_chat(tokenizer: Path, chats: Path, setup: Setup) -> None:
    from zephon.ops.chat_template import ChatTemplate
    from zephon.tokenizer.tokenizer import load_tokenizer

    messages = pq.read_table(chats).slice(0, 1000).column("messages").to_pylist()
    template = ChatTemplate(TEMPLATE, {})
    began = time.perf_counter()
    texts = [template.render(one).text for one in messages]
    render = (time.perf_counter() - began) / len(messages)
    tokens = int(load_tokenizer(tokenizer).encode(pa.array(texts, pa.large_string()))[1][-1]) / len(texts)
    print(
        f"Jinja alone, one thread: {render * 1e6:.0f} µs per conversation of {tokens:.0f} tokens, "
        f"{tokens / render / 1e6:.1f} million tokens/s"
    )
    job = {
        "sources": {"chat": str(chats)},
        "tokenizer": str(tokenizer),
        "cache": str(setup.folder / "cache"),
        "threads": setup.threads,
        "seconds": setup.seconds,
    }
    wall, cpu = chat_speed(job)
    print(f"chat: {wall / 1e6:.1f} million tokens/s with {setup.threads} threads, {cpu / 1e6:.1f} per CPU second")


def bench(setup: Setup) -> None:
    documents, tokenizer, chats = prepare(setup.folder)
    if setup.wants("rows"):
        bench_rows(documents, setup.seconds)
    if setup.wants("chat"):
        bench_chat(tokenizer, chats, setup)
