"""Settings shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from servers.hub import Hub
from store_data import s3_store
from support import train_tiny_tokenizer

# Machines that run tests are shared and slow at times: an example may take as long as it takes (pytest's own timeout
# catches a hang). In CI the examples are always the same, so that a red run is about the change under test.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "local"))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small tokenizer with BOS and EOS of its own."""
    return train_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or leaves anything in the user's cache folder."""
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "zephon-cache"))


@pytest.fixture(scope="session")
def s3_session() -> Iterator[SimpleNamespace]:
    """An S3 server behind a proxy; see `store_data.s3_store`."""
    with s3_store() as store:
        yield store


@pytest.fixture
def s3(s3_session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The S3 server, named in the environment, its account empty and nothing spoilt."""
    for key, value in s3_session.environment.items():
        monkeypatch.setenv(key, value)
    s3_session.server.fault = None
    s3_session.server.forget()
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
    monkeypatch.setattr("zephon.io.stores.base._FIRST_WAIT", 0.002)
    monkeypatch.setattr("zephon.io.stores.base._LONGEST_WAIT", 0.05)
