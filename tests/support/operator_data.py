"""Operators of a user's own, as tests use them, some of which break the rules, and small pipelines around them."""

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import column_of
from zephon.io import Dataset
from zephon.ops.functions import Operator
from zephon.ops.rows import Rows
from zephon.ops.stateful import Stateful
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource


def applied(operator, table, skips=True):
    """What an operator makes of a table: rows left, and faults."""
    rows = Rows(table, np.arange(table.num_rows), skips)
    operator.apply(rows)
    return rows


def numbered(count=400, **columns):
    return {"text": [f"document {n} of some words" for n in range(count)], "number": list(range(count)), **columns}


def source_of(columns=None, count=200, **changes):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns or numbered(count))
    values = {"datasets": [Dataset.from_table("web", table)], "chunk_size": 30, "seed": 1, **changes}
    return StaticMixtureWorkSource(**values)


def finished(pipeline, tokenizer, buffer=None, **options):
    """A pipeline of row operators, with all that comes after them."""
    pipeline = pipeline.options(**{"runner": "inline", "canonical_replicas": 2, **options})
    pipeline = pipeline.tokenize(tokenizer).pack_flat(31)
    return (pipeline.shuffle(buffer) if buffer else pipeline).batch(2)


def texts_of(pipeline, tokenizer, batches=120):
    """The documents in the stream of two lanes, put together again from what the records hold."""
    decoder = load_tokenizer(tokenizer)
    lanes = {0: [], 1: []}
    for batch, _ in zip(pipeline, range(batches), strict=False):
        for number, record in zip(batch.sequence_numbers.tolist(), batch.tokens, strict=True):
            lanes[number % 2].append(record)
    out = set()
    for records in lanes.values():
        tokens = np.concatenate(records)
        ends = np.flatnonzero(tokens == decoder.eos_id)
        out |= {decoder.decode(part[1:-1]) for part in np.split(tokens, ends + 1)[:-1]}
    return out


def shout(row):
    return {"text": row["text"].upper()} if row["text"] else None


def two_of_each(row):
    return [{"text": f"one {row['text']}"}, {"text": f"two {row['text']} and more"}] if row["number"] % 3 else row


def reversed_texts(table):
    texts = [None if text is None else text[::-1] for text in table.column("text").to_pylist()]
    return table.set_column(table.column_names.index("text"), "text", column_of(texts))


def every_other(table):
    """Drops by content, and keeps the place of each row."""
    return table.filter(column_of([number % 2 == 0 for number in table.column("number").to_pylist()]))


LAMBDAS = [lambda row: row["number"] > 1, lambda row: row["number"] < 1]


def fails_on_sevens(row):
    if row["number"] % 7 == 0:
        raise ValueError(f"no {row['number']}")
    return row


def valued(row):
    """New columns, of values that vary in type, and that are missing in some rows."""
    number = row["number"]
    made = {"score": [None, number, number / 4, number][number % 4], "lists": {"first": None if number % 9 else number}}
    if number % 6:
        made["word"] = f"word {number}" if number % 5 else number
    return made


class Joined(Stateful):
    """Puts three rows into one."""

    def init_state(self):
        return []

    def push(self, state, row):
        state.append(row["text"] or "")
        if len(state) == 3:
            joined = " | ".join(state)
            state.clear()
            return {"text": joined}
        return None

    def flush(self, state):
        return {"text": " | ".join(state)} if state else None

    def transform(self, row):
        return {"text": row["text"] + "!"}


class JoinedOrFails(Joined):
    """Fails over some rows, after it has changed its state, and gives for others what is no row."""

    def push(self, state, row):
        made = super().push(state, row)
        kind = row["number"] % 9
        if kind == 3:
            raise ValueError(f"no {row['number']}")
        return {3: "no text"} if kind == 4 else {"text": "\ud800"} if kind == 5 else made


class Doubled(Stateful):
    """Gives every row, and the row before it in its window once more."""

    def init_state(self):
        return {"last": None}

    def push(self, state, row):
        before, state["last"] = state["last"], row
        return [row] if before is None else [before, row]


class Suffix(Operator):
    """Opens something in every worker, and uses it."""

    columns = ("text",)

    def __init__(self, text="."):
        self.text = text
        self.opened = None

    def setup(self):
        self.opened = self.text

    def __call__(self, table):
        texts = [(text or "") + self.opened for text in table.column("text").to_pylist()]
        return table.set_column(table.column_names.index("text"), "text", column_of(texts))


class Counting:
    """Breaks the rules: what it gives depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, row):
        self.calls += 1
        return {"text": f"{row['text']} {self.calls}"}


def numbered_in_its_block(table):
    """Breaks the rules: what it gives depends on which rows come together."""
    texts = [f"{text} {n}" for n, text in enumerate(table.column("text").to_pylist())]
    return table.set_column(table.column_names.index("text"), "text", column_of(texts))
