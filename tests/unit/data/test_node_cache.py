"""The node's cache: whole or not at all, once for all processes, within its limit, and never in the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zephon.data.fetch import Spans
from zephon.data.node_cache import NodeCache
from zephon.errors import RecipeError

KB = 1 << 10


def content(seed: int, size: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(size))


def entries(cache: NodeCache) -> list[Path]:
    return [path for path in cache.folder.rglob("*.range") if path.is_file()]


def taken(cache: NodeCache) -> int:
    return sum(path.stat().st_size for path in cache.folder.glob("??/*") if path.is_file())


def read(cache: NodeCache, key: object, size: int, download=None) -> bytes:
    """Entry `key`, whose bytes follow from it, of a file of the same name."""
    return bytes(cache.fetch(str(key), key, size, download or (lambda: content(hash(key) % 251, size))))


def refused() -> bytes:
    raise AssertionError("was downloaded although it is there")


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty"])
def test_damaged_entries_are_made_anew(tmp_path, damage):
    cache, data = NodeCache(tmp_path / "data", None), content(5, 3 * KB)
    cache.fetch("x", 0, len(data), lambda: data)
    assert bytes(NodeCache(tmp_path / "data", None).fetch("x", 0, len(data), refused)) == data
    (path,) = entries(cache)
    spoilt = bytearray(path.read_bytes())
    spoilt[100] ^= 1
    path.write_bytes({"flip": spoilt, "cut": spoilt[:-9], "longer": spoilt + b"x", "empty": b""}[damage])
    assert bytes(cache.fetch("x", 0, len(data), lambda: data)) == data
    assert bytes(cache.fetch("x", 0, len(data), refused)) == data


def test_all_entries_of_a_file_are_dropped_and_no_others(tmp_path):
    cache = NodeCache(tmp_path / "data", None)
    for owner in ("a", "b"):
        for key in range(3):
            cache.fetch(owner, key, 10, lambda: bytes(10))
    cache.drop("a")
    assert len(entries(cache)) == 3
    cache.fetch("b", 0, 10, refused)
    assert cache.fetch("a", 0, 10, lambda: bytes(10)) == bytes(10)


def test_what_was_not_used_for_longest_goes_first_and_the_limit_holds(tmp_path):
    cache = NodeCache(tmp_path / "data", 40 * KB)
    for n in range(12):
        read(cache, n, 8 * KB)
        if n:
            read(cache, 0, 8 * KB, refused)  # used all the time
        assert taken(cache) <= 40 * KB
        time.sleep(0.01)
    for n in (0, 11):
        read(cache, n, 8 * KB, refused)
    with pytest.raises(AssertionError):
        read(cache, 1, 8 * KB, refused)


def test_files_of_others_are_neither_counted_nor_removed(tmp_path):
    folder = tmp_path / "data"
    mine = folder / "ab" / "notes.range"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"x" * 100 * KB)
    (folder / "thesis.tex").write_bytes(b"y" * 100 * KB)
    link = folder / "ab" / f"ab{'0' * 38}.range"
    link.symlink_to(folder / "thesis.tex")
    cache = NodeCache(folder, 20 * KB)
    for n in range(10):
        read(cache, n, 8 * KB)
    assert mine.exists()
    assert link.is_symlink()
    assert (folder / "thesis.tex").stat().st_size == 100 * KB


def test_many_threads_download_an_entry_once(tmp_path):
    cache, count = NodeCache(tmp_path / "data", None), []

    def download() -> bytes:
        count.append(1)
        time.sleep(0.05)
        return content(0, KB)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: read(cache, "x", KB, download), range(8)))
    assert results == [content(0, KB)] * 8
    assert len(count) == 1


CHILD = """
import sys, time
from pathlib import Path
from zephon.data.node_cache import NodeCache
folder, log, entries, limit, pause = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]), float(sys.argv[5])
cache = NodeCache(folder, limit or None)
for n in range(entries):
    def download():
        with open(log, "a") as file:
            file.write(f"{n}\\n")
        time.sleep(pause)
        return bytes((n + i) % 251 for i in range(20000))
    assert bytes(cache.fetch(str(n), n, 20000, download)) == bytes((n + i) % 251 for i in range(20000))
