"""Operators of a user's own, as tests use them: some that keep the rules, some that break each of them."""

from zephon.columns.arrow import column_of
from zephon.ops.functions import Operator
from zephon.ops.stateful import Stateful


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
