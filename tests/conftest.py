"""Settings shared by all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
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
