"""The decode cache: bounded bytes, one decode per group, errors that do not stick."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pyarrow as pa
import pytest

from zephon.errors import DataError, RecipeError
from zephon.io import DecodeCache


def table(size: int) -> pa.Table:
    return pa.table({"n": pa.array(range(size // 8), pa.int64())})


def never():
    raise AssertionError("decoded again")


def test_the_least_recently_used_groups_go_first_and_bytes_stay_bounded():
    cache = DecodeCache(1000)
    for key in "abc":
        cache.get(key, lambda: table(320))
    cache.get("a", never)
    cache.get("d", lambda: table(320))
    assert cache.bytes == 960
    cache.get("a", never)
    cache.get("c", never)
    with pytest.raises(AssertionError):
        cache.get("b", never)


def test_a_group_larger_than_the_cache_is_kept_until_another_is_asked_for():
    cache = DecodeCache(100)
    big = cache.get("big", lambda: table(8000))
    assert cache.get("big", never) is big
    cache.get("small", lambda: table(80))
    assert cache.bytes == 80


def test_a_cache_of_no_bytes_keeps_nothing():
    cache = DecodeCache(0)
    assert cache.get("a", lambda: table(80)).num_rows == 10
    assert cache.bytes == 0
    with pytest.raises(AssertionError):
        cache.get("a", never)
    with pytest.raises(RecipeError, match="max_bytes of the decode cache is -1; expected 0 or more"):
        DecodeCache(-1)


def test_groups_with_rows_left_go_to_disk_and_used_up_ones_are_dropped():
    tables = {key: pa.table({"text": pa.array([key * n for n in range(50)], pa.large_string())}) for key in "abcd"}
    size = tables["a"].nbytes
    cache = DecodeCache(size, 1 << 28)
    cache.get("a", lambda: tables["a"], 20)
    cache.get("b", lambda: tables["b"], 50)  # all of it
    cache.get("c", lambda: tables["c"], 1)
    cache.get("d", lambda: tables["d"], 1)
    assert cache.bytes <= size and [cache.holds(key) for key in "abcd"] == [True, False, True, True]
    kept = cache.get("a", never, 29)
    assert kept.equals(tables["a"]) and kept is not tables["a"]
    assert cache.get("a", never, 1).equals(kept) and not cache.holds("a")
    assert cache.get("b", lambda: tables["b"], 0) is tables["b"]
    cache.discard(lambda key: key == "c")
    assert not cache.holds("c")
    assert kept["text"][49].as_py() == "a" * 49  # also when its file is gone


def test_used_up_groups_take_a_quarter_of_the_memory_and_are_there_in_the_next_pass():
    cache = DecodeCache(1600)
    for key in range(5):
        cache.get(key, lambda: table(160), 20)
    assert cache.bytes == 320  # two of them
    assert cache.get(4, never, 20) is not None
    cache.discard(lambda key: True)
    for key in range(9):
        cache.get(key, lambda: table(160), 10)
    assert cache.bytes == 1440


@pytest.mark.parametrize("full", [False, True])
def test_without_room_on_disk_groups_are_decoded_again(full, monkeypatch):
    cache = DecodeCache(100, 1 << 28 if full else 1000)
    if full:
        usage = os.statvfs("/")
        monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=1000, f_frsize=usage.f_frsize))
    for key in "ab":
        cache.get(key, lambda: table(320), 1)
    assert not cache.holds("a") and cache.get("a", lambda: table(320), 1).num_rows == 40


def test_a_fork_writes_to_a_file_of_its_own():
    cache = DecodeCache(100, 1 << 28)

    def fill(keys, shift):
        for key in keys:
            cache.get(key, lambda key=key: pa.table({"n": [key + shift] * 40}), 1)
        return all(cache.get(key, never)["n"].to_pylist() == [key + shift] * 40 for key in keys[:-1])

    assert fill(range(4), 0)
    child = os.fork()
    if not child:
        os._exit(0 if fill(range(10, 40), 1000) else 1)
    assert fill(range(10, 40), 0)
    assert os.waitpid(child, 0)[1] == 0
    assert fill(range(10, 40), 0)


def test_threads_that_want_one_group_decode_it_once():
    cache, calls, start = DecodeCache(1000), [], threading.Barrier(8)

    def decode():
        calls.append(1)
        return table(80)

    def want():
        start.wait()
        return cache.get("a", decode)

    with ThreadPoolExecutor(8) as pool:
        tables = [future.result() for future in [pool.submit(want) for _ in range(8)]]
    assert len(calls) == 1 and all(found is tables[0] for found in tables)


def test_an_error_reaches_every_waiter_and_is_not_remembered():
    cache, entered, release = DecodeCache(1000), threading.Event(), threading.Event()

    def fail():
        entered.set()
        release.wait(10)
        raise DataError("broken")

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(cache.get, "a", fail)
        entered.wait(10)
        others = [pool.submit(cache.get, "a", fail) for _ in range(2)]
        release.set()
        for future in (first, *others):
            with pytest.raises(DataError, match="broken"):
                future.result(10)
    assert cache.get("a", lambda: table(80)).num_rows == 10


def test_what_a_miss_costs_does_not_grow_with_the_groups_that_are_kept():
    def lines(groups: int) -> int:
        cache = DecodeCache(1 << 30)
        for key in range(groups):
            cache.get(key, lambda: pa.table({"a": [1]}), 1)
        executed = 0

        def count(frame, event, _):
            nonlocal executed
            executed += event == "line"
            return count

        sys.settrace(count)
        try:
            cache.get(groups, lambda: pa.table({"a": [1]}), 1)
        finally:
            sys.settrace(None)
        return executed

    assert lines(2000) == lines(20)
