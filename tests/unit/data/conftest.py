"""What tests of catalogs and indexes share."""

import os

import pytest

from zephon.data.storage import StoredFile


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The names of all data files opened from now on."""
    names: list[str] = []
    original = StoredFile.open

    def recorded(self, *ranges):
        names.append(os.path.basename(self.path))
        return original(self, *ranges)

    monkeypatch.setattr(StoredFile, "open", recorded)
    return names