print("done")
"""


def child(folder: Path, log: Path, entries: int, limit: int = 0, pause: float = 0.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(folder), str(log), str(entries), str(limit), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_processes_download_an_entry_once_between_them(tmp_path):
    log = tmp_path / "log"
    children = [child(tmp_path / "data", log, 20, pause=0.02) for _ in range(3)]
    for process in children:
        assert process.communicate(timeout=60)[0] == b"done\n"
    assert sorted(map(int, log.read_text().split())) == list(range(20))


def test_processes_killed_at_any_point_leave_a_cache_that_works(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "data"
    for n in range(3):
        process = child(folder, log, 400, limit=300_000, pause=0.0005)
        deadline = time.monotonic() + 30
        lines = len(log.read_text().split()) if log.exists() else 0
        while (len(log.read_text().split()) if log.exists() else 0) < lines + 2 + 6 * n:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.003 * n)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    last = child(folder, log, 40, limit=300_000)
    assert last.communicate(timeout=60)[0] == b"done\n"
    cache = NodeCache(folder, 300_000)
    assert taken(cache) <= 300_000
    (folder / "00").mkdir(exist_ok=True)
    (folder / "00" / f"{'0' * 40}.part").write_bytes(b"begun by a process that was killed")
    for part in folder.rglob("*.part"):
        os.utime(part, (1, 1))
    for n in range(40, 80):  # sweeps remove what was left behind
        read(cache, n, 20_000)
    assert not list(folder.rglob("*.part"))


FULL = """
import logging, resource, sys
from pathlib import Path
from zephon.data.node_cache import NodeCache
logging.basicConfig(level=logging.WARNING)
cache = NodeCache(Path(sys.argv[1]), None)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # the system refuses every larger file from here on
for n in range(20):
    assert bytes(cache.fetch("x", n, 9000, lambda: bytes([n]) * 9000)) == bytes([n]) * 9000
cache.fetch("x", "small", 100, lambda: bytes(100))
"""


def test_a_disk_that_takes_no_more_means_streaming_and_one_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "data")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing more can be kept in the cache") == 1
    assert not list((tmp_path / "data").rglob("*.part"))


def test_a_folder_that_cannot_be_made_means_streaming(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = NodeCache(tmp_path / "file" / "data", None)
    for n in range(3):
        assert cache.fetch("x", n, 4, lambda: b"data") == b"data"
    assert caplog.text.count("nothing more can be kept") == 1


def test_a_failed_download_is_an_error_of_whoever_asked_and_leaves_nothing(tmp_path):
    cache = NodeCache(tmp_path / "data", None)

    def fails() -> bytes:
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        read(cache, "x", 4, fails)
    assert not list(tmp_path.rglob("*.*"))
    assert read(cache, "x", 4, lambda: b"data") == b"data"


def test_a_download_that_hangs_in_another_process_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("zephon.data.node_cache._WAIT_SECONDS", 0.1)
    cache, begun, end = NodeCache(tmp_path / "data", None), threading.Event(), threading.Event()

    def hangs() -> bytes:
        begun.set()
        end.wait(30)
        return b"data"

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(read, cache, "x", 4, hangs)
        begun.wait(10)
        assert read(NodeCache(tmp_path / "data", None), "x", 4, lambda: b"data") == b"data"
        end.set()
        assert slow.result() == b"data"


def test_a_limit_too_small_for_the_data_is_refused_with_the_least_that_will_do(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    spans = Spans(NodeCache(tmp_path / "data", 10_000_000))
    spans.require("small", 1_000_000)
    spans.check_limit()
    spans.require("web", 2_000_000)
    spans.require("later", 1_500_000)
    with pytest.raises(RecipeError, match=r"cache_limit_bytes is 10,000,000.*at least 16,032,768.*'web'.*2,000,000 "):
        spans.check_limit()
