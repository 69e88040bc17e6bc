"""Settings shared by all tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from support import train_tiny_tokenizer
from support.servers.clouds import Amazon
from support.servers.hub import Hub

# Machines that run tests are shared and slow at times: an example may take as long as it takes (pytest's own timeout
# catches a hang). In CI the examples are always the same, so that a red run is about the change under test.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "local"))


# Started in the background of a script, Python leaves SIGINT ignored, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


_BROWSER_TESTS = Path(__file__).parent / "integration" / "test_report_page.py"


def _without_browser() -> bool:
    """Whether there is no Chromium, where that is no failure: a machine of a user, which CI is not."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    from browser import chromium

    return os.environ.get("CI") != "true" and chromium() is None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that are left out."""
    if _without_browser():
        name = _BROWSER_TESTS.relative_to(Path(__file__).parents[1])
        terminalreporter.write_line(f"no chromium here: {name} is deselected (Debian: apt-get install chromium)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a browser where there is none; CI has one, or fails."""
    if _without_browser() and (left_out := [item for item in items if item.path == _BROWSER_TESTS]):
        items[:] = [item for item in items if item.path != _BROWSER_TESTS]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small tokenizer with BOS and EOS of its own."""
    return train_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or leaves anything in the user's cache folder."""
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "zephon-cache"))


@pytest.fixture(scope="session")
def peer_data(pytestconfig: pytest.Config) -> Path:
    """A folder with a dataset of each format that other libraries write, written by them (see tests/peers).

    Importing those libraries takes much of a minute, so it is done once and kept in pytest's cache.
    """
    peers = Path(__file__).parent / "peers"
    libraries = Path(sys.prefix) / "peers"
    sources = [peers / name for name in ("write.py", "rows.py", "requirements.txt")]
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = pytestconfig.cache.mkdir("peers") / key
    with FileLock(f"{folder}.lock"):  # tests run in several processes
        if not folder.exists():
            unfinished = folder.with_suffix(".tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            environment = {**os.environ, "PYTHONPATH": str(libraries), "HF_HOME": str(unfinished / "home")}
            command = [sys.executable, str(peers / "write.py"), str(unfinished)]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=280)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def s3_session() -> Iterator[Amazon]:
    """An S3 server."""
    bucket = Amazon()
    with bucket.server:
        yield bucket


@pytest.fixture
def s3(s3_session: Amazon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Amazon]:
    """The S3 server, named in the environment, nothing counted or spoilt; what a test writes goes with it."""
    for key, value in s3_session.environment.items():
        monkeypatch.setenv(key, value)
    s3_session.server.fault = None
    s3_session.server.forget()
    with s3_session.scope():
        yield s3_session
    s3_session.server.fault = None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub without repositories, named in the environment."""
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come at once, and give up soon."""
    monkeypatch.setattr("zephon.data.store.FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr("zephon.data.store.LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr("zephon.data.store.FIRST_DEADLINE_SECONDS", 0.1)
    monkeypatch.setattr("zephon.data.clients.OBSTORE_RETRY", {"max_retries": 0})
    monkeypatch.setattr("zephon.data.clients._stores", {})
