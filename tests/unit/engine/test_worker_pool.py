"""The pool of workers, wherever these run."""

import pytest

from zephon import WorkerError
from zephon.engine.processes.pool import Refused, WorkerPool


class Working:
    """A worker that answers with its number."""

    is_ready = True

    def __init__(self, number, refusal):
        self.number, self.refusal, self.free, self.is_closed = number, refusal, [0, 1], False

    def begin(self, on_change):
        if self.refusal:
            on_change(self, Refused(self.refusal))

    def ask(self, _seat, _number, _args):
        return True, self.number, []

    def close(self):
        self.is_closed = True


class Kind:
    kind = "worker"

    def __init__(self, refusals):
        self.refusals, self.made = refusals, []

    def prepare(self, _functions):
        pass

    def worker(self, number):
        self.made.append(Working(number, self.refusals.get(number)))
        return self.made[-1]

    def waiting(self):
        return ""


def started(refusals):
    kind = Kind(refusals)
    pool = WorkerPool(2, kind)
    pool.add(len)
    pool.start()
    return pool, kind


def test_a_worker_that_is_refused_while_it_begins_is_ended_and_not_used(caplog):
    pool, kind = started({0: "other tokens."})
    assert {pool.call(0, about=str, near=near) for near in (0, 1, 2)} == {1}
    assert "other tokens. It is not used." in caplog.text
    assert [each.is_closed for each in kind.made] == [True, False]


def test_without_a_worker_that_can_be_used_calls_end_with_the_reason():
    pool, _ = started({0: "other tokens.", 1: "other pixels."})
    with pytest.raises(WorkerError, match=r"no worker of 2 can be used. other pixels."):
        pool.call(0, about=str)
